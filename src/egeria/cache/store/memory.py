"""The store's twin in memory: for tests, and for data so small that a disk is not worth it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from egeria.cache.store.codec import Codec
from egeria.cache.store.prepared import check_leaves, have_length, prepare
from egeria.cache.store.rows import Floats, Mask, RowLayout, Rows, as_positions, unchanged
from egeria.cache.store.usage import Usage


class _Kept(NamedTuple):
    fingerprint: Floats
    length: int
    blocks: tuple[bytes, ...]


class MemoryStore:
    """Rows in a dictionary, encoded as on the disk; it answers as `DiskStore` does and needs no checksums."""

    def __init__(self, layouts: Sequence[RowLayout], capacity: int) -> None:
        self.layouts = tuple(layouts)
        self.capacity = capacity
        self.num_damaged = 0
        self.num_unstorable = 0
        self._codecs = [Codec(layout) for layout in layouts]
        self._rows: dict[int, _Kept] = {}
        self._lock = threading.Lock()
        self._usage = Usage("The store of activations")

    @property
    def row_bytes(self) -> int:
        """The size of the longest row."""
        return sum(codec.slot_bytes for codec in self._codecs)

    @property
    def size_bytes(self) -> int:
        """What is stored now."""
        with self._lock:
            return sum(len(block) for kept in self._rows.values() for block in kept.blocks)

    def lookup(self, positions: Any) -> Rows:
        """Return what is known of the positions [b]."""
        return _known(self._look(positions))

    def advise(self, positions: Any) -> None:
        """Do nothing: everything is there."""

    def read(self, positions: Any, out: Sequence[Tensor], known: Rows | None = None) -> Mask:
        """Fill `out[k][i]`; return a mask [b] of the rows that are there. Raises `StoreError` as `DiskStore` does."""
        with self._usage.inside():
            kept = self._look(positions)
            check_leaves(self._codecs, out, len(kept))
            found = _known(kept)
            good = found.valid & have_length(self._codecs, found.lengths, out)
            if known is not None:
                good = unchanged(known, good, found.fingerprints, found.lengths)
            lengths = np.where(good, found.lengths, 0)
            for leaf, (codec, rows) in enumerate(zip(self._codecs, out, strict=True)):
                landing = codec.landing(rows, lengths)
                for index in np.flatnonzero(good):
                    row = kept[index]
                    assert row is not None
                    landing.blocks[index][:] = row.blocks[leaf]
                landing.settle(good)
            return good

    def write(self, positions: Any, rows: Sequence[Tensor], fingerprints: Any, lengths: Any = None) -> int:
        """Store rows; return how many were. Raises `StoreError` as `DiskStore` does."""
        with self._usage.inside():
            given = {"fingerprints": fingerprints, "lengths": lengths}
            batch = prepare(self._codecs, positions, rows, **given, capacity=self.capacity)
            with self._lock:
                self.num_unstorable += batch.num_unstorable
                for position, entry, blocks in zip(batch.positions.tolist(), batch.entries, batch.blocks, strict=True):
                    held = tuple(bytes(block) for block in blocks)
                    self._rows[position] = _Kept(entry["fingerprint"].copy(), int(entry["length"]), held)
            return len(batch.positions)

    def close(self, *, remove: bool = True) -> None:
        """Forget everything; there is nothing that could be kept."""
        self._usage.end(0.0)
        with self._lock:
            self._rows.clear()

    def _look(self, positions: Any) -> list[_Kept | None]:
        with self._lock:
            return [self._rows.get(position) for position in as_positions(positions).tolist()]


def _known(kept: Sequence[_Kept | None]) -> Rows:
    nothing = np.zeros(2, dtype=np.float32)
    return Rows(
        valid=np.array([row is not None for row in kept], dtype=bool),
        fingerprints=np.array([nothing if row is None else row.fingerprint for row in kept]).reshape(-1, 2),
        lengths=np.array([0 if row is None else row.length for row in kept], dtype=np.int64),
    )
