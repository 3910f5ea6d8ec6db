"""The one file of a store: a header that describes it, an entry for each position, and a slot for each row.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from egeria.cache.store.codec import RowCodec
from egeria.cache.store.rows import Integers, RowLayout, StoreError

MAGIC = b"egeria-2"
HEADER_BYTES = 4096
PREFIX = struct.Struct("<8sII")
"""Magic, whether a second process opened the file, and the size of the description that follows as JSON."""
SHARED_OFFSET = len(MAGIC)
ENTRY = np.dtype([("checksum", "<u4"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""An entry lies within 16 aligned bytes. A checksum of 0 means that there is no row."""
BLOCK_BYTES = 2**20
PRIVATE = 0o600
_CAN_ADVISE = hasattr(os, "posix_fadvise")
_SAFELY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)

Entries = NDArray[np.void]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreDescription:
    """Everything another process must know to read a store."""

    layouts: tuple[RowLayout, ...]
    capacity: int
    """Positions that have a place."""
    boundary: str = ""
    """Name of the last frozen layer module."""
    num_views: int = 1
    """Augmentation variants of a sample, side by side."""
    is_viewed: bool = False
    """Whether augmentation is fixed: what is stored for other inputs is of no use."""
    front: int = 0
    """Checksum of the weights and statistics of the frozen layers."""

    def to_json(self) -> bytes:
        """Return the description as it stands in the header."""
        layouts = [
            (layout.shape, str(layout.dtype).removeprefix("torch."), layout.storage, layout.length_axis)
            for layout in self.layouts
        ]
        fields = ("capacity", "boundary", "num_views", "is_viewed", "front")
        return json.dumps({**{name: getattr(self, name) for name in fields}, "layouts": layouts}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StoreDescription:
        """Return the description that stands in a header.

        Raises:
            OSError: it is none.
        """
        try:
            record = json.loads(text)
            layouts = tuple(_layout(*entry) for entry in record.pop("layouts"))
            return cls(layouts=layouts, **{**record, "capacity": int(record["capacity"])})
        except (ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
            raise OSError(f"its header must describe a store, found {type(error).__name__}: {error}") from error


class RowsFile:
    """Reads and writes the file. It keeps no rows in memory, so that threads may use it at once.

    Every method raises `OSError` where the disk cannot be used.

    Args:
        path: of the file.
        descriptor: of the open file.
        description: of the store.
    """

    def __init__(self, path: Path, descriptor: int, description: StoreDescription) -> None:
        self.path = path
        self.descriptor = descriptor
        self.description = description
        self.codec = RowCodec(description.layouts)
        self._slots_offset = HEADER_BYTES + description.capacity * ENTRY.itemsize
        self.size_bytes = self._slots_offset + description.capacity * self.codec.row_bytes

    @classmethod
    def create(cls, path: Path, description: StoreDescription) -> RowsFile:
        """Make the file with all its blocks on the disk, never a sparse one; it gets its name when it is complete.

        Args:
            path: of the file.
            description: of the store.

        Raises:
            OSError: there is one already, there is no room, or the right to it is missing. Nothing new is left.
        """
        text = description.to_json()
        if PREFIX.size + len(text) > HEADER_BYTES:
            raise OSError(errno.EFBIG, f"{len(description.layouts)} leaves are too many for the header of a store")
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        unfinished = unfinished_path(path)
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, PRIVATE)
        try:
            made = cls(path, descriptor, description)
            _allocate(descriptor, made.size_bytes)
            write_fully(descriptor, [memoryview(PREFIX.pack(MAGIC, 0, len(text)) + text)], 0)
            made._advise_random()
            unfinished.replace(path)
        except BaseException:
            close(descriptor)
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return made

    @classmethod
    def open(cls, path: Path, *, read_only: bool) -> RowsFile:
        """Open the file of another process.

        Args:
            path: of the file.
            read_only: whether to leave the file as it is; otherwise its maker learns that it is shared.

        Raises:
            OSError: there is none, or it is damaged.
        """
        descriptor = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | _SAFELY)
        try:
            header = memoryview(bytearray(HEADER_BYTES))
            if not read_fully(descriptor, [header], 0) or bytes(header[: len(MAGIC)]) != MAGIC:
                raise OSError(f"a store must begin with {MAGIC!r}, found {bytes(header[: len(MAGIC)])!r}")
            _, _, num_bytes = PREFIX.unpack_from(header)
            text = bytes(header[PREFIX.size : PREFIX.size + num_bytes])
            found = cls(path, descriptor, StoreDescription.from_json(text))
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes != found.size_bytes:
                raise OSError(errno.EIO, f"{path.name} must have {found.size_bytes} bytes, found {size_bytes}")
            if not read_only:
                write_fully(descriptor, [memoryview(struct.pack("<I", 1))], SHARED_OFFSET)
            found._advise_random()
        except BaseException:
            close(descriptor)
            raise
        return found

    def is_shared(self) -> bool:
        """Return whether another process has opened the file to write."""
        flag = memoryview(bytearray(4))
        return read_fully(self.descriptor, [flag], SHARED_OFFSET) and any(flag)

    def read_entries(self, positions: Integers) -> Entries:
        """Return the entries of sorted positions [b]; an entry that is not there any more says that there is no row."""
        entries = np.zeros(len(positions), dtype=ENTRY)
        for block, offset in _stretches(entries, positions):
            if not read_fully(self.descriptor, [block], offset):
                block[:] = bytes(len(block))
        return entries

    def write_entries(self, positions: Integers, entries: Entries) -> None:
        """Set the entries [b] of sorted positions [b].

        Args:
            positions: [b], each there once.
            entries: [b]
        """
        for block, offset in _stretches(np.ascontiguousarray(entries), positions):
            write_fully(self.descriptor, [block], offset)

    def read_row(self, position: int, blocks: Sequence[memoryview]) -> bool:
        """Fill the blocks of a row's leaves; False if the file ends before.

        Args:
            position: of the row.
            blocks: memory for each leaf.
        """
        return read_fully(self.descriptor, blocks, self._offset(position))

    def write_row(self, position: int, blocks: Sequence[memoryview]) -> None:
        """Write the blocks of a row's leaves; they are with the operating system then.

        Args:
            position: of the row.
            blocks: bytes of each leaf.
        """
        write_fully(self.descriptor, blocks, self._offset(position))

    def advise(self, positions: Integers, lengths: Integers) -> None:
        """Ask the kernel to fetch rows in the background.

        Args:
            positions: [b]
            lengths: [b] of the rows.
        """
        if _CAN_ADVISE:
            offsets = (self._slots_offset + positions * self.codec.row_bytes).tolist()
            fadvise, wanted = os.posix_fadvise, os.POSIX_FADV_WILLNEED
            with contextlib.suppress(OSError):
                for offset, size_bytes in zip(offsets, self.codec.sizes(lengths).tolist(), strict=True):
                    fadvise(self.descriptor, offset, size_bytes, wanted)

    def drop_pages(self) -> None:
        """Write out what waits in memory, and let the next read come from the disk."""
        os.fsync(self.descriptor)
        if _CAN_ADVISE:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _advise_random(self) -> None:
        """Have the kernel read no more than it is asked for."""
        if _CAN_ADVISE:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def _offset(self, position: int) -> int:
        return self._slots_offset + position * self.codec.row_bytes


