"""`Summary`: every number about a run, from its events, while it goes on and afterwards."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from egeria import events
from egeria.events import Event, IntervalMeasured, RunClosed, RunStarted
from egeria.journal import Journal
from egeria.policy import first_stage

Kind = TypeVar("Kind", bound=Event)
_LESS = re.compile(
    r"(?<![a-z])(loss|error|err|perplexity|ppl|mse|rmse|mae|wer|cer|ter|fid|nll)(?![a-z])"
)
UNKNOWN_START = RunStarted(
    step=0,
    config={},
    modules=[],
    trainable=[],
    deepest_freeze=0,
    rule="unknown",
    total_steps=None,
    interval_steps=0,
    environment={},
)


@dataclass(frozen=True, slots=True)
class Pace:
    """Median seconds of an iteration, over the steps with `frozen` front modules frozen."""

    frozen: int
    num_steps: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Training time by one clock (wall or CPU), in seconds."""

    unfrozen_iteration_s: float | None
    """Median iteration time with nothing frozen; None without such an interval."""
    training_s: float
    """Iteration time times steps, over all intervals; without the overhead of egeria."""
    overhead_s: float
    """All that egeria itself cost."""
    saved_s: float | None
    """Unfrozen minus found iteration time, times steps; less the overhead."""

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


