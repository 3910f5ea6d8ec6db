"""What freezes are foretold to cost, by the worth of steps that was measured before them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from egeria.events import IntervalMeasured, PlasticityRead, RunStarted
from egeria.policy.shares import LATER_ERRORS, complete, helped, telling
from egeria.policy.worth import FIRST_LOOK_SHARE, SETTLED_SHARE
from egeria.report.freezing import depth_points
from egeria.report.history import History

POINTS = 5.0
"""Points that all of what steps bring is worth where shares of right answers are judged, at a
training loss of 1. Source: records 0031 and 0033 of the bench, by eight fine-tunings; of single
ones 1 to 9."""
LATE_SHARE = 0.1
"""Share of the training at its end whose mean loss counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp:
    """What a run gave up by freezing, as far as worth foretells it."""

    share: float
    """Of what the steps of all layer modules but the last bring at the largest learning rate."""
    loss: float
    """Training loss at the end, a cross-entropy in nats."""

    @property
    def points(self) -> float:
        """Points of accuracy that such runs lost on average."""
        return POINTS * self.share * math.sqrt(self.loss)


def given_up(history: History) -> GivenUp | None:
    """Return it; None where nothing froze, worth did not decide, the loss is none of that kind, or
    the run goes on.
    """
    intervals, begins, started = (
        history.of(IntervalMeasured),
        freezes(history),
        history.last(RunStarted),
    )
    total_steps = None if started is None else started.total_steps
    if not history.closed and history.last_step < (total_steps or 0):
        return None
    shares = None if history.of(PlasticityRead) else worth_shares(intervals, total_steps)
    if shares is None or not begins or max(begins) >= len(shares):
        return None
    late = [
        event.loss for event in intervals if event.step >= (1 - LATE_SHARE) * intervals[-1].step
    ]
    losses = [loss for loss in late if loss is not None]
    if not losses or statistics.fmean(losses) < 0:
        return None
    share = math.fsum(
        shares[module] * still_to_come(intervals, at) for module, at in begins.items()
    )
    return GivenUp(share=share, loss=statistics.fmean(losses))


def worth_shares(
    intervals: Sequence[IntervalMeasured], total_steps: int | None = None
) -> list[float] | None:
    """Return each layer module's share of what all that came trained but the last brought while
    that was measured.

    Front to back. The first steps, in which a fresh head learns, are left out. None where nothing
    was measured, or brought. What was measured need not have decided.

    Args:
        intervals: of the run.
        total_steps: of the whole run; None takes what was made so far for it.
    """
    last = total_steps or max((event.step for event in intervals), default=0)
    measured, count = _measured(intervals)
    num_unsettled = sum(event.step <= SETTLED_SHARE * last for event in measured)
    rows = telling([event.worth for event in measured if event.worth], num_unsettled, count)
    if not helped(rows, count):
        return None
    sums = [
        max(0.0, math.fsum(part or 0.0 for part in column)) for column in zip(*rows, strict=True)
    ]
    total = math.fsum(sums[:count])
    return [part / total for part in sums[:count]] if total > 0 else None


def stood_out(intervals: Sequence[IntervalMeasured], total_steps: int | None = None) -> bool:
    """Return whether what steps bring stood out from the noise of batches, by the rule of the
    policy 'worth'.

    Args:
        intervals: of the run.
        total_steps: of the whole run; None takes what was made so far for it.
    """
    last = total_steps or max((event.step for event in intervals), default=0)
    measured, count = _measured(intervals)
    is_first_look = len(measured) < 2 or measured[-2].step <= FIRST_LOOK_SHARE * last
    rows = complete([event.worth for event in measured if event.worth])
    return helped(rows, count, 0.0 if is_first_look else LATER_ERRORS)


def _measured(intervals: Sequence[IntervalMeasured]) -> tuple[list[IntervalMeasured], int]:
    """Return the intervals in which worth was measured, and by how many layer modules of the front
    it is judged.
    """
    measured = [
        event
        for event in intervals
        if event.worth and any(part is not None for part in event.worth)
    ]
    if not measured:
        return [], 0
    num_modules = len(measured[-1].worth or ())
    return measured, min(measured[-1].num_pretrained or num_modules, num_modules - 1)


def freezes(history: History) -> dict[int, float]:
    """Return at which share of the training each layer module froze that is frozen at its end."""
    last = max(
        [1, *(event.step for event in history.of(IntervalMeasured))]
    )  # rates are told up to there
    found = dict[int, float]()
    for point in depth_points(history):
        at = min(1.0, point.step / last)
        found = {module: found.get(module, at) for module in range(point.frozen)}
    return found


def still_to_come(intervals: Sequence[IntervalMeasured], at: float) -> float:
    """Return what steps bring from a share of the training on, as a share of what all would bring
    at the largest rate.

    The learning rate then, or on average from then on where that is more, times what is left of the
    training. For a rate that falls on a straight line it is the square of that rate, as in record
    0031.
    """
    last, largest = intervals[-1].step, max(event.learning_rate for event in intervals)
    rates = [event.learning_rate for event in intervals if event.step >= at * last]
    if not rates or not largest > 0:
        return 0.0
    return max(rates[0], statistics.fmean(rates)) / largest * (1 - at)
