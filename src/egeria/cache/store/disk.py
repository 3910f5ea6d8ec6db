"""`DiskStore`: rows of activations by position (paper §4.3), in one file.

A row is written in three steps: its entry is cleared, its bytes are written, its entry is set with
their checksum. So a process that is killed on the way leaves no row that looks complete, and
whoever reads while a row is written, in whatever process, finds that the checksum does not fit. The
disk need not keep any of it through a power cut: a store is never used again after its run.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from egeria.cache.store import file
from egeria.cache.store.codec import RowCodec
from egeria.cache.store.file import (
    ENTRY,
    HEADER_BYTES,
    SHARED_OFFSET,
    Entries,
    advise_kernel,
    fully,
)
from egeria.cache.store.rows import (
    Integers,
    Mask,
    RowLayout,
    Rows,
    StoreError,
    as_positions,
    as_store_error,
)

CLOSE_TIMEOUT_S = 10.0


@dataclass(eq=False)
class DiskStore:
    """Rows by position. Get one from `create` or `join`.

    It may forget any row at any time, and never returns a wrong one. Any number of threads may use
    it at once: readers never wait for each other, writers take turns, and a row that is read while
    it is written is not served. All entries are held in memory, so that `lookup` never waits for a
    disk. Processes of one host may share the file; what others wrote is seen after `advise`.
    """

    path: Path
    """Of the file."""
    descriptor: int
    """The open file."""
    layouts: Sequence[RowLayout]
    """Of the leaves of a row."""
    capacity: int
    """Positions it has room for."""
    _: KW_ONLY
    boundary: str
    """Name of the last frozen layer module."""
    front: int
    """Checksum of the weights and statistics of the frozen layers."""
    ignores_padding: bool
    """Whether it is proven that rows are the same whatever length a batch is padded to."""

    def __post_init__(self) -> None:
        self.layouts = tuple(self.layouts)
        self.num_damaged = 0
        """Rows found with a wrong checksum and forgotten."""
        self._codec = RowCodec(self.layouts)
        self.row_bytes = self._codec.row_bytes
        """What the values of a row take."""
        self._slots_offset = HEADER_BYTES + self.capacity * ENTRY.itemsize
        self.size_bytes = self._slots_offset + self.capacity * self.row_bytes
        """What the store takes."""
        self._pid = os.getpid()
        self._own = self._is_shared = self._is_closed = False
        self._entries = np.zeros(self.capacity, dtype=ENTRY)
        self._entries_lock = threading.Lock()  # never held while waiting for a disk
        self._file_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._changed = threading.Condition()
        self._num_inside = 0
        advise_kernel(self.descriptor, 0, 0, "RANDOM")
        self._finalizer = weakref.finalize(self, file.close_file, self.descriptor)
        self._finalizer.atexit = False  # a thread may still be reading then

    @classmethod
    def create(
        cls, path: Path, layouts: Sequence[RowLayout], capacity: int, **description: Any
    ) -> DiskStore:
        """Make a store; further arguments are those of the class, where they matter.

        Raises `StoreError` if there is no room, no right, or a store already; nothing new is left
        behind then.
        """
        cls._check(layouts, capacity)
        description = {**file.DESCRIPTION, **description}
        with as_store_error(f"A store of activations cannot be made as {path}"):
            made = cls(
                path,
                file.create_file(path, layouts, capacity, description),
                layouts,
                capacity,
                **description,
            )
        made._own = True
        return made

    @classmethod
    def join(cls, path: Path) -> DiskStore:
        """Open the store of another process of this host, which learns of it.

        Raises `StoreError` if there is none, or it is damaged.
        """
        with as_store_error(f"The store {path} cannot be joined"):
            descriptor, description = file.open_file(path)
            found = cls(path, descriptor, **description)
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes != found.size_bytes:
                raise OSError(
                    errno.EIO, f"{path.name} must have {found.size_bytes} bytes, found {size_bytes}"
                )
            fully(os.pwritev, descriptor, [memoryview(struct.pack("<I", 1))], SHARED_OFFSET)
            found._is_shared = True
            found._refresh(np.arange(found.capacity))
        return found

    @property
    def num_stored(self) -> int:
        """Rows that are there, as far as this process knows."""
        with self._entries_lock:
            return int(np.count_nonzero(self._entries["checksum"]))

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
        """Take in what other processes wrote at these positions, and have the kernel fetch the rows
        that are there.

        Raises `StoreError` if the disk cannot be read, or the store is closed.
        """
        with self._using("read"):
            places = as_positions(positions)
            if not self._is_shared:
                flag = memoryview(bytearray(4))
                self._is_shared = fully(os.preadv, self.descriptor, [flag], SHARED_OFFSET) and any(
                    flag
                )
            if self._is_shared:
                self._refresh(places)
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
        """Wait for those inside and close the file; whoever made the store deletes it. More than
        once is no error.

        Another process that joined can still use what it has open.
        """
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
        if self._own:
            file.remove_store(self.path)

    @staticmethod
    def _check(layouts: Sequence[RowLayout], capacity: int) -> None:
        if not layouts or capacity < 1:
            raise StoreError(
                f"A store needs a leaf and a position, found {len(layouts)} and {capacity}."
            )

    def _put(
        self, positions: Integers, entries: Entries, blocks: Sequence[Sequence[memoryview]]
    ) -> None:
        """Write rows by rising position, each once, and their entries [n], which have all but their
        checksums.
        """
        self._set(positions, np.zeros(len(positions), dtype=ENTRY))
        offsets = (self._slots_offset + positions * self.row_bytes).tolist()
        for index, seal in enumerate(file.seals(positions, entries)):
            fully(os.pwritev, self.descriptor, blocks[index], offsets[index])
            entries["checksum"][index] = file.checksum(blocks[index], seal)
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
        offsets = (self._slots_offset + places * self.row_bytes).tolist()
        for index, seal in zip(
            order.tolist(), file.seals(places[order], entries[order]), strict=True
        ):
            if fully(os.preadv, self.descriptor, blocks[index], offsets[index]):
                good[index] = file.checksum(blocks[index], seal) == entries["checksum"][index]
        for finish in finishes:
            finish(good)
        return good

    def _forget_unchanged(self, positions: Integers, entries: Entries) -> int:
        """Forget the rows whose entries are still these, and return how many those were."""
        self._refresh(positions)
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

    def _refresh(self, positions: Integers) -> None:
        """Take in what other processes wrote; an entry that is not in the file any more says that
        there is no row.
        """
        positions = np.unique(positions[(positions >= 0) & (positions < self.capacity)])
        fresh = np.zeros(len(positions), dtype=ENTRY)
        with self._file_lock:
            for block, offset in file.stretches(fresh, positions):
                if not fully(os.preadv, self.descriptor, [block], offset):
                    block[:] = bytes(len(block))
            with self._entries_lock:
                self._entries[positions] = fresh

    def _set(self, positions: Integers, entries: Entries) -> None:
        """Set the entries of positions that are inside, sorted and each there once."""
        with self._file_lock:
            for block, offset in file.stretches(entries, positions):
                fully(os.pwritev, self.descriptor, [block], offset)
            with self._entries_lock:
                self._entries[positions] = entries

    def _advise_rows(self, positions: Integers, lengths: Integers) -> None:
        """Ask the kernel to fetch rows in the background."""
        offsets = (self._slots_offset + positions * self.row_bytes).tolist()
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
