"""The part of a data set that a smaller tier takes."""

import random
from collections.abc import Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


def sample(items: Sequence[T], count: int | None) -> list[T]:
    """Return some of the items in their order, always the same: seeds change the training, not the task.

    Args:
        items: what there is.
        count: how many; None takes all.
    """
    if count is None or count >= len(items):
        return list(items)
    return [items[index] for index in sorted(random.Random(0).sample(range(len(items)), count))]


def hold_out(items: Sequence[H], num_train: int | None, num_judged: int | None) -> tuple[list[H], list[H]]:
    """Return some items to train on and others to judge by, always the same; no two are equal across both.

    Args:
        items: what there is.
        num_train: how many to train on, those of `sample`; None takes all that are not judged by.
        num_judged: how many to judge by, None takes all that are left; where training on so many leaves too few, they
            are held out of training.
    """
    train = sample(items, num_train)
    known = set(train)
    left = [item for item in items if item not in known]
    if num_judged is None or len(left) >= num_judged:
        return train, sample(left, num_judged)
    judged = sample(items, num_judged)
    known = set(judged)
    return sample([item for item in items if item not in known], num_train), judged
