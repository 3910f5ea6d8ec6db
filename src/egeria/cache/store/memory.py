"""The store in memory, for data so small that a disk is not worth it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from egeria.cache.store.base import Entries, Store
from egeria.cache.store.codec import EncodedRows
from egeria.cache.store.rows import Integers, Mask, RowLayout

NUM_STAMPS = 2**32 - 1


class MemoryStore(Store):
    """Rows in a dictionary, encoded as on the disk. In place of checksums rows have the number of their write."""

    def __init__(self, layouts: Sequence[RowLayout], capacity: int, **description: Any) -> None:
        super().__init__(layouts, capacity, **description)
        self.size_bytes = 0
        self._num_writes = 0
        self._rows: dict[int, tuple[int, tuple[bytes, ...]]] = {}

    def advise(self, positions: Any) -> None:
        """Do nothing: everything is there."""

    def drop_pages(self) -> None:
        """Do nothing: there are none."""

    def close(self, *, remove: bool = True) -> None:
        """Forget everything; there is nothing that could be kept."""
        with self._changed, self._entries_lock:
            self._is_closed = True
            self._rows.clear()
            self._entries[:], self.size_bytes = 0, 0

    def _put(self, batch: EncodedRows, entries: Entries) -> None:
        blocks = [tuple(map(bytes, row)) for row in batch.blocks]
        self._num_writes = self._num_writes % NUM_STAMPS + 1
        entries["checksum"] = self._num_writes
        with self._entries_lock:
            for position, row in zip(batch.positions.tolist(), blocks, strict=True):
                self.size_bytes += _size(row) - _size(self._rows.get(position, (0, ()))[1])
                self._rows[position] = self._num_writes, row
            self._entries[batch.positions] = entries

    def _get(self, places: Integers, entries: Entries, blocks: Sequence[Sequence[memoryview]]) -> Mask:
        with self._entries_lock:
            rows = [self._rows.get(place, (0, ())) for place in places.tolist()]
        good = np.array([row[0] for row in rows]) == entries["checksum"]
        for index in np.flatnonzero(good).tolist():
            for target, source in zip(blocks[index], rows[index][1], strict=True):
                target[:] = source
        return np.asarray(good, dtype=bool)

    def _forget_unchanged(self, positions: Integers, entries: Entries) -> int:
        """Forget nothing: rows in memory are not damaged, but may be replaced while they are read."""
        return 0


def _size(blocks: Sequence[bytes]) -> int:
    return sum(map(len, blocks))
