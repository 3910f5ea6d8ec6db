"""The append-only record of a run: one JSON object a line, and one warning for each refusal."""

import dataclasses
import json
import logging
import os
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from egeria.errors import JournalError
from egeria.events import EVENT_TYPES, SCHEMA_VERSION, Declined, Event, FaultCaught

FILE_NAME = "journal.jsonl"
RUNS = Path("egeria_runs")
Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """The events of a run, oldest first."""

    directory: Path
    events: tuple[Event, ...]
    num_damaged: int  # lines that could not be read: at most one per crash of the run

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def first(self, kind: type[Kind]) -> Kind | None:
        """Return the first event of one kind, or None."""
        return next(iter(self.of(kind)), None)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


def read_journal(directory: str | Path) -> Journal:
    """Read the journal of a run; lines that are torn or unknown are counted and left out.

    Args:
        directory: the run's directory, or the journal file itself.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    path = Path(directory)
    try:
        path = path / FILE_NAME if path.is_dir() else path
        text = path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise JournalError(
            f"A run's directory holds a {FILE_NAME}; {path} cannot be read: {error}. "
            "Give the directory that `attach` was given, or that `run.directory` names."
        ) from error
    events, damaged = list[Event](), 0
    for line in filter(str.strip, text.split("\n")):
        try:
            record = json.loads(line)
            if record["event"] == "journal_opened":
                version = record.get("schema_version")
                if not isinstance(version, int) or version > SCHEMA_VERSION:
                    known = f"This egeria reads journals up to schema {SCHEMA_VERSION}"
                    raise JournalError(f"{known}, {path} has schema {version!r}. Use a newer one.")
                continue
            kind = EVENT_TYPES[record["event"]]
            names = {field.name for field in dataclasses.fields(kind)}
            events.append(kind(**{key: value for key, value in record.items() if key in names}))
        except (LookupError, TypeError, ValueError, RecursionError):
            damaged += 1
    return Journal(directory=path.parent, events=tuple(events), num_damaged=damaged)


class EgeriaWarning(UserWarning):
    """The library stepped back from something; training continues."""


class Recorder:
    """Appends events to `journal.jsonl` in a directory, and warns the user, each reason once.

    Where nothing can be written, or no more, it warns and raises nothing. A crash loses at most
    the last line.

    Args:
        directory: where the journal lives; None for none, so that only listeners get events.
        echoes: whether another process says the same, so that this one warns of its failures only.
    """

    def __init__(self, directory: Path | None, *, echoes: bool = False) -> None:
        self.directory, self.step, self._echoes = directory, 0, echoes
        self._warned, self._declined = set[str](), set[str]()
        self._faults: Counter[str] = Counter()
        self._file: IO[str] | None = None
        self._listeners: dict[object, Callable[[Event], object]] = {}
        if directory is not None:
            self._guard(lambda: self._open(directory / FILE_NAME))

    def write(self, event: Event) -> None:
        """Append an event to the journal; it is with the operating system when this returns."""
        self._guard(lambda: self._append(event.to_dict()))
        for key, listener in list(self._listeners.items()):
            try:
                listener(event)
            except Exception as error:
                self._listeners.pop(key, None)
                name = getattr(listener, "__qualname__", type(listener).__name__)
                raised = f"a callback for events, {name}, raised {type(error).__name__}: {error}"
                message = f"egeria: {raised}. It is not called any more; training continues."
                self.warn(f"listener {name} {id(key)}", message)

    def listen(self, listener: Callable[[Event], object]) -> Callable[[], object]:
        """Call `listener` with each event from now on; return what ends that."""
        key = object()
        self._listeners[key] = listener
        return partial(self._listeners.pop, key, None)

    def close(self) -> None:
        """Close the file; nothing more is written."""
        self._listeners.clear()
        self._close_file()

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
        self._file = path.open("a", encoding="utf-8")
        weakref.finalize(self, self._file.close)  # a run that is never closed must not leak it
        if self._file.tell():  # the last line may be torn; empty ones are passed over
            self._file.write("\n")
        self._append({"event": "journal_opened", "schema_version": SCHEMA_VERSION})

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            record = {**record, "time": round(time.time(), 3)}
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, ValueError, TypeError) as error:
            self._close_file()
            failed = f"The journal in {self.directory} cannot be written: {error}"
            next_step = "Training continues. Give `attach` a writable `directory`."
            self.warn("journal", f"{failed}. {next_step}")

    def _close_file(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):  # of a full disk: what it could not write is lost
            if file is not None:
                file.close()


def run_directory(given: str | Path | None) -> Path:
    """Return the directory of a run; without a given one, one that is new."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.time_ns() % 10**9:09}"
    return RUNS / name if given is None else Path(given)
