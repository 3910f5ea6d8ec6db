"""The bootstrapping stage: the early, critical period in which nothing may freeze (paper §3)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """Watches the mean loss of successive intervals.

    Left when the loss of an interval differs by less than `change_threshold` from the one before.
    """

    change_threshold: float
    previous_loss: float | None = None
    change: float | None = None
    """Relative change of the loss at the last interval; None before the second one."""

    @property
    def is_over(self) -> bool:
        """Tell whether the critical period has passed."""
        return self.change is not None and self.change < self.change_threshold

    def observe(self, loss: float | None) -> Bootstrap:
        """Return the next state; an interval without a finite loss says nothing."""
        if loss is None:
            return self
        if self.previous_loss is None:
            return replace(self, previous_loss=loss)
        return replace(self, previous_loss=loss, change=_relative_change(self.previous_loss, loss))


def _relative_change(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return abs(before - after) / abs(before) if before else float("inf")
