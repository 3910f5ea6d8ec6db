"""`Summary`: every number about a run, from its events, while it goes on and afterwards."""

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from egeria import events, policy
from egeria.events import Declined, Event, IntervalMeasured, Resumed, RunClosed, RunStarted

_NOTHING: dict[str, Any] = {"config": {}, "modules": [], "trainable": [], "environment": {}}
_NOTHING |= {"deepest_freeze": 0, "interval_steps": 0, "total_steps": None}
FEW_STEPS = 30  # with nothing frozen, under which their time says little
UNKNOWN_START = RunStarted(step=0, rule="unknown", **_NOTHING)


class Pace(NamedTuple):
    """Median seconds of an iteration, over the steps with `frozen` front modules frozen."""

    frozen: int
    num_steps: int
    wall_s: float
    cpu_s: float
    memory_bytes: int | None  # most CUDA memory allocated; None on the CPU


class Clock(NamedTuple):
    """Training time by one clock (wall or CPU), in seconds."""

    unfrozen_iteration_s: float | None  # median with nothing frozen, measured or computed
    training_s: float  # iteration time times steps, over all intervals; without the overhead
    overhead_s: float  # all that egeria itself cost, up to the newest interval
    saved_s: float | None  # unfrozen minus found iteration time, times steps; less the overhead

    @property
    def unfrozen_s(self) -> float | None:
        """What the same steps would have taken with nothing frozen, without egeria."""
        return None if self.saved_s is None else self.training_s + self.overhead_s + self.saved_s

    @property
    def saved_share(self) -> float | None:
        """The time saved as a share of `unfrozen_s`; negative where egeria cost more."""
        return ratio(self.saved_s, self.unfrozen_s)

    @property
    def overhead_share(self) -> float | None:
        """The overhead as a share of the training time."""
        return ratio(self.overhead_s, self.training_s)


class DepthPoint(NamedTuple):
    """From this step on, `frozen` front modules are frozen, for `num_steps` steps."""

    step: int
    frozen: int
    num_steps: int
    parameter_share: float | None  # of the trainable parameters, that is frozen
    skipped_share: float | None  # of an iteration's compute: the backward pass of what is frozen


