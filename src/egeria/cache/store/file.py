"""The file of a store: made with all its blocks and without a name, read and written whole.

The file is read with `preadv` into the caller's memory, not mapped. A mapped file that somebody
truncates kills the training with SIGBUS, mapped pages make the process look as large as its store,
and the kernel's readahead would fetch many times what random rows need. Hence also the advice to
the kernel: access is random, and these rows are wanted soon. Where there is no `posix_fadvise`
(macOS) nothing is advised.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

BLOCK_BYTES = 2**20
PART_BYTES = 64 * 2**20
"""Of a file, that gets its blocks at a time."""
ALLOCATION_S = 5.0
"""How long a file may take to get them: one at the bottom of a slow network would hold the training
up for minutes."""


def open_unnamed(directory: Path, size_bytes: int) -> int:
    """Return a new open file that has no name, so that the system frees it when the process ends.

    All of its blocks are on the disk. Raises `OSError`; nothing is left behind then.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        _allocate(file.fileno(), size_bytes)
        return os.dup(file.fileno())


def close_file(descriptor: int) -> None:
    """Close a file, if it is open."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


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


def checksum(blocks: Sequence[memoryview]) -> int:
    """Return the checksum of a row; never 0, which stands for a row that is not there."""
    found = 0
    for block in blocks:
        found = zlib.crc32(block, found)
    return found or 1


def _allocate(descriptor: int, size_bytes: int) -> None:
    """Give a file all of its blocks: in a sparse one a full disk would show only when rows are
    written.

    Where the file system cannot do that, every block is touched instead, by the system library or
    here. Raises `OSError`, also where it takes too long.
    """
    allocate = getattr(os, "posix_fallocate", _write_zeros)
    deadline = time.monotonic() + ALLOCATION_S
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
