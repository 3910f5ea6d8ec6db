"""Files of fixed size, read and written at a place.

The data are read with `preadv` into the caller's memory, not mapped. A mapped file that somebody truncates
kills the training with SIGBUS, mapped pages make the process look as large as its store, and the
kernel's readahead would fetch many times what random rows need. Hence also the advice to the kernel: access
is random, and these stretches are wanted soon. Where there is no `posix_fadvise` (macOS) nothing is advised.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

BLOCK_BYTES = 2**20
PRIVATE = 0o600
_CAN_ADVISE = hasattr(os, "posix_fadvise")
_SAFELY = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


def make(path: Path, size_bytes: int) -> int:
    """Make a file that has all its blocks on the disk, never a sparse one; return its descriptor.

    Raises:
        OSError: there is one already, there is no room, or the right to it is missing. Nothing new is left.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, PRIVATE)
    try:
        _allocate(descriptor, size_bytes)
        advise_random(descriptor)
    except BaseException:
        discard(path, descriptor)
        raise
    return descriptor


def open_sized(path: Path, size_bytes: int, *, writable: bool) -> int:
    """Open a file; return its descriptor.

    Raises:
        OSError: it cannot be opened, or is not of this size.
    """
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _SAFELY)
    try:
        found = os.fstat(descriptor).st_size
        if found != size_bytes:
            raise OSError(errno.EIO, f"{path.name} must have {size_bytes} bytes, found {found}")
        advise_random(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def close(descriptors: Iterable[int]) -> None:
    """Close descriptors; what cannot be closed is left."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def discard(path: Path, descriptor: int) -> None:
    """Close and delete a file; what cannot be deleted is left."""
    close([descriptor])
    with contextlib.suppress(OSError):
        path.unlink()


def advise_random(descriptor: int) -> None:
    """Tell the kernel not to read more than it is asked for."""
    if _CAN_ADVISE:
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def advise_wanted(descriptor: int, stretches: Iterable[tuple[int, int]]) -> None:
    """Ask the kernel to fetch stretches (offset, size) already; it goes on meanwhile."""
    if _CAN_ADVISE:
        fadvise, wanted = os.posix_fadvise, os.POSIX_FADV_WILLNEED
        with contextlib.suppress(OSError):
            for offset, size_bytes in stretches:
                fadvise(descriptor, offset, size_bytes, wanted)


def forget_pages(descriptor: int) -> None:
    """Write out what waits in memory, and let the next read come from the disk.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    os.fsync(descriptor)
    if _CAN_ADVISE:
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_fully(descriptor: int, block: memoryview, offset: int) -> bool:
    """Fill the block from this place; False if the file ends before.

    Raises:
        OSError: the disk cannot be read.
    """
    done = os.preadv(descriptor, (block,), offset)
    while done < len(block):
        more = os.preadv(descriptor, (block[done:],), offset + done)
        if more == 0:
            return False
        done += more
    return True


def write_fully(descriptor: int, block: memoryview, offset: int) -> None:
    """Write the whole block at this place; it is with the operating system then.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    done = os.pwrite(descriptor, block, offset)
    while done < len(block):
        more = os.pwrite(descriptor, block[done:], offset + done)
        if more == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += more


def _allocate(descriptor: int, size_bytes: int) -> None:
    if size_bytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
    zeros = memoryview(bytes(BLOCK_BYTES))
    for offset in range(0, size_bytes, BLOCK_BYTES):
        write_fully(descriptor, zeros[: min(BLOCK_BYTES, size_bytes - offset)], offset)
