"""`Store`: rows of activations by position (paper §4.3); `MemoryStore` and `DiskStore` keep their bytes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from egeria.cache.store.codec import EncodedRows, RowCodec
from egeria.cache.store.rows import Integers, Mask, RowLayout, Rows, StoreError, as_positions

ENTRY = np.dtype([("checksum", "<u4"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""An entry lies within 16 aligned bytes. A checksum of 0 means that there is no row."""

Entries = NDArray[np.void]


class Store(ABC):
    """Rows by position. A store may forget any row at any time, and never returns a wrong one.

    Any number of threads may use it at once: readers never wait for each other, writers take turns, and a row that
    is read while it is written is not served. `close` waits for those inside. All entries are held in memory, so
    that `lookup` never waits for a disk.

    Args:
        layouts: of the leaves of a row.
        capacity: positions it has room for.
        boundary: name of the last frozen layer module.
        num_views: augmentation variants of a sample, side by side.
        is_viewed: whether augmentation is fixed: what is stored for other inputs is of no use.
        front: checksum of the weights and statistics of the frozen layers.
    """

    size_bytes: int
    """What the store takes."""

    def __init__(
        self,
        layouts: Sequence[RowLayout],
        capacity: int,
        *,
        boundary: str = "",
        num_views: int = 1,
        is_viewed: bool = False,
        front: int = 0,
    ) -> None:
        self.layouts, self.capacity = tuple(layouts), capacity
        self.boundary, self.front = boundary, front
        self.num_views, self.is_viewed = num_views, is_viewed
        self.num_damaged = 0
        """Rows found with a wrong checksum and forgotten."""
        self._codec = RowCodec(self.layouts)
        self.row_bytes = self._codec.row_bytes
        """What the values of a row take."""
        self._entries = np.zeros(capacity, dtype=ENTRY)
        self._entries_lock = threading.Lock()  # never held while waiting for a disk
        self._write_lock = threading.Lock()
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False

    @property
    def num_stored(self) -> int:
        """Rows that are there, as far as this process knows."""
        return len(self._stored())

    def lookup(self, positions: Any) -> Rows:
        """Return what is known of the positions [b]; from memory alone. Those outside the store have no row."""
        entries = self._look(as_positions(positions))
        lengths = entries["length"].astype(np.int64)
        return Rows(valid=entries["checksum"] != 0, fingerprints=entries["fingerprint"].copy(), lengths=lengths)

    @abstractmethod
    def advise(self, positions: Any) -> None:
        """Get ready for these positions [b]: they will be looked up and read soon. May wait for a disk."""

    def read(self, positions: Any, out: Sequence[Tensor], known: Rows | None = None) -> Mask:
        """Fill `out[k][i]` for each leaf `k` and position `i`, padded with zeros.

        Args:
            positions: [b]
            out: a tensor [b, ...] for each leaf, whose length may be another than at writing; contiguous ones fastest.
            known: what an earlier `lookup` of the positions returned. Rows that changed since are not
                served; without it, a caller who compared fingerprints may be given a newer row.

        Returns:
            A mask [b]. Where it is False the row is not there, damaged, just being written or longer than `out`,
            and `out` may hold anything.

        Raises:
            StoreError: the disk cannot be read, `out` is not for these rows, or the store is closed.
        """
        with self._using("read"):
            places = as_positions(positions)
            self._codec.check(out, len(places))
            entries = self._look(places)
            wanted = (entries["checksum"] != 0) & self._codec.fits(entries["length"], out)
            if known is not None:  # a NaN for a fingerprint is never the same
                wanted &= known.valid & (known.lengths == entries["length"])
                wanted &= (known.fingerprints == entries["fingerprint"]).all(axis=1)
            good, finish = self._fetch(places, entries, wanted, out)
            finish(good)
            damaged = wanted & ~good
            if damaged.any():
                self.num_damaged += self._forget_unchanged(places[damaged], entries[damaged])
            return good

    def write(self, positions: Any, rows: Sequence[Tensor], fingerprints: Any, lengths: Any = None) -> int:
        """Store rows; those there already are replaced.

        Args:
            positions: [b]; those outside the store are left out.
            rows: a tensor [b, ...] for each leaf, which must not change meanwhile.
            fingerprints: [b, 2] of the model's input.
            lengths: [b] true lengths; None takes the rows as long as they are. Longer ones than fit are left out.

        Returns:
            How many were stored.

        Raises:
            StoreError: the disk is full or cannot be written, the rows are not what the store is for, or it is closed.
        """
        with self._using("written"):
            batch = self._codec.encode(positions, rows, fingerprints, lengths, capacity=self.capacity)
            entries = np.zeros(len(batch.positions), dtype=ENTRY)
            entries["length"], entries["fingerprint"] = batch.lengths, batch.fingerprints
            with self._write_lock:
                self._put(batch, entries)
            return len(batch.positions)

    @abstractmethod
    def drop_pages(self) -> None:
        """Have the next read come from the disk itself, to see how fast that is. Raises `StoreError`."""

    @abstractmethod
    def close(self, *, remove: bool = True) -> None:
        """Let go of everything; with `remove` nothing of it stays on the disk. More than once is no error."""

    @abstractmethod
    def _put(self, batch: EncodedRows, entries: Entries) -> None:
        """Store the rows and their entries [n], which have all but their checksums."""

    @abstractmethod
    def _get(self, places: Integers, entries: Entries, blocks: Sequence[Sequence[memoryview]]) -> Mask:
        """Fill the blocks [n] of rows; return which are those of the entries [n], and undamaged."""

    @abstractmethod
    def _forget_unchanged(self, positions: Integers, entries: Entries) -> int:
        """Forget the rows whose entries are still these, and return how many those were."""

    def _fetch(self, places: Integers, entries: Entries, wanted: Mask, out: Sequence[Tensor]) -> tuple[Mask, Any]:
        """Return which of the wanted rows [b] were got, undamaged, and what puts those into `out`."""
        lengths = np.where(wanted, entries["length"], 0).astype(np.int64)
        blocks, finish = self._codec.decode_into(out, lengths)
        order = np.flatnonzero(wanted)
        order = order[np.argsort(places[order], kind="stable")]
        good = np.zeros(len(places), dtype=bool)
        good[order] = self._get(places[order], entries[order], [blocks[index] for index in order])
        return good, finish

    def _look(self, positions: Integers) -> Entries:
        """Return the entries of positions [b]; those outside have no row."""
        found = np.zeros(len(positions), dtype=ENTRY)
        inside = (positions >= 0) & (positions < self.capacity)
        with self._entries_lock:
            found[inside] = self._entries[positions[inside]]
        return found

    def _stored(self) -> Integers:
        with self._entries_lock:
            return np.flatnonzero(self._entries["checksum"])

    @contextmanager
    def _using(self, purpose: str) -> Iterator[None]:
        """Count the caller among those inside, and turn what the operating system reports into a `StoreError`."""
        with self._changed:
            if self._is_closed:
                raise StoreError("The store of activations is closed.")
            self._num_inside += 1
        try:
            with as_store_error(f"The store of activations cannot be {purpose}"):
                yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()


@contextmanager
def as_store_error(what: str) -> Iterator[None]:
    """Turn what the operating system reports into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error}.") from error
