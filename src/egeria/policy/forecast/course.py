"""The learning rate: the way that was gone, interval by interval, and the way still ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from egeria.config import Config
from egeria.policy.forecast.movement import FARTHEST, LEAST_READINGS, Law
from egeria.policy.values import Interval, Reading

ERA_FALL = 4.0
"""Fall of the learning rate that begins a new era: movement at the higher rate says nothing about that to come."""
IN_SIGHT = 20.0
"""Times the longest way that was seen over which a law tells whether a module is far from freezing."""
SETTLING = 3
"""Evaluations at the beginning of an era in which the modules fall to where the lower rate lets them."""


@dataclass(kw_only=True, slots=True)
class Course:
    """Where the training is on its way; eras begin where the rate falls far.

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
    """Of all."""
    settling: int = 0
    """Evaluations until the modules have settled in this era."""
    way_ahead: float | None = None
    last_rate: float | None = None
    ways: dict[int, float] = field(default_factory=dict)
    """By evaluation of this era, the way from the one before."""

    def go_on(self, interval: Interval) -> bool:
        """Take in an interval; return whether an era began with it."""
        rate = interval.learning_rate
        begins = rate * ERA_FALL < self.era_rate
        self.settling = SETTLING if begins else max(0, self.settling - 1)
        self.era_rate = rate if begins else max(self.era_rate, rate)
        self.largest_rate = max(self.largest_rate, rate)
        ways = {**self.ways, interval.evaluation: rate * (interval.step - self.step)}
        oldest = interval.evaluation - self.memory
        self.ways = {} if self.settling else {at: way for at, way in ways.items() if at > oldest}
        self.interval_steps = interval.step - self.step
        self.step, self.rose, self.rate = interval.step, rate > self.rate, rate
        self.way_ahead, self.last_rate = interval.way_ahead, interval.last_rate
        return begins

    def forget(self) -> None:
        """Let no reading reach back: nothing is looked at for a while, and then against a new snapshot."""
        self.ways = {}

    def settle(self) -> None:
        """Begin to settle: what was frozen moves again, and a snapshot from before would not show that."""
        self.settling, self.ways = SETTLING, {}

    def way_since_snapshot(self, reading: Reading) -> float | None:
        """Return the way from the snapshot to the reading; None where it is unknown, or reaches into an older era."""
        if reading.age is None:
            return None
        since = [self.ways.get(reading.evaluation - back) for back in range(reading.age)]
        way = math.fsum(way for way in since if way is not None)
        return way if way > 0 and None not in since else None

    def change_ahead(self, law: Law | None) -> float | None:
        """Return the plasticity against now that a module would reach by the end; None where that is unknown."""
        if law is None or self.way_ahead is None or self.way_ahead > FARTHEST * law.longest:
            return None
        return self.change_in_sight(law)

    def change_in_sight(self, law: Law) -> float | None:
        """Return roughly what it would reach as far as anything can be seen; None without a way ahead."""
        if self.way_ahead is None or self.last_rate is None:
            return None
        way = min(self.way_ahead, IN_SIGHT * law.longest)
        return law.change_ahead(way, self.last_rate / self.rate if self.rate > 0 else 1.0)

    def outgrows(self, law: Law, limit: float) -> bool:
        """Tell whether the way ahead is longer now than a law can see, or changes a module by more than a limit."""
        change = self.change_in_sight(law)
        return change is None or change > limit or (self.way_ahead or 0.0) > IN_SIGHT * law.longest

    @property
    def comes_to_rest(self) -> bool:
        """Whether the rate will have fallen far at the end. Else the run ends in the midst of learning.

        One that would stay to the last step and then be zero is no schedule, but what is feared where none is known.
        """
        if self.last_rate is None or self.way_ahead is None or self.total_steps is None:
            return False
        stays = math.isclose(self.way_ahead, self.rate * (self.total_steps - self.step), rel_tol=1e-3)
        return (self.rate if stays and not self.last_rate else self.last_rate) * ERA_FALL <= self.largest_rate

    @property
    def has_fallen(self) -> bool:
        """Whether the rate is far below its peak."""
        return self.rate * ERA_FALL <= self.largest_rate

    @property
    def rate_fall(self) -> float:
        """How far the learning rate will have fallen at the end, as a share of the one now; 1 where that is unknown."""
        if self.last_rate is None or self.rate <= 0:
            return 1.0
        return 1 - min(1.0, max(0.0, self.last_rate / self.rate))

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values, without what it was made with."""
        return {
            name: list(self.ways.items()) if name == "ways" else value
            for name, value in asdict(self).items()
            if name not in ("memory", "total_steps")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name, value in state.items():
            setattr(self, name, {int(at): way for at, way in value} if name == "ways" else value)


def longest_memory(config: Config) -> int:
    """Return the evaluations that a reading can reach back, to the snapshot and by coming late."""
    kept = config.reference.refresh_evaluations or max(config.plasticity.window, 2 * LEAST_READINGS)
    return 2 * kept + config.controller.queue_length