@dataclass(frozen=True, slots=True)
class DepthPoint:
    """From this step on, `frozen` front modules are frozen, for `num_steps` steps."""

    step: int
    frozen: int
    num_steps: int
    parameter_share: float | None
    """Share of the trainable parameters that is frozen."""
    skipped_share: float | None
    """Share of an iteration's compute that is skipped: the backward pass of what is frozen."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric that the user logged, over the run."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def lower_is_better(self) -> bool:
        """Whether less of it is better, guessed from the words in its name."""
        return _LESS.search(self.name.lower()) is not None

    @property
    def best(self) -> float | None:
        """The best finite value; None where there was none."""
        finite = filter(math.isfinite, self.values)
        return (min if self.lower_is_better else max)(finite, default=None)


class Summary:
    """Where a run stands or ended; shares are between 0 and 1, and what is not known is None.

    Args:
        events: of the journal, oldest first. Where a state was loaded, those behind its step are
            left out; a new run in an old directory replaces what is there.
        directory: of the run.
        step: of a run that goes on, the optimizer steps done.
        started: what is known of a run before its first step, which writes it.
        num_damaged: lines of the journal that could not be read.
    """

    def __init__(
        self,
        events: Iterable[Event],
        directory: Path | None = None,
        *,
        step: int = 0,
        started: RunStarted = UNKNOWN_START,
        num_damaged: int = 0,
    ) -> None:
        self._processes, self.num_earlier_runs = _course(events)
        self.events = tuple(itertools.chain.from_iterable(self._processes))
        self.directory, self.num_damaged = directory or Path(), num_damaged
        self.step = max([step, *(event.step for event in self.events)])
        """Optimizer steps done, those before the journal's first step included."""
        self.started = self.last(RunStarted) or started
        """How the run began; empty where the journal lacks it."""

    @classmethod
    def from_journal(cls, journal: Journal) -> Summary:
        """Return the summary of a journal that was read."""
        return cls(journal, journal.directory, num_damaged=journal.num_damaged)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[Kind]) -> Kind | None:
        """Return the latest event of one kind, or None."""
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)

    # --- the run ---------------------------------------------------------------------------------

    def setting(self, group: str, name: str) -> Any:
        """Return a setting of the run; None where the journal lacks it."""
        return self.started.config.get(group, {}).get(name)

    @property
    def name(self) -> str:
        """Of the directory."""
        return self.directory.resolve().name

    @property
    def title(self) -> str:
        """What was trained on what; the name of the directory where the journal does not say."""
        model, data = (self.started.environment.get(name) for name in ("model", "data"))
        return f"{model} on {data}" if model and data else str(model or self.name)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, as `attach` was given them."""
        return self.started.total_steps

    @property
    def first_step(self) -> int:
        """Where the journal begins: 0, or the step at which a run went on in a new directory."""
        begins = (entry for entry in self.events if isinstance(entry, _BEGINS))
        begin = next(begins, None)
        return begin.step if isinstance(begin, events.Resumed) else 0

    @property
    def num_resumed(self) -> int:
        """How often the run went on behind what is in the journal."""
        return len(self._processes) - 1

    @property
    def closed(self) -> bool:
        """Whether the run was closed; False while it goes on, or after a crash."""
        return any(isinstance(event, RunClosed) for event in (self._processes or [[]])[-1])

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        found = (e for e in reversed(self.events) if isinstance(e, _HAS_STAGE))
        event = next(found, None)
        return event.stage if event else first_stage(self.setting("policy", "name"))

    @property
    def plasticity(self) -> float | None:
        """The newest reading."""
        reading = self.last(events.PlasticityRead)
        return reading.value if reading else None

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """What the user logged; empty in `run.summary()`."""
        found: dict[str, list[tuple[int, float]]] = {}
        for event in self.of(events.MetricLogged):
            for name, value in event.values.items():
                found.setdefault(name, []).append((event.step, value))
        return tuple(Metric(name, *zip(*points, strict=True)) for name, points in found.items())

    # --- what was frozen -------------------------------------------------------------------------

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the layer modules, front to back; empty before the first step, and where the
        model could not be cut.
        """
        return tuple(entry["name"] for entry in self.started.modules)

    @property
    def num_modules(self) -> int:
        """How many layer modules the model has."""
        return len(self.started.modules)

    @cached_property
    def changes(self) -> tuple[tuple[int, int, int], ...]:
        """Step, frozen modules before, and behind, of each change of the depth."""
        found, depth = [], 0
        for event in self.events:
            if isinstance(event, (events.ModuleFrozen, events.Resumed)):
                after = event.frozen
            elif isinstance(event, events.Thawed) or (
                isinstance(event, events.Declined) and event.what == "freezing"
            ):
                after = 0  # a session that cannot continue thaws everything
            else:
                continue
            if after != depth:
                found.append((event.step, depth, after))
                depth = after
        return tuple(found)

    @cached_property
    def depths(self) -> tuple[DepthPoint, ...]:
        """How deep the run was frozen from when on, one point for each change."""
        course = {self.first_step: 0} | {step: after for step, _, after in self.changes}
        points = sorted(course.items())
        ends = [*(step for step, _ in points[1:]), self.step]
        shares, skipped = self._parameter_shares(), self._skipped_shares()
        return tuple(
            DepthPoint(step, depth, max(end - step, 0), shares.get(depth), skipped.get(depth))
            for (step, depth), end in zip(points, ends, strict=True)
        )

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen; of a closed run, how many were."""
        return self.depths[-1].frozen

    @property
    def parameter_share(self) -> float | None:
        """Share of the trainable parameters that is frozen."""
        return self.depths[-1].parameter_share

    @property
    def mean_parameter_share(self) -> float | None:
        """The same, mean over the steps."""
        return self._mean([point.parameter_share for point in self.depths])

    @property
    def skipped_share(self) -> float | None:
        """Share of the compute so far that was skipped, mean over the steps."""
        return self._mean([point.skipped_share for point in self.depths])

    def steps_frozen(self, module: int) -> int:
        """Return for how many steps a layer module was frozen."""
        return sum(point.num_steps for point in self.depths if point.frozen > module)

    def _mean(self, shares: Sequence[float | None]) -> float | None:
        known = [
            (e, p.num_steps) for e, p in zip(shares, self.depths, strict=True) if e is not None
        ]
        num_steps = sum(length for _, length in known)
        if len(known) < len(shares) or not num_steps:
            return None
        return sum(share * length for share, length in known) / num_steps

    def _parameter_shares(self) -> dict[int, float]:
        """Return the share of the parameters that is frozen at each depth."""
        sums = list(itertools.accumulate(entry["num_trainable"] for entry in self.started.modules))
        shares = {depth: part / sums[-1] for depth, part in enumerate(sums, 1)} if any(sums) else {}
        # The session also counts what belongs to no layer module.
        measured = {event.frozen: event.parameter_share for event in self.of(events.ModuleFrozen)}
        return {0: 0.0} | shares | measured

    def _skipped_shares(self) -> dict[int, float]:
        """Return the share of an iteration that goes with the backward pass of what is frozen."""
        modules = self.started.modules
        forward = [float(entry.get("share", math.nan)) for entry in modules]
        if not all(map(math.isfinite, forward)):
            return {0: 0.0}
        trained = [entry["num_trainable"] / max(1, entry["num_parameters"]) for entry in modules]
        # A module with nothing to train has no backward pass that freezing could take away.
        saved = map(
            lambda share, trains: share if trains else 0.0,
            backward_shares(forward, trained),
            self.started.trainable,
        )
        return dict(enumerate(itertools.accumulate(saved, initial=0.0)))

    # --- what it cost and saved ------------------------------------------------------------------

    @cached_property
    def intervals(self) -> list[IntervalMeasured]:
        """The intervals that have steps and a time; others say nothing of the pace."""
        return [
            interval
            for interval in self.of(IntervalMeasured)
            if interval.num_steps > 0
            and 0 < interval.iteration_wall_s < math.inf
            and math.isfinite(interval.iteration_cpu_s)
        ]

    @cached_property
    def paces(self) -> tuple[Pace, ...]:
        """The pace at each depth that the run was at, shallowest first."""
        found: dict[int, list[IntervalMeasured]] = {}
        for interval in self.intervals:
            found.setdefault(interval.frozen, []).append(interval)
        return tuple(
            Pace(
                frozen,
                sum(entry.num_steps for entry in group),
                _median((entry.iteration_wall_s, entry.num_steps) for entry in group),
                _median((entry.iteration_cpu_s, entry.num_steps) for entry in group),
            )
            for frozen, group in sorted(found.items())
        )

    @cached_property
    def wall(self) -> Clock:
        """The training time by the wall clock."""
        return self._clock("wall_s")

    @cached_property
    def cpu(self) -> Clock:
        """The training time by the CPU clock, that of a controller process included."""
        return self._clock("cpu_s")

    @property
    def time_saved_s(self) -> float | None:
        """Estimated seconds of wall clock saved, less the overhead; negative where it cost more."""
        return self.wall.saved_s

    @property
    def overhead_s(self) -> float:
        """Seconds that egeria itself took, to the end of the newest interval."""
        return self.wall.overhead_s

    @property
    def overhead_share(self) -> float | None:
        """The overhead as a share of the training time."""
        return self.wall.overhead_share

    def _clock(self, name: str) -> Clock:
        unfrozen = [getattr(pace, name) for pace in self.paces if not pace.frozen]
        overhead_s = sum(_overhead(process, name) for process in self._processes)
        training_s, saved_s = 0.0, -overhead_s
        for interval in self.intervals:
            pace_s = getattr(interval, f"iteration_{name}")
            training_s += pace_s * interval.num_steps
            if unfrozen and interval.frozen:  # else jitter would pass for a saving
                saved_s += (unfrozen[0] - pace_s) * interval.num_steps
        if not unfrozen:
            return Clock(None, training_s, overhead_s, None)
        return Clock(unfrozen[0], training_s, overhead_s, saved_s)


_BEGINS = (events.Resumed, IntervalMeasured)
_HAS_STAGE = (events.Resumed, events.StageChanged)
_TAKES_CONTROLLER = (events.PlasticityRead, events.ReferenceRefreshed)


def backward_shares(forward: Sequence[float], trained: Sequence[float]) -> list[float]:
    """Return the share of an iteration's operations that goes with the backward pass of each layer
    module.

    Backward there is one part for each of the forward pass for the inputs, and another for the
    weights, as far as they train: of a layer with LoRA hardly any do.

    Args:
        forward: each one's share of the forward pass.
        trained: share of its parameters that train.
    """
    backward = [share * (1.0 + part) for share, part in zip(forward, trained, strict=True)]
    total = math.fsum(forward) + math.fsum(backward)
    return [part / total for part in backward] if total else backward


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return a part as a share of the whole; None where one is not known."""
    return part / whole if part is not None and whole is not None and whole > 0 else None


