"""Keeping evaluations within their share of the training time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FIRST_REVIEW = 3
TOLERATED, TOLERATED_WHERE_COUNTED = 1.25, 1.5
LARGEST_GROWTH = 10
PASS_SHARE, READING_SHARE = 1 / 6, 1 / 20


def count_iterations(front_share: float, share_of_samples: float) -> float:
    """Return how many iterations an evaluation takes by its operations.

    A pass without gradients in a cheaper number format takes about half of a pass of the training,
    and that a third of an iteration; activations are pooled and compared besides. Measured on one
    core, evaluations took 0.6 to 1.3 times that in transformers, and twice in convolutional nets.

    Args:
        front_share: the part of the forward pass up to the layer module, 0 to 1.
        share_of_samples: samples that go through it, over all passes, as a share of the
            iteration's.
    """
    return share_of_samples * (READING_SHARE + PASS_SHARE * front_share)


@dataclass(eq=False)
class Budget:
    """Fits `n` to a share of the training time that evaluations may take.

    Where the operations of an evaluation can be counted, `n` follows the count for each layer
    module, so that what a run decides does not depend on how busy the machine is; time acts only
    where a window of evaluations and the next one both took half as long again as the budget
    allows. Where nothing can be counted only time acts: the first review comes after three
    evaluations, before any slope is known, then one after every window, of which two in a row must
    agree.

    Costs are in iterations measured at the same time, so that a busy machine, which slows both,
    changes little. What measuring adds to `n` stays, and `n` never exceeds ten times its first
    value: a slope is a movement per evaluation, so that a change of `n` within a history bends it.

    Args:
        share: of the training time.
        window: evaluations between reviews.
    """

    share: float
    window: int
    evaluations: tuple[float, ...] = ()
    refreshes: tuple[float, ...] = ()
    next_review: int = FIRST_REVIEW
    first_interval_steps: int | None = None
    is_warned: bool = True  # the first review acts at once
    counted: float | None = None  # iterations that an evaluation takes by its operations
    unforeseen: float = 0.0  # iterations that evaluations took beyond what was counted

    def note_evaluation(self, iterations: float) -> None:
        """Record the cost of one evaluation."""
        self.evaluations = (*self.evaluations, iterations)

    def note_refresh(self, iterations: float, period: int) -> None:
        """Record the cost of a refresh of the reference, which `period` evaluations share."""
        self.refreshes = (*self.refreshes, iterations / period)[-self.window :]

    def expect(self, counted: float, interval_steps: int) -> tuple[int, str] | None:
        """Return the `n` that fits evaluations of `counted` iterations, and the reason, if new."""
        if counted == self.counted:
            return None
        self.counted, self.is_warned = counted, False
        self.evaluations, self.next_review = (), self.window
        first = self.first_interval_steps = self.first_interval_steps or interval_steps
        fitting = max(first, self._fit(counted + self.unforeseen))
        besides = f", and {self.unforeseen:.2g} were measured besides" if self.unforeseen else ""
        reason = f"the operations of an evaluation are those of {counted:.2g} iterations{besides}"
        return None if fitting == interval_steps else (fitting, self._explain(reason))

    def review(self, interval_steps: int) -> tuple[int, str] | None:
        """Return a longer `n` and the reason; None where this one will do, or it is too early."""
        if len(self.evaluations) < self.next_review:
            return None
        self.first_interval_steps = self.first_interval_steps or interval_steps
        cost = statistics.median(self.evaluations) + statistics.median(self.refreshes or (0.0,))
        self.evaluations, self.next_review = (), self.window
        share, longer = cost / interval_steps, self._fit(cost)
        tolerated = TOLERATED if self.counted is None else TOLERATED_WHERE_COUNTED
        is_over = share > self.share * tolerated and longer > interval_steps
        acts, self.is_warned = is_over and self.is_warned, is_over
        if acts and self.counted:
            self.unforeseen = max(self.unforeseen, cost - self.counted)
        takes = f"an evaluation takes as long as {cost:.2g} iterations, {share:.1%} of"
        return (longer, self._explain(f"{takes} {interval_steps} of them")) if acts else None

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the settings."""
        return {name: v for name, v in asdict(self).items() if name not in ("share", "window")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        vars(self).update({name: state[name] for name in self.state_dict()})

    def _fit(self, cost: float) -> int:
        """Return the shortest interval that keeps to the budget, within the limit of growth."""
        longest = LARGEST_GROWTH * (self.first_interval_steps or 1)
        return min(math.ceil(round(cost / self.share, 6)), longest)

    def _explain(self, reason: str) -> str:
        return f"{reason}; the budget is {self.share:.1%}"
