"""What a run froze when, and the compute that was really skipped by it."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from egeria.events import ComputeProfiled
from egeria.report.freezing import backward_shares_of, depth_points, mean_over_steps
from egeria.report.history import History
from egeria.report.summary import list_uses


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a run at one depth, and with the same periods."""

    begin: float
    end: float
    """In epochs."""
    frozen: int
    periods: tuple[int, ...] = ()
    """For each layer module, how many steps lie between its updates; empty where all are updated at every step."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Shares of the floating-point work of the whole run: forward, backward, and the gradients of what trains."""

    backward: float | None
    """Backward passes of frozen layer modules, and of those that rest between updates, at the steps at which they do;
    None where something froze or rested and nobody profiled the model."""
    forward: float | None
    """Forward passes that were not made because the activations came from the store, by samples served."""

    @property
    def total(self) -> float | None:
        """Both."""
        return None if self.backward is None or self.forward is None else self.backward + self.forward


def spans(history: History, steps_per_epoch: int) -> tuple[Span, ...]:
    """Return how deep a run was frozen, and what was updated rarely, from its first step to its last."""
    points = depth_points(history)
    steps = [*(point.step for point in points), history.last_step]
    return tuple(
        Span(begin=begin / steps_per_epoch, end=end / steps_per_epoch, frozen=point.frozen, periods=point.periods)
        for point, begin, end in zip(points, steps, steps[1:], strict=False)
    )


def measure_skipped(history: History) -> Skipped:
    """Return what freezing skipped, and what the store did."""
    backward = mean_over_steps(depth_points(history), lambda point: point.skipped_share)
    return Skipped(backward=backward, forward=_served_share(history))


def _served_share(history: History) -> float | None:
    """Return the share of the work that stored activations spared.

    Each generation counts from the step that decided it to that of the next decision, with the forward
    share of the modules then frozen, and for the share of its samples that came from the store.
    """
    uses = list_uses(history)
    if not any(use.hit_share for use in uses):
        return 0.0
    profile = history.last(ComputeProfiled)
    last_step = history.last_step
    backward = backward_shares_of(history)
    if profile is None or backward is None or not last_step:
        return None
    points = depth_points(history)
    steps = [point.step for point in points]
    ends = [*(use.decided.step for use in uses[1:]), last_step]
    served = 0.0
    for use, end in zip(uses, ends, strict=True):
        depth = points[max(0, bisect.bisect_right(steps, use.decided.step) - 1)].frozen
        num_steps = max(0, min(end, _thaw_step(history, use.decided.step)) - use.decided.step)
        served += (use.hit_share or 0.0) * sum(profile.forward_shares[:depth]) * num_steps
    return (1 - math.fsum(backward)) * served / last_step


def _thaw_step(history: History, step: int) -> int:
    """Return the first step after this one at which the depth changes."""
    points = depth_points(history)
    now = next((point.frozen for point in reversed(points) if point.step <= step), 0)
    changes = [point.step for point in points if point.step > step and point.frozen != now]
    return min(changes, default=history.last_step)
