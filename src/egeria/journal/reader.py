"""Reading: the events of a journal in order; torn or unknown lines are counted and left out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from egeria.errors import JournalError
from egeria.events import EVENT_TYPES, SCHEMA_VERSION, Event
from egeria.journal.store import download, is_url, local_directory

FILE_NAME = "journal.jsonl"
RUNS = Path("egeria_runs")
NOT_FINITE = ("nan", "inf", "-inf")
Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """The events of a run, oldest first."""

    directory: Path
    events: tuple[Event, ...]
    times: tuple[float, ...]
    """Seconds since the epoch at which each event was written; 0 where its line has no time."""
    num_damaged: int
    """Lines that could not be read: at most one per crash of the run that wrote them."""

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
    """Read the journal of a run.

    Args:
        directory: the run's directory, or the journal file itself; also the URL of a directory.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    path, text = _read(directory)
    events: list[Event] = []
    times: list[float] = []
    damaged = 0
    for line in filter(str.strip, text.split("\n")):
        record = _parse(line)
        if record.get("event") == "journal_opened":
            _check_schema(record.get("schema_version"), path)
        elif (event := _event(record)) is None:
            damaged += 1
        else:
            events.append(event)
            time = record.get("time")
            times.append(float(time) if isinstance(time, (int, float)) else 0.0)
    return Journal(
        directory=path.parent, events=tuple(events), times=tuple(times), num_damaged=damaged
    )


def _read(directory: str | Path) -> tuple[Path, str]:
    """Return the file of a journal, or where it would be on this host, and its text."""
    place: object = directory
    try:
        if is_url(directory):
            place = url = str(directory)
            content = download(url, FILE_NAME).decode("utf-8", errors="replace")
            if not content:
                raise FileNotFoundError(f"there is no {FILE_NAME} in {url}")
            return local_directory(url, RUNS) / FILE_NAME, content
        path = Path(directory)
        place = path = path / FILE_NAME if path.is_dir() else path
        return path, path.read_text(encoding="utf-8", errors="replace")
    except Exception as error:
        raise JournalError(
            f"A run's directory holds a {FILE_NAME}; {place} cannot be read: {error}. "
            f"Give the directory that `attach` was given, or that `run.directory` names."
        ) from error


def _parse(line: str) -> dict[str, Any]:
    """Return the object on a line, empty where there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _check_schema(version: object, path: Path) -> None:
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise JournalError(
            f"This egeria reads journals up to schema {SCHEMA_VERSION}; {path} has schema "
            f"{version!r}. "
            f"Read it with the egeria that wrote it, or a newer one."
        )


def _event(record: dict[str, Any]) -> Event | None:
    name = record.get("event")
    kind = EVENT_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    values = {
        field.name: _numbers(record[field.name])
        if "float" in str(field.type)
        else record[field.name]
        for field in dataclasses.fields(kind)
        if field.name in record
    }
    try:
        return kind(**values)
    except TypeError:
        return None


def _numbers(value: Any) -> Any:
    """Return the value with the texts that the writer puts for numbers JSON cannot hold as those
    numbers.
    """
    if isinstance(value, str) and value in NOT_FINITE:
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return value
