"""The store in memory, for data so small that a disk is not worth it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from egeria.cache.store.codec import RowCodec
from egeria.cache.store.rows import Floats, Mask, RowLayout, Rows, StoreError, as_positions, unchanged


class _Stored(NamedTuple):
    fingerprint: Floats
    length: int
    blocks: tuple[bytes, ...]


class MemoryStore:
    """Rows in a dictionary, encoded as on the disk; it answers as `DiskStore` does and needs no checksums.

    Args:
        layouts: of the leaves of a row.
        capacity: positions it has room for.
    """

    def __init__(self, layouts: Sequence[RowLayout], capacity: int) -> None:
        self.layouts = tuple(layouts)
        self.capacity = capacity
        self.num_damaged = 0
        self._codec = RowCodec(layouts)
        self.row_bytes = self._codec.row_bytes
        self._rows: dict[int, _Stored] | None = {}
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What is stored now."""
        with self._lock:
            return sum(len(block) for row in (self._rows or {}).values() for block in row.blocks)

    def lookup(self, positions: Any) -> Rows:
        """Return what is known of the positions [b]."""
        return _known(self._look(positions))

    def advise(self, positions: Any) -> None:
        """Do nothing: everything is there."""

    def read(self, positions: Any, out: Sequence[Tensor], known: Rows | None = None) -> Mask:
        """Fill `out[k][i]`; return a mask [b] of the rows that are there. Arguments and errors are `DiskStore`'s."""
        self._check_open()
        rows = self._look(positions)
        self._codec.check(out, len(rows))
        found = _known(rows)
        good = found.valid & self._codec.fits(found.lengths, out)
        if known is not None:
            good = unchanged(known, good, found.fingerprints, found.lengths)
        blocks, finish = self._codec.decode_into(out, np.where(good, found.lengths, 0))
        for index in np.flatnonzero(good):
            row = rows[index]
            assert row is not None
            for target, source in zip(blocks[index], row.blocks, strict=True):
                target[:] = source
        finish(good)
        return good

    def write(self, positions: Any, rows: Sequence[Tensor], fingerprints: Any, lengths: Any = None) -> int:
        """Store rows; return how many were. Arguments and errors are `DiskStore`'s."""
        batch = self._codec.encode(positions, rows, fingerprints, lengths, capacity=self.capacity)
        described = zip(batch.positions.tolist(), batch.fingerprints, batch.lengths.tolist(), batch.blocks, strict=True)
        stored = {place: _Stored(own, length, tuple(map(bytes, blocks))) for place, own, length, blocks in described}
        self._check_open()
        with self._lock:
            if self._rows is not None:
                self._rows.update(stored)
        return len(batch.positions)

    def close(self, *, remove: bool = True) -> None:
        """Forget everything; there is nothing that could be kept."""
        with self._lock:
            self._rows = None

    def _check_open(self) -> None:
        if self._rows is None:
            raise StoreError("The store of activations is closed.")

    def _look(self, positions: Any) -> list[_Stored | None]:
        with self._lock:
            return [(self._rows or {}).get(position) for position in as_positions(positions).tolist()]


def _known(rows: Sequence[_Stored | None]) -> Rows:
    nothing = np.zeros(2, dtype=np.float32)
    return Rows(
        valid=np.array([row is not None for row in rows], dtype=bool),
        fingerprints=np.array([nothing if row is None else row.fingerprint for row in rows]).reshape(-1, 2),
        lengths=np.array([0 if row is None else row.length for row in rows], dtype=np.int64),
    )
