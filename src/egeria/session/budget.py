"""Keeping evaluations within their share of the training time, by making fewer of them."""

from __future__ import annotations

import math
import statistics

FIRST_REVIEW = 3
TOLERATED = 1.25


class Budget:
    """Compares what evaluations take from the training process with what the training takes.

    The first review comes after three evaluations, before any slope is known, then one after every
    window. `n` only ever grows: a slope is a movement per evaluation, and a later, shorter interval would
    make movement look slower than the early one it is measured against. Only `n`, not the probe
    batch: plasticity changes its scale with the number of samples.

    Args:
        share: of the training time.
        window: evaluations between reviews, and between refreshes.
    """

    def __init__(self, share: float, window: int) -> None:
        self._share = share
        self._window = window
        self._evaluations_s: list[float] = []
        self._refreshes_s: list[float] = []
        self._next_review = FIRST_REVIEW

    def note_evaluation(self, seconds: float) -> None:
        """Take in what one evaluation took."""
        self._evaluations_s.append(seconds)

    def note_refresh(self, seconds: float) -> None:
        """Take in what a refresh of the reference took."""
        self._refreshes_s.append(seconds)

    def review(self, interval_steps: int, iteration_s: float) -> tuple[int, str] | None:
        """Return a longer interval and the reason for it; None where the present one will do, or it is too early.

        Args:
            interval_steps: `n` as it is.
            iteration_s: median seconds of an iteration without egeria.
        """
        if len(self._evaluations_s) < self._next_review:
            return None
        cost_s = statistics.median(self._evaluations_s)
        if self._refreshes_s:
            cost_s += statistics.median(self._refreshes_s) / self._window
        self._evaluations_s = []
        self._next_review = self._window
        if iteration_s <= 0:
            return None
        share = cost_s / (interval_steps * iteration_s)
        if share <= self._share * TOLERATED:
            return None
        reason = (
            f"an evaluation takes {1000 * cost_s:.1f} ms, {share:.1%} of {interval_steps} iterations of "
            f"{1000 * iteration_s:.1f} ms; the budget is {self._share:.1%}"
        )
        return math.ceil(cost_s / (self._share * iteration_s)), reason
