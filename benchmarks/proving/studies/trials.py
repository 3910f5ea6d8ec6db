"""Whether worth foretells what a freeze costs: branched trials beside what an observer measured.

A *point* is a trial: the front layer modules up to a depth frozen from a share of the training on. What that cost is
the quality of plain training of the same seed less that of the trial; what may have foretold it is what was known of
these modules at the step of the freeze.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.proving.comparing.comparison import difference_of
from benchmarks.proving.comparing.results import Outcome
from benchmarks.proving.comparing.statistics import Estimate, rank_correlations
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.policies import OBSERVER, PLAIN, parse_policy
from benchmarks.proving.running.runfile import ORACLE, RunFile
from benchmarks.proving.studies.oracle import Survey
from egeria.events import IntervalMeasured, ModuleFrozen, ModulesOrdered, PlasticityRead, RunStarted
from egeria.policy.evidence import Movement
from egeria.policy.worth import FIRST_LOOK_SHARE
from egeria.report.history import read_history

OBSERVED = (
    f"{OBSERVER}:plasticity.metric=relative_sp,reference.precision=fp32,controller.kind=inline,"
    "controller.budget_share=1000,freezing.enabled=false"
)
"""What the observer's readings cost is no matter here, and nothing in them may depend on times."""
_TRIAL = re.compile(r"static:schedule=(?P<time>[\d.]+):(?P<depth>\d+)")
NEWEST_SHARE = 0.05
"""Share of the training before a freeze whose weight changes and gradients count."""
NEWEST_READINGS = 4
"""Of plasticity that count for a layer module: two snapshots, two distances from each; so many make a law, too."""

