"""Memory that two processes share. It has no name, so nothing is left behind however they end."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref

BLOCK_BYTES = 64 * 1024


class Segment:
    """A stretch of shared memory, known by a file descriptor that the child process inherits.

    One side writes and may let it grow, the other maps what it is told there is.

    Args:
        descriptor: of a segment that the other side made; None makes a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        self._finalizer.atexit = False  # at the end of the process others may still want to read from it

    def reserve(self, size_bytes: int) -> mmap.mmap:
        """Return the memory, made large enough.

        Raises:
            OSError: there is not that much.
        """
        found = os.fstat(self.descriptor).st_size
        if found < size_bytes:
            _allocate(self.descriptor, found, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        return self.map(size_bytes)

    def map(self, size_bytes: int) -> mmap.mmap:
        """Return the memory, of which at least `size_bytes` were reserved."""
        if self._map is None or len(self._map) < size_bytes:
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return self._map

    def close(self) -> None:
        """Let go; the memory itself goes when the other side has let go too."""
        self._map = None
        self._finalizer()


def _allocate(descriptor: int, begin: int, end: int) -> None:
    """Make a file larger for real: to write into a hole that finds no room kills the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, end)
        return
    while begin < end:
        begin += os.pwrite(descriptor, bytes(min(BLOCK_BYTES, end - begin)), begin)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("egeria", os.MFD_CLOEXEC)
    # Elsewhere a file without a name does the same.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
