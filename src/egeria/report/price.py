"""What freezes are foretold to cost, by the worth of steps that was measured before them."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from egeria.events import IntervalMeasured
from egeria.policy.worth import FADING, SETTLED_SHARE
from egeria.report.freezing import depth_points
from egeria.report.history import History

POINTS = 5.0
"""Points of accuracy that all of what steps bring is worth, at a training loss of 1. Source: records 0031 and 0033 of
the bench, by nine fine-tunings; of single ones 1 to 5.5."""
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
    """Return it; None where nothing froze, or worth was not measured, or the loss is none of that kind."""
    intervals, begins = history.of(IntervalMeasured), freezes(history)
    shares = worth_shares(intervals)
    if shares is None or not begins or max(begins) >= len(shares):
        return None
    late = [event.loss for event in intervals if event.step >= (1 - LATE_SHARE) * intervals[-1].step]
    losses = [loss for loss in late if loss is not None]
    if not losses or statistics.fmean(losses) < 0:
        return None
    return GivenUp(share=part_of(shares, learning_rates(intervals), begins), loss=statistics.fmean(losses))


def worth_shares(intervals: Sequence[IntervalMeasured]) -> list[float] | None:
    """Return each layer module's share of what all but the last brought while that was measured, front to back.

    The first steps, in which a fresh head learns, are left out. None where nothing was measured, or brought.
    """
    last = max((event.step for event in intervals), default=0)
    rows = [
        event.worth[:-1]
        for event in intervals
        if event.worth and event.step > SETTLED_SHARE * last and any(part is not None for part in event.worth)
    ]
    sums = [max(0.0, math.fsum(part or 0.0 for part in column)) for column in zip(*rows, strict=True)]
    total = math.fsum(sums)
    return [part / total for part in sums] if total > 0 else None


def learning_rates(intervals: Sequence[IntervalMeasured]) -> list[tuple[float, float]]:
    """Return the learning rates, as shares of the largest, each after the share of the training at which it was."""
    last = max(event.step for event in intervals)
    largest = max(event.learning_rate for event in intervals) or 1.0
    return [(event.step / last, event.learning_rate / largest) for event in intervals]


def freezes(history: History) -> dict[int, float]:
    """Return at which share of the training each layer module froze that is frozen at its end."""
    last, found = max(1, history.last_step), dict[int, float]()
    for point in depth_points(history):
        begins = dict.fromkeys(range(point.frozen), point.step / last)
        found = {module: found.get(module, at) for module, at in begins.items()}
    return found


def part_of(
    shares: Sequence[float],
    rates: Sequence[tuple[float, float]],
    begins: Mapping[int, float],
    power: float = FADING + 1,
) -> float:
    """Return the share of what steps bring that freezes give up.

    Args:
        shares: of what each layer module brings.
        rates: as `learning_rates` returns them.
        begins: for each layer module that freezes the share of the training at which it does.
        power: of the learning rate, with which what steps bring fades.
    """
    return math.fsum(shares[module] * _rate_at(at, rates) ** power for module, at in begins.items())


def _rate_at(at: float, rates: Sequence[tuple[float, float]]) -> float:
    """Return the learning rate at a share of the training, on a straight line between the two known beside it."""
    place = bisect.bisect_left([time for time, _ in rates], at)
    if place in (0, len(rates)):
        return rates[min(place, len(rates) - 1)][1]
    (before, first), (after, second) = rates[place - 1 : place + 1]
    return first + (second - first) * (at - before) / (after - before)
