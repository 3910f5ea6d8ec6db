"""How fast the run went, and what freezing saved: estimates against its own unfrozen pace."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from egeria.events import IntervalMeasured
from egeria.report.history import History


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Training time by one clock (wall or CPU), in seconds.

    `training_s + overhead_s + saved_s` is the estimate for the same steps with nothing frozen.
    """

    unfrozen_iteration_s: float | None
    """Median iteration time over the intervals with nothing frozen; None where there was none."""
    training_s: float
    """Iteration time times steps, over all intervals; the overhead of egeria is not in it."""
    overhead_s: float
    """All that egeria itself cost."""
    saved_s: float | None
    """Unfrozen minus found iteration time, times steps, over the intervals with something frozen; less the overhead."""

    @property
    def unfrozen_s(self) -> float | None:
        """What the same steps would have taken with nothing frozen, without egeria."""
        return None if self.saved_s is None else self.training_s + self.overhead_s + self.saved_s

    @property
    def saved_share(self) -> float | None:
        """The time saved as a share of `unfrozen_s`; negative where egeria cost more than it saved."""
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


def measured_intervals(history: History) -> list[IntervalMeasured]:
    """Return the intervals that have steps and a time; the others (a time of 0 too) say nothing of the pace."""
    return [
        interval
        for interval in history.of(IntervalMeasured)
        if interval.num_steps > 0
        and 0 < interval.iteration_wall_s < math.inf
        and math.isfinite(interval.iteration_cpu_s)
    ]


def measure_clocks(history: History) -> tuple[Clock, Clock]:
    """Return the wall clock and the CPU clock of a run."""
    intervals = measured_intervals(history)
    return (
        _clock(intervals, lambda interval: interval.iteration_wall_s, history.overhead.wall_s),
        _clock(intervals, lambda interval: interval.iteration_cpu_s, history.overhead.cpu_s),
    )


def measure_paces(history: History) -> tuple[DepthPace, ...]:
    """Return the pace at each depth that the run was at, shallowest first."""
    by_depth: dict[int, list[IntervalMeasured]] = {}
    for interval in measured_intervals(history):
        by_depth.setdefault(interval.frozen, []).append(interval)
    medians = {
        depth: (
            statistics.median(interval.iteration_wall_s for interval in intervals),
            statistics.median(interval.iteration_cpu_s for interval in intervals),
        )
        for depth, intervals in by_depth.items()
    }
    unfrozen_wall_s, unfrozen_cpu_s = medians.get(0, (None, None))
    return tuple(
        DepthPace(
            frozen=depth,
            num_steps=sum(interval.num_steps for interval in by_depth[depth]),
            wall_s=wall_s,
            cpu_s=cpu_s,
            wall_ratio=_ratio(wall_s, unfrozen_wall_s),
            cpu_ratio=_ratio(cpu_s, unfrozen_cpu_s),
        )
        for depth, (wall_s, cpu_s) in sorted(medians.items())
    )


def _clock(intervals: list[IntervalMeasured], read: Callable[[IntervalMeasured], float], overhead_s: float) -> Clock:
    unfrozen = [read(interval) for interval in intervals if interval.frozen == 0]
    unfrozen_s = statistics.median(unfrozen) if unfrozen else None
    saved_s = None
    if unfrozen_s is not None:
        # Only where something was frozen: else the jitter of the unfrozen pace would pass for a saving.
        gains = ((unfrozen_s - read(interval)) * interval.num_steps for interval in intervals if interval.frozen > 0)
        saved_s = sum(gains) - overhead_s
    return Clock(
        unfrozen_iteration_s=unfrozen_s,
        training_s=sum(read(interval) * interval.num_steps for interval in intervals),
        overhead_s=overhead_s,
        saved_s=saved_s,
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole is not None and whole > 0 else None
