"""Time to accuracy: the training it took to reach the quality that plain training converges to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.proving.comparing.results import Evaluation, Outcome
from benchmarks.proving.comparing.statistics import Spread, spread

CONVERGED, NEARLY = "converged", "99 %"
TARGETS = (CONVERGED, NEARLY)
CLOCKS = ("wall", "cpu")
NUM_CONVERGED = 3
"""The plain run's last evaluations whose mean is the value it converges to, nothing deducted."""
NEARLY_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Reached:
    """One run against the plain run of the same seed."""

    seed: int
    value: float
    """To be reached."""
    plain_s: float
    """Of training until the plain run reached it first."""
    found_s: float | None
    """None where the run never did."""
    whole_s: float
    """Of the whole run: one that did not reach the value would have needed more."""


@dataclass(frozen=True, kw_only=True)
class AccuracyTime:
    """Time to accuracy over seeds; those that did not reach it are counted, and in no mean."""

    seeds: tuple[Reached, ...]
    saved: Spread | None
    """Per cent of the plain run's time, over the seeds that reached the value."""
    faster: Spread | None
    """Per cent by which plain takes longer: plain / found - 1, over the same seeds."""

    @property
    def num_reached(self) -> int:
        """Seeds that reached the value."""
        return sum(reached.found_s is not None for reached in self.seeds)

    def shows(self) -> str:
        """Write the saving, and how many seeds it speaks of."""
        text = f"{self.saved.shows(1, signed=True)} %" if self.saved else ""
        if self.num_reached == len(self.seeds):
            return text
        told = f"reached by {self.num_reached} of {len(self.seeds)}"
        return f"{text} ({told})" if text else f"not reached (0 of {len(self.seeds)})"


def target_value(plain: Outcome, target: str) -> float:
    """Return the value to reach: what the plain run converges to, or within 1 % of it."""
    value = statistics.fmean(evaluation.value for evaluation in plain.evaluations[-NUM_CONVERGED:])
    if target == CONVERGED:
        return value
    worse = -NEARLY_SHARE if plain.run.workload.higher_is_better else NEARLY_SHARE
    return value + worse * abs(value)


def time_to(
    evaluations: Sequence[Evaluation], value: float, *, higher_is_better: bool, clock: str = "wall"
) -> float | None:
    """Return the seconds of training at the first evaluation that is as good as `value`; None where none is."""
    margin = 1e-9 * abs(value)  # a mean of equal numbers may differ from them in its last bit
    for evaluation in evaluations:
        better = evaluation.value - value if higher_is_better else value - evaluation.value
        if better >= -margin:
            return _seconds(evaluation, clock)
    return None


def value_at(evaluations: Sequence[Evaluation], time_s: float, clock: str = "wall") -> float | None:
    """Return the metric after so many seconds of training, interpolated between evaluations.

    Before the first evaluation it is not known; behind the end it is that of the end.
    """
    before: Evaluation | None = None
    for after in evaluations:
        if _seconds(after, clock) >= time_s:
            break
        before = after
    else:
        return evaluations[-1].value
    if _seconds(after, clock) == time_s:
        return after.value
    if before is None:
        return None
    share = (time_s - _seconds(before, clock)) / (_seconds(after, clock) - _seconds(before, clock))
    return before.value + share * (after.value - before.value)


def accuracy_time(pairs: Sequence[tuple[Outcome, Outcome]], target: str, clock: str) -> AccuracyTime:
    """Return the time to accuracy of runs, each beside the plain run of its seed."""
    seeds = tuple(_reached(plain, outcome, target, clock) for plain, outcome in pairs)
    ratios = [reached.found_s / reached.plain_s for reached in seeds if reached.found_s is not None]
    return AccuracyTime(
        seeds=seeds,
        saved=spread([100 * (1 - ratio) for ratio in ratios]),
        faster=spread([100 * (1 / ratio - 1) for ratio in ratios]),
    )


def _reached(plain: Outcome, outcome: Outcome, target: str, clock: str) -> Reached:
    value = target_value(plain, target)
    higher = plain.run.workload.higher_is_better
    plain_s, found_s = (
        time_to(run.evaluations, value, higher_is_better=higher, clock=clock) for run in (plain, outcome)
    )
    return Reached(
        seed=outcome.run.seed,
        value=value,
        plain_s=math.nan if plain_s is None else plain_s,  # a plain run that diverged
        found_s=found_s,
        whole_s=_seconds(outcome.final, clock),
    )


def _seconds(evaluation: Evaluation, clock: str) -> float:
    return evaluation.wall_s if clock == "wall" else evaluation.cpu_s
