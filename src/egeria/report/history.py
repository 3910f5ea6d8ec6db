"""The course a run really took: the journal's events, less those that a resumed run went back on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from egeria.events import (
    Event,
    IntervalMeasured,
    PlasticityRead,
    ReferenceRefreshed,
    Resumed,
    RunClosed,
    RunStarted,
)
from egeria.journal import Journal, read_journal

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """What egeria itself cost, in seconds; the CPU time of a controller process is part of it."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    complete: bool = True
    """False where a process never closed its run, so that only evaluations could be counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The events that count, oldest first, and what was left out."""

    directory: Path
    events: tuple[Event, ...]
    overhead: Overhead
    first_step: int
    """Where the journal begins: 0, or the step at which a run went on in a new directory."""
    closed: bool
    """Whether the last process closed its run; False while it runs, or after a crash."""
    num_processes: int
    """How many processes wrote this course: 1 plus the number of times it was resumed."""
    num_overridden: int
    """Events after the point that a resumed run went back to."""
    num_earlier_runs: int
    """Runs in the same directory that a fresh run replaced; nothing here speaks of them."""
    num_damaged: int

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[Kind]) -> Kind | None:
        """Return the latest event of one kind, or None."""
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)


def read_history(directory: str | Path) -> History:
    """Read a journal and keep the course that its last process stands on.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    journal = read_journal(directory)
    kept: list[list[Event]] = []
    num_overridden = num_earlier_runs = 0
    for process in _processes(journal):
        if kept and not any(isinstance(event, Resumed) for event in process):
            if not _progressed(process):
                continue
            # Nobody loaded a state: a new run in an old directory, which owes the old one nothing.
            kept, num_overridden, num_earlier_runs = [], 0, num_earlier_runs + 1
        kept.append([])
        for event in process:
            if isinstance(event, Resumed):
                num_overridden += _rewind(kept, event.step)
            kept[-1].append(event)
    return History(
        directory=journal.directory,
        events=tuple(event for process in kept for event in process),
        overhead=_overhead(kept),
        first_step=_first_step(kept),
        closed=bool(kept) and any(isinstance(event, RunClosed) for event in kept[-1]),
        num_processes=len(kept),
        num_overridden=num_overridden,
        num_earlier_runs=num_earlier_runs,
        num_damaged=journal.num_damaged,
    )


def _processes(journal: Journal) -> list[list[Event]]:
    """Cut the journal where a run was attached."""
    processes: list[list[Event]] = []
    for event in journal:
        if not isinstance(event.step, int):
            continue
        if isinstance(event, RunStarted) or not processes:
            processes.append([])
        processes[-1].append(event)
    return processes


def _progressed(process: list[Event]) -> bool:
    return any(event.step > process[0].step for event in process)


def _rewind(kept: list[list[Event]], step: int) -> int:
    """Drop what happened after `step`; a closing stays, for what it says of the overhead was spent."""
    num_dropped = 0
    for index, process in enumerate(kept):
        remaining = [event for event in process if event.step <= step or isinstance(event, RunClosed)]
        num_dropped += len(process) - len(remaining)
        kept[index] = [
            dataclasses.replace(event, step=min(event.step, step)) if isinstance(event, RunClosed) else event
            for event in remaining
        ]
    return num_dropped


def _first_step(kept: list[list[Event]]) -> int:
    for event in kept[0] if kept else []:
        if isinstance(event, Resumed):
            return event.step
        if isinstance(event, IntervalMeasured):
            break
    return 0


def _overhead(kept: list[list[Event]]) -> Overhead:
    wall_s = cpu_s = 0.0
    complete = True
    for process in kept:
        closing = next((event for event in reversed(process) if isinstance(event, RunClosed)), None)
        if closing is not None:
            wall_s += closing.overhead_wall_s
            cpu_s += closing.overhead_cpu_s + closing.controller_cpu_s
            continue
        complete = complete and not any(isinstance(event, IntervalMeasured) for event in process)
        costs = [event for event in process if isinstance(event, (PlasticityRead, ReferenceRefreshed))]
        wall_s += sum(event.wall_s for event in costs)
        cpu_s += sum(event.cpu_s + event.controller_cpu_s for event in costs)
    return Overhead(wall_s=wall_s, cpu_s=cpu_s, complete=complete)
