"""Keeping evaluations within their share of the training time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

FIRST_REVIEW = 3
TOLERATED = 1.25
TOLERATED_WHERE_COUNTED = 1.5
LARGEST_GROWTH = 10

PASS_SHARE, READING_SHARE = 1 / 6, 1 / 20


def count_iterations(front_share: float, share_of_samples: float) -> float:
    """Return how many iterations an evaluation takes by its operations.

    A pass of the model without gradients and in a cheaper number format takes about half of a pass
    of the training, and that a third of an iteration; activations are to be pooled and compared
    besides. A rough guide: measured on one core, evaluations took 0.6 to 1.3 times that in
    transformers, and about twice in convolutional nets.

    Args:
        front_share: the part of the forward pass up to the layer module, 0 to 1.
        share_of_samples: samples that go through it, over all passes, as a share of the
            iteration's.
    """
    return share_of_samples * (READING_SHARE + PASS_SHARE * front_share)


class Budget:
    """Fits `n` to a share of the training time that evaluations may take.

    Where the operations of an evaluation can be counted, `n` follows the count for each layer
    module, so that what a run decides does not depend on how busy the machine is. Time is measured
    as well, and acts only where a window of evaluations and the next one both took half as long
    again as the budget allows. Where nothing can be counted only time acts: the first review comes
    after three evaluations, before any slope is known, then one after every window, of which two in
    a row must agree.

    Costs are in iterations measured at the same time, so that a busy machine, which slows both,
    changes little. What measuring adds to `n` stays, and `n` never exceeds ten times its first
    value: a slope is a movement per evaluation, so a change of `n` within a history bends it,
    towards freezing later where `n` grows and earlier where it shrinks. Only `n` changes, not the
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
        self._counted: float | None = None
        """Iterations that an evaluation takes by its operations."""
        self._unforeseen = 0.0
        """Iterations that evaluations turned out to take beyond what was counted."""

    def note_evaluation(self, iterations: float) -> None:
        """Record the cost of one evaluation."""
        self._evaluations.append(iterations)

    def note_refresh(self, iterations: float, period: int) -> None:
        """Record the cost of a refresh of the reference, which `period` evaluations share."""
        self._refreshes = [*self._refreshes, iterations / period][-self._window :]

    def expect(self, counted: float, interval_steps: int) -> tuple[int, str] | None:
        """Return the `n` that fits evaluations of `counted` iterations, and the reason; None where
        that is as it is.
        """
        if counted == self._counted:
            return None
        self._counted = counted
        self._first_interval_steps = self._first_interval_steps or interval_steps
        self._evaluations, self._next_review, self._is_warned = [], self._window, False
        fitting = max(self._first_interval_steps, self._fit(counted + self._unforeseen))
        if fitting == interval_steps:
            return None
        unforeseen = (
            f", and {self._unforeseen:.2g} were measured besides" if self._unforeseen else ""
        )
        reason = (
            f"the operations of an evaluation are those of {counted:.2g} iterations{unforeseen}"
        )
        return fitting, f"{reason}; the budget is {self._share:.1%}"

    def review(self, interval_steps: int) -> tuple[int, str] | None:
        """Return a longer interval and the reason for it; None where the present one will do, or it
        is too early.
        """
        if len(self._evaluations) < self._next_review:
            return None
        self._first_interval_steps = self._first_interval_steps or interval_steps
        cost = statistics.median(self._evaluations)
        cost += statistics.median(self._refreshes) if self._refreshes else 0.0
        self._evaluations, self._next_review = [], self._window
        share, longer = cost / interval_steps, self._fit(cost)
        tolerated = TOLERATED if self._counted is None else TOLERATED_WHERE_COUNTED
        is_over = share > self._share * tolerated and longer > interval_steps
        acts, self._is_warned = is_over and self._is_warned, is_over
        if not acts:
            return None
        if self._counted:
            self._unforeseen = max(self._unforeseen, cost - self._counted)
        reason = (
            f"an evaluation takes as long as {cost:.2g} iterations, {share:.1%} of "
            f"{interval_steps} of them"
        )
        return longer, f"{reason}; the budget is {self._share:.1%}"

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the settings."""
        state = {
            name[1:]: value
            for name, value in vars(self).items()
            if name not in ("_share", "_window")
        }
        return {
            name: list(value) if isinstance(value, list) else value for name, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name in self.state_dict():
            value = state[name]
            setattr(self, f"_{name}", list(value) if isinstance(value, list) else value)

    def _fit(self, cost: float) -> int:
        """Return the shortest interval in which an evaluation keeps to the budget, within the limit
        of growth.
        """
        return min(
            math.ceil(round(cost / self._share, 6)),
            LARGEST_GROWTH * (self._first_interval_steps or 1),
        )
