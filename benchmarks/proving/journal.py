"""Journals of runs: reading those of any version of egeria, and writing those of runs without egeria.

A journal is a file of JSON objects, one a line. An event here is the dictionary of its line: its kind under 'event',
its optimizer step under 'step', and whatever else it has. Kinds that the reader of an event does not know are passed
over, so that archives of versions that were never released stay readable.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "journal.jsonl"
Event = dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """The events of a run, oldest first, without those that it went back on when it was resumed."""

    events: tuple[Event, ...]
    num_processes: int = 1
    """That wrote them: one more than the run was resumed."""

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self.events if event["event"] in kinds]

    def last(self, *kinds: str) -> Event | None:
        """Return the latest event of some kinds; None where there is none."""
        return next(iter(self.of(*kinds)[::-1]), None)

    @property
    def last_step(self) -> int:
        """Optimizer steps by the end of the journal."""
        return max((event["step"] for event in self.events), default=0)

    @property
    def cut(self) -> Event:
        """Return the event with the layer modules that the run went by; an empty one where it had none."""
        return self.last("modules_ordered") or self.last("run_started") or {"modules": [], "trainable": []}


def read_journal(directory: Path) -> Journal:
    """Read the journal of a directory; torn lines are left out.

    Raises:
        OSError: there is none.
    """
    kept: list[list[Event]] = []
    for process in _processes(_lines(directory / FILE_NAME)):
        if kept and not any(event["event"] == "resumed" for event in process):
            if all(event["step"] <= process[0]["step"] for event in process):
                continue  # an attempt that never made a step
            kept = []  # a new run in an old directory
        kept.append([])
        for event in process:
            if event["event"] == "resumed":
                for part in kept:
                    part[:] = [entry for entry in part if entry["step"] <= event["step"]]
            kept[-1].append(event)
    return Journal(tuple(event for process in kept for event in process), len(kept))


def _lines(path: Path) -> Iterator[Event]:
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("event"), str) and isinstance(record.get("step"), int):
            yield record


def _processes(events: Iterator[Event]) -> list[list[Event]]:
    """Cut the events where a run was started; what the first run declined before that is its own."""
    found: list[list[Event]] = [[]]
    for event in events:
        if event["event"] == "run_started" and any(entry["event"] == "run_started" for entry in found[-1]):
            found.append([])
        found[-1].append(event)
    return found if found[0] else []


class JournalWriter:
    """Appends events to the journal of a directory, which is made; each is in the file when `write` returns."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        content = path.read_bytes() if path.exists() else b""
        self._file = path.open("a", encoding="utf-8")
        if content and not content.endswith(b"\n"):  # whoever wrote it was killed
            self._file.write("\n")
        self._append({"event": "journal_opened", "schema_version": 1})

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append an event; numbers that JSON cannot hold become text."""
        self._append({"event": kind, "step": step, **values})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, record: Event) -> None:
        text = json.dumps(_finite({**record, "time": round(time.time(), 3)}), separators=(",", ":"), allow_nan=False)
        self._file.write(text + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