class Metric(NamedTuple):
    """One metric that the user logged, over the run."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Summary(events.EventsByKind):
    """The numbers of a run so far; shares are from 0 to 1, and what is unknown is None."""

    name: str  # of the directory
    events: tuple[Event, ...]  # those that count, oldest first
    processes: list[list[Event]]  # the same by the process that wrote them
    started: RunStarted
    modules: tuple[str, ...]  # names of the layer modules, front to back; empty without a cut
    total_steps: int | None  # optimizer steps of the whole run, as `attach` was given them
    step: int  # optimizer steps done, also those before the journal begins
    first_step: int  # at which the journal begins; not 0 if a run was resumed in a new directory
    closed: bool  # False while it goes on, or after a crash
    stage: str  # 'bootstrapping' or 'knowledge-guided'
    num_resumed: int
    num_other_runs: int  # in the same directory; they do not count
    num_damaged: int  # lines of the journal that could not be read
    first_damaged: int | None  # number of the first of them

    @classmethod
    def from_events(
        cls,
        found: Iterable[Event],
        directory: Path | None = None,
        *,
        step: int = 0,
        started: RunStarted = UNKNOWN_START,
    ) -> "Summary":
        """Return the summary of a run, live or finished.

        Events after the step of a loaded state do not count, nor other runs in the same
        directory. Give `step` and `started` for a run that goes on.
        """
        processes, num_other_runs = _course(found)
        kept = tuple(itertools.chain(*processes))
        starts = [event for event in kept if isinstance(event, RunStarted)] or [started]
        # A run that is resumed after freezing had ended has none.
        started = next((event for event in reversed(starts) if event.modules), starts[-1])
        begin = next((e for e in kept if isinstance(e, (Resumed, IntervalMeasured))), None)
        stages = [policy.first_stage(started.config.get("policy", {}).get("name"))]
        stages += [e.stage for e in kept if isinstance(e, (Resumed, events.StageChanged))]
        return cls(
            name=(directory or Path()).resolve().name,
            events=kept,
            processes=processes,
            started=started,
            modules=tuple(module["name"] for module in started.modules),
            total_steps=started.total_steps,
            step=max([step, *(event.step for event in kept)]),
            first_step=begin.step if isinstance(begin, Resumed) else 0,
            closed=any(isinstance(event, RunClosed) for event in processes[-1]),
            stage=stages[-1],
            num_resumed=len(processes) - 1,
            num_other_runs=num_other_runs,
            num_damaged=getattr(found, "num_damaged", 0),
            first_damaged=getattr(found, "first_damaged", None),
        )

    @property
    def title(self) -> str:
        """The model and its data; the name of the directory if the journal does not have them."""
        model, data = (self.started.environment.get(name) for name in ("model", "data"))
        return f"{model} on {data}" if model and data else str(model or self.name)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """What the user logged; empty in `run.summary()`."""
        found: dict[str, list[tuple[int, float]]] = {}
        for event in self.of(events.MetricLogged):
            for name, value in event.values.items():
                found.setdefault(name, []).append((event.step, value))
        return tuple(Metric(name, *zip(*points, strict=True)) for name, points in found.items())

    @cached_property
    def depths(self) -> tuple[DepthPoint, ...]:
        """The frozen depth over the run, one point for each change."""
        course, depth = {self.first_step: 0}, 0  # by step
        for event in self.events:
            is_end = isinstance(event, Declined) and event.what == "freezing"
            after = 0 if is_end or isinstance(event, events.Thawed) else depth
            if isinstance(event, (events.ModuleFrozen, Resumed)):
                after = event.frozen
            if after != depth:
                depth = course[event.step] = after
        ends = [*list(course)[1:], self.step]
        trainable = (module["num_trainable"] for module in self.started.modules)
        sums = list(itertools.accumulate(trainable, initial=0))
        shares = {depth: part / max(1, sums[-1]) for depth, part in enumerate(sums)}
        # The session also counts what belongs to no layer module.
        shares |= {event.frozen: event.parameter_share for event in self.of(events.ModuleFrozen)}
        skipped = self._skipped_shares()
        return tuple(
            DepthPoint(step, depth, max(end - step, 0), shares.get(depth), skipped.get(depth))
            for (step, depth), end in zip(course.items(), ends, strict=True)
        )

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen, or were when the run was closed."""
        return self.depths[-1].frozen

    @property
    def parameter_share(self) -> float | None:
        """Share of the trainable parameters that is frozen."""
        return self.depths[-1].parameter_share

    @property
    def skipped_share(self) -> float | None:
        """Share of the compute so far that was skipped, mean over the steps."""
        skipped = [(point.skipped_share or 0.0) * point.num_steps for point in self.depths]
        if any(point.skipped_share is None for point in self.depths):
            return None
        return ratio(math.fsum(skipped), sum(point.num_steps for point in self.depths))

    def _skipped_shares(self) -> dict[int, float]:
        """Return the share of an iteration's compute that each depth skips."""
        modules = self.started.modules
        forward = [float(entry.get("share", math.nan)) for entry in modules]
        if not all(0 <= share <= 1 for share in forward):
            return {0: 0.0}
        trained = [entry["num_trainable"] / max(1, entry["num_parameters"]) for entry in modules]
        # Freezing a module with nothing to train skips no backward pass.
        backward = zip(backward_shares(forward, trained), self.started.trainable, strict=False)
        saved = (share * trains for share, trains in backward)
        return dict(enumerate(itertools.accumulate(saved, initial=0.0)))

    @cached_property
    def intervals(self) -> list[IntervalMeasured]:
        """The intervals with steps and a time; others say nothing about the pace."""
        return [e for e in self.of(IntervalMeasured) if e.num_steps > 0 and e.iteration_wall_s > 0]

    @cached_property
    def paces(self) -> tuple[Pace, ...]:
        """The pace at each depth, shallowest first."""
        found = []
        for frozen in sorted({interval.frozen for interval in self.intervals}):
            group = [interval for interval in self.intervals if interval.frozen == frozen]
            wall_s = _median([(each.iteration_wall_s, each.num_steps) for each in group])
            cpu_s = _median([(each.iteration_cpu_s, each.num_steps) for each in group])
            most = max(each.memory_bytes or 0 for each in group)
            num_steps = sum(each.num_steps for each in group)
            found.append(Pace(frozen, num_steps, wall_s, cpu_s, most or None))
        return tuple(found)

    @cached_property
    def wall(self) -> Clock:
        """The training time by the wall clock."""
        return self._clock("wall_s")

    @cached_property
    def cpu(self) -> Clock:
        """The CPU time of the training, with that of a controller process."""
        return self._clock("cpu_s")

    @property
    def time_saved_s(self) -> float | None:
        """Estimated wall-clock seconds saved, less the overhead; negative if egeria cost more."""
        return self.wall.saved_s

    @property
    def num_unfrozen(self) -> int:
        """Steps in measured intervals with nothing frozen; under `FEW_STEPS` times are computed."""
        return sum(pace.num_steps for pace in self.paces if not pace.frozen)

    def _clock(self, name: str) -> Clock:
        unfrozen_s = next((getattr(pace, name) for pace in self.paces if not pace.frozen), None)
        others = [pace for pace in self.paces if pace.frozen]
        if self.num_unfrozen < FEW_STEPS and others:
            # Computed from the depth with the most steps, and the share of compute that it skips.
            most = max(others, key=lambda pace: pace.num_steps)
            skipped = self._skipped_shares().get(most.frozen)
            if skipped is not None:
                unfrozen_s = getattr(most, name) / (1.0 - skipped)
        overhead_s = sum(_overhead(process, name) for process in self.processes)
        training_s, saved_s = 0.0, -overhead_s
        for interval in self.intervals:
            pace_s = getattr(interval, f"iteration_{name}")
            training_s += pace_s * interval.num_steps
            if unfrozen_s is not None and interval.frozen:  # else jitter would pass for a saving
                saved_s += (unfrozen_s - pace_s) * interval.num_steps
        return Clock(unfrozen_s, training_s, overhead_s, None if unfrozen_s is None else saved_s)