def _course(found: Iterable[Event]) -> tuple[list[list[Event]], int]:
    """Return the events of the last run, by process, and how many other runs were left out."""
    processes: list[list[Event]] = []
    for event in found:
        is_start = isinstance(event, RunStarted)
        if not processes or (is_start and any(isinstance(e, RunStarted) for e in processes[-1])):
            processes.append([])
        processes[-1].append(event)
    kept: list[list[Event]] = []
    num_left_out = 0
    for process in processes:
        if kept and not any(isinstance(event, events.Resumed) for event in process):
            if not process[-1].step:
                continue  # an attempt that never stepped
            kept, num_left_out = [], num_left_out + 1
        kept.append([])
        for event in process:
            if isinstance(event, events.Resumed):
                kept = [[e for e in part if e.step <= event.step] for part in kept]
            kept[-1].append(event)
    return kept, num_left_out


def _overhead(process: list[Event], name: str) -> float:
    """Return what egeria cost one process so far, by the clock of that name."""
    told = [event for event in process if isinstance(event, (IntervalMeasured, RunClosed))]
    if not told:
        return 0.0
    cost_s = float(getattr(told[-1], f"overhead_{name}"))
    if name == "wall_s":  # the controller process runs in parallel
        return cost_s
    if isinstance(told[-1], RunClosed):
        return cost_s + told[-1].controller_cpu_s
    return cost_s + sum(e.controller_cpu_s for e in process if isinstance(e, _TAKES_CONTROLLER))


def _median(paces: Iterable[tuple[float, int]]) -> float:
    """Return the median of the paces of intervals, each with its number of steps and counted as
    often: the many short intervals of a warm-up are few steps.
    """
    ordered = sorted(paces)
    left = sum(num_steps for _, num_steps in ordered) / 2
    for (pace, num_steps), (next_pace, _) in itertools.pairwise(ordered):
        left -= num_steps
        if left <= 0:
            return pace if left else (pace + next_pace) / 2
    return ordered[-1][0]
