"""The course a run really took: the journal's events, less those that a resumed
run went back on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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
class History:
    """The events that count, oldest first, and what was left out."""

    directory: Path
    events: tuple[Event, ...]
    overhead_wall_s: float
    """What egeria itself cost; of a process that did not close its run, to the end of the journal
    as it is."""
    overhead_cpu_s: float
    """The same by the CPU clock, the time of a controller process included."""
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

    @property
    def last_step(self) -> int:
        """Optimizer steps by the end of the journal, those before its first step included."""
        return max((event.step for event in self.events), default=0)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[Kind]) -> Kind | None:
        """Return the latest event of one kind, or None."""
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)


def read_history(directory: str | Path) -> History:
    """Read a journal and keep the course that its last process stands on."""
    return course_of(read_journal(directory))


def course_of(journal: Journal) -> History:
    """Keep the course that the last process of a journal stands on."""
    kept: list[list[Event]] = []
    num_overridden = num_earlier_runs = 0
    for process in _processes(journal):
        if kept and not any(isinstance(event, Resumed) for event in process):
            if all(event.step <= process[0].step for event in process):
                continue  # an attempt that never stepped
            # Nobody loaded a state: a new run in an old directory, which owes the old one nothing.
            kept, num_overridden, num_earlier_runs = [], 0, num_earlier_runs + 1
        kept.append([])
        for event in process:
            if isinstance(event, Resumed):
                num_overridden += _rewind(kept, event.step)
            kept[-1].append(event)
    begins = (
        event
        for event in (kept[0] if kept else ())
        if isinstance(event, (Resumed, IntervalMeasured))
    )
    begin = next(begins, None)
    costs = [_cost(process) for process in kept]
    return History(
        directory=journal.directory,
        events=tuple(event for process in kept for event in process),
        overhead_wall_s=sum(wall_s for wall_s, _ in costs),
        overhead_cpu_s=sum(cpu_s for _, cpu_s in costs),
        first_step=begin.step if isinstance(begin, Resumed) else 0,
        closed=any(isinstance(event, RunClosed) for process in kept[-1:] for event in process),
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


def _rewind(kept: list[list[Event]], step: int) -> int:
    """Drop what happened after `step`; a closing stays, for what it says of the
    overhead was spent.
    """
    num_before = sum(map(len, kept))
    for process in kept:
        process[:] = [
            replace(event, step=min(event.step, step)) if isinstance(event, RunClosed) else event
            for event in process
            if event.step <= step or isinstance(event, RunClosed)
        ]
    return num_before - sum(map(len, kept))


def _cost(process: list[Event]) -> tuple[float, float]:
    """Return what egeria cost one process, in wall and CPU seconds.

    Without a closing it is what the newest interval tells, and the evaluations since.
    """
    closing = next((event for event in reversed(process) if isinstance(event, RunClosed)), None)
    if closing is not None:
        return closing.overhead_wall_s, closing.overhead_cpu_s + closing.controller_cpu_s
    wall_s = cpu_s = controller_cpu_s = 0.0
    for event in process:
        if isinstance(event, (PlasticityRead, ReferenceRefreshed)):
            wall_s, cpu_s = wall_s + event.wall_s, cpu_s + event.cpu_s
            controller_cpu_s += event.controller_cpu_s
        elif isinstance(event, IntervalMeasured):
            wall_s, cpu_s = event.overhead_wall_s, event.overhead_cpu_s
    return wall_s, cpu_s + controller_cpu_s


def setting(started: RunStarted, group: str, name: str) -> Any:
    """Return a setting of the run; None where the journal lacks it."""
    settings = started.config.get(group)
    return settings.get(name) if isinstance(settings, dict) else None