def backward_shares(forward: Sequence[float], trained: Sequence[float]) -> list[float]:
    """Return the share of an iteration's operations in the backward pass of each layer module.

    For each operation of the forward pass the backward pass has one for the inputs, and another for
    the weights as far as they train: a layer with LoRA trains hardly any.
    """
    backward = [share * (1.0 + part) for share, part in zip(forward, trained, strict=True)]
    total = math.fsum(forward) + math.fsum(backward)
    return [part / total for part in backward] if total else backward


def _median(counted: list[tuple[float, int]]) -> float:
    """Return the median of values that each count as often as the number beside them says."""
    ordered = sorted(counted)
    ends = list(itertools.accumulate(amount for _, amount in ordered))
    return sum(ordered[bisect.bisect(ends, (ends[-1] - odd) // 2)][0] for odd in (1, 0)) / 2


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a part as a share of the whole; None if one is unknown."""
    return part / whole if part is not None and whole is not None and whole > 0 else None


def _course(found: Iterable[Event]) -> tuple[list[list[Event]], int]:
    """Return the events of the newest run by process, at least one; and the number of others."""
    processes: list[list[Event]] = [[]]
    for event in found:
        if isinstance(event, RunStarted) and any(isinstance(e, RunStarted) for e in processes[-1]):
            processes.append([])
        processes[-1].append(event)
    kept: list[list[Event]] = []
    num_left_out = 0
    for process in processes:
        if kept and not any(isinstance(event, Resumed) for event in process):
            if not any(event.step for event in process):
                continue  # an attempt that never stepped
            kept, num_left_out = [], num_left_out + 1
        kept.append([])
        for event in process:
            if isinstance(event, Resumed):
                kept = [[e for e in part if e.step <= event.step] for part in kept]
            kept[-1].append(event)
    return kept, num_left_out


def _overhead(process: Sequence[Event], name: str) -> float:
    """Return the overhead in one process so far, by the clock of that name."""
    counts = [event for event in process if isinstance(event, (IntervalMeasured, RunClosed))]
    if not counts:
        return 0.0
    cost_s = float(getattr(counts[-1], f"overhead_{name}"))
    if name == "wall_s":  # the controller process runs in parallel
        return cost_s
    if isinstance(counts[-1], RunClosed):
        return cost_s + counts[-1].controller_cpu_s
    kinds = (events.PlasticityRead, events.ReferenceRefreshed)
    return cost_s + sum(event.controller_cpu_s for event in process if isinstance(event, kinds))
