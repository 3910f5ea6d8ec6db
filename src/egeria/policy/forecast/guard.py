"""The guard on the training loss: whether it left its trend after a freeze."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

LENGTH = 10
"""Intervals that the trend is fitted to, and that a freeze is watched for."""
LEAST_BEFORE, LEAST_SINCE = 5, 3
"""Intervals that either side must have before anything is said."""
NUM_ERRORS = 4.0
"""Standard errors above the trend that make an alarm: seven looks at each freeze shall hardly ever be wrong."""
LEAST_SHARE = 0.01
"""Share of the loss that it must be above its trend: less is no reason to thaw, however certain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossGuard:
    """Compares the mean loss of the intervals since a freeze with the end of the line through those before it.

    A loss that merely falls no further is no alarm: losses fall ever more slowly by themselves. Freezing more while
    a freeze is watched begins the watch anew, against the trend from before the first.
    """

    before: tuple[float, ...] = ()
    since: tuple[float, ...] | None = None
    """None while nothing is watched."""

    def watch(self) -> LossGuard:
        """Return the guard right after a freeze."""
        return replace(self, since=())

    @property
    def is_ready(self) -> bool:
        """Tell whether a freeze could be watched now."""
        return len(self.before) >= LEAST_BEFORE

    def observe(self, loss: float) -> LossGuard:
        """Return the guard with one interval more."""
        if self.since is None:
            return replace(self, before=(*self.before, loss)[-LENGTH:])
        since = (*self.since, loss)
        return LossGuard(before=since) if len(since) >= LENGTH else replace(self, since=since)

    @property
    def excess(self) -> float | None:
        """Share of the loss by which it lies above its trend, where that is an alarm; else None."""
        if self.since is None or len(self.since) < LEAST_SINCE or not self.is_ready:
            return None
        reached, scatter = _end_of_trend(self.before)
        # The end of a line is known half as well as its middle, and few points hardly tell how they scatter.
        error = scatter * math.sqrt(4 / len(self.before) + 1 / len(self.since)) * (1 + 2 / (len(self.before) - 2))
        above = math.fsum(self.since) / len(self.since) - reached
        is_alarm = above > max(NUM_ERRORS * error, LEAST_SHARE * abs(reached))
        return above / abs(reached) if is_alarm and reached else None

    def state_dict(self) -> dict[str, Any]:
        """Return the losses as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LossGuard:
        """Rebuild a guard from `state_dict`."""
        since = state["since"]
        return cls(before=tuple(state["before"]), since=None if since is None else tuple(since))


def _end_of_trend(values: Sequence[float]) -> tuple[float, float]:
    """Return where the least-squares line through losses ends, and how they scatter around it."""
    count = len(values)
    centre, mean = (count - 1) / 2, math.fsum(values) / count
    spread = count * (count * count - 1) / 12
    slope = math.fsum((place - centre) * (value - mean) for place, value in enumerate(values)) / spread
    rests = [value - mean - slope * (place - centre) for place, value in enumerate(values)]
    return mean + slope * centre, math.sqrt(math.fsum(rest * rest for rest in rests) / (count - 2))
