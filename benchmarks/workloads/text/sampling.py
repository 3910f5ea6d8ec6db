"""The part of a data set that a smaller tier takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def sample(items: Sequence[T], count: int | None) -> list[T]:
    """Return some of the items in their order, always the same: seeds change the training, not the task.

    Args:
        items: what there is.
        count: how many; None takes all.
    """
    if count is None or count >= len(items):
        return list(items)
    return [items[index] for index in sorted(random.Random(0).sample(range(len(items)), count))]
