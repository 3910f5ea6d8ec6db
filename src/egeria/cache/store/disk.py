"""The store on the disk: one slot for each position, and a checksum for each row.

A row is written in three steps: its entry is cleared, its bytes are written, its entry is set with their
checksum. So a process that is killed on the way leaves no row that looks complete, and whoever reads while a row is
written, in whatever process, finds that the checksum does not fit. The disk need not keep any of it through a
power cut: a store is never used again after its run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from egeria.cache.store import file as files
from egeria.cache.store.file import ENTRY, Entries, RowsFile, StoreDescription, unfinished_path
from egeria.cache.store.rows import Integers, Mask, RowLayout, Rows, StoreError, as_positions, unchanged

DECIDED = {True: ".opened", False: ".refused"}
"""Endings of the files by which the process that decides on a store informs the others of its host."""
CLOSE_TIMEOUT_S = 10.0
SEALED = np.dtype([("position", "<i8"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""What of an entry its checksum covers, before the row itself."""


class DiskStore:
    """Rows of activations by position (paper §4.3). Get one from `create` or `join`.

    Any number of threads may use it at once: readers never wait for each other, writers take turns, and
    a row that is read while it is written is not served. `close` waits for those inside. Processes
    of one host may share the file; what others wrote is seen after `advise`. Each process keeps a copy of all
    entries in memory, so that `lookup` never waits for a disk.
    """

    def __init__(self, file: RowsFile, *, own: bool) -> None:
        description = file.description
        self.path = file.path
        self.layouts, self.capacity = description.layouts, description.capacity
        self.boundary, self.front = description.boundary, description.front
        self.num_views, self.is_viewed = description.num_views, description.is_viewed
        self.row_bytes = file.codec.row_bytes
        """What the values of a row take on the disk."""
        self.size_bytes = file.size_bytes
        """What the store takes on the disk."""
        self.num_damaged = 0
        """Rows found with a wrong checksum and forgotten."""
        self._file, self._codec = file, file.codec
        self._own, self._is_shared = own, False
        self._pid = os.getpid()
        self._entries = np.zeros(self.capacity, dtype=ENTRY)
        self._entries_lock = threading.Lock()  # never held while waiting for the disk
        self._file_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False
        self._finalizer = weakref.finalize(self, files.close, file.descriptor)
        self._finalizer.atexit = False  # a thread may still be reading then

    @classmethod
    def create(cls, path: Path, layouts: Sequence[RowLayout], capacity: int, **description: Any) -> DiskStore:
        """Make a store in a file of its own, with all of its blocks on the disk.

        Args:
            path: of the file.
            layouts: of the leaves of a row.
            capacity: positions it has room for.
            description: what the `StoreDescription` has beside these.

        Raises:
            StoreError: there is no room, no right, or a store already. Nothing new is left behind.
        """
        if not layouts or capacity < 1:
            raise StoreError(f"A store needs a leaf and a position, found {len(layouts)} and {capacity}.")
        with _as_store_error(f"A store of activations cannot be made as {path}"):
            described = StoreDescription(layouts=tuple(layouts), capacity=capacity, **description)
            return cls(RowsFile.create(path, described), own=True)

    @classmethod
    def join(cls, path: Path, *, read_only: bool = False) -> DiskStore:
        """Open the store of another process of this host.

        Args:
            path: of the file.
            read_only: whether to leave the file as it is.

        Raises:
            StoreError: there is none, or it is damaged.
        """
        with _as_store_error(f"The store {path} cannot be joined"):
            found = cls(RowsFile.open(path, read_only=read_only), own=False)
            found._is_shared = not read_only
            found._refresh(np.arange(found.capacity))
        return found

    @property
    def num_stored(self) -> int:
        """Rows that are there, as far as this process knows."""
        return len(self._stored())

    def lookup(self, positions: Any) -> Rows:
        """Return what is known of the positions [b]; from memory alone. Those outside the store have no row."""
        entries = self._look(as_positions(positions))
        lengths = entries["length"].astype(np.int64)
        return Rows(valid=entries["checksum"] != 0, fingerprints=entries["fingerprint"].copy(), lengths=lengths)

    def advise(self, positions: Any) -> None:
        """Take in what other processes wrote at these positions, and have the kernel fetch the rows that are there.

        Raises:
            StoreError: the disk cannot be read, or the store is closed.
        """
        with self._using("read"):
            places = as_positions(positions)
            self._is_shared = self._is_shared or self._file.is_shared()
            if self._is_shared:
                self._refresh(places)
            entries = self._look(places)
            stored = entries["checksum"] != 0
            self._file.advise(places[stored], entries["length"][stored])

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
            if known is not None:
                wanted = unchanged(known, wanted, entries["fingerprint"], entries["length"])
            blocks, finish = self._codec.decode_into(out, np.where(wanted, entries["length"], 0).astype(np.int64))
            good = self._fetch(places, entries, wanted, blocks)
            finish(good)
            damaged = wanted & ~good
            if damaged.any():
                self.num_damaged += self._clear_unchanged(places[damaged], entries[damaged])
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
            with self._write_lock:
                self._set(batch.positions, entries)
                entries["length"], entries["fingerprint"] = batch.lengths, batch.fingerprints
                checksums = _seals(batch.positions, entries)
                for index, (position, blocks) in enumerate(zip(batch.positions.tolist(), batch.blocks, strict=True)):
                    self._file.write_row(position, blocks)
                    entries["checksum"][index] = _checksum(blocks, checksums[index])
                self._set(batch.positions, entries)
            return len(batch.positions)

    def verify(self, chunk: int = 256) -> tuple[int, int]:
        """Read every stored row and return how many there are and how many are damaged; nothing is changed.

        Raises:
            StoreError: the disk cannot be read, or the store is closed.
        """
        num_damaged = 0
        with self._using("read"):
            stored = self._stored()
            for begin in range(0, len(stored), chunk):
                places = stored[begin : begin + chunk]
                entries = self._look(places)
                possible = self._codec.fits(entries["length"])
                lengths = np.where(possible, entries["length"], 0).astype(np.int64)
                bad = ~self._fetch(places, entries, possible, self._codec.room(lengths))
                self._refresh(places[bad])  # one that was rewritten meanwhile is not damaged
                again = self._look(places[bad])
                num_damaged += int((again["checksum"] == entries["checksum"][bad]).sum())
        return len(stored), num_damaged

    def drop_pages(self) -> None:
        """Have the next read come from the disk itself, to see how fast that is.

        Raises:
            StoreError: the disk cannot be written, or the store is closed.
        """
        with self._using("written"):
            self._file.drop_pages()

    def close(self, *, remove: bool = True) -> None:
        """Wait for those inside and close the file; with `remove` whoever made the store deletes it.

        Another process that joined can still use what it has open.
        """
        if os.getpid() != self._pid:  # a forked child has a copy, whose locks a thread of the parent may have held
            self._finalizer()
            return
        with self._changed:
            self._is_closed = True
            # A descriptor closed while a thread is about to use it may be another file by then.
            if self._changed.wait_for(lambda: self._num_inside == 0, CLOSE_TIMEOUT_S):
                self._finalizer()
        if remove and self._own:
            remove_store(self.path)

    @contextmanager
    def _using(self, purpose: str) -> Iterator[None]:
        """Count the caller among those inside, and turn what the operating system reports into a `StoreError`."""
        with self._changed:
            if self._is_closed:
                raise StoreError("The store of activations is closed.")
            self._num_inside += 1
        try:
            with _as_store_error(f"The store of activations cannot be {purpose}"):
                yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def _fetch(self, places: Integers, entries: Entries, wanted: Mask, blocks: Sequence[Sequence[memoryview]]) -> Mask:
        """Fill the blocks [b] of the wanted rows; return a mask [b] of those that are undamaged."""
        order = np.flatnonzero(wanted)
        order = order[np.argsort(places[order], kind="stable")]
        self._file.advise(places[order], entries["length"][order])
        good = np.zeros(len(places), dtype=bool)
        checksums, offsets = entries["checksum"].tolist(), places.tolist()
        for row, seal in zip(order.tolist(), _seals(places[order], entries[order]), strict=True):
            if self._file.read_row(offsets[row], blocks[row]):
                good[row] = _checksum(blocks[row], seal) == checksums[row]
        return good

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

    def _refresh(self, positions: Integers) -> None:
        """Take in what other processes wrote at positions."""
        positions = np.unique(positions[(positions >= 0) & (positions < self.capacity)])
        with self._file_lock:
            fresh = self._file.read_entries(positions)
            with self._entries_lock:
                self._entries[positions] = fresh

    def _set(self, positions: Integers, entries: Entries) -> None:
        """Set the entries of positions that are inside, sorted and each there once."""
        with self._file_lock:
            self._file.write_entries(positions, entries)
            with self._entries_lock:
                self._entries[positions] = entries

    def _clear_unchanged(self, positions: Integers, entries: Entries) -> int:
        """Forget the rows whose entries are still these, and return how many those were."""
        self._refresh(positions)
        same = self._look(positions)["checksum"] == entries["checksum"]
        positions = np.unique(positions[same])
        self._set(positions, np.zeros(len(positions), dtype=ENTRY))
        return len(positions)


def remove_store(path: Path) -> None:
    """Delete the file of a store, also an unfinished one, and what was decided on it; what cannot be deleted stays."""
    decided = [path.with_name(path.name + ending) for ending in DECIDED.values()]
    for name in (path, unfinished_path(path), *decided):
        with contextlib.suppress(OSError):
            name.unlink()


def _seals(positions: Integers, entries: Entries) -> list[int]:
    """Return where the checksum of each row [b] begins: with its position, length and fingerprint."""
    sealed = np.zeros(len(positions), dtype=SEALED)
    sealed["position"], sealed["length"], sealed["fingerprint"] = positions, entries["length"], entries["fingerprint"]
    view, size = memoryview(sealed.tobytes()), SEALED.itemsize
    return [zlib.crc32(view[begin : begin + size]) for begin in range(0, len(view), size)]


def _checksum(blocks: Sequence[memoryview], seal: int) -> int:
    """Return the checksum of a row as it stands in its entry, where 0 means that there is no row."""
    for block in blocks:
        seal = zlib.crc32(block, seal)
    return seal or 1


@contextmanager
def _as_store_error(what: str) -> Iterator[None]:
    """Turn what the operating system reports into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error}.") from error
