"""How far the activations of a layer module move, how far they would still move, and how much of that is little."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

LEAST_READINGS = 4
"""Readings from which a law can be fitted."""
FARTHEST = 5.0
"""Times the longest rate sum seen up to which a law may be followed. In eleven runs that were followed to their end,
the median of what came was 0.3 to 2.2 times what the law had predicted up to there, and up to 2.8 times farther on.
Single ones scatter more: one in ten came to up to ten times as much."""
LARGEST_EXPONENT = 1.0
"""Of a random walk; taken also where all readings have the same distance from their snapshots. A straight movement
has 2, plasticity being a square, but none stays straight for long."""
SATURATED = 0.25
"""Share of the similarities from which more change hardly shows: such readings are flat, whatever the module does."""
SMALLEST = 1e-14
"""Plasticity under which it is rounding."""
SMALLEST_SPREAD = 1e-9
"""Under which all readings have the same distance from their snapshots."""
LARGEST_LOGARITHM = 100.0
"""Of growth: more is as good as infinite, and stays a number."""
STRICTER = 0.25
"""Factor on the limit after an alarm of the guard, and where the noise of steps cannot be measured."""
STILL_LEARNING = 0.1
"""Factor where the rate stays high to the end: what moves is still learning. In a short translation run modules that
would have changed by 1 % of the similarities took 1 to 2 % of the loss with them."""
LARGEST_WEIGHT = 2.0
"""Largest factor for a module with much work."""
LARGEST_EASE = 4.0
"""Largest factor for a module whose steps hardly affect the loss, once the rate has fallen. In a segmentation run four
of five modules could be frozen with 3 % to change, and nothing was lost: their noise was 0.3 % of the loss. At a high
rate small noise means that a module has hardly begun to learn: 0.002 % where ResNet-50 stood still at a seventh of its
training, and lost two points by the freeze."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """Plasticity as a power of the rate sum: the learning rate, summed over the steps since the snapshot.

    The exponent shows the kind of movement: 1 a random walk, 0 noise around a place that is reached, as SGD makes
    at a constant rate.
    """

    rate_sum: float
    """Geometric mean of the rate sums that it was fitted to."""
    longest: float
    """The largest of them."""
    level: float
    """Plasticity after `rate_sum`."""
    exponent: float
    count: int
    """Readings that it was fitted to."""
    spread: float
    """Sum of the squared distances of the logarithms of the rate sums from their mean."""
    scatter: float
    """Standard deviation of the logarithms of the readings around the law."""

    @property
    def stationarity(self) -> float:
        """From 0 for a module that still moves away to 1 for one that only fluctuates around its place."""
        return min(1.0, 2 * (1 - self.exponent))

    def change_ahead(self, remaining_rate_sum: float, rate_share: float) -> float:
        """Return the plasticity against now that the module may reach.

        It is one standard error above the law, in the exponent too: the farther ahead, the less a few readings
        predict.

        Args:
            remaining_rate_sum: of the steps still to come.
            rate_share: the learning rate at their end as a share of the one now. Noise that is as large then is
                no progress: it counts as far as it fades.
        """
        if remaining_rate_sum <= 0:
            return 0.0
        exponent = min(1.0, self.exponent + self.scatter / math.sqrt(self.spread))
        kept = (1 - exponent) * min(1.0, max(0.0, rate_share)) if self.level < SATURATED else 0.0
        distance = math.log(remaining_rate_sum) - math.log(self.rate_sum)
        beyond = max(0.0, distance)  # a smaller rate sum is no less sure to bring less
        error = self.scatter * math.sqrt(1 / self.count + beyond * beyond / self.spread)
        return self.level * math.exp(min(LARGEST_LOGARITHM, self.exponent * distance + error)) * (1 - kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the law as plain values."""
        state = asdict(self)
        return {"way": state.pop("rate_sum"), **state}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PowerLaw:
        """Return the law that `state_dict` described."""
        return cls(rate_sum=state["way"], **{name: value for name, value in state.items() if name != "way"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Movement:
    """The readings of one layer module against one snapshot."""

    samples: tuple[tuple[float, float], ...] = ()
    """Rate sum since the snapshot, and plasticity."""

    def observe(self, rate_sum: float, plasticity: float) -> Movement:
        """Return the movement with one more reading.

        Args:
            rate_sum: since the snapshot.
            plasticity: against it.
        """
        return Movement(samples=(*self.samples, (rate_sum, plasticity)))

    def law(self) -> PowerLaw | None:
        """Return the law fitted by least squares over logarithms; None while there are too few readings."""
        if len(self.samples) < LEAST_READINGS:
            return None
        distances = [math.log(rate_sum) for rate_sum, _ in self.samples]
        levels = [math.log(max(plasticity, SMALLEST)) for _, plasticity in self.samples]
        middle, level = math.fsum(distances) / len(distances), math.fsum(levels) / len(levels)
        spread = math.fsum((distance - middle) ** 2 for distance in distances)
        pairs = list(zip(distances, levels, strict=True))
        together = math.fsum((distance - middle) * (value - level) for distance, value in pairs)
        slope = together / spread if spread > SMALLEST_SPREAD else LARGEST_EXPONENT
        residuals = (value - level - slope * (distance - middle) for distance, value in pairs)
        return PowerLaw(
            rate_sum=math.exp(middle),
            longest=max(rate_sum for rate_sum, _ in self.samples),
            level=math.exp(level),
            exponent=min(LARGEST_EXPONENT, max(0.0, slope)),
            count=len(pairs),
            spread=max(spread, SMALLEST_SPREAD),
            scatter=math.sqrt(math.fsum(residual * residual for residual in residuals) / (len(pairs) - 2)),
        )


def limit_for(
    limit: float,
    *,
    work: float | None,
    noise_share: float | None,
    loss_limit: float,
    has_fallen: bool,
    ends_low: bool,
) -> float:
    """Return the plasticity that one module may still reach, and yet freeze.

    Args:
        limit: of an average module.
        work: of the module, times the average; None where unknown. A module with more saves more by the same change.
            One with less has no stricter limit, since it also keeps those after it from freezing.
        noise_share: share of the loss that the noise of its steps makes, with that of all in front; None where
            unknown, 0 where steps went up their own gradients, which also shows nothing of it.
        loss_limit: the noise share from which the limit holds as it is.
        has_fallen: whether the rate is far below its peak.
        ends_low: whether the rate will have fallen far at the end.
    """
    limit *= 1.0 if work is None else min(LARGEST_WEIGHT, max(1.0, work))
    if noise_share is None:
        limit *= STRICTER
    elif noise_share > 0 and has_fallen:
        limit *= min(LARGEST_EASE, max(1.0, loss_limit / noise_share))
    return limit if ends_low else STILL_LEARNING * limit
