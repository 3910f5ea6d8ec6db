"""Telling whether any process of a run still lives: by a lock that the system takes back when the last one dies.

A process number alone would not do (it is given to another after a while, and means nothing in another container),
and neither would a file that a killed process leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from egeria.cache.store.files import PRIVATE
from egeria.cache.store.manifest import maker

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = "lock"
LARGEST_NOTE = 4096


class RunLock:
    """A lock on the directory of a run: shared by its processes, alone by who removes it.

    It belongs to the open file, which forked children inherit: `release` frees it for all of them.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()

    @classmethod
    def share(cls, directory: Path) -> RunLock | None:
        """Hold the lock as one of the run's processes; None if the directory is being removed or is gone.

        Raises:
            OSError: files cannot be made or locked there.
        """
        return cls._take(directory, alone=False)

    @classmethod
    def alone(cls, directory: Path) -> RunLock | None:
        """Hold the lock of a run that has no process any more; None if it has one.

        Raises:
            OSError: files cannot be opened or locked there.
        """
        return cls._take(directory, alone=True)

    def sign(self) -> None:
        """Note in the file who this is, for those who read lists. Raises `OSError`."""
        os.pwrite(self._descriptor, json.dumps(maker()).encode(), 0)

    def release(self) -> None:
        """Let go; in a forked child only of the child's own copy of the file."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            if os.getpid() == self._pid:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    @classmethod
    def _take(cls, directory: Path, *, alone: bool) -> RunLock | None:
        if fcntl is None:
            raise OSError("files cannot be locked on this system")
        path = directory / LOCK_NAME
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if _is_still_there(path, descriptor):
                return cls(descriptor)
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None


def is_live(directory: Path) -> bool:
    """Tell whether a process of the run may still live; where that cannot be found out, it may."""
    try:
        lock = RunLock.alone(directory)
    except OSError:
        return True
    if lock is not None:
        lock.release()
    return lock is None and directory.is_dir()


def read_note(directory: Path) -> dict[str, Any]:
    """Return who signed the lock; empty where nobody did."""
    with contextlib.suppress(OSError, ValueError), (directory / LOCK_NAME).open("rb") as file:
        found = json.loads(file.read(LARGEST_NOTE))
        return found if isinstance(found, dict) else {}
    return {}


def _is_still_there(path: Path, descriptor: int) -> bool:
    """Tell whether the file locked is the one the path names; another may have removed it in between."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
