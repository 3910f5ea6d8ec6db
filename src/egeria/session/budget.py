"""Keeping evaluations within their share of the training time, by making fewer of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

FIRST_REVIEW = 3
TOLERATED = 1.25
LARGEST_GROWTH = 10


class Budget:
    """Compares what evaluations take from the training process with what the training takes.

    Costs are in iterations of the same moment, so that a busy machine, which slows both, changes
    nothing. The first review comes after three evaluations, before any slope is known, then one after
    every window; of these two in a row must agree. `n` only ever grows, and never beyond ten times what it
    was at first: a slope is a movement per evaluation, so each change of `n` in the midst of a history
    bends it, towards freezing later where `n` grows and earlier where it shrinks. Only `n`, not the
    probe batch: plasticity changes its scale with the number of samples.

    Args:
        share: of the training time.
        window: evaluations between reviews.
    """

    def __init__(self, share: float, window: int) -> None:
        self._share = share
        self._window = window
        self._evaluations: list[float] = []
        self._refreshes: list[float] = []
        self._next_review = FIRST_REVIEW
        self._first_interval_steps: int | None = None
        self._is_warned = True  # the first review acts at once

    def note_evaluation(self, iterations: float) -> None:
        """Take in what one evaluation took."""
        self._evaluations.append(iterations)

    def note_refresh(self, iterations: float, period: int) -> None:
        """Take in what a refresh of the reference took, and how many evaluations share it."""
        self._refreshes = [*self._refreshes, iterations / period][-self._window :]

    def review(self, interval_steps: int) -> tuple[int, str] | None:
        """Return a longer interval and the reason for it; None where the present one will do, or it is too early.

        Args:
            interval_steps: `n` as it is.
        """
        if len(self._evaluations) < self._next_review:
            return None
        if self._first_interval_steps is None:
            self._first_interval_steps = interval_steps
        cost = statistics.median(self._evaluations)
        cost += statistics.median(self._refreshes) if self._refreshes else 0.0
        self._evaluations, self._next_review = [], self._window
        share = cost / interval_steps
        longer = min(math.ceil(cost / self._share), LARGEST_GROWTH * self._first_interval_steps)
        is_over = share > self._share * TOLERATED and longer > interval_steps
        acts, self._is_warned = is_over and self._is_warned, is_over
        if not acts:
            return None
        reason = f"an evaluation takes as long as {cost:.2g} iterations, {share:.1%} of {interval_steps} of them"
        return longer, f"{reason}; the budget is {self._share:.1%}"

    def state_dict(self) -> dict[str, Any]:
        """Return all it knows."""
        return {
            name.removeprefix("_"): value for name, value in vars(self).items() if name not in ("_share", "_window")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name in self.state_dict():
            value = state[name]
            setattr(self, f"_{name}", list(value) if isinstance(value, list) else value)
