"""The user's cache directory: a subdirectory for each run, and in it a file for each generation's
store.

A run never uses what another left behind. Subdirectories whose run has no process any more are
removed when the next run begins; runs that live side by side leave each other alone. Whether a
process of a run still lives is known by a lock that the system takes back when the last one ends: a
process number is given to another after a while, and means nothing in another container, and a file
would be left behind by a killed process.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from egeria.cache.store.disk import DiskStore
from egeria.cache.store.file import DECIDED, HEADER_BYTES, PRIVATE, bytes_per_position, remove_store
from egeria.cache.store.rows import RowLayout, StoreError, as_store_error

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

RUN_NAME = re.compile(r"run-([0-9a-f]{16})")
STORE_NAME = re.compile(r"generation-\d{4,}")
LOCK_NAME = "lock"
FREE_SHARE = 0.5
POLL_S = 0.05
JOIN_TIMEOUT_S = 10.0
ATTEMPTS = 100


class CacheDirectory:
    """The part of a cache directory that belongs to one run, held as long as one of its processes
    lives.

    Args:
        path: the cache directory; made if it is not there.
        limit_bytes: the most this run's stores may take; None sets no such limit.
        limit_share: the most a new store may take of the free space. Half leaves room for
            checkpoints.
        token: of a run that another process of the job began, to join it; None begins one, and
            removes what dead runs left.

    Raises:
        StoreError: the directory cannot be written or locked, or the run to join is gone.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        limit_bytes: int | None = None,
        limit_share: float = FREE_SHARE,
        token: str | None = None,
    ) -> None:
        root = Path(path).absolute()
        self._limit_bytes, self._limit_share = limit_bytes, limit_share
        try:
            if token is None:
                root.mkdir(parents=True, exist_ok=True)
                sweep(root)
                self.path, lock = _begin(root)
            else:
                self.path, lock = _join(root, token)
        except OSError as error:
            raise StoreError(
                f"The cache directory {root} cannot be used: {error}. Give another one."
            ) from error
        self._finalizer = weakref.finalize(self, _leave, self.path, lock, os.getpid())

    @property
    def token(self) -> str:
        """What another process of the job needs to join."""
        return self.path.name.partition("-")[2]

    def room_bytes(self) -> int:
        """Return what a new store of this run may take now. Raises `StoreError`."""
        with as_store_error(f"The cache directory {self.path} cannot be measured"):
            room = int(shutil.disk_usage(self.path).free * self._limit_share)
        if self._limit_bytes is not None:
            room = min(room, self._limit_bytes - size_bytes(self.path))
        return max(0, room)

    def capacity(self, layouts: Sequence[RowLayout], wanted: int) -> int:
        """Return how many of the wanted positions a new store of such rows has room for. Raises
        `StoreError`.
        """
        return max(
            0, min(wanted, (self.room_bytes() - HEADER_BYTES) // bytes_per_position(layouts))
        )

    def create(
        self, number: int, layouts: Sequence[RowLayout], capacity: int, **description: Any
    ) -> DiskStore:
        """Make the store of a generation, by whose number other processes join it.

        Further arguments are those of `DiskStore`. Raises `StoreError` if it goes beyond the limit
        or the disk is full.
        """
        needed, room = HEADER_BYTES + capacity * bytes_per_position(layouts), self.room_bytes()
        if needed > room:
            raise StoreError(
                f"A store in {self.path.parent} may take {room} bytes now, {needed} are needed. "
                "Raise the limit, "
                f"free space, or store fewer samples."
            )
        return DiskStore.create(self._store_path(number), layouts, capacity, **description)

    def join(self, number: int) -> DiskStore:
        """Open the store of a generation that another process of the job made.
        Raises `StoreError`.
        """
        return DiskStore.join(self._store_path(number))

    def publish(self, number: int, *, opened: bool) -> None:
        """Let the other processes of the host know whether a generation is stored. Raises
        `StoreError`.
        """
        with as_store_error(f"The cache directory {self.path} cannot be written"):
            self._decided_path(number, opened=opened).touch(mode=PRIVATE)

    def published(self, number: int) -> bool | None:
        """Return what the process that decides on a generation has published; None where it has not
        yet.
        """
        return next(
            (opened for opened in DECIDED if self._decided_path(number, opened=opened).exists()),
            None,
        )

    def close(self) -> None:
        """Leave; the last process of the run removes its directory, with the stores that are still
        open.
        """
        self._finalizer()

    def _store_path(self, number: int) -> Path:
        return self.path / f"generation-{number:04d}"

    def _decided_path(self, number: int, *, opened: bool) -> Path:
        return self.path / f"{self._store_path(number).name}{DECIDED[opened]}"


def lock_run(directory: Path, *, alone: bool) -> int | None:
    """Return the open file that locks a run's directory; None if it cannot be had, or the directory
    is gone.

    It can be had `alone` only where the run has no process any more; else as one of its processes,
    unless the directory is being removed. Raises `OSError` if files cannot be made or locked there.
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
        if os.path.samestat(
            path.lstat(), os.fstat(descriptor)
        ):  # another may have removed it in between
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _unlock(lock: int) -> None:
    """Unlock and close a file; closing alone would not do where forked children
    have inherited it.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _runs_in(root: Path) -> list[Path]:
    """Return the directories of runs in a cache directory; a link could lead to anything. Raises
    `OSError`.
    """
    return sorted(
        path for path in root.iterdir() if RUN_NAME.fullmatch(path.name) and _is_directory(path)
    )


def sweep(root: Path) -> int:
    """Remove the runs that have no process any more; return how many. Raises `OSError`."""
    num_runs = 0
    for path in _runs_in(root):
        with contextlib.suppress(OSError):  # somebody else's, or already gone
            if (lock := lock_run(path, alone=True)) is not None:
                num_runs += 1
                _remove_run(path, lock)
    return num_runs


def size_bytes(path: Path) -> int:
    """Return what the files under a directory take, or a file; those that go away meanwhile take
    nothing.
    """
    total = 0
    with contextlib.suppress(OSError):
        for entry in (path, *path.rglob("*")):
            with contextlib.suppress(OSError):
                total += entry.lstat().st_size if entry.is_file() else 0
    return total


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _begin(root: Path) -> tuple[Path, int]:
    """Make the directory of a new run and lock it; one that sees it before it is locked may remove
    it, so try again.
    """
    for _ in range(ATTEMPTS):
        path = root / f"run-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        lock = lock_run(path, alone=False)
        if lock is not None:
            return path, lock
        time.sleep(POLL_S)
    raise OSError("no run could be begun: another process keeps removing it")


def _join(root: Path, token: str) -> tuple[Path, int]:
    path, deadline = root / f"run-{token}", time.monotonic() + JOIN_TIMEOUT_S
    while RUN_NAME.fullmatch(path.name):
        lock = lock_run(path, alone=False) if path.is_dir() else None
        if lock is not None:
            return path, lock
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    raise OSError(f"there is no run {token!r} to join")


def _leave(path: Path, lock: int, pid: int) -> None:
    """Release a run, and remove it if no other process holds it; a forked child only closes its
    copy of the file.
    """
    if os.getpid() != pid:
        os.close(lock)
        return
    _unlock(lock)
    with contextlib.suppress(OSError):
        if _is_directory(path) and (last := lock_run(path, alone=True)) is not None:
            _remove_run(path, last)


def _remove_run(path: Path, lock: int) -> None:
    """Delete our files of a run whose lock is held alone, the lock last; anything else stays."""
    with contextlib.suppress(OSError):
        for found in {entry.name.strip(".").partition(".")[0] for entry in path.iterdir()}:
            if STORE_NAME.fullmatch(found):
                remove_store(path / found)
        (path / LOCK_NAME).unlink()
        path.rmdir()
    _unlock(lock)
