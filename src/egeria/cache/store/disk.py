"""The store on the disk, one file: a header that describes it, an entry for each position, and a slot for each row.

A row is written in three steps: its entry is cleared, its bytes are written, its entry is set with their
checksum. So a process that is killed on the way leaves no row that looks complete, and whoever reads while a row is
written, in whatever process, finds that the checksum does not fit. The disk need not keep any of it through a
power cut: a store is never used again after its run.

The file is read with `preadv` into the caller's memory, not mapped. A mapped file that somebody truncates
kills the training with SIGBUS, mapped pages make the process look as large as its store, and the kernel's
readahead would fetch many times what random rows need. Hence also the advice to the kernel: access is random, and
these rows are wanted soon. Where there is no `posix_fadvise` (macOS) nothing is advised.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from egeria.cache.store.base import ENTRY, Entries, Store, as_store_error
from egeria.cache.store.codec import EncodedRows, RowCodec
from egeria.cache.store.rows import Integers, Mask, RowLayout, StoreError, as_positions

MAGIC = b"egeria-2"
HEADER_BYTES = 4096
PREFIX = struct.Struct("<8sII")
"""Magic, whether a second process opened the file, and the size of the description that follows as JSON."""
SHARED_OFFSET = len(MAGIC)
DESCRIPTION = ("capacity", "boundary", "num_views", "is_viewed", "front")
SEALED = np.dtype([("position", "<i8"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""What of an entry its checksum covers, before the row itself."""
DECIDED = {True: ".opened", False: ".refused"}
"""Endings of the files by which the process that decides on a store informs the others of its host."""
CLOSE_TIMEOUT_S = 10.0
BLOCK_BYTES = 2**20
PRIVATE = 0o600
_SAFELY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class DiskStore(Store):
    """Rows in a file. Get one from `create` or `join`.

    Processes of one host may share the file; what others wrote is seen after `advise`.
    """

    def __init__(
        self, path: Path, descriptor: int, layouts: Sequence[RowLayout], capacity: int, **description: Any
    ) -> None:
        super().__init__(layouts, capacity, **description)
        self.path = path
        self._descriptor = descriptor
        self._slots_offset = HEADER_BYTES + capacity * ENTRY.itemsize
        self.size_bytes = self._slots_offset + capacity * self.row_bytes
        self._own = self._is_shared = False
        self._pid = os.getpid()
        self._file_lock = threading.Lock()
        _advise(descriptor, 0, 0, "RANDOM")
        self._finalizer = weakref.finalize(self, _close, descriptor)
        self._finalizer.atexit = False  # a thread may still be reading then

    @classmethod
    def create(cls, path: Path, layouts: Sequence[RowLayout], capacity: int, **description: Any) -> DiskStore:
        """Make a store with all of its blocks on the disk, never in a sparse file; it is named when it is complete.

        Further arguments are those of `Store`. Raises `StoreError` if there is no room, no right, or a store already;
        nothing new is left behind then.
        """
        if not layouts or capacity < 1:
            raise StoreError(f"A store needs a leaf and a position, found {len(layouts)} and {capacity}.")
        with as_store_error(f"A store of activations cannot be made as {path}"):
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            unfinished = _unfinished(path)
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, PRIVATE)
            made = cls(path, descriptor, layouts, capacity, **description)
            try:
                header = made._header()
                _allocate(descriptor, made.size_bytes)
                _fully(os.pwritev, descriptor, [header], 0)
                unfinished.replace(path)
            except BaseException:
                made._finalizer()
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                raise
        made._own = True
        return made

    @classmethod
    def join(cls, path: Path, *, read_only: bool = False) -> DiskStore:
        """Open the store of another process of this host, which learns of it unless this one only reads.

        Raises `StoreError` if there is none, or it is damaged.
        """
        with as_store_error(f"The store {path} cannot be joined"):
            descriptor = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | _SAFELY)
            try:
                description = _read_header(descriptor)
            except BaseException:
                _close(descriptor)
                raise
            found = cls(path, descriptor, **description)
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes != found.size_bytes:
                raise OSError(errno.EIO, f"{path.name} must have {found.size_bytes} bytes, found {size_bytes}")
            if not read_only:
                _fully(os.pwritev, descriptor, [memoryview(struct.pack("<I", 1))], SHARED_OFFSET)
            found._is_shared = not read_only
            found._refresh(np.arange(found.capacity))
        return found

    def advise(self, positions: Any) -> None:
        """Take in what other processes wrote at these positions, and have the kernel fetch the rows that are there.

        Raises `StoreError` if the disk cannot be read, or the store is closed.
        """
        with self._using("read"):
            places = as_positions(positions)
            if not self._is_shared:
                flag = memoryview(bytearray(4))
                self._is_shared = _fully(os.preadv, self._descriptor, [flag], SHARED_OFFSET) and any(flag)
            if self._is_shared:
                self._refresh(places)
            entries = self._look(places)
            stored = entries["checksum"] != 0
            self._advise_rows(places[stored], entries["length"][stored])

    def verify(self, chunk: int = 256) -> tuple[int, int]:
        """Read every stored row and return how many there are and how many are damaged; nothing is changed.

        Raises `StoreError` if the disk cannot be read, or the store is closed.
        """
        num_damaged = 0
        with self._using("read"):
            stored = self._stored()
            for begin in range(0, len(stored), chunk):
                places = stored[begin : begin + chunk]
                entries = self._look(places)
                out = [torch.empty(len(places), *layout.shape, dtype=layout.dtype) for layout in self.layouts]
                good, _ = self._fetch(places, entries, self._codec.fits(entries["length"], out), out)
                self._refresh(places[~good])  # one that was rewritten meanwhile is not damaged
                again = self._look(places[~good])
                num_damaged += int((again["checksum"] == entries["checksum"][~good]).sum())
        return len(stored), num_damaged

    def drop_pages(self) -> None:
        """Write out what waits in memory, and let the next read come from the disk. Raises `StoreError`."""
        with self._using("written"):
            os.fsync(self._descriptor)
            _advise(self._descriptor, 0, 0, "DONTNEED")

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

    def _put(self, batch: EncodedRows, entries: Entries) -> None:
        positions = batch.positions
        self._set(positions, np.zeros(len(positions), dtype=ENTRY))
        seals = _seals(positions, entries)
        for index, (position, blocks) in enumerate(zip(positions.tolist(), batch.blocks, strict=True)):
            _fully(os.pwritev, self._descriptor, blocks, self._slots_offset + position * self.row_bytes)
            entries["checksum"][index] = _checksum(blocks, seals[index])
        self._set(positions, entries)

    def _get(self, places: Integers, entries: Entries, blocks: Sequence[Sequence[memoryview]]) -> Mask:
        self._advise_rows(places, entries["length"])
        good = np.zeros(len(places), dtype=bool)
        offsets = (self._slots_offset + places * self.row_bytes).tolist()
        for index, seal in enumerate(_seals(places, entries)):
            if _fully(os.preadv, self._descriptor, blocks[index], offsets[index]):
                good[index] = _checksum(blocks[index], seal) == entries["checksum"][index]
        return good

    def _forget_unchanged(self, positions: Integers, entries: Entries) -> int:
        self._refresh(positions)
        same = self._look(positions)["checksum"] == entries["checksum"]
        positions = np.unique(positions[same])
        self._set(positions, np.zeros(len(positions), dtype=ENTRY))
        return len(positions)

    def _refresh(self, positions: Integers) -> None:
        """Take in what other processes wrote; an entry that is not in the file any more says that there is no row."""
        positions = np.unique(positions[(positions >= 0) & (positions < self.capacity)])
        fresh = np.zeros(len(positions), dtype=ENTRY)
        with self._file_lock:
            for block, offset in _stretches(fresh, positions):
                if not _fully(os.preadv, self._descriptor, [block], offset):
                    block[:] = bytes(len(block))
            with self._entries_lock:
                self._entries[positions] = fresh

    def _set(self, positions: Integers, entries: Entries) -> None:
        """Set the entries of positions that are inside, sorted and each there once."""
        with self._file_lock:
            for block, offset in _stretches(entries, positions):
                _fully(os.pwritev, self._descriptor, [block], offset)
            with self._entries_lock:
                self._entries[positions] = entries

    def _advise_rows(self, positions: Integers, lengths: Integers) -> None:
        """Ask the kernel to fetch rows in the background."""
        offsets = (self._slots_offset + positions * self.row_bytes).tolist()
        for offset, size_bytes in zip(offsets, self._codec.sizes(lengths).tolist(), strict=True):
            _advise(self._descriptor, offset, size_bytes, "WILLNEED")

    def _header(self) -> memoryview:
        layouts = [
            (layout.shape, str(layout.dtype).removeprefix("torch."), layout.storage, layout.length_axis)
            for layout in self.layouts
        ]
        record = {**{name: getattr(self, name) for name in DESCRIPTION}, "layouts": layouts}
        text = json.dumps(record).encode()
        if PREFIX.size + len(text) > HEADER_BYTES:
            raise OSError(errno.EFBIG, f"{len(layouts)} leaves are too many for the header of a store")
        return memoryview(PREFIX.pack(MAGIC, 0, len(text)) + text)


