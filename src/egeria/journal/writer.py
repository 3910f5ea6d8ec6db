"""Writing: one JSON object a line, flushed at once, so that a crash loses at most the last line."""

from __future__ import annotations

import contextlib
import json
import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from egeria.events import SCHEMA_VERSION, Event

FILE_NAME = "journal.jsonl"
KEPT_IN_MEMORY = 1000


class JournalWriter:
    """Appends events to `journal.jsonl` in a directory, which it makes.

    A directory that cannot be written, or a disk that fills up later, raises nothing: the last events stay in
    memory, and `on_failure` is called once.

    Args:
        directory: where the journal lives; None keeps events in memory alone.
        on_failure: called once with a sentence when writing fails.
    """

    def __init__(self, directory: Path | None, on_failure: Callable[[str], None]) -> None:
        self.directory = directory
        self.recent: deque[Event] = deque(maxlen=KEPT_IN_MEMORY)
        self._on_failure = on_failure
        self._file: IO[str] | None = None
        if directory is not None:
            self._guard(lambda: self._open(directory))

    def write(self, event: Event) -> None:
        """Append one event; it is with the operating system when this returns."""
        self.recent.append(event)
        if self._file is not None:
            self._guard(lambda: self._append({**event.to_dict(), "time": round(time.time(), 3)}))

    def close(self) -> None:
        """Close the file; further events stay in memory."""
        file, self._file = self._file, None
        if file is not None:
            self._guard(file.close)

    def _open(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        torn = path.exists() and not _ends_with_newline(path)
        self._file = path.open("a", encoding="utf-8")
        weakref.finalize(self, _close, self._file)  # a run that is never closed must not leak its file
        if torn:
            self._file.write("\n")
        self._append({"event": "journal_opened", "schema_version": SCHEMA_VERSION, "time": round(time.time(), 3)})

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(_finite(record), allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, ValueError, TypeError) as error:
            if self._file is not None:
                _close(self._file)
                self._file = None
            self._on_failure(
                f"The journal in {self.directory} cannot be written: {error}. Training continues; events stay "
                f"in memory. Give `attach` a writable `directory` with free space."
            )


def _close(file: IO[str]) -> None:
    """Close a file whose disk may be full: what it could not write is lost, and was reported before."""
    with contextlib.suppress(OSError):
        file.close()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    """Return the value with every number JSON cannot hold written as text ('nan', 'inf')."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
