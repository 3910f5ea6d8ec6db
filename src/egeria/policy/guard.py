"""What the training loss shows of freezing: whether it left its trend after a freeze, and how much of it is noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

TREND_INTERVALS = 10
"""Intervals that the trend is fitted to, and that a freeze is watched for."""
LEAST_BEFORE, LEAST_SINCE = 5, 3
"""Intervals that either side must have before an alarm."""
NUM_ERRORS = 4.0
"""Standard errors above the trend that make an alarm: seven tests after each freeze shall hardly ever be wrong."""
LEAST_SHARE = 0.01
"""Share of the loss that it must be above its trend: less is no reason to thaw, however certain."""
NOISE_INTERVALS = 5
"""Intervals over which the median of the noise is taken: a single step shows little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossGuard:
    """Compares the mean loss of the intervals since a freeze with the end of the line through those before it.

    A loss that merely falls no further is no alarm: losses fall ever more slowly by themselves. Freezing more while
    a freeze is watched restarts the watch, against the trend from before the first.
    """

    before: tuple[float, ...] = ()
    since: tuple[float, ...] | None = None
    """Losses since the freeze; None while nothing is watched."""

    @property
    def is_ready(self) -> bool:
        """Whether a freeze could be watched now."""
        return len(self.before) >= LEAST_BEFORE

    def observe(self, loss: float) -> LossGuard:
        """Return the guard with one more interval."""
        if self.since is None:
            return replace(self, before=(*self.before, loss)[-TREND_INTERVALS:])
        since = (*self.since, loss)
        return LossGuard(before=since) if len(since) >= TREND_INTERVALS else replace(self, since=since)

    @property
    def excess(self) -> float | None:
        """Share of the loss by which it lies above its trend, where that is an alarm; else None."""
        if self.since is None or len(self.since) < LEAST_SINCE or not self.is_ready:
            return None
        reached, scatter = _end_of_trend(self.before)
        # The end of a line is known half as well as its middle, and few points are a poor estimate of their scatter.
        error = scatter * math.sqrt(4 / len(self.before) + 1 / len(self.since)) * (1 + 2 / (len(self.before) - 2))
        above = math.fsum(self.since) / len(self.since) - reached
        is_alarm = above > max(NUM_ERRORS * error, LEAST_SHARE * abs(reached))
        return above / abs(reached) if is_alarm and reached else None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseHistory:
    """How much of the loss is the noise of steps, over the newest intervals since the modules have settled."""

    parts: tuple[tuple[float | None, ...], ...] = ()
    """For each interval, by how much the noise of each layer module raises the loss; None for a frozen one."""
    losses: tuple[float, ...] = ()

    def observe(self, part: Sequence[float | None] | None, loss: float | None) -> NoiseHistory:
        """Return the history with one more interval; one without a measure or a loss changes nothing."""
        if part is None or loss is None:
            return self
        parts, losses = (*self.parts, tuple(part)), (*self.losses, loss)
        return NoiseHistory(parts=parts[-NOISE_INTERVALS:], losses=losses[-NOISE_INTERVALS:])

    def share(self, module: int, settled_loss: float | None) -> float | None:
        """Return the share of the loss that is the noise of a layer module; None while that is unknown.

        Where the loss has fallen by more than is left of it, as where all samples are learned in the end, it is the
        share of its fall since `settled_loss`, the one at the end of the critical period.
        """
        known = [value for part in self.parts if (value := part[module]) is not None]
        if not known or not self.losses:
            return None
        loss = statistics.fmean(self.losses)
        measure = max(abs(loss), 0.0 if settled_loss is None else settled_loss - loss)
        return max(0.0, statistics.median(known)) / measure if measure else None


def _end_of_trend(values: Sequence[float]) -> tuple[float, float]:
    """Return where the least-squares line through losses ends, and their standard deviation around it."""
    count = len(values)
    centre, mean = (count - 1) / 2, math.fsum(values) / count
    spread = count * (count * count - 1) / 12
    slope = math.fsum((place - centre) * (value - mean) for place, value in enumerate(values)) / spread
    residuals = [value - mean - slope * (place - centre) for place, value in enumerate(values)]
    return mean + slope * centre, math.sqrt(math.fsum(residual * residual for residual in residuals) / (count - 2))
