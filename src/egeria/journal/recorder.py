"""Writing a journal: one JSON object a line; and one warning for each thing that is declined."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from egeria.events import SCHEMA_VERSION, Declined, Event, FaultCaught
from egeria.journal import reader
from egeria.journal.reader import FILE_NAME, without_login


class EgeriaWarning(UserWarning):
    """The library stepped back from something; training continues."""


class Recorder:
    """Appends events to `journal.jsonl` in a directory, and warns the user, each reason once.

    A directory that cannot be written, or a disk that fills up later, raises nothing: there is a
    warning. A crash loses at most the last line.

    Args:
        directory: where the journal lives; None for none, so that only listeners get events.
        url: of a directory in a store, to which its files are copied by `upload` and by `close`.
        echoes: whether another process says the same, so that this one warns of its failures only.
    """

    def __init__(
        self, directory: Path | None, *, url: str | None = None, echoes: bool = False
    ) -> None:
        self.directory = directory
        self.step = 0
        self._url, self._echoes = url, echoes
        self._warned, self._declined = set[str](), set[str]()
        self._faults: Counter[str] = Counter()
        self._file: IO[str] | None = None
        self._listeners: dict[object, Callable[[Event], object]] = {}
        if directory is not None:
            self._guard(lambda: self._open(directory / FILE_NAME))

    def write(self, event: Event) -> None:
        """Append an event to the journal; it is with the operating system when this returns."""
        if self._file is not None:
            self._guard(lambda: self._append(event.to_dict()))
        for key, listener in list(self._listeners.items()):
            try:
                listener(event)
            except Exception as error:
                self._listeners.pop(key, None)
                name = getattr(listener, "__qualname__", type(listener).__name__)
                message = f"egeria: a callback for events, {name}, raised {type(error).__name__}: "
                message += f"{error}. It is not called any more; training continues."
                self.warn(f"listener {name} {id(key)}", message)

    def listen(self, listener: Callable[[Event], object]) -> Callable[[], object]:
        """Call `listener` with each event from now on; return what ends that."""
        key = object()
        self._listeners[key] = listener
        return partial(self._listeners.pop, key, None)

    def close(self) -> None:
        """Copy the directory to the store and close the file; nothing more is written."""
        self.upload()
        self._listeners.clear()
        file, self._file = self._file, None
        if file is not None:
            self._guard(file.close)

    def upload(self) -> None:
        """Copy the files to the store, if there is one; warn once of a failure."""
        if self._url is None or self._file is None or self.directory is None:
            return
        try:
            reader.upload(self.directory.iterdir(), self._url)
        except Exception as error:  # of the store's own kind
            self._decline_copy(self._url, error)

    def warn(self, what: str, message: str) -> None:
        """Warn unless there was a warning about `what` before."""
        if what in self._warned:
            return
        self._warned.add(what)
        try:
            warnings.warn(message, EgeriaWarning, stacklevel=2)
        except EgeriaWarning:  # warnings are errors here; ours must still not stop the training
            logging.getLogger("egeria").warning(message)

    def decline(self, what: str, reason: str) -> None:
        """Journal and say, the first time, what the library will not do, and why."""
        if what not in self._declined:
            self._declined.add(what)
            self.write(Declined(step=self.step, what=what, reason=reason))
        if not self._echoes:
            self.warn(what, f"egeria: {what}: {reason.rstrip('.')}. Training continues.")

    def fault(self, where: str, error: Exception) -> None:
        """Journal a failure of ours, and warn the first time that there is one in this place."""
        self._faults[where] += 1
        text, count = f"{type(error).__name__}: {error}", self._faults[where]
        self.write(FaultCaught(step=self.step, where=where, error=text, count=count))
        message = f"egeria: {where} failed ({text}). Training continues; see the journal."
        self.warn(f"fault in {where}", message)

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lost = None if self._url is None else self._fetch(path, self._url)
        self._file = path.open("a", encoding="utf-8")
        weakref.finalize(self, _close, self._file)  # a run that is never closed must not leak it
        if self._file.tell():  # the last line may be torn; empty ones are passed over
            self._file.write("\n")
        self._append({"event": "journal_opened", "schema_version": SCHEMA_VERSION})
        if lost is not None and self._url is not None:
            self._decline_copy(self._url, lost)
            self._url = None  # what other hosts may have written there must not be replaced

    def _fetch(self, path: Path, url: str) -> Exception | None:
        """Take over the store's journal if it is longer than this host's; return why not."""
        try:
            stored = reader.download(url, path.name)
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
            file, self._file = self._file, None
            if file is not None:
                _close(file)
            next_step = "Training continues. Give `attach` a writable `directory`."
            failed = f"The journal in {self.directory} cannot be written: {error}"
            self.warn("journal", f"{failed}. {next_step}")


def run_directory(given: str | Path | None) -> Path:
    """Return the directory of a run on this host; without a given one, one that is new."""
    if given is not None and not reader.is_url(given):
        return Path(given)
    if given is not None:
        place = reader.local_directory(str(given))
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            return place
        return Path(tempfile.gettempdir()) / place
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        place = reader.RUNS / f"{name}{suffix}"
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # the recorder will say so
            break
        return place
    return reader.RUNS / name


def _close(file: IO[str]) -> None:
    """Close a file whose disk may be full; what it could not write is lost."""
    with contextlib.suppress(OSError):
        file.close()
