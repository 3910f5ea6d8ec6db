"""`Summary`: every number of a report, computed from the journal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egeria.events import (
    Declined,
    FaultCaught,
    ModulesOrdered,
    PlasticityRead,
    ReadingDropped,
    Resumed,
    RunStarted,
    StageChanged,
)
from egeria.policy import first_stage
from egeria.report.diagnosis import why_nothing_froze
from egeria.report.freezing import (
    DepthPoint,
    FreezeMark,
    Module,
    depth_points,
    freeze_marks,
    list_modules,
    mean_over_steps,
)
from egeria.report.history import History
from egeria.report.metrics import Metric, list_metrics
from egeria.report.pace import Clock, DepthPace, measure_clocks, measure_paces, measured_intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run did and what it cost; shares are between 0 and 1, times in seconds."""

    directory: Path
    name: str
    modules: tuple[Module, ...]
    deepest_freeze: int
    total_steps: int | None
    first_step: int
    """Where the journal begins; above 0 for a run that went on in a new directory."""
    steps_done: int
    """Optimizer steps by the end of the journal, those before `first_step` included."""
    steps_measured: int
    """Steps in intervals of known pace; the times speak of these alone."""
    interval_steps: int
    interval_reason: str
    rule: str
    stage: str
    config: dict[str, Any]
    environment: dict[str, Any]
    closed: bool
    num_processes: int
    num_overridden: int
    num_earlier_runs: int
    num_damaged: int
    overhead_complete: bool
    """False where a process did not close its run: the overhead then counts its evaluations alone."""
    wall: Clock
    cpu: Clock
    paces: tuple[DepthPace, ...]
    depths: tuple[DepthPoint, ...]
    mean_parameter_share: float | None
    """Frozen share of the parameters, mean over the steps done."""
    mean_skipped_share: float | None
    """Skipped share of the compute, mean over the steps done; None where it was not profiled."""
    timeline: tuple[FreezeMark, ...]
    why_nothing_froze: str | None
    num_readings: int
    dropped: dict[str, int]
    """Evaluations without a usable reading, counted by reason."""
    declined: tuple[tuple[str, str], ...]
    """What the library chose not to do, and why."""
    faults: tuple[tuple[str, str, int], ...]
    """Where something of ours failed, the error, and how often."""
    metrics: tuple[Metric, ...]

    @property
    def span(self) -> tuple[int, int]:
        """The steps that the journal covers."""
        return self.first_step, self.steps_done

    @property
    def frozen_now(self) -> int:
        """How many front modules are frozen at the end of the journal."""
        return self.depths[-1].frozen

    @property
    def num_dropped(self) -> int:
        """Evaluations without a usable reading."""
        return sum(self.dropped.values())


def summarize(history: History) -> Summary:
    """Compute the summary of a run; whatever the journal does not tell is empty or None."""
    start = history.last(RunStarted) or _UNKNOWN_START
    cut = history.last(ModulesOrdered) or start
    steps_done = max((event.step for event in history.events), default=0)
    depths = depth_points(history)
    wall, cpu = measure_clocks(history)
    return Summary(
        directory=history.directory,
        name=history.directory.resolve().name,
        modules=list_modules(history, depths, steps_done),
        deepest_freeze=cut.deepest_freeze,
        total_steps=start.total_steps,
        first_step=history.first_step,
        steps_done=steps_done,
        steps_measured=sum(interval.num_steps for interval in measured_intervals(history)),
        interval_steps=start.interval_steps,
        interval_reason=start.interval_reason,
        rule=start.rule,
        stage=_stage(history),
        config=start.config,
        environment=start.environment,
        closed=history.closed,
        num_processes=history.num_processes,
        num_overridden=history.num_overridden,
        num_earlier_runs=history.num_earlier_runs,
        num_damaged=history.num_damaged,
        overhead_complete=history.overhead.complete,
        wall=wall,
        cpu=cpu,
        paces=measure_paces(history),
        depths=depths,
        mean_parameter_share=mean_over_steps(depths, steps_done, lambda point: point.parameter_share),
        mean_skipped_share=mean_over_steps(depths, steps_done, lambda point: point.skipped_share),
        timeline=freeze_marks(history),
        why_nothing_froze=why_nothing_froze(history),
        num_readings=len(history.of(PlasticityRead)),
        dropped=dict(Counter(event.reason for event in history.of(ReadingDropped)).most_common()),
        declined=tuple(dict.fromkeys((event.what, event.reason) for event in history.of(Declined))),
        faults=_faults(history),
        metrics=list_metrics(history),
    )


_UNKNOWN_START = RunStarted(
    step=0,
    config={},
    modules=[],
    trainable=[],
    deepest_freeze=0,
    rule="unknown",
    total_steps=None,
    interval_steps=0,
    interval_reason="unknown: the first lines of the journal are missing",
    environment={},
)


def _stage(history: History) -> str:
    stages = [event.stage for event in history.events if isinstance(event, (StageChanged, Resumed))]
    if stages:
        return stages[-1]
    start = history.last(RunStarted)
    settings = start.config.get("policy") if start is not None else None
    return first_stage(settings.get("name") if isinstance(settings, dict) else None)


def _faults(history: History) -> tuple[tuple[str, str, int], ...]:
    counts = Counter((event.where, event.error) for event in history.of(FaultCaught))
    return tuple((where, error, amount) for (where, error), amount in counts.items())
