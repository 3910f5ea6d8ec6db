"""What to read ahead, what to keep of the last mini-batches and what to drop: values in, values out (paper §4.3).

"Future batches are known, so they are prefetched; the last five mini-batches stay in memory." No thread,
clock, file or tensor is known here; the fetcher does what this says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
"""Row numbers in the store, one for each sample of a batch [b]."""
MAX_NOTED = 256
"""Batches remembered as started, or as hinted, if they are never asked for."""
_Key = tuple[int, bytes]


@dataclass(frozen=True, eq=False, slots=True)
class Planned:
    """One batch that is expected, by its number and its rows; equal only to itself."""

    number: int
    positions: Positions

    @property
    def key(self) -> _Key:
        """What makes two listings the same batch."""
        return self.number, self.positions.tobytes()


class Standing(Enum):
    """How far a batch had come when it was taken."""

    UNPLANNED = "it is not being read"
    READING = "its read is under way"
    READY = "it has been read"


@dataclass(frozen=True, slots=True)
class Taken:
    """What to do for a batch that is needed now, and what it makes useless."""

    standing: Standing
    planned: Planned | None
    """The read to wait for or to use; None where there is none."""
    dropped: tuple[Planned, ...]
    """Batches read that nobody will ask for any more."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """Where the rows of a batch lie in the last mini-batches."""

    numbers: NDArray[np.int64]
    """The remembered batch that holds each row [b]; meaningless where `found` is False."""
    rows: NDArray[np.int64]
    """The row's place in that batch [b]."""
    found: NDArray[np.bool_]


