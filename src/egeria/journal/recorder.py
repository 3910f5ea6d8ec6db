"""Writing: one JSON object a line, flushed at once; and one warning for each thing that the library
declines to do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from egeria.events import SCHEMA_VERSION, Declined, Event, FaultCaught
from egeria.journal.reader import (
    FILE_NAME,
    RUNS,
    download,
    is_url,
    local_directory,
    upload,
    without_login,
)

KEPT_IN_MEMORY = 1000


class EgeriaWarning(UserWarning):
    """The library stepped back from something; training continues."""


class Recorder:
    """Appends events to `journal.jsonl` in a directory, which it makes, and warns the user, each
    reason once.

    A directory that cannot be written, or a disk that fills up later, raises nothing: there is a
    warning, and the last events stay in memory. A crash loses at most the last line.

    Args:
        directory: where the journal lives; None keeps it in memory.
        url: of a directory in a store, to which its files are copied by `upload` and by `close`.
        echoes: whether another process of the job says the same, so that only failures of this one
            are told here.
    """

    def __init__(
        self, directory: Path | None, *, url: str | None = None, echoes: bool = False
    ) -> None:
        self.directory = directory
        self._url = url
        self.step = 0
        self.recent: deque[Event] = deque(maxlen=KEPT_IN_MEMORY)
        self._echoes = echoes
        self._warned: set[str] = set()
        self._declined: set[str] = set()
        self._faults: dict[str, int] = {}
        self._file: IO[str] | None = None
        self._listeners: dict[object, Callable[[Event], object]] = {}
        if directory is not None:
            self._guard(lambda: self._open(directory))

    def write(self, event: Event) -> None:
        """Append an event to the journal; it is with the operating system when this returns."""
        self.recent.append(event)
        if self._file is not None:
            self._guard(lambda: self._append(event.to_dict()))
        for key, listener in list(self._listeners.items()):
            try:
                listener(event)
            except Exception as error:
                self._listeners.pop(key, None)
                name = getattr(listener, "__qualname__", type(listener).__name__)
                self.warn(
                    f"listener {name} {id(key)}",
                    f"egeria: a callback for events, {name}, raised {type(error).__name__}: "
                    f"{error}. It is not called "
                    f"any more; training continues.",
                )

    def listen(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` with each event from now on; return what ends that. One that raises is
        dropped.
        """
        key = object()
        self._listeners[key] = listener

        def remove() -> None:
            self._listeners.pop(key, None)

        return remove

    def close(self) -> None:
        """Copy the directory to the store, close the file and release the listeners; further events
        stay in memory.
        """
        self.upload()
        self._listeners.clear()
        file, self._file = self._file, None
        if file is not None:
            self._guard(file.close)

    def upload(self) -> None:
        """Copy the files of the directory to the store, if it has a URL; training waits for it.

        A failure is journaled and told once; the next call tries again.
        """
        if self._url is None or self._file is None or self.directory is None:
            return
        try:
            upload(self.directory.iterdir(), self._url)
        except Exception as error:  # of the store's own kind
            self._decline_copy(self._url, error)

    def warn(self, what: str, message: str) -> None:
        """Warn unless there was a warning about `what` before."""
        if what not in self._warned:
            self._warned.add(what)
            try:
                warnings.warn(message, EgeriaWarning, stacklevel=2)
            except EgeriaWarning:  # warnings are errors here; ours must still not stop the training
                logging.getLogger("egeria").warning(message)

    def decline(self, what: str, reason: str, *, by_this_process: bool = False) -> None:
        """Journal that the library will not do something, and say so, the first time.

        Args:
            what: it will not do.
            reason: why.
            by_this_process: whether no other process of the job says the same.
        """
        if what not in self._declined:
            self._declined.add(what)
            self.write(Declined(step=self.step, what=what, reason=reason))
        if by_this_process or not self._echoes:
            self.warn(what, f"egeria: {what}: {reason.rstrip('.')}. Training continues.")

    def fault(self, where: str, error: Exception) -> None:
        """Journal a failure of ours, with how many there were in this place, and warn the first
        time.
        """
        count = self._faults[where] = self._faults.get(where, 0) + 1
        text = f"{type(error).__name__}: {error}"
        self.write(FaultCaught(step=self.step, where=where, error=text, count=count))
        self.warn(
            f"fault in {where}",
            f"egeria: {where} failed ({text}). Training continues; see the journal.",
        )

    def _open(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        lost = self._fetch(path)
        self._file = path.open("a", encoding="utf-8")
        weakref.finalize(self, _close, self._file)  # a run that is never closed must not leak it
        if self._file.tell():  # the last line may be torn; empty ones are passed over
            self._file.write("\n")
        self._append({"event": "journal_opened", "schema_version": SCHEMA_VERSION})
        if lost is not None and self._url is not None:
            # What other hosts may have written there must not be replaced.
            self._decline_copy(self._url, lost)
            self._url = None

    def _fetch(self, path: Path) -> Exception | None:
        """Take over the store's journal if it is longer than this host's; return why not."""
        if self._url is None:
            return None
        try:
            stored = download(self._url, path.name)
        except Exception as error:  # of the store's own kind
            return error
        if len(stored) > (path.stat().st_size if path.exists() else 0):
            path.write_bytes(stored)
        return None

    def _decline_copy(self, url: str, error: Exception) -> None:
        reason = without_login(f"{type(error).__name__}: {error}")
        what = f"copy the journal to {without_login(url)}"
        self.decline(what, f"{reason}; it is in {self.directory}")

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        record = {**record, "time": round(time.time(), 3)}
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._file.flush()

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, ValueError, TypeError) as error:
            if self._file is not None:
                _close(self._file)
                self._file = None
            self.warn(
                "journal",
                f"The journal in {self.directory} cannot be written: {error}. Training continues; "
                "events stay in memory. Give `attach` a writable `directory` with free space.",
            )


def run_directory(given: str | Path | None) -> Path:
    """Return what was given, else make one that no other run writes to; where that fails, the
    journal says so.

    Of a URL it is the local directory that is copied there.
    """
    if given is not None:
        return _local_directory(str(given)) if is_url(given) else Path(given)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        try:
            (RUNS / f"{name}{suffix}").mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            break
        return RUNS / f"{name}{suffix}"
    return RUNS / name


def _local_directory(url: str) -> Path:
    """Return where a run with a URL is kept on this host; somewhere temporary where nothing can be
    written here.
    """
    place = local_directory(url, RUNS)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / place
    return place


def _close(file: IO[str]) -> None:
    """Close a file whose disk may be full: what it could not write is lost, and was reported
    before.
    """
    with contextlib.suppress(OSError):
        file.close()
