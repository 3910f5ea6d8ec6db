"""What 'forecast' decides by: how modules move with the learning rate, and what the loss shows of
freezing them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from egeria.policy.protocol import Interval, Reading

LEAST_READINGS = 4  # from so many on a law can be fitted
FARTHEST = 5.0
"""Times the longest rate sum seen up to which a law may be followed. In eleven runs that were
followed to their end, the median of what came was 0.3 to 2.2 times what the law had predicted up to
there, and up to 2.8 times farther on. Single ones scatter more: one in ten came to up to ten times
as much."""
LARGEST_EXPONENT = 1.0
"""Of a random walk; taken also where all readings have the same distance from their snapshots. A
straight movement has 2, plasticity being a square, but none stays straight for long."""
SATURATED = 0.25
"""Share of the similarities from which more change hardly shows: such readings are flat, whatever
the module does."""
SMALLEST = 1e-14  # plasticity under which it is rounding
SMALLEST_SPREAD = 1e-9  # under which all readings have the same distance from their snapshots
LARGEST_LOGARITHM = 100.0  # of growth: more is as good as infinite, and stays a number
ERA_FALL = 4.0
"""Fall of the learning rate that begins a new era: movement at the higher rate does not predict
that to come."""
IN_SIGHT = 20.0
"""Times the longest rate sum that was seen up to which a law predicts whether a module is far from
freezing."""
SETTLING = 3
"""Evaluations at the beginning of an era in which the modules fall to where the lower rate lets
them."""
TREND_INTERVALS = 10  # intervals that the trend is fitted to, and that a freeze is watched for
LEAST_BEFORE, LEAST_SINCE = 5, 3  # intervals that either side must have before an alarm
NUM_ERRORS = 4.0
"""Standard errors above the trend that make an alarm: seven tests after each freeze shall hardly
ever be wrong."""
LEAST_SHARE = 0.01
"""Share of the loss that it must be above its trend: less is no reason to thaw, however certain."""
NOISE_INTERVALS = 5  # of which the median of the noise is taken: a single step shows little
LEAST_FALL = 0.1
"""Share of the loss that its fall since the critical period counts for at least: that ends where
the loss hardly falls any more between two intervals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """Plasticity as a power of the rate sum: the learning rate, summed over the steps since the
    snapshot.

    An exponent of 1 is a random walk, one of 0 noise around a place that is reached, as SGD makes
    at a constant rate.
    """

    rate_sum: float  # geometric mean of those that it was fitted to
    longest: float  # the largest of them
    level: float  # plasticity after `rate_sum`
    exponent: float
    count: int  # readings that it was fitted to
    spread: float  # sum of the squared distances of the logarithms of the rate sums from their mean
    scatter: float  # standard deviation of the logarithms of the readings around the law

    def change_ahead(self, remaining_rate_sum: float, rate_share: float) -> float:
        """Return the plasticity against now that the module may reach over the rate sum of the
        steps still to come.

        It is one standard error above the law, in the exponent too. Noise counts as far as it
        fades: `rate_share` is the learning rate at the end as a share of the one now.
        """
        if remaining_rate_sum <= 0:
            return 0.0
        exponent = min(1.0, self.exponent + self.scatter / math.sqrt(self.spread))
        kept = (1 - exponent) * min(1.0, max(0.0, rate_share)) if self.level < SATURATED else 0.0
        distance = math.log(remaining_rate_sum) - math.log(self.rate_sum)
        beyond = max(0.0, distance)  # a smaller rate sum is no less sure to bring less
        error = self.scatter * math.sqrt(1 / self.count + beyond * beyond / self.spread)
        return (
            self.level
            * math.exp(min(LARGEST_LOGARITHM, self.exponent * distance + error))
            * (1 - kept)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Movement:
    """The readings of one layer module against one snapshot."""

    samples: tuple[tuple[float, float], ...] = ()
    """Rate sum since the snapshot, and plasticity."""

    def law(self) -> PowerLaw | None:
        """Return the law fitted by least squares over logarithms; None while there are too few
        readings.
        """
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
            scatter=math.sqrt(
                math.fsum(residual * residual for residual in residuals) / (len(pairs) - 2)
            ),
        )


