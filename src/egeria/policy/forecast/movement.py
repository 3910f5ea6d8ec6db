"""How far the activations of a layer module move, and how far they would still go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

LEAST_READINGS = 4
"""Readings from which a law can be fitted."""
FARTHEST = 5.0
"""Times the longest way that was seen over which a law may be followed. In eleven runs that were seen to their end, the
middle of what came was 0.3 to 2.2 times what the law had said up to there, and up to 2.8 times farther on.
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
"""Of growth: more is as good as endless, and stays a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """Plasticity as a power of the way since the snapshot: the learning rate, added up over the steps.

    The exponent tells what the movement is: 1 a random walk, 0 noise around a place that is reached, as SGD makes
    at a rate that stays.
    """

    way: float
    """Middle of the ways it was fitted to."""
    longest: float
    """The longest of them."""
    level: float
    """Plasticity after that way."""
    exponent: float
    count: int
    """Readings it was fitted to."""
    spread: float
    """Of the logarithms of their ways: sum of the squared distances from the middle."""
    scatter: float
    """Of the logarithms of the readings around the law."""

    @property
    def stillness(self) -> float:
        """How far the module is at its place, from 0 for one that still wanders to 1 for one that only trembles."""
        return min(1.0, 2 * (1 - self.exponent))

    def change_ahead(self, way: float, rate_share: float) -> float:
        """Return the plasticity against now that the module may come to.

        That is one standard error above the law, in the exponent too: the farther the way, the less a few readings
        tell of it.

        Args:
            way: still ahead.
            rate_share: the learning rate at its end as a share of the one now. Noise that is as large then is
                no progress: it counts as far as it fades.
        """
        if way <= 0:
            return 0.0
        exponent = min(1.0, self.exponent + self.scatter / math.sqrt(self.spread))
        kept = (1 - exponent) * min(1.0, max(0.0, rate_share)) if self.level < SATURATED else 0.0
        distance = math.log(way) - math.log(self.way)
        beyond = max(0.0, distance)  # a shorter way is no less sure to bring less
        error = self.scatter * math.sqrt(1 / self.count + beyond * beyond / self.spread)
        return self.level * math.exp(min(LARGEST_LOGARITHM, self.exponent * distance + error)) * (1 - kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Movement:
    """The readings of one layer module against one snapshot."""

    samples: tuple[tuple[float, float], ...] = ()
    """Way since the snapshot, and plasticity."""

    def observe(self, way: float, plasticity: float) -> Movement:
        """Return the movement with one reading more."""
        return Movement(samples=(*self.samples, (way, plasticity)))

    def law(self) -> Law | None:
        """Fit the law by least squares over logarithms; None while there are too few readings."""
        if len(self.samples) < LEAST_READINGS:
            return None
        ways = [math.log(way) for way, _ in self.samples]
        levels = [math.log(max(plasticity, SMALLEST)) for _, plasticity in self.samples]
        middle, level = math.fsum(ways) / len(ways), math.fsum(levels) / len(levels)
        spread = math.fsum((way - middle) ** 2 for way in ways)
        together = math.fsum((way - middle) * (value - level) for way, value in zip(ways, levels, strict=True))
        slope = together / spread if spread > SMALLEST_SPREAD else LARGEST_EXPONENT
        rests = (value - level - slope * (way - middle) for way, value in zip(ways, levels, strict=True))
        return Law(
            way=math.exp(middle),
            longest=max(way for way, _ in self.samples),
            level=math.exp(level),
            exponent=min(LARGEST_EXPONENT, max(0.0, slope)),
            count=len(ways),
            spread=max(spread, SMALLEST_SPREAD),
            scatter=math.sqrt(math.fsum(rest * rest for rest in rests) / (len(ways) - 2)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the readings as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Movement:
        """Rebuild a movement from `state_dict`."""
        return cls(samples=tuple((way, plasticity) for way, plasticity in state["samples"]))
