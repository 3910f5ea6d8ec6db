"""The bytes of a store's file: a header that describes it, an entry for each position, and a slot
for each row.

The file is read with `preadv` into the caller's memory, not mapped. A mapped file that somebody
truncates kills the training with SIGBUS, mapped pages make the process look as large as its store,
and the kernel's readahead would fetch many times what random rows need. Hence also the advice to
the kernel: access is random, and these rows are wanted soon. Where there is no `posix_fadvise`
(macOS) nothing is advised.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from egeria.cache.store.codec import RowCodec
from egeria.cache.store.rows import Integers, RowLayout, StoreError

ENTRY = np.dtype([("checksum", "<u4"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""An entry lies within 16 aligned bytes. A checksum of 0 means that there is no row."""
SEALED = np.dtype([("position", "<i8"), ("length", "<i4"), ("fingerprint", "<f4", (2,))])
"""What of an entry its checksum covers, before the row itself."""
MAGIC = b"egeria-3"
HEADER_BYTES = 4096
PREFIX = struct.Struct("<8sII")
"""Magic, whether a second process opened the file, and the size of the description that follows as
JSON."""
SHARED_OFFSET = len(MAGIC)
DESCRIPTION = {"boundary": "", "front": 0, "ignores_padding": False}
"""What is told of a store besides its layouts and capacity, where nothing else is said."""
DECIDED = {True: ".opened", False: ".refused"}
"""Endings of the files by which the process that decides on a store informs the others of its
host."""
BLOCK_BYTES = 2**20
PART_BYTES = 64 * 2**20
"""Of a file, that gets its blocks at a time."""
ALLOCATION_S = 5.0
"""How long a file may take to get them: one at the bottom of a slow network would hold the training
up for minutes."""
PRIVATE = 0o600
_SAFELY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)

Entries = NDArray[np.void]


def bytes_per_position(layouts: Sequence[RowLayout]) -> int:
    """Return what a position takes on the disk, its entry included."""
    return RowCodec(layouts).row_bytes + ENTRY.itemsize


def create_file(
    path: Path, layouts: Sequence[RowLayout], capacity: int, description: Mapping[str, Any]
) -> int:
    """Make the file of a store, all of its blocks on the disk, and return it open; it is named when
    it is complete.

    Raises `OSError`; nothing new is left behind then.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    entries = [
        (one.shape, str(one.dtype).removeprefix("torch."), one.length_axis) for one in layouts
    ]
    text = json.dumps({**description, "capacity": capacity, "layouts": entries}).encode()
    if PREFIX.size + len(text) > HEADER_BYTES:
        raise OSError(errno.EFBIG, f"{len(layouts)} leaves are too many for the header of a store")
    unfinished = _unfinished(path)
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, PRIVATE)
    try:
        _allocate(descriptor, HEADER_BYTES + capacity * bytes_per_position(layouts))
        fully(os.pwritev, descriptor, [memoryview(PREFIX.pack(MAGIC, 0, len(text)) + text)], 0)
        unfinished.replace(path)
    except BaseException:
        close_file(descriptor)
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return descriptor


def open_file(path: Path) -> tuple[int, dict[str, Any]]:
    """Open the file of a store; return it and the arguments that describe the store. Raises
    `OSError` if it is none.
    """
    descriptor = os.open(path, os.O_RDWR | _SAFELY)
    try:
        return descriptor, _read_header(descriptor)
    except BaseException:
        close_file(descriptor)
        raise


def close_file(descriptor: int) -> None:
    """Close a file, if it is open."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def remove_store(path: Path) -> None:
    """Delete the file of a store, also an unfinished one, and what was decided on it; what cannot
    be deleted stays.
    """
    decided = [path.with_name(path.name + ending) for ending in DECIDED.values()]
    for name in (path, _unfinished(path), *decided):
        with contextlib.suppress(OSError):
            name.unlink()


