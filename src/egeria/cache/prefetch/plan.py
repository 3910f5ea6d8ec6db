"""Which batches to read ahead: values in, values out (paper §4.3: "future batches are known, so they are prefetched").

No thread, clock, file or tensor is known here; the fetcher does what this decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
"""Row numbers in the store, one for each sample of a batch [b]."""
BatchKey = tuple[int, bytes]
"""A batch by its number and its rows: two listings with the same key are the same batch."""


def batch_key(number: int, positions: Positions) -> BatchKey:
    """Return the key of a batch.

    Args:
        number: of the batch.
        positions: [b]
    """
    return number, positions.tobytes()


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """A batch to be read now."""

    key: BatchKey
    positions: Positions
    was_hinted: bool
    """Whether the operating system was told of it before."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """What to do now that other batches are expected."""

    reads: list[PlannedRead]
    hints: list[Positions]
    """Batches that the operating system should be told of, for they are read soon."""
    dropped: list[BatchKey]
    """Batches whose reads were started in vain."""


class PrefetchPlan:
    """The state of the read-ahead, changed by the calls below alone.

    A batch is listed (`expect`), its read is started at once or later, and it leaves the list when it is taken, passed
    over or not expected any more. As long as it is listed it is started once.

    Args:
        depth: batches that may be read and waiting at once.
        num_hinted: batches beyond them that the operating system is told of.
    """

    def __init__(self, *, depth: int = 3, num_hinted: int = 2) -> None:
        self._depth = depth
        self._num_hinted = num_hinted
        self._listed: dict[BatchKey, Positions] = {}
        self._started: set[BatchKey] = set()
        self._hinted: set[BatchKey] = set()
        self._last: int | None = None

    def expect(self, batches: Iterable[tuple[int, Positions]]) -> PlanStep:
        """Replace the list of what comes next, in order; the batch taken last is not expected again."""
        numbered: dict[int, Positions] = {}
        for number, positions in batches:
            if number != self._last:
                numbered.setdefault(number, positions)
        self._listed = {batch_key(number, positions): positions for number, positions in numbered.items()}
        dropped = [key for key in self._started if key not in self._listed]
        self._started.difference_update(dropped)
        fresh = [key for key in self._listed if key not in self._started][: self._depth - len(self._started)]
        reads = [PlannedRead(key, self._listed[key], key in self._hinted) for key in fresh]
        self._started.update(fresh)
        known = self._started | self._hinted
        soon = [key for key in list(self._listed)[: self._depth + self._num_hinted] if key not in known]
        self._hinted = self._hinted.intersection(self._listed).union(soon)
        return PlanStep(reads, [self._listed[key] for key in soon], dropped)

    def take(self, number: int, positions: Positions) -> tuple[bool, list[BatchKey]]:
        """Note that a batch is needed now; everything listed before it is passed over.

        Args:
            number: of the batch.
            positions: [b]; if they are others than listed, its read is of no use.

        Returns:
            Whether its read was started, and the batches whose reads were started in vain.
        """
        self._last = number
        listed, wanted = list(self._listed), batch_key(number, positions)
        place = next((place for place, key in enumerate(listed) if key[0] == number), -1)
        passed = [key for key in listed[: place + 1] if key in self._started]
        for key in listed[: place + 1]:
            del self._listed[key]
        self._started.difference_update(passed)
        return wanted in passed, [key for key in passed if key != wanted]