@dataclass(kw_only=True, slots=True)
class LearningRateHistory:
    """The learning rate so far and to come. An *era* is a stretch of training that ends where the
    rate falls far.
    """

    memory: int  # evaluations that a reading can reach back, to its snapshot and by coming late
    total_steps: int | None = None
    step: int = 0
    interval_steps: int = 0  # of the newest interval
    rate: float = 0.0
    rose: bool = False  # in the newest interval
    era_rate: float = 0.0  # the largest of this era
    largest_rate: float = 0.0
    settling: int = 0  # evaluations until the modules have settled in this era
    past_rate_sum: float = 0.0
    remaining_rate_sum: float | None = None
    last_rate: float | None = None
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
        self.past_rate_sum += rate * self.interval_steps
        sums = {**self.rate_sums, interval.evaluation: rate * self.interval_steps}
        oldest = interval.evaluation - self.memory
        self.rate_sums = (
            {} if self.settling else {at: rate_sum for at, rate_sum in sums.items() if at > oldest}
        )
        self.step, self.rose, self.rate = interval.step, rate > self.rate, rate
        self.remaining_rate_sum, self.last_rate = interval.remaining_rate_sum, interval.last_rate
        return begins

    def rate_sum_since_snapshot(self, reading: Reading) -> float | None:
        """Return the rate sum from the snapshot to the reading; None where unknown or begun in an
        older era.
        """
        if reading.age is None:
            return None
        since = [self.rate_sums.get(reading.evaluation - back) for back in range(reading.age)]
        rate_sum = math.fsum(part for part in since if part is not None)
        return rate_sum if rate_sum > 0 and None not in since else None

    def change_ahead(self, law: PowerLaw | None) -> float | None:
        """Return the plasticity against now that a module would reach by the end; None where that
        is unknown.
        """
        if (
            law is None
            or self.remaining_rate_sum is None
            or self.remaining_rate_sum > FARTHEST * law.longest
        ):
            return None
        return self.rough_change_ahead(law)

    def rough_change_ahead(self, law: PowerLaw) -> float | None:
        """Return roughly what it would reach, at most `IN_SIGHT` times as far as was seen; None
        where unknown.
        """
        if self.remaining_rate_sum is None or self.last_rate is None:
            return None
        rate_sum = min(self.remaining_rate_sum, IN_SIGHT * law.longest)
        return law.change_ahead(rate_sum, self.last_rate / self.rate if self.rate > 0 else 1.0)

    def exceeds(self, law: PowerLaw, limit: float) -> bool:
        """Return whether a module would change by more than a limit, or the end is farther than its
        law predicts.
        """
        change = self.rough_change_ahead(law)
        return (
            change is None
            or change > limit
            or (self.remaining_rate_sum or 0.0) > IN_SIGHT * law.longest
        )

    @property
    def ends_low(self) -> bool:
        """Whether the rate will have fallen far at the end; else the run ends while it still
        learns.

        A rate that stays to the last step and then is zero is no schedule: it is assumed where none
        is known.
        """
        if self.last_rate is None or self.remaining_rate_sum is None or self.total_steps is None:
            return False
        constant = math.isclose(
            self.remaining_rate_sum, self.rate * (self.total_steps - self.step), rel_tol=1e-3
        )
        return (
            self.rate if constant and not self.last_rate else self.last_rate
        ) * ERA_FALL <= self.largest_rate

    def has_more_ahead(self, share: float) -> bool:
        """Return whether more than a share of the run's rate sum is still to come, at a rate that
        will fall far.

        What is not known yet, as before a scheduler was called twice, counts as more.
        """
        ahead = self.remaining_rate_sum
        if share >= 1 or self.total_steps is None:
            return False
        return ahead is None or (self.ends_low and ahead > share * (self.past_rate_sum + ahead))

    @property
    def remaining_fall(self) -> float:
        """How far the rate will have fallen at the end, as a share of the one now; 1 where that is
        unknown.
        """
        if self.last_rate is None or self.rate <= 0:
            return 1.0
        return 1 - min(1.0, max(0.0, self.last_rate / self.rate))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossGuard:
    """Compares the mean loss of the intervals since a freeze with the end of the line through those
    before it.

    A loss that merely falls no further is no alarm: losses fall ever more slowly by themselves.
    Freezing more while a freeze is watched restarts the watch, against the trend from before the
    first. What lands first, or waits, is watched from when it is in force.
    """

    before: tuple[float, ...] = ()
    since: tuple[float, ...] | None = None  # the freeze; None while nothing is watched
    awaited: tuple[int, ...] = ()
    """How many front layer modules will be frozen by each freeze that was decided and is not known
    to be in force."""

    @property
    def is_ready(self) -> bool:
        """Whether a freeze could be watched now."""
        return len(self.before) >= LEAST_BEFORE

    @property
    def is_watching(self) -> bool:
        """Whether a freeze is watched, or will be."""
        return self.since is not None or (self.is_ready and self.awaited != ())

    def await_freeze(self, depth: int) -> LossGuard:
        """Return the guard behind a decision to freeze so many layer modules."""
        return replace(self, awaited=(*self.awaited, depth))

    def in_force(self, frozen: int | None) -> LossGuard:
        """Return the guard where so many layer modules are frozen; None: all that were decided to
        freeze.
        """
        awaited = tuple(depth for depth in self.awaited if frozen is not None and depth > frozen)
        begins = self.is_ready and awaited != self.awaited
        return replace(self, since=() if begins else self.since, awaited=awaited)

    def observe(self, loss: float) -> LossGuard:
        """Return the guard with one more interval."""
        if self.since is None:
            return replace(self, before=(*self.before, loss)[-TREND_INTERVALS:])
        since = (*self.since, loss)
        if len(since) >= TREND_INTERVALS:
            return replace(self, before=since, since=None)
        return replace(self, since=since)

    def in_longer(self, times: float) -> LossGuard:
        """Return the guard with what it has seen taken together, for intervals that are longer from
        now on.

        Args:
            times: how many times as long; under 1.5 nothing changes, nor while a freeze is watched.
        """
        count = round(times)
        if count < 2 or self.is_watching:
            return self
        newest_first = self.before[::-1]
        means = [
            statistics.fmean(newest_first[at : at + count])
            for at in range(0, len(newest_first) - count + 1, count)
        ]
        return replace(self, before=tuple(means[::-1]))

    @property
    def excess(self) -> float | None:
        """Share of the loss by which it lies above its trend, where that is an alarm; else None."""
        if self.since is None or len(self.since) < LEAST_SINCE or not self.is_ready:
            return None
        reached, scatter = _end_of_trend(self.before)
        # The end of a line is known half as well as its middle, and few points are a poor estimate
        # of their scatter.
        error = (
            scatter
            * math.sqrt(4 / len(self.before) + 1 / len(self.since))
            * (1 + 2 / (len(self.before) - 2))
        )
        above = math.fsum(self.since) / len(self.since) - reached
        is_alarm = above > max(NUM_ERRORS * error, LEAST_SHARE * abs(reached))
        return above / abs(reached) if is_alarm and reached else None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseHistory:
    """How much of the loss is the noise of steps, over the newest intervals since the modules have
    settled.
    """

    parts: tuple[tuple[float | None, ...], ...] = ()
    """For each interval, by how much the noise of each layer module raises the loss; None for a
    frozen one."""
    losses: tuple[float, ...] = ()

    def observe(self, part: Sequence[float | None] | None, loss: float | None) -> NoiseHistory:
        """Return the history with one more interval; one without a measure or a loss changes
        nothing.
        """
        if part is None or loss is None:
            return self
        parts, losses = (*self.parts, tuple(part)), (*self.losses, loss)
        return NoiseHistory(parts=parts[-NOISE_INTERVALS:], losses=losses[-NOISE_INTERVALS:])

    def of(self, module: int) -> float | None:
        """Return by how much the noise of a layer module raises the loss; None while that is
        unknown.
        """
        known = [value for part in self.parts if (value := part[module]) is not None]
        return max(0.0, statistics.median(known)) if known and self.losses else None

    def share_of_learned(self, loss: float, settled_loss: float | None) -> float:
        """Return what is a difference in the loss as a share of what was learned, so far.

        That is the fall of the loss since `settled_loss`, the one at the end of the critical
        period, and at least `LEAST_FALL` of the loss.
        """
        mean = statistics.fmean(self.losses) if self.losses else 0.0
        learned = max(
            LEAST_FALL * abs(mean), abs(mean) if settled_loss is None else settled_loss - mean
        )
        return loss / (learned or 1.0)


def _end_of_trend(values: Sequence[float]) -> tuple[float, float]:
    """Return where the least-squares line through losses ends, and their standard deviation around
    it.
    """
    count = len(values)
    centre, mean = (count - 1) / 2, math.fsum(values) / count
    spread = count * (count * count - 1) / 12
    slope = (
        math.fsum((place - centre) * (value - mean) for place, value in enumerate(values)) / spread
    )
    residuals = [value - mean - slope * (place - centre) for place, value in enumerate(values)]
    return mean + slope * centre, math.sqrt(
        math.fsum(residual * residual for residual in residuals) / (count - 2)
    )
