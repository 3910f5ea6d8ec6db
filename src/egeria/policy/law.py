"""How far the activations of a layer module move with the learning rate, and how far they would still move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from egeria.config import Config
from egeria.policy.protocol import Interval, Reading

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
ERA_FALL = 4.0
"""Fall of the learning rate that begins a new era: movement at the higher rate does not predict that to come."""
IN_SIGHT = 20.0
"""Times the longest rate sum that was seen up to which a law predicts whether a module is far from freezing."""
SETTLING = 3
"""Evaluations at the beginning of an era in which the modules fall to where the lower rate lets them."""
_SAVED_AS = {"remaining_rate_sum": "way_ahead", "rate_sums": "ways"}
"""Keys in saved states that differ from the names here."""


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


@dataclass(kw_only=True, slots=True)
class LearningRateHistory:
    """The learning rate so far and to come. An *era* is a stretch of training that ends where the rate falls far.

    Args:
        memory: evaluations that a reading can reach back, to its snapshot and by coming late.
        total_steps: of the run; None where unknown.
    """

    memory: int
    total_steps: int | None = None
    step: int = 0
    interval_steps: int = 0
    """Of the newest interval."""
    rate: float = 0.0
    """The learning rate now."""
    rose: bool = False
    """Whether it rose in the newest interval."""
    era_rate: float = 0.0
    """Largest rate of this era."""
    largest_rate: float = 0.0
    """Of the run so far."""
    settling: int = 0
    """Evaluations until the modules have settled in this era."""
    remaining_rate_sum: float | None = None
    """Sum of the learning rate over the steps still to come; None where unknown."""
    last_rate: float | None = None
    """Rate of the last step; None where unknown."""
    rate_sums: dict[int, float] = field(default_factory=dict)
    """By evaluation of this era, the sum of the learning rate since the evaluation before."""

    def update(self, interval: Interval) -> bool:
        """Add an interval; return whether an era began with it."""
        rate = interval.learning_rate
        begins = rate * ERA_FALL < self.era_rate
        self.settling = SETTLING if begins else max(0, self.settling - 1)
        self.era_rate = rate if begins else max(self.era_rate, rate)
        self.largest_rate = max(self.largest_rate, rate)
        self.interval_steps = interval.step - self.step
        sums = {**self.rate_sums, interval.evaluation: rate * self.interval_steps}
        oldest = interval.evaluation - self.memory
        self.rate_sums = {} if self.settling else {at: rate_sum for at, rate_sum in sums.items() if at > oldest}
        self.step, self.rose, self.rate = interval.step, rate > self.rate, rate
        self.remaining_rate_sum, self.last_rate = interval.remaining_rate_sum, interval.last_rate
        return begins

    def forget(self) -> None:
        """Drop the past, so that the next reading used is one against a new snapshot."""
        self.rate_sums = {}

    def settle(self) -> None:
        """Begin to settle, as after a thaw: a snapshot from before would not show what moves again."""
        self.settling, self.rate_sums = SETTLING, {}

    def rate_sum_since_snapshot(self, reading: Reading) -> float | None:
        """Return the rate sum from the snapshot to the reading; None where unknown or begun in an older era."""
        if reading.age is None:
            return None
        since = [self.rate_sums.get(reading.evaluation - back) for back in range(reading.age)]
        rate_sum = math.fsum(part for part in since if part is not None)
        return rate_sum if rate_sum > 0 and None not in since else None

    def change_ahead(self, law: PowerLaw | None) -> float | None:
        """Return the plasticity against now that a module would reach by the end; None where that is unknown."""
        if law is None or self.remaining_rate_sum is None or self.remaining_rate_sum > FARTHEST * law.longest:
            return None
        return self.rough_change_ahead(law)

    def rough_change_ahead(self, law: PowerLaw) -> float | None:
        """Return roughly what it would reach, at most `IN_SIGHT` times as far as was seen; None where unknown."""
        if self.remaining_rate_sum is None or self.last_rate is None:
            return None
        rate_sum = min(self.remaining_rate_sum, IN_SIGHT * law.longest)
        return law.change_ahead(rate_sum, self.last_rate / self.rate if self.rate > 0 else 1.0)

    def exceeds(self, law: PowerLaw, limit: float) -> bool:
        """Return whether a module would change by more than a limit, or the end is farther than its law predicts.

        Args:
            law: of the module.
            limit: largest plasticity against now.
        """
        change = self.rough_change_ahead(law)
        return change is None or change > limit or (self.remaining_rate_sum or 0.0) > IN_SIGHT * law.longest

    @property
    def ends_low(self) -> bool:
        """Whether the rate will have fallen far at the end; else the run ends while it still learns.

        A rate that stays to the last step and then is zero is no schedule: it is assumed where none is known.
        """
        if self.last_rate is None or self.remaining_rate_sum is None or self.total_steps is None:
            return False
        constant = math.isclose(self.remaining_rate_sum, self.rate * (self.total_steps - self.step), rel_tol=1e-3)
        return (self.rate if constant and not self.last_rate else self.last_rate) * ERA_FALL <= self.largest_rate

    @property
    def has_fallen(self) -> bool:
        """Whether the rate is far below its peak."""
        return self.rate * ERA_FALL <= self.largest_rate

    @property
    def remaining_fall(self) -> float:
        """How far the rate will have fallen at the end, as a share of the one now; 1 where that is unknown."""
        if self.last_rate is None or self.rate <= 0:
            return 1.0
        return 1 - min(1.0, max(0.0, self.last_rate / self.rate))

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain values, without the arguments."""
        state = {_SAVED_AS.get(name, name): value for name, value in asdict(self).items()}
        del state["memory"], state["total_steps"]
        return {**state, "ways": list(self.rate_sums.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        names = {key: name for name, key in _SAVED_AS.items()}
        for key, value in state.items():
            setattr(self, names.get(key, key), {int(at): part for at, part in value} if key == "ways" else value)


def longest_memory(config: Config) -> int:
    """Return the evaluations that a reading can reach back, to the snapshot and by coming late."""
    kept = config.reference.refresh_evaluations or max(config.plasticity.window, 2 * LEAST_READINGS)
    return 2 * kept + config.controller.queue_length