class PrefetchPlan:
    """The state of the read-ahead and of the memory, moved on by the calls below alone.

    An expected batch goes from listed (`expect`) to being read (`start`), to ready (`finish`), and out
    (`take`); `remember` puts it among the last ones. Once started it is not started again before it was
    taken or passed over, however often it is listed.

    Args:
        depth: batches that may be read and waiting at once.
        num_hinted: batches beyond them that the operating system is told of.
        num_remembered: mini-batches kept after they were used (paper §4.3: five).
    """

    def __init__(self, *, depth: int = 3, num_hinted: int = 2, num_remembered: int = 5) -> None:
        self._depth = depth
        self._num_hinted = num_hinted
        self._num_remembered = num_remembered
        self._listed: list[Planned] = []
        self._held: dict[int, Planned] = {}
        self._reading: set[Planned] = set()
        self._started: dict[_Key, None] = {}
        self._hinted: dict[_Key, None] = {}
        self._last: int | None = None
        self._memory: dict[int, RowIndex] = {}

    @property
    def num_ahead(self) -> int:
        """Batches that are read or being read and not handed over yet; never more than `depth`."""
        return len(self._reading.union(self._held.values()))

    @property
    def remembered(self) -> tuple[int, ...]:
        """The numbers of the last mini-batches kept, oldest first."""
        return tuple(self._memory)

    def expect(self, batches: Iterable[tuple[int, Positions]]) -> tuple[Planned, ...]:
        """Take note of what comes next, in order; it replaces what was expected before.

        Returns:
            Batches read in vain: they are not expected any more.
        """
        under_way = {planned.key: planned for planned in self._reading.union(self._held.values())}
        listed: dict[int, Planned] = {}
        for number, positions in batches:
            if number != self._last and number not in listed:
                planned = Planned(number, positions)
                listed[number] = under_way.get(planned.key, planned)
        self._listed = list(listed.values())
        wanted = set(self._listed)
        dropped = self._drop([planned for planned in self._held.values() if planned not in wanted])
        for planned in self._reading & wanted:  # given up before, and wanted again while its read goes on
            self._held[planned.number] = planned
            _note(self._started, planned.key)
        return dropped

    def start(self) -> Planned | None:
        """Return the batch to read now, which counts as being read from here on; None if there is nothing to do."""
        if self.num_ahead >= self._depth:
            return None
        for planned in self._listed:
            if planned.key not in self._started:
                _note(self._started, planned.key)
                self._held[planned.number] = planned
                self._reading.add(planned)
                return planned
        return None

    def finish(self, planned: Planned) -> bool:
        """Note that a read is over; False means that what was read is of no use any more."""
        self._reading.discard(planned)
        return self._held.get(planned.number) is planned

    def hints(self) -> list[Planned]:
        """Return the batches that the operating system should be told of, each once: those that are read soon."""
        known = self._started.keys() | self._hinted.keys()
        fresh = [soon for soon in self._listed[: self._depth + self._num_hinted] if soon.key not in known]
        for planned in fresh:
            _note(self._hinted, planned.key)
        return fresh

    def was_hinted(self, planned: Planned) -> bool:
        """Tell whether the operating system was told of a batch that is expected."""
        return planned.key in self._hinted

    def take(self, number: int, positions: Positions) -> Taken:
        """Note that a batch is needed now; everything listed before it is passed over.

        A number that is unknown, or known with other rows, is answered with `UNPLANNED`; what is
        expected after it stays planned.
        """
        self._last = number
        passed = self._pass(number)
        planned = self._held.get(number)
        if planned is not None and planned.key != Planned(number, positions).key:
            planned = None
        dropped = self._drop([held for held in passed if held is not planned and self._held.get(held.number) is held])
        if planned is None:
            return Taken(Standing.UNPLANNED, None, dropped)
        if planned in self._reading:
            return Taken(Standing.READING, planned, dropped)  # it stays among the held until `hand_over`
        del self._held[number]
        return Taken(Standing.READY, planned, dropped)

    def hand_over(self, planned: Planned) -> None:
        """Let go of a batch that was taken while it was being read: it was waited for, or given up."""
        if self._held.get(planned.number) is planned:
            del self._held[planned.number]

    def remember(self, number: int, positions: Positions) -> tuple[int, ...]:
        """Keep a mini-batch that was used, as the newest; return the numbers of those that it displaces."""
        self._memory.pop(number, None)
        self._memory[number] = RowIndex.of(positions)
        displaced = list(self._memory)[: -self._num_remembered] if self._num_remembered else [number]
        for old in displaced:
            del self._memory[old]
        return tuple(displaced)

    def forget(self, number: int) -> None:
        """Keep a mini-batch no longer; one that is not kept is no error."""
        self._memory.pop(number, None)

    def invalidate(self, positions: Positions) -> None:
        """Serve these rows [b] from memory no more: their contents have changed."""
        for remembered in self._memory.values():
            remembered.invalidate(positions)

    def recall(self, positions: Positions) -> Recalled:
        """Return where rows [b] lie in memory; of several places the newest."""
        numbers = np.full(len(positions), -1, dtype=np.int64)
        rows = np.zeros(len(positions), dtype=np.int64)
        found = np.zeros(len(positions), dtype=np.bool_)
        for number, remembered in reversed(self._memory.items()):
            places, here = remembered.find(positions)
            fresh = here & ~found
            numbers[fresh], rows[fresh] = number, places[fresh]
            found |= here
        return Recalled(numbers, rows, found)

    def _pass(self, number: int) -> list[Planned]:
        """Take a batch and what is listed before it off the list; return them."""
        place = next((place for place, listed in enumerate(self._listed) if listed.number == number), None)
        if place is None:
            return []
        passed, self._listed = self._listed[: place + 1], self._listed[place + 1 :]
        for planned in passed:
            self._started.pop(planned.key, None)
            self._hinted.pop(planned.key, None)
        return passed

    def _drop(self, useless: Sequence[Planned]) -> tuple[Planned, ...]:
        """Hold some batches no longer; return those that had been read."""
        for planned in useless:
            del self._held[planned.number]
        return tuple(planned for planned in useless if planned not in self._reading)


def _note(keys: dict[_Key, None], key: _Key) -> None:
    """Add a key; the oldest go, for what was expected and never came must not pile up."""
    keys[key] = None
    while len(keys) > MAX_NOTED:
        del keys[next(iter(keys))]


@dataclass(frozen=True, eq=False, slots=True)
class RowIndex:
    """The positions of one mini-batch in memory, sorted so that rows are found quickly."""

    positions: Positions
    places: NDArray[np.int64]
    is_valid: NDArray[np.bool_]

    @classmethod
    def of(cls, positions: Positions) -> RowIndex:
        """Return the index of rows that lie in this order."""
        places = np.argsort(positions, kind="stable")
        return cls(positions[places], places, np.ones(len(positions), dtype=np.bool_))

    def find(self, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the place of each row [b], and whether it is there."""
        if not len(self.positions):
            return np.zeros(len(positions), dtype=np.int64), np.zeros(len(positions), dtype=np.bool_)
        index = np.minimum(np.searchsorted(self.positions, positions), len(self.positions) - 1)
        return self.places[index], (self.positions[index] == positions) & self.is_valid[index]

    def invalidate(self, positions: Positions) -> None:
        """Find these rows no more."""
        self.is_valid[np.isin(self.positions, positions)] = False
