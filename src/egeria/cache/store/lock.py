"""The lock by which the processes of a run, and others, know that the run still has a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from egeria.cache.store.file import PRIVATE

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = "lock"


class RunLock:
    """A lock on the directory of a run: shared by its processes, alone by who removes it.

    It belongs to the open file, which forked children inherit: `release` frees it for all of them.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pid = os.getpid()

    @classmethod
    def take(cls, directory: Path, *, alone: bool) -> RunLock | None:
        """Return the lock of a run's directory; None if it cannot be had, or the directory is gone.

        Args:
            directory: of the run.
            alone: whether to hold it alone, which only works where the run has no process any more; else as one of
                its processes, unless the directory is being removed.

        Raises:
            OSError: files cannot be made or locked there.
        """
        if fcntl is None:
            raise OSError("files cannot be locked on this system")
        path = directory / LOCK_NAME
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(descriptor)):  # another may have removed it in between
                    return cls(descriptor)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Release the lock; in a forked child only close the child's own copy of the file."""
        if self.descriptor < 0:
            return
        descriptor, self.descriptor = self.descriptor, -1
        with contextlib.suppress(OSError):
            if os.getpid() == self._pid:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