def remove_store(path: Path) -> None:
    """Delete the file of a store, also an unfinished one, and what was decided on it; what cannot be deleted stays."""
    decided = [path.with_name(path.name + ending) for ending in DECIDED.values()]
    for name in (path, _unfinished(path), *decided):
        with contextlib.suppress(OSError):
            name.unlink()


def bytes_per_position(layouts: Sequence[RowLayout]) -> int:
    """Return what a position takes on the disk, its entry included."""
    return RowCodec(layouts).row_bytes + ENTRY.itemsize


def _unfinished(path: Path) -> Path:
    """Return the name of a store that is being made."""
    return path.with_name(f".{path.name}")


def _read_header(descriptor: int) -> dict[str, Any]:
    """Return the arguments that describe the store in a file. Raises `OSError` if it is none."""
    header = memoryview(bytearray(HEADER_BYTES))
    if not _fully(os.preadv, descriptor, [header], 0) or bytes(header[: len(MAGIC)]) != MAGIC:
        raise OSError(f"a store must begin with {MAGIC!r}, found {bytes(header[: len(MAGIC)])!r}")
    num_bytes = PREFIX.unpack_from(header)[2]
    try:
        record = json.loads(bytes(header[PREFIX.size : PREFIX.size + num_bytes]))
        layouts = tuple(_layout(*entry) for entry in record["layouts"])
        description = {name: record[name] for name in DESCRIPTION}
        return {**description, "layouts": layouts, "capacity": int(record["capacity"])}
    except (ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
        raise OSError(f"its header must describe a store, found {type(error).__name__}: {error}") from error


def _layout(shape: Sequence[int], name: str, storage: str, length_axis: int | None) -> RowLayout:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return RowLayout(shape=tuple(map(int, shape)), dtype=dtype, storage=storage, length_axis=length_axis)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _advise(descriptor: int, offset: int, size_bytes: int, advice: str) -> None:
    """Advise the kernel on a part of a file, where that can be done."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, size_bytes, getattr(os, f"POSIX_FADV_{advice}"))


def _fully(
    transfer: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    blocks: Sequence[memoryview],
    offset: int,
) -> bool:
    """Read or write (`os.preadv`, `os.pwritev`) all of the blocks, one after the other; False if the file ends before.

    Raises `OSError` if the disk is full or cannot be used.
    """
    done, total = transfer(descriptor, blocks, offset), sum(map(len, blocks))
    while done < total:
        begins = accumulate(map(len, blocks), initial=0)
        rest = [block[max(0, done - begin) :] for begin, block in zip(begins, blocks, strict=False)]
        rest = [block for block in rest if block]
        more = transfer(descriptor, rest, offset + done)
        if more == 0:
            if transfer is os.pwritev:
                raise OSError(errno.EIO, "nothing was written")
            return False
        done += more
    return True


def _stretches(entries: Entries, positions: Integers) -> Iterator[tuple[memoryview, int]]:
    """Yield the bytes of entries that lie side by side in the file, and where they begin there."""
    view, size = np.ascontiguousarray(entries).view(np.uint8).data, ENTRY.itemsize
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    for begin, end in pairwise(cuts):
        if begin < end:
            yield view[begin * size : end * size], HEADER_BYTES + int(positions[begin]) * size


def _allocate(descriptor: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
    zeros = memoryview(bytes(BLOCK_BYTES))
    for offset in range(0, size_bytes, BLOCK_BYTES):
        _fully(os.pwritev, descriptor, [zeros[: size_bytes - offset]], offset)


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
