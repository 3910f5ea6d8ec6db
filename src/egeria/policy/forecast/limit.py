"""How much of the similarities a layer module may still change, and yet freeze."""

from __future__ import annotations

STRICTER = 0.25
"""What an alarm of the guard makes of the limit, and what holds where the noise of steps cannot be measured."""
UNSETTLED = 0.1
"""What holds where the rate stays high to the end: what moves is still learning. In a short translation run modules
that would have changed by 1 % of the similarities took 1 to 2 % of the loss with them."""
LARGEST_WEIGHT = 2.0
"""Times the limit that a module with much work may change by."""
LARGEST_EASE = 4.0
"""Times the limit that a module may change by whose steps hardly bear on the loss, once the rate has fallen. In a
segmentation run four of five modules could be frozen with 3 % to change, and nothing was lost: their noise was 0.3 % of
the loss. At a high rate small noise tells of a module that has hardly begun to learn: 0.002 % where ResNet-50 stood
still at a seventh of its training, and lost two points by the freeze."""


def limit_for(
    limit: float,
    *,
    work: float | None,
    bearing: float | None,
    loss_limit: float,
    has_fallen: bool,
    comes_to_rest: bool,
) -> float:
    """Return the limit of one module.

    Args:
        limit: of an average one.
        work: of the module, times the average; None where unknown. A module with more saves more by the same change.
            One with less has no stricter limit, since it also keeps those behind it from freezing.
        bearing: share of the loss that the noise of its steps makes, with that of all in front; None where unknown,
            0 where steps went up their own gradients, which tells nothing of it either.
        loss_limit: the bearing from which the limit holds as it is.
        has_fallen: whether the rate is far below its peak.
        comes_to_rest: whether the rate will have fallen far at the end.
    """
    limit *= 1.0 if work is None else min(LARGEST_WEIGHT, max(1.0, work))
    if bearing is None:
        limit *= STRICTER
    elif bearing > 0 and has_fallen:
        limit *= min(LARGEST_EASE, max(1.0, loss_limit / bearing))
    return limit if comes_to_rest else UNSETTLED * limit
