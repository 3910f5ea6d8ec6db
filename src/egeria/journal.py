"""The append-only record of a run: one JSON object a line, and one warning for each refusal."""

import itertools
import json
import logging
import os
import re
import secrets
import stat
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from egeria.config import is_local
from egeria.errors import ConfigError, EgeriaError, JournalError, brief, redact
from egeria.events import SCHEMA_VERSION, Declined, Event, EventsByKind, FaultCaught, read_event

FILE_NAME = "journal.jsonl"
_BEGIN = b'{"event":"journal_opened"'  # of each journal of ours
_TAIL_BYTES = 2**20  # at the end of a journal, which tell whether it has steps
_LONGEST_LINE, _MOST_DIGITS = 2**22, 15  # letters, and of a number; what is longer is damaged


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal(EventsByKind):
    """The events in a journal, oldest first; where runs wrote side by side, one after the other."""

    directory: Path
    events: tuple[Event, ...]
    num_damaged: int  # lines that could not be read: at most one per crash of the run
    first_damaged: int | None  # number of the first of them, from 1

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


def read_journal(directory: str | Path) -> Journal:
    """Read the journal of a run; lines that are torn or do not fit are counted and left out.

    Args:
        directory: the run's directory, or the journal file itself.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    try:
        path = Path(directory).expanduser()
        return _read(path / FILE_NAME if path.is_dir() else path)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise JournalError(
            f"A run's directory holds a {FILE_NAME}; {directory} cannot be read: {error}. "
            "Give the directory that `attach` was given, or that `run.directory` names."
        ) from error


def _read(path: Path) -> Journal:
    runs, damaged = dict[object, list[Event]](), set[int]()  # runs by their ids
    # Instead of a number that is too large comes an object, which fits no field.
    whole = lambda text: object() if len(text) > _MOST_DIGITS else int(text)  # noqa: E731
    read = json.JSONDecoder(parse_int=whole).decode
    opened: object = 0  # stands for the id of a run from when there were none
    for number, line in _lines(path):
        try:
            record = read(line)
            if record["event"] == "journal_opened":
                version, opened = record.get("schema_version"), number
                if not isinstance(version, int) or version > SCHEMA_VERSION:
                    known = f"This egeria reads journals up to schema {SCHEMA_VERSION}"
                    raise JournalError(f"{known}, {path} has schema {version!r}. Use a newer one.")
                runs.setdefault(record.get("run", opened), [])
            else:
                run, event = record.get("run", opened), read_event(record)
                runs.setdefault(run, []).append(event)
        except (LookupError, TypeError, ValueError, RecursionError):
            damaged.add(number)
    if damaged and not runs:
        raise ValueError("none of its lines is of a journal")
    return Journal(
        directory=path.parent,
        events=tuple(itertools.chain(*runs.values())),
        num_damaged=len(damaged),
        first_damaged=min(damaged, default=None),
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines of a file with their numbers; one that is too long comes in parts."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        number, is_whole = 0, True
        while line := file.readline(_LONGEST_LINE):
            number, is_whole = number + is_whole, line.endswith("\n")
            if not line.isspace():
                yield number, line


class EgeriaWarning(UserWarning):
    """The library stepped back from something; training continues."""


class Recorder:
    """Appends events to `journal.jsonl` in a directory, and warns the user, each reason once.

    Where nothing can be written any more it warns and raises nothing. A crash loses a line at most.

    Args:
        directory: where the journal lives; None for none, so that only listeners get events.
        echoes: whether another process says the same, so that this one warns of its failures only.
    """

    def __init__(self, directory: Path | None, *, echoes: bool = False) -> None:
        self.directory, self.step, self._echoes = directory, 0, echoes
        self.run = secrets.token_hex(4)  # the id of this run, in each of its lines
        # Whether the journal has steps of an earlier run, and whether another writes to it now.
        self.is_used = self.is_shared = False
        self._warned, self._declined = set[str](), set[str]()
        self._faults: Counter[str] = Counter()
        self._file: IO[bytes] | None = None
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
                raised = f"a callback for events, {name}, raised {brief(error)}"
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
            warnings.warn(str(EgeriaError(message)), EgeriaWarning, stacklevel=2)
        except EgeriaWarning as error:  # they are errors here; ours must not stop the training
            logging.getLogger("egeria").warning(str(error))

    def decline(self, what: str, reason: str, *, by_each: bool = False) -> None:
        """Journal and say, once, what the library will not do, and why; `by_each` on all ranks."""
        if what not in self._declined:
            self._declined.add(what)
            self.write(Declined(step=self.step, what=what, reason=reason))
        if by_each or not self._echoes:
            self.warn(what, f"egeria: {what}: {reason.rstrip('.')}. Training continues.")

    def fault(self, where: str, error: Exception) -> None:
        """Journal a failure of ours, and warn the first time that there is one in this place."""
        self._faults[where] += 1
        text, count = brief(error), self._faults[where]
        self.write(FaultCaught(step=self.step, where=where, error=text, count=count))
        message = f"egeria: {where} failed ({text}). Training continues; see the journal."
        self.warn(f"fault in {where}", message)

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open_safely(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._file = os.fdopen(file, "a+b", buffering=0)  # read from anywhere, written at the end
        weakref.finalize(self, self._file.close)  # a run that is never closed must not leak it
        size_bytes = self._file.seek(0, os.SEEK_END)  # a pipe has no place to go to
        self._file.seek(0)
        if not _BEGIN.startswith(self._file.read(len(_BEGIN))):
            raise FileExistsError(f"{path} is no journal of egeria. Move it away")
        self._file.seek(max(0, size_bytes - _TAIL_BYTES))
        tail = self._file.read()
        self.is_used = re.search(rb'"step":[1-9]', tail) is not None
        self.is_shared = not _lock(file)
        if tail and not tail.endswith(b"\n"):  # the last line is torn
            self._file.write(b"\n")
        self._append({"event": "journal_opened", "schema_version": SCHEMA_VERSION})

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            record = {**record, "run": self.run, "time": round(time.time(), 3)}
            line = redact(json.dumps(record, separators=(",", ":"))).encode() + b"\n"
            # At once, so that no line of another process comes between.
            if self._file.write(line) < len(line):
                raise OSError("the disk is full")

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
        if file is not None:
            with suppress(OSError), file:
                _lock(file.fileno(), give_back=True)  # workers of a loader may have it open


def run_directory(given: str | Path | None) -> Path:
    """Return the absolute directory of a run; without a given one, one that is new."""
    if given is None:
        given = f"egeria_runs/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    if not (isinstance(given, (str, os.PathLike)) and is_local(str(given))):
        raise ConfigError(
            f"directory is a folder of this host, found {given!r}. Give a folder, and copy it "
            "elsewhere when the run has ended."
        )
    return Path(given).expanduser().absolute()


def check_own(path: Path, mark: bytes) -> None:
    """Raise ConfigError where there is something that `replace_file` does not replace."""
    try:
        with suppress(FileNotFoundError), open(path, "rb", opener=_open_safely) as file:
            if not re.search(mark, file.read(2**12)):
                raise FileExistsError("egeria did not write the file that is there")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError("its folder is missing, or cannot be written to")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}. Take another folder.") from error


def replace_file(path: Path, mark: bytes, write: Callable[[IO[bytes]], object]) -> None:
    """Have `write` write a file, as a whole or not at all, in place of one that egeria wrote.

    Args:
        path: where to. A link is not followed.
        mark: regular expression for the first 4 KiB of each file of this kind.
        write: takes the open file.

    Raises:
        ConfigError, OSError: it cannot be written, or what is there has no mark.
    """
    check_own(path, mark)
    unfinished = path.with_name(f".egeria-{secrets.token_hex(8)}")
    try:
        with unfinished.open("xb") as file:
            write(file)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _lock(file: int, *, give_back: bool = False) -> bool:
    """Lock a file, or give the lock back; return False if another program holds it."""
    try:
        import fcntl  # noqa: PLC0415  (not on Windows)

        fcntl.flock(file, fcntl.LOCK_UN if give_back else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:  # other errors: this file system has no locks
        return not isinstance(error, BlockingIOError)
    return True


def _open_safely(path: str | Path, flags: int) -> int:
    """Open a file so that a link is not followed, and a pipe not waited for."""
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # as far as the system has them
        flags |= getattr(os, name, 0)
    return os.open(path, flags, 0o666)