def unfinished_path(path: Path) -> Path:
    """Return the name of a store that is being made."""
    return path.with_name(f".{path.name}")


def bytes_per_position(layouts: Sequence[RowLayout]) -> int:
    """Return what a position takes on the disk, its entry included."""
    return RowCodec(layouts).row_bytes + ENTRY.itemsize


def close(descriptor: int) -> None:
    """Close a file; one that cannot be closed is left."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def read_fully(descriptor: int, blocks: Sequence[memoryview], offset: int) -> bool:
    """Fill the blocks, one after the other, from a place in a file; False if the file ends before.

    Args:
        descriptor: of the file.
        blocks: memory to fill.
        offset: of the place.

    Raises:
        OSError: the disk cannot be read.
    """
    done, total = os.preadv(descriptor, blocks, offset), sum(map(len, blocks))
    while done < total:
        more = os.preadv(descriptor, _remaining(blocks, done), offset + done)
        if more == 0:
            return False
        done += more
    return True


def write_fully(descriptor: int, blocks: Sequence[memoryview], offset: int) -> None:
    """Write the blocks, one after the other, at a place in a file.

    Args:
        descriptor: of the file.
        blocks: bytes to write.
        offset: of the place.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    done, total = os.pwritev(descriptor, blocks, offset), sum(map(len, blocks))
    while done < total:
        more = os.pwritev(descriptor, _remaining(blocks, done), offset + done)
        if more == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += more


def _remaining(blocks: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of blocks after so many bytes."""
    for index, block in enumerate(blocks):
        if done < len(block):
            return [block[done:], *blocks[index + 1 :]]
        done -= len(block)
    return []


def _stretches(entries: Entries, positions: Integers) -> Iterator[tuple[memoryview, int]]:
    """Yield the bytes of entries that lie side by side in the file, and where they begin there."""
    view, size = entries.view(np.uint8).data, ENTRY.itemsize
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
        write_fully(descriptor, [zeros[: min(BLOCK_BYTES, size_bytes - offset)]], offset)


def _layout(shape: Sequence[int], name: str, storage: str, length_axis: int | None) -> RowLayout:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return RowLayout(shape=tuple(map(int, shape)), dtype=dtype, storage=storage, length_axis=length_axis)