WORTH, PLASTICITY, CHANGE, GRADIENT = "worth", "plasticity", "weight change", "gradient norm"
TO_THE_END = " to the end"
DEPTH, OTHERS = "number of modules to the end", "cost with the other seeds"


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a freeze cost, and what foretold it."""

    workload: str
    """Its name, and the tier."""
    seed: int | None
    """None for the mean over seeds."""
    time: float
    """Share of the training from which on it is frozen."""
    depth: int
    """How many front layer modules are."""
    cost: float
    """Final quality lost: in points, or in per cent where the metric is relative; negative where it is better."""
    foretold: dict[str, float | None]
    """By name; None where it is not known."""


def plan(
    pattern: RunFile, seeds: Sequence[int], times: Sequence[float], depths: Sequence[int], known: Survey
) -> tuple[list[RunFile], list[RunFile]]:
    """Return the plain runs, and what is to be made once those are finished: an observed run and trials for each seed.

    Args:
        pattern: a run of the workload; policy and seed are put in.
        seeds: of all runs.
        times: shares of the training.
        depths: numbers of front layer modules; what may not freeze is left out.
        known: of the network.

    Raises:
        RefusedError: none of the depths may freeze.
    """
    deepest = len(known.weights)
    texts = [f"static:schedule={time:g}:{depth}" for time in times for depth in depths if depth <= deepest]
    if not texts:
        raise RefusedError(
            f"Of {pattern.workload.name} 1 to {deepest} layer modules may freeze; found --depths {depths}."
        )
    plain = parse_policy(PLAIN)
    begun = [dataclasses.replace(pattern, policy=plain, seed=seed, keeps_epochs=known.is_in_order) for seed in seeds]
    then = [dataclasses.replace(pattern, policy=parse_policy(OBSERVED), seed=seed) for seed in seeds]
    tried = [dataclasses.replace(pattern, policy=parse_policy(text), seed=seed, purpose=ORACLE)
             for seed in seeds for text in texts]  # fmt: skip
    return begun, [*then, *tried]


def choose(
    outcomes: Sequence[Outcome],
    seeds: Sequence[int] | None = None,
    times: Sequence[float] | None = None,
    depths: Sequence[int] | None = None,
) -> list[Outcome]:
    """Return plain and observed runs and trials; None stands for all seeds that were observed, times and depths.

    Raises:
        RefusedError: a trial has no plain or no observed run beside it, or there is no trial.
    """
    named = {(*_group(outcome), outcome.run.policy.text) for outcome in outcomes}
    texts = None if times is None else [f"{time:g}" for time in times]
    chosen = []
    for outcome in outcomes:
        trial = _TRIAL.fullmatch(outcome.run.policy.text)
        is_wanted = outcome.run.policy.text in (PLAIN, OBSERVED) or (
            trial is not None
            and (texts is None or trial["time"] in texts)
            and (depths is None or int(trial["depth"]) in depths)
        )
        is_seed = (*_group(outcome), OBSERVED) in named if seeds is None else outcome.run.seed in seeds
        if is_wanted and is_seed:
            chosen.append(outcome)
    missing = {(*_group(outcome), text) for outcome in chosen for text in (PLAIN, OBSERVED)} - named
    if missing or not any(_TRIAL.fullmatch(outcome.run.policy.text) for outcome in chosen):
        lacks = ", ".join(f"{name} seed {seed}, {text}" for name, _, seed, text in sorted(missing)) or "any trial"
        raise RefusedError(f"There is no finished run of {lacks}. Make it with `python -m benchmarks trials`.")
    return chosen


@dataclass
class Observed:
    """What was measured in a run in which nothing froze.

    Args:
        intervals: from the first to the last.
        readings: of plasticity.
        trainable: for each layer module whether it has anything to train.
        total_steps: of the training.
    """

    intervals: Sequence[IntervalMeasured]
    readings: Sequence[PlasticityRead]
    trainable: Sequence[bool]
    total_steps: int

    @classmethod
    def read(cls, directory: Path) -> Observed:
        """Return what a journal tells."""
        history = read_history(directory)
        started = history.of(RunStarted)[-1]
        cut = (history.of(ModulesOrdered) or [started])[-1]
        assert started.total_steps is not None, "the bench gives it"
        return cls(history.of(IntervalMeasured), history.of(PlasticityRead), cut.trainable, started.total_steps)

    def __post_init__(self) -> None:
        found = self.intervals
        self._steps = np.array([0, *(it.step for it in found), self.total_steps])
        rates = np.array([it.learning_rate for it in (found[0], *found, found[-1])])
        means = (rates[1:] + rates[:-1]) / 2  # a rate is told at the end of an interval: that of the step to come
        self._sums = np.concatenate([[0.0], np.cumsum(np.diff(self._steps) * means)])
        self._step_of = {it.evaluation: it.step for it in found}

    def rate_sum(self, begin: float, end: float) -> float:
        """Return the sum of the learning rate over the steps from one to another."""
        return float(np.interp(end, self._steps, self._sums) - np.interp(begin, self._steps, self._sums))

    def foretell(self, step: int, depth: int) -> dict[str, float | None]:
        """Return what is known at a step of a freeze of the first layer modules, by name."""
        ahead = self.rate_sum(step, self.total_steps)
        share = ahead / whole if (whole := self.rate_sum(0, self.total_steps)) > 0 else 0.0
        newest = [it for it in self.intervals if step - NEWEST_SHARE * self.total_steps < it.step <= step]
        places = range(depth)
        worths = [self._worth_share(place, step) for place in places]
        read = [self._plasticity(place, step, ahead) for place in places]
        changes = [self._change(newest, place, ahead) for place in places]
        gradients = [self._mean_gradient(newest, place) for place in places]
        return {
            WORTH: _total(worths, share),
            PLASTICITY: _total([level for level, _ in read], 1 / depth),
            PLASTICITY + TO_THE_END: _total([to_end for _, to_end in read]),
            CHANGE: _total([level for level, _ in changes], 1 / depth),
            CHANGE + TO_THE_END: _total([to_end for _, to_end in changes]),
            GRADIENT: _total(gradients),
            GRADIENT + TO_THE_END: _total(gradients, ahead),
            DEPTH: depth * share,
        }

    def _worth_share(self, place: int, step: int) -> float | None:
        """Return the share of a layer module in what all steps of the first look brought, those of the last included.

        The policy 'worth' leaves out the last module and the first half of the look.
        """
        last = min(step, FIRST_LOOK_SHARE * self.total_steps)
        measured = [it.worth for it in self.intervals if it.worth and it.step <= last]
        rows = [worth for worth in measured if any(part is not None for part in worth)]
        sums = [math.fsum(column) if None not in column else None for column in zip(*rows, strict=True)]
        total = math.fsum(part for part in sums if part is not None)
        if not self.trainable[place]:
            return 0.0
        return None if total <= 0 or sums[place] is None else max(0.0, sums[place] / total)

    def _plasticity(self, place: int, step: int, ahead: float) -> tuple[float | None, float | None]:
        """Return the newest plasticity of a layer module, and what it would come to by the end."""
        read = [found for found in self.readings if found.module == place and found.step <= step][-NEWEST_READINGS:]
        since = [self._step_of.get(found.evaluation - (found.age or 0), found.step) for found in read]
        sums = [self.rate_sum(begin, found.step) for begin, found in zip(since, read, strict=True)]
        samples = [(rates, found.value) for rates, found in zip(sums, read, strict=True) if rates > 0]
        if not samples:
            return None, None
        level = statistics.fmean(value for _, value in samples)
        law = Movement(samples=tuple(samples)).law()
        if law is None:
            return level, ahead * statistics.fmean(value / rates for rates, value in samples)
        return level, law.level * (ahead / law.rate_sum) ** law.exponent if ahead > 0 else 0.0

    def _change(
        self, newest: Sequence[IntervalMeasured], place: int, ahead: float
    ) -> tuple[float | None, float | None]:
        """Return the weight change of a layer module in an interval, and what it would add up to by the end."""
        found = [(it, it.weight_changes[place]) for it in newest if it.weight_changes]
        known = [(self.rate_sum(it.step - it.num_steps, it.step), change) for it, change in found if change is not None]
        rates = math.fsum(rate for rate, _ in known)
        if not known or rates <= 0:
            return None, None
        changes = [change for _, change in known]
        return statistics.fmean(changes), ahead * math.fsum(changes) / rates

    def _mean_gradient(self, newest: Sequence[IntervalMeasured], place: int) -> float | None:
        """Return the L1 norm of the gradients of a layer module for each step."""
        norms = [
            it.gradients[place] / it.num_steps for it in newest if it.gradients and it.gradients[place] is not None
        ]
        return statistics.fmean(norms) if norms else None


def find_points(outcomes: Sequence[Outcome]) -> list[Point]:
    """Return a point for each trial of `choose`; those that never froze so deep, or have no finite cost, are none."""
    beside = {(*_group(outcome), outcome.run.policy.text): outcome for outcome in outcomes}
    observed = {_group(outcome): Observed.read(outcome.directory) for outcome in outcomes
                if outcome.run.policy.text == OBSERVED}  # fmt: skip
    points = []
    for outcome in outcomes:
        trial = _TRIAL.fullmatch(outcome.run.policy.text)
        if trial is None:
            continue
        group, depth, workload = _group(outcome), int(trial["depth"]), outcome.run.workload
        better = round(difference_of(workload, beside[(*group, PLAIN)].quality, outcome.quality), 9)  # ties stay ties
        step = _freeze_step(outcome.directory, depth)
        if step is None or not math.isfinite(better):
            continue
        points.append(
            Point(
                workload=f"{workload.name} ({outcome.run.tier})",
                seed=outcome.run.seed,
                time=float(trial["time"]),
                depth=depth,
                cost=-better if workload.higher_is_better else better,
                foretold=observed[group].foretell(step, depth),
            )
        )
    return [
        dataclasses.replace(point, foretold=point.foretold | {OTHERS: _with_others(point, points)}) for point in points
    ]


def average_seeds(points: Sequence[Point]) -> list[Point]:
    """Return a point for each freeze, cost and what foretold it averaged over the seeds; what is not of all is None."""
    freezes: dict[tuple[str, float, int], list[Point]] = {}
    for point in points:
        freezes.setdefault((point.workload, point.time, point.depth), []).append(point)
    averaged = []
    for (workload, time, depth), same in freezes.items():
        columns = {name: [point.foretold[name] for point in same] for name in same[0].foretold if name != OTHERS}
        foretold = {name: _total(column, 1 / len(column)) for name, column in columns.items()}
        cost = statistics.fmean(point.cost for point in same)
        averaged.append(
            Point(workload=workload, seed=None, time=time, depth=depth, cost=cost, foretold={**foretold, OTHERS: None})
        )
    return averaged


def comparable(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """Return the points at which all is known and finite that is known at any, and the names of that."""
    asked = points[0].foretold if points else {}
    names = [name for name in asked if any(_is_known(point.foretold[name]) for point in points)]
    return [point for point in points if all(_is_known(point.foretold[name]) for name in names)], names


def correlate(points: Sequence[Point], *, within: bool) -> dict[str, tuple[Estimate, Estimate]]:
    """Return by name the rank correlation with the cost, and by how much the first, that of worth, is above it.

    Args:
        points: those at which something is not known that is at others are left out; where none is left, so is all.
        within: whether they are ranked among those of their workload and seed.
    """
    points, names = comparable(points)
    if not points:
        return {}
    columns = {name: [point.foretold[name] or 0.0 for point in points] for name in names}
    groups = [(point.workload, point.seed) for point in points]
    return rank_correlations(columns, [point.cost for point in points], groups, within=within)


def _group(outcome: Outcome) -> tuple[str, str, int]:
    return outcome.run.workload.name, outcome.run.tier, outcome.run.seed


def _freeze_step(directory: Path, depth: int) -> int | None:
    """Return the step at which so many layer modules were frozen; None where that never was."""
    frozen = read_history(directory).of(ModuleFrozen)
    return next((event.step for event in frozen if event.frozen >= depth), None)


def _with_others(point: Point, points: Sequence[Point]) -> float | None:
    """Return the mean cost of the same freeze with the other seeds."""
    same = (point.workload, point.time, point.depth)
    costs = [it.cost for it in points if (it.workload, it.time, it.depth) == same and it.seed != point.seed]
    return statistics.fmean(costs) if costs else None


def _total(parts: Sequence[float | None], factor: float = 1.0) -> float | None:
    """Return the sum times a factor; None where a part is not known."""
    known = [part for part in parts if part is not None]
    return factor * math.fsum(known) if len(known) == len(parts) else None


def _is_known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
