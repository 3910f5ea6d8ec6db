"""`Summary`: every number of a report, computed from the journal."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from egeria import events
from egeria.policy import first_stage
from egeria.report import freezing
from egeria.report.diagnosis import why_nothing_froze
from egeria.report.history import History, setting

_LESS = re.compile(
    r"(?<![a-z])(loss|error|err|perplexity|ppl|mse|rmse|mae|wer|cer|ter|fid|nll)(?![a-z])"
)
_UNKNOWN_START = events.RunStarted(
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Training time by one clock (wall or CPU), in seconds.

    `training_s + overhead_s + saved_s` is the estimate for the same steps with nothing frozen.
    """

    unfrozen_iteration_s: float | None
    """Median iteration time over the steps of the intervals in which nothing was frozen; None
    without any."""
    training_s: float
    """Iteration time times steps, over all intervals; the overhead of egeria is not in it."""
    overhead_s: float
    """All that egeria itself cost."""
    saved_s: float | None
    """Unfrozen minus found iteration time, times steps, over the other intervals; less the
    overhead."""

    @property
    def unfrozen_s(self) -> float | None:
        """What the same steps would have taken with nothing frozen, without egeria."""
        return None if self.saved_s is None else self.training_s + self.overhead_s + self.saved_s

    @property
    def saved_share(self) -> float | None:
        """The time saved as a share of `unfrozen_s`; negative where egeria cost
        more than it saved.
        """
        return _ratio(self.saved_s, self.unfrozen_s)

    @property
    def overhead_share(self) -> float | None:
        """The overhead as a share of the training time."""
        return _ratio(self.overhead_s, self.training_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthPace:
    """The median iteration while `frozen` front modules were frozen."""

    frozen: int
    num_steps: int
    wall_s: float
    cpu_s: float
    wall_ratio: float | None
    """To the unfrozen iteration: 0.8 means that an iteration takes a fifth less."""
    cpu_ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric that the user logged, over the run."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def lower_is_better(self) -> bool:
        """Whether less of it is better, guessed from the words in its name; the page says which way
        it was read.
        """
        return _LESS.search(self.name.lower()) is not None

    @property
    def final(self) -> float:
        """The value logged last, finite or not."""
        return self.values[-1]

    @property
    def best(self) -> float | None:
        """The best finite value; None where there was none."""
        finite = [value for value in self.values if math.isfinite(value)]
        return (min if self.lower_is_better else max)(finite) if finite else None

    @property
    def best_step(self) -> int | None:
        """The step at which the best value was first logged."""
        return None if self.best is None else self.steps[self.values.index(self.best)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatUse:
    """One number format that the reference had, and what its checks found."""

    taken: events.RungTaken
    num_checks: int
    largest_share: float | None
    """Its error as a share of the plasticity it was to show, the largest of all checks; None
    without any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """One decision about the frozen forward pass, and what came of it."""

    decided: events.CacheDecided
    used: events.CacheUsed | None
    """The last word on it; None where nothing was stored."""

    @property
    def hit_share(self) -> float | None:
        """Share of the samples that came from the store; None where nothing was stored."""
        return (
            None if self.used is None else _ratio(self.used.hits, self.used.hits + self.used.misses)
        )

    def stored_elsewhere(self, steps_per_epoch: object) -> tuple[int, float] | None:
        """Return how many samples were computed though another host had them stored, and the
        seconds that took.

        All that are computed behind the first epoch of a store are such, where a sampler deals them
        to another host in each epoch. None where there is one store for all, or the length of an
        epoch is not known.
        """
        used, numbers = self.used, self.decided.numbers
        if (
            used is None
            or not used.batches
            or not isinstance(steps_per_epoch, int)
            or "num_hosts" not in numbers
        ):
            return None
        if used.dropped_writes or numbers.get("stored_share", 1.0) < 1:  # some are stored nowhere
            return None
        per_batch = (used.hits + used.misses) / used.batches
        again = round(used.misses - used.mismatches - used.damaged - steps_per_epoch * per_batch)
        gain_s = (numbers.get("prefix_s") or 0.0) - (numbers.get("serve_s") or 0.0)
        return (again, again / per_batch * gain_s) if again > 0 and gain_s > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run did and what it cost; shares are between 0 and 1, times in seconds."""

    history: History
    started: events.RunStarted
    """How the run began; empty where the journal lacks its first lines."""
    name: str
    """Of the directory."""
    modules: tuple[freezing.Module, ...]
    deepest_freeze: int
    steps_done: int
    """Optimizer steps by the end of the journal, those before its first step included."""
    steps_measured: int
    """Steps in intervals of known pace; the times speak of these alone."""
    stage: str
    last_full_step: int | None
    """Where the last interval of known pace ended in which nothing was frozen; None without
    any."""
    wall: Clock
    cpu: Clock
    paces: tuple[DepthPace, ...]
    depths: tuple[freezing.DepthPoint, ...]
    mean_parameter_share: float | None
    """Frozen share of the parameters, mean over the steps done."""
    mean_skipped_share: float | None
    """Skipped share of the compute, mean over the steps done; None where it was not profiled."""
    timeline: tuple[freezing.FreezeMark, ...]
    why_nothing_froze: str | None
    num_readings: int
    dropped: dict[str, int]
    """Evaluations without a usable reading, counted by reason."""
    declined: tuple[tuple[str, str], ...]
    """What the library chose not to do, and why."""
    faults: tuple[tuple[str, str, int], ...]
    """Where something of ours failed, the error, and how often."""
    metrics: tuple[Metric, ...]
    formats: tuple[FormatUse, ...]
    cache: tuple[CacheUse, ...]

    @property
    def title(self) -> str:
        """What was trained on what; the name of the directory where the journal does not tell."""
        model, data = (self.started.environment.get(name) for name in ("model", "data"))
        return f"{model} on {data}" if model and data else str(model or self.name)

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
    started = history.last(events.RunStarted) or _UNKNOWN_START
    depths = freezing.depth_points(history)
    intervals = measured_intervals(history)
    wall, cpu = wall_clock(history), cpu_clock(history)
    faults = Counter((event.where, event.error) for event in history.of(events.FaultCaught))
    return Summary(
        history=history,
        started=started,
        name=history.directory.resolve().name,
        modules=freezing.list_modules(history, depths),
        deepest_freeze=(history.last(events.ModulesOrdered) or started).deepest_freeze,
        steps_done=history.last_step,
        steps_measured=sum(interval.num_steps for interval in intervals),
        stage=stage_of(history),
        last_full_step=max(
            (interval.step for interval in intervals if _is_full(interval)), default=None
        ),
        wall=wall,
        cpu=cpu,
        paces=_paces(intervals, wall.unfrozen_iteration_s, cpu.unfrozen_iteration_s),
        depths=depths,
        mean_parameter_share=freezing.mean_over_steps(depths, lambda point: point.parameter_share),
        mean_skipped_share=freezing.mean_over_steps(depths, lambda point: point.skipped_share),
        timeline=freezing.freeze_marks(history),
        why_nothing_froze=why_nothing_froze(history),
        num_readings=len(history.of(events.PlasticityRead)),
        dropped=dict(
            Counter(event.reason for event in history.of(events.ReadingDropped)).most_common()
        ),
        declined=tuple(
            dict.fromkeys((event.what, event.reason) for event in history.of(events.Declined))
        ),
        faults=tuple((where, error, amount) for (where, error), amount in faults.items()),
        metrics=_list_metrics(history),
        formats=list_formats(history),
        cache=list_uses(history),
    )


def stage_of(history: History) -> str:
    """Return the stage that a run is in at the end of its journal."""
    stages = [
        event.stage
        for event in history.events
        if isinstance(event, (events.StageChanged, events.Resumed))
    ]
    started = history.last(events.RunStarted) or _UNKNOWN_START
    return stages[-1] if stages else first_stage(setting(started, "policy", "name"))


def wall_clock(history: History) -> Clock:
    """Return the training time by the wall clock."""
    return _clock(measured_intervals(history), "iteration_wall_s", history.overhead_wall_s)


def cpu_clock(history: History) -> Clock:
    """Return the training time by the CPU clock."""
    return _clock(measured_intervals(history), "iteration_cpu_s", history.overhead_cpu_s)


def measured_intervals(history: History) -> list[events.IntervalMeasured]:
    """Return the intervals that have steps and a time; the others (a time of 0 too) say nothing of
    the pace.
    """
    return [
        interval
        for interval in history.of(events.IntervalMeasured)
        if interval.num_steps > 0
        and 0 < interval.iteration_wall_s < math.inf
        and math.isfinite(interval.iteration_cpu_s)
    ]


def list_formats(history: History) -> tuple[FormatUse, ...]:
    """Return the number formats of the reference, in the order they were taken."""
    taken = history.of(events.RungTaken)
    uses = []
    for event, end in zip(taken, [*(later.step for later in taken[1:]), math.inf], strict=False):
        # The check that ends the use of a format is written at the same step as the format after
        # it.
        during = [
            check for check in history.of(events.FidelityChecked) if event.step <= check.step <= end
        ]
        checks = [check for check in during if check.rung == event.after]
        shares = [check.error / check.plasticity for check in checks if check.plasticity > 0]
        uses.append(
            FormatUse(taken=event, num_checks=len(checks), largest_share=max(shares, default=None))
        )
    return tuple(uses)


def list_uses(history: History) -> tuple[CacheUse, ...]:
    """Return the decisions about the frozen forward pass, oldest first."""
    last = {event.generation: event for event in history.of(events.CacheUsed)}
    return tuple(
        CacheUse(decided=event, used=last.get(event.generation) if event.mode == "stored" else None)
        for event in history.of(events.CacheDecided)
    )


def _list_metrics(history: History) -> tuple[Metric, ...]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in history.of(events.MetricLogged):
        for name, value in event.values.items():
            if isinstance(value, (int, float)):
                found.setdefault(str(name), []).append((event.step, float(value)))
    metrics = []
    for name, points in found.items():
        steps, values = zip(*points, strict=True)
        metrics.append(Metric(name=name, steps=steps, values=values))
    return tuple(metrics)


def _clock(intervals: list[events.IntervalMeasured], name: str, overhead_s: float) -> Clock:
    paces = [(float(getattr(interval, name)), interval) for interval in intervals]
    unfrozen = [(pace, interval.num_steps) for pace, interval in paces if _is_full(interval)]
    unfrozen_s = freezing.median_over_steps(unfrozen) if unfrozen else None
    saved_s = None
    if unfrozen_s is not None:
        # Only where something was frozen: else the jitter of the unfrozen pace would pass for a
        # saving.
        gains = (
            (unfrozen_s - pace) * interval.num_steps
            for pace, interval in paces
            if not _is_full(interval)
        )
        saved_s = sum(gains) - overhead_s
    training_s = sum(pace * interval.num_steps for pace, interval in paces)
    return Clock(
        unfrozen_iteration_s=unfrozen_s,
        training_s=training_s,
        overhead_s=overhead_s,
        saved_s=saved_s,
    )


def _paces(
    intervals: list[events.IntervalMeasured],
    unfrozen_wall_s: float | None,
    unfrozen_cpu_s: float | None,
) -> tuple[DepthPace, ...]:
    """Return the pace at each depth that the run was at, shallowest first."""
    paces: list[DepthPace] = []
    for depth in sorted({interval.frozen for interval in intervals}):
        at_depth = [interval for interval in intervals if interval.frozen == depth]
        wall_s = freezing.median_over_steps(
            (entry.iteration_wall_s, entry.num_steps) for entry in at_depth
        )
        cpu_s = freezing.median_over_steps(
            (entry.iteration_cpu_s, entry.num_steps) for entry in at_depth
        )
        paces.append(
            DepthPace(
                frozen=depth,
                num_steps=sum(interval.num_steps for interval in at_depth),
                wall_s=wall_s,
                cpu_s=cpu_s,
                wall_ratio=_ratio(wall_s, unfrozen_wall_s),
                cpu_ratio=_ratio(cpu_s, unfrozen_cpu_s),
            )
        )
    return tuple(paces)


def _is_full(interval: events.IntervalMeasured) -> bool:
    return interval.frozen == 0


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole is not None and whole > 0 else None
