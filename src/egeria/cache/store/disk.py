"""`DiskStore`: rows of activations by position (paper §4.3), in one file.

What is known of the rows is kept in memory, the rows themselves in a file without a name, which
the system frees when the process ends, however that ends. A row is written in three steps: its
entry is cleared, its bytes are written, its entry is set with their checksum. So whoever reads
while a row is written finds that the checksum does not fit.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from egeria.cache.store import file
from egeria.cache.store.codec import (
    Integers,
    Mask,
    RowCodec,
    RowLayout,
    Rows,
    StoreError,
    as_positions,
    as_store_error,
)
from egeria.cache.store.file import advise_kernel, fully

ENTRY = np.dtype([("checksum", "<u4"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""What is known of a row. A checksum of 0 means that there is none."""
CLOSE_TIMEOUT_S = 10.0

Entries = NDArray[np.void]


@dataclass(eq=False)
class DiskStore:
    """Rows by position.

    It may forget any row at any time, and never returns a wrong one. Any number of threads may use
    it at once: readers never wait for each other, writers take turns, and a row that is read while
    it is written is not served. `lookup` never waits for a disk.

    Raises `StoreError` if there is no room or no right to make it; nothing is left behind then.
    """

    directory: Path
    """Where the file is made."""
    layouts: Sequence[RowLayout]
    """Of the leaves of a row."""
    capacity: int
    """Positions it has room for."""

    def __post_init__(self) -> None:
        self.layouts = tuple(self.layouts)
        if not self.layouts or self.capacity < 1:
            raise StoreError(
                f"A store needs a leaf and a position, found {len(self.layouts)} and "
                f"{self.capacity}."
            )
        self.num_damaged = 0
        """Rows found with a wrong checksum and forgotten."""
        self._codec = RowCodec(self.layouts)
        self.row_bytes = self._codec.row_bytes
        """What the values of a row take."""
        self.size_bytes = self.capacity * self.row_bytes
        """What the store takes."""
        self._pid, self._is_closed = os.getpid(), False
        self._entries = np.zeros(self.capacity, dtype=ENTRY)
        self._entries_lock = threading.Lock()  # never held while waiting for a disk
        self._write_lock, self._changed = threading.Lock(), threading.Condition()
        self._num_inside = 0
        with as_store_error(f"A store of activations cannot be made in {self.directory}"):
            self.descriptor = file.open_unnamed(self.directory, self.size_bytes)
        advise_kernel(self.descriptor, 0, 0, "RANDOM")
        self._finalizer = weakref.finalize(self, file.close_file, self.descriptor)
        self._finalizer.atexit = False  # a thread may still be reading then

    def lookup(self, positions: Any) -> Rows:
        """Return what is known of the positions [b]; from memory alone. Those outside the store
        have no row.
        """
        entries = self._look(as_positions(positions))
        lengths = entries["length"].astype(np.int64)
        return Rows(
            valid=entries["checksum"] != 0,
            fingerprints=entries["fingerprint"].copy(),
            lengths=lengths,
        )

    def advise(self, positions: Any) -> None:
        """Have the kernel fetch the rows that are there.

        Raises `StoreError` if the store is closed.
        """
        with self._using("read"):
            places = as_positions(positions)
            entries = self._look(places)
            stored = entries["checksum"] != 0
            self._advise_rows(places[stored], entries["length"][stored])

    def read(self, positions: Any, out: Sequence[Tensor], known: Rows | None = None) -> Mask:
        """Fill `out[k][i]` for each leaf `k` and position `i`, padded with zeros.

        Args:
            positions: [b]
            out: a tensor [b, ...] for each leaf, whose length may be another than at writing;
                contiguous ones fastest.
            known: what an earlier `lookup` of the positions returned. Rows that changed since are
                not served; without it, a caller who compared fingerprints may be given a newer row.

        Returns:
            A mask [b]. Where it is False the row is not there, damaged, just being written or
            longer than `out`, and `out` may hold anything.

        Raises:
            StoreError: the disk cannot be read, `out` is not for these rows, or the store is
                closed.
        """
        with self._using("read"):
            places = as_positions(positions)
            self._codec.check(out, len(places))
            entries = self._look(places)
            wanted = (entries["checksum"] != 0) & self._codec.fits(entries["length"], out)
            if known is not None:  # a NaN for a fingerprint is never the same
                wanted &= known.valid & (known.lengths == entries["length"])
                wanted &= (known.fingerprints == entries["fingerprint"]).all(axis=1)
            good = self._fetch(places, entries, wanted, out)
            damaged = wanted & ~good
            if damaged.any():
                self.num_damaged += self._forget_unchanged(places[damaged], entries[damaged])
            return good

    def write(
        self, positions: Any, rows: Sequence[Tensor], fingerprints: Any, lengths: Any = None
    ) -> int:
        """Store rows; those there already are replaced, and of several for one position the last
        counts.

        Args:
            positions: [b]; those outside the store are left out.
            rows: a tensor [b, ...] for each leaf, which must not change meanwhile.
            fingerprints: [b, 2] of the model's input.
            lengths: [b] true lengths; None takes the rows as long as they are. Longer ones than fit
                are left out.

        Returns:
            How many were stored.

        Raises:
            StoreError: the disk is full or cannot be written, the rows are not what the store is
                for, or it is closed.
        """
        with self._using("written"):
            places, prints = as_positions(positions), np.asarray(fingerprints, dtype=np.float32)
            self._codec.check(rows, len(places))
            if prints.shape != (len(places), 2):
                raise StoreError(
                    f"Fingerprints must be of shape {(len(places), 2)}, found {prints.shape}."
                )
            given = np.asarray(
                self._codec.room(rows) if lengths is None else lengths, dtype=np.int64
            )
            sizes = np.broadcast_to(given, places.shape)
            fits = (places >= 0) & (places < self.capacity) & self._codec.fits(sizes, rows)
            chosen = _last_of_each(places, fits)
            blocks = self._codec.encode(rows, sizes, chosen)
            order = np.argsort(places[chosen])
            chosen = chosen[order]
            entries = np.zeros(len(chosen), dtype=ENTRY)
            entries["length"], entries["fingerprint"] = sizes[chosen], prints[chosen]
            with self._write_lock:
                self._put(places[chosen], entries, [blocks[index] for index in order])
            return len(chosen)

    def drop_pages(self) -> None:
        """Have the next read come from the disk itself, to see how fast that is. Raises
        `StoreError`.
        """
        with self._using("written"):
            os.fsync(self.descriptor)
            advise_kernel(self.descriptor, 0, 0, "DONTNEED")

    def close(self) -> None:
        """Wait for those inside and free the file. More than once is no error."""
        if (
            os.getpid() != self._pid
        ):  # a forked child has a copy, whose locks a thread of the parent may have held
            self._finalizer()
            return
        with self._changed:
            self._is_closed = True
            # A descriptor closed while a thread is about to use it may be another file by then.
            if self._changed.wait_for(lambda: self._num_inside == 0, CLOSE_TIMEOUT_S):
                self._finalizer()

    def _put(
        self, positions: Integers, entries: Entries, blocks: Sequence[Sequence[memoryview]]
    ) -> None:
        """Write rows by rising position, each once, and their entries [n], which have all but their
        checksums.
        """
        self._set(positions, np.zeros(len(positions), dtype=ENTRY))
        for index, offset in enumerate((positions * self.row_bytes).tolist()):
            fully(os.pwritev, self.descriptor, blocks[index], offset)
            entries["checksum"][index] = file.checksum(blocks[index])
        self._set(positions, entries)

    def _fetch(
        self, places: Integers, entries: Entries, wanted: Mask, out: Sequence[Tensor]
    ) -> Mask:
        """Read the wanted rows [b] into `out`; return which are those of the entries [b], and
        undamaged.
        """
        blocks, finishes = self._codec.decode_into(
            out, np.where(wanted, entries["length"], 0).astype(np.int64)
        )
        order = np.flatnonzero(wanted)
        order = order[np.argsort(places[order], kind="stable")]
        self._advise_rows(places[order], entries["length"][order])
        good = np.zeros(len(places), dtype=bool)
        offsets = (places * self.row_bytes).tolist()
        for index in order.tolist():
            if fully(os.preadv, self.descriptor, blocks[index], offsets[index]):
                good[index] = file.checksum(blocks[index]) == entries["checksum"][index]
        for finish in finishes:
            finish(good)
        return good

    def _forget_unchanged(self, positions: Integers, entries: Entries) -> int:
        """Forget the rows whose entries are still these, and return how many those were."""
        same = self._look(positions)["checksum"] == entries["checksum"]
        positions = np.unique(positions[same])
        self._set(positions, np.zeros(len(positions), dtype=ENTRY))
        return len(positions)

    def _look(self, positions: Integers) -> Entries:
        """Return the entries of positions [b], as far as known; those outside have no row."""
        found = np.zeros(len(positions), dtype=ENTRY)
        inside = (positions >= 0) & (positions < self.capacity)
        with self._entries_lock:
            found[inside] = self._entries[positions[inside]]
        return found

    def _set(self, positions: Integers, entries: Entries) -> None:
        """Set the entries of positions that are inside, each there once."""
        with self._entries_lock:
            self._entries[positions] = entries

    def _advise_rows(self, positions: Integers, lengths: Integers) -> None:
        """Ask the kernel to fetch rows in the background."""
        offsets = (positions * self.row_bytes).tolist()
        for offset, size_bytes in zip(offsets, self._codec.sizes(lengths).tolist(), strict=True):
            advise_kernel(self.descriptor, offset, size_bytes, "WILLNEED")

    @contextmanager
    def _using(self, purpose: str) -> Iterator[None]:
        """Count the caller among those inside, and turn what the operating system reports into a
        `StoreError`.
        """
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


def _last_of_each(places: Integers, fits: Mask) -> Integers:
    """Return which rows to store, in their order: the last for each position, if it fits."""
    _, from_the_end = np.unique(places[::-1], return_index=True)
    last = np.sort(len(places) - 1 - from_the_end)
    return np.asarray(last[fits[last]], dtype=np.int64)
