"""What is stored where: 16 bytes a position, in a file that the processes of a host share.

Each process keeps a copy in its own memory, so that looking up never waits for a disk and a truncated file
harms nobody; what others wrote is taken in by `refresh`. The file is read and written, never mapped.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from egeria.cache.store import files
from egeria.cache.store.rows import Integers

MAGIC = b"egeria-1"
HEADER_BYTES = 64
ENTRY = np.dtype([("checksum", "<u4"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""An entry lies within 16 aligned bytes. A checksum of 0 means that there is no row."""
SEALED = np.dtype([("position", "<i8"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""What of an entry its checksum covers, before the row itself."""

Entries = NDArray[np.void]


class Index:
    """The entries of a store.

    Threads may share it. `refresh`, `put` and `clear` wait for the disk and for one another; `look` for neither.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        self.descriptor = descriptor
        self.capacity = capacity
        self._entries = np.zeros(capacity, dtype=ENTRY)
        self._memory_lock = threading.Lock()
        self._file_lock = threading.Lock()
        self._is_shared = False

    @classmethod
    def make(cls, path: Path, capacity: int) -> Index:
        """Make the file, without a row. Raises `OSError`."""
        descriptor = files.make(path, file_bytes(capacity))
        try:
            files.write_fully(descriptor, memoryview(MAGIC), 0)
        except BaseException:
            files.discard(path, descriptor)
            raise
        return cls(descriptor, capacity)

    @classmethod
    def open(cls, path: Path, capacity: int, *, writable: bool = True) -> Index:
        """Open the file of another process and take in what it holds. Raises `OSError`."""
        descriptor = files.open_sized(path, file_bytes(capacity), writable=writable)
        try:
            found = Index(descriptor, capacity)
            found._check()
            if writable:
                files.write_fully(descriptor, memoryview(struct.pack("<I", 1)), len(MAGIC))
                found._is_shared = True
            found.refresh()
        except BaseException:
            files.close([descriptor])
            raise
        return found

    def is_shared(self) -> bool:
        """Tell whether another process opened the file as well. Raises `OSError`."""
        if not self._is_shared:
            flag = memoryview(bytearray(4))
            self._is_shared = files.read_fully(self.descriptor, flag, len(MAGIC)) and any(flag)
        return self._is_shared

    def inside(self, positions: Integers) -> NDArray[np.bool_]:
        """Return which positions [b] have a place in the store."""
        return np.asarray((positions >= 0) & (positions < self.capacity))

    def look(self, positions: Integers) -> Entries:
        """Return the entries of positions [b]; those outside have no row."""
        found = np.zeros(len(positions), dtype=ENTRY)
        inside = self.inside(positions)
        with self._memory_lock:
            found[inside] = self._entries[positions[inside]]
        return found

    def refresh(self, positions: Integers | None = None) -> None:
        """Take in what other processes wrote, for some positions or all; what is gone has no row. Raises `OSError`."""
        if positions is None:
            positions = np.arange(self.capacity)
        positions = np.unique(positions[self.inside(positions)])
        with self._file_lock:
            fresh = np.zeros(len(positions), dtype=ENTRY)
            for block, offset in _stretches(fresh, positions):
                if not files.read_fully(self.descriptor, block, offset):
                    block[:] = bytes(len(block))
            with self._memory_lock:
                self._entries[positions] = fresh

    def put(self, positions: Integers, entries: Entries) -> None:
        """Set the entries of positions that are inside, sorted and each there once. Raises `OSError`."""
        with self._file_lock:
            for block, offset in _stretches(np.ascontiguousarray(entries), positions):
                files.write_fully(self.descriptor, block, offset)
            with self._memory_lock:
                self._entries[positions] = entries

    def clear(self, positions: Integers) -> None:
        """Forget rows, here at once and then for all; positions as for `put`. Raises `OSError`."""
        nothing = np.zeros(len(positions), dtype=ENTRY)
        with self._file_lock:
            with self._memory_lock:
                self._entries[positions] = nothing
            for block, offset in _stretches(nothing, positions):
                files.write_fully(self.descriptor, block, offset)

    def clear_unchanged(self, positions: Integers, entries: Entries) -> int:
        """Forget the rows whose entries are still these, and return how many that were. Raises `OSError`."""
        self.refresh(positions)
        same = self.look(positions)["checksum"] == entries["checksum"]
        positions = np.unique(positions[same])
        self.clear(positions)
        return len(positions)

    def stored(self) -> Integers:
        """Return the positions that have a row."""
        with self._memory_lock:
            return np.flatnonzero(self._entries["checksum"])

    def _check(self) -> None:
        found = memoryview(bytearray(len(MAGIC)))
        if not files.read_fully(self.descriptor, found, 0) or bytes(found) != MAGIC:
            raise OSError(f"the index must begin with {MAGIC!r}, found {bytes(found)!r}")


def file_bytes(capacity: int) -> int:
    """Return the size of an index of so many positions."""
    return HEADER_BYTES + capacity * ENTRY.itemsize


def seals(positions: Integers, entries: Entries) -> list[int]:
    """Return where the checksum of each row [b] begins: with its position, length and fingerprint."""
    sealed = np.zeros(len(positions), dtype=SEALED)
    sealed["position"], sealed["length"], sealed["fingerprint"] = positions, entries["length"], entries["fingerprint"]
    view, size = memoryview(sealed.tobytes()), SEALED.itemsize
    return [zlib.crc32(view[begin : begin + size]) for begin in range(0, len(view), size)]


def _stretches(entries: Entries, positions: Integers) -> Iterator[tuple[memoryview, int]]:
    """Yield the bytes of entries that lie side by side in the file, and where they begin there."""
    view, size = entries.view(np.uint8).data, ENTRY.itemsize
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    for begin, end in pairwise(cuts):
        if begin < end:
            yield view[begin * size : end * size], HEADER_BYTES + int(positions[begin]) * size