def advise_kernel(descriptor: int, offset: int, size_bytes: int, advice: str) -> None:
    """Advise the kernel on a part of a file, where that can be done."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, size_bytes, getattr(os, f"POSIX_FADV_{advice}"))


def fully(
    transfer: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    blocks: Sequence[memoryview],
    offset: int,
) -> bool:
    """Read or write (`os.preadv`, `os.pwritev`) all of the blocks, one after the other; False if
    the file ends before.

    Raises `OSError` if the disk is full or cannot be used.
    """
    done, total = transfer(descriptor, blocks, offset), sum(map(len, blocks))
    while done < total:
        begins = accumulate(map(len, blocks), initial=0)
        rest = [block[max(0, done - begin) :] for begin, block in zip(begins, blocks, strict=False)]
        more = transfer(descriptor, [block for block in rest if block], offset + done)
        if more == 0:
            if transfer is os.pwritev:
                raise OSError(errno.EIO, "nothing was written")
            return False
        done += more
    return True


def stretches(entries: Entries, positions: Integers) -> Iterator[tuple[memoryview, int]]:
    """Yield the bytes of entries that lie side by side in the file, and where they begin there."""
    view, size = np.ascontiguousarray(entries).view(np.uint8).data, ENTRY.itemsize
    cuts = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    for begin, end in pairwise(cuts):
        if begin < end:
            yield view[begin * size : end * size], HEADER_BYTES + int(positions[begin]) * size


def seals(positions: Integers, entries: Entries) -> list[int]:
    """Return where the checksum of each row [b] begins: with its position, length
    and fingerprint.
    """
    sealed = np.zeros(len(positions), dtype=SEALED)
    sealed["position"], sealed["length"], sealed["fingerprint"] = (
        positions,
        entries["length"],
        entries["fingerprint"],
    )
    view, size = memoryview(sealed.tobytes()), SEALED.itemsize
    return [zlib.crc32(view[begin : begin + size]) for begin in range(0, len(view), size)]


def checksum(blocks: Sequence[memoryview], seal: int) -> int:
    """Return the checksum of a row as it stands in its entry, where 0 means that
    there is no row.
    """
    for block in blocks:
        seal = zlib.crc32(block, seal)
    return seal or 1


def _unfinished(path: Path) -> Path:
    """Return the name of a store that is being made."""
    return path.with_name(f".{path.name}")


def _read_header(descriptor: int) -> dict[str, Any]:
    header = memoryview(bytearray(HEADER_BYTES))
    if not fully(os.preadv, descriptor, [header], 0) or bytes(header[: len(MAGIC)]) != MAGIC:
        raise OSError(f"a store must begin with {MAGIC!r}, found {bytes(header[: len(MAGIC)])!r}")
    num_bytes = PREFIX.unpack_from(header)[2]
    try:
        record = json.loads(bytes(header[PREFIX.size : PREFIX.size + num_bytes]))
        layouts = tuple(_layout(*entry) for entry in record["layouts"])
        return {name: record[name] for name in DESCRIPTION} | {
            "layouts": layouts,
            "capacity": int(record["capacity"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
        raise OSError(
            f"its header must describe a store, found {type(error).__name__}: {error}"
        ) from error


def _layout(shape: Sequence[int], name: str, length_axis: int | None) -> RowLayout:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return RowLayout(shape=tuple(map(int, shape)), dtype=dtype, length_axis=length_axis)


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Give a file all of its blocks: in a sparse one a full disk would show only when rows are
    written.

    Where the file system cannot do that, every block is touched instead, by the system library or
    here. Raises `OSError`, also where it takes too long.
    """
    allocate, deadline = (
        getattr(os, "posix_fallocate", _write_zeros),
        time.monotonic() + ALLOCATION_S,
    )
    for offset in range(0, size_bytes, PART_BYTES):
        if time.monotonic() > deadline:
            raise OSError(
                errno.ETIMEDOUT,
                f"the file system allocates too slowly: {offset} of {size_bytes} bytes in "
                f"{ALLOCATION_S:g} s",
            )
        part = descriptor, offset, min(PART_BYTES, size_bytes - offset)
        try:
            allocate(*part)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            allocate = _write_zeros
            allocate(*part)


def _write_zeros(descriptor: int, offset: int, size_bytes: int) -> None:
    zeros = memoryview(bytes(BLOCK_BYTES))
    for begin in range(0, size_bytes, BLOCK_BYTES):
        fully(os.pwritev, descriptor, [zeros[: size_bytes - begin]], offset + begin)
