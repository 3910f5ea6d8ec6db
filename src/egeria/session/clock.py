"""Counting steps and evaluation intervals; their length `n` may change while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class IntervalClock:
    """Knows which interval the run is in.

    Args:
        interval_steps: `n` to begin with.
    """

    def __init__(self, interval_steps: int) -> None:
        self.num_steps = 0
        self.interval_steps = interval_steps
        self.evaluation = 0
        """The number of the newest interval that ended."""
        self._began = 0

    @property
    def next_step_ends(self) -> bool:
        """Tell whether the interval ends with the next step."""
        return self.num_steps + 1 >= self._began + self.interval_steps

    def is_at_part(self, count: int) -> bool:
        """Tell whether the newest step ended the interval, or one of as many parts of it."""
        return (self.num_steps - self._began) % max(1, self.interval_steps // count) == 0

    def tick(self) -> bool:
        """Count a step; return whether an interval ended with it."""
        self.num_steps += 1
        if self.num_steps < self._began + self.interval_steps:
            return False
        self._began = self.num_steps
        self.evaluation += 1
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "step": self.num_steps,
            "interval_steps": self.interval_steps,
            "evaluation": self.evaluation,
            "interval_began": self._began,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved counts."""
        step, interval_steps, evaluation, began = (
            int(state[name]) for name in ("step", "interval_steps", "evaluation", "interval_began")
        )
        self.num_steps, self.interval_steps, self.evaluation, self._began = step, interval_steps, evaluation, began
