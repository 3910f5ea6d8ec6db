"""The user's cache directory: a subdirectory for each run, and in it a store for each generation.

A run never uses what another left behind. Subdirectories whose run has no process any more are removed when
the next run begins; runs that live side by side leave each other alone.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from egeria.cache.store.disk import VERDICTS, DiskStore, bytes_per_position, remove_store
from egeria.cache.store.files import PRIVATE
from egeria.cache.store.index import HEADER_BYTES
from egeria.cache.store.lock import LOCK_NAME, RunLock
from egeria.cache.store.rows import RowLayout, StoreError

RUN_NAME = re.compile(r"run-([0-9a-f]{16})")
GENERATIONS = "generation-*"
FREE_SHARE = 0.5
POLL_S = 0.05
ATTEMPTS = 100


class CacheDirectory:
    """The part of a cache directory that belongs to one run, held as long as one of its processes lives.

    Args:
        path: the cache directory; made if it is not there.
        limit_bytes: the most this run's stores may take; None sets no such limit.
        limit_share: the most a new store may take of the free space. Half leaves room for checkpoints.
        token: of a run that another process of the job began, to join it; None begins one, and
            removes what dead runs left.
        timeout_s: how long to wait for a run to join.

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
        timeout_s: float = 10.0,
    ) -> None:
        root = Path(path).absolute()
        self.limit_bytes = limit_bytes
        self.limit_share = limit_share
        self.num_swept = 0
        """Runs found dead and removed."""
        self.swept_bytes = 0
        try:
            if token is None:
                root.mkdir(parents=True, exist_ok=True)
                self.num_swept, self.swept_bytes = sweep(root)
                self.path, lock = _begin(root)
            else:
                self.path, lock = _join(root, token, timeout_s)
        except OSError as error:
            raise StoreError(f"The cache directory {root} cannot be used: {error}. Give another one.") from error
        self._stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()  # a closed one must not be kept in memory
        self._finalizer = weakref.finalize(self, _leave, self.path, lock)

    @property
    def token(self) -> str:
        """What another process of the job needs to join."""
        return self.path.name.partition("-")[2]

    def room_bytes(self) -> int:
        """Return what a new store of this run may take now. Raises `StoreError`."""
        with self._told("be measured"):
            room = int(shutil.disk_usage(self.path).free * self.limit_share)
            if self.limit_bytes is not None:
                room = min(room, self.limit_bytes - size_bytes(self.path))
        return max(0, room)

    def capacity(self, layouts: Sequence[RowLayout], wanted: int) -> int:
        """Return how many positions of the wanted ones a new store has room for. Raises `StoreError`."""
        return max(0, min(wanted, (self.room_bytes() - HEADER_BYTES) // bytes_per_position(layouts)))

    def create(self, number: int, layouts: Sequence[RowLayout], capacity: int, **description: Any) -> DiskStore:
        """Make the store of a generation.

        Args:
            number: of the generation, by which other processes join its store.
            layouts: of the leaves of a row.
            capacity: positions it has room for.
            description: what the `Manifest` has beside these, such as the boundary.

        Raises:
            StoreError: it goes beyond the limit, or the disk has no room.
        """
        needed, room = HEADER_BYTES + capacity * bytes_per_position(layouts), self.room_bytes()
        if needed > room:
            raise StoreError(
                f"A store in {self.path.parent} may take {room} bytes now, {needed} are needed. Raise the limit, "
                f"free space, or store fewer samples."
            )
        return self._keep(DiskStore.create(self._generation(number), layouts, capacity, **description))

    def join(self, number: int, *, timeout_s: float = 0.0) -> DiskStore:
        """Open the store of a generation that another process of the job made or is about to make.

        Raises:
            StoreError: there is none after `timeout_s`, or it is damaged.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._keep(DiskStore.join(self._generation(number)))
            except StoreError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_S)

    def tell(self, number: int, *, opened: bool) -> None:
        """Let the other processes of the host know whether a generation is stored. Raises `StoreError`."""
        path = self._generation(number)
        with self._told("be written"):
            path.mkdir(mode=0o700, exist_ok=True)
            (path / VERDICTS[opened]).touch(mode=PRIVATE)

    def verdict(self, number: int) -> bool | None:
        """Return what the process that decides on a generation has told; None where it has not yet."""
        path = self._generation(number)
        return next((opened for opened, name in VERDICTS.items() if (path / name).exists()), None)

    def close(self) -> None:
        """Close the stores and leave; the last process of the run removes its directory."""
        for store in list(self._stores):
            store.close()
        self._stores.clear()
        self._finalizer()

    def _generation(self, number: int) -> Path:
        return self.path / GENERATIONS.replace("*", f"{number:04d}")

    def _keep(self, store: DiskStore) -> DiskStore:
        self._stores.add(store)
        return store

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"The cache directory {self.path} cannot {what}: {error}.") from error


def runs(root: Path) -> list[Path]:
    """Return the directories of runs in a cache directory. Raises `OSError`."""
    return sorted(path for path in root.iterdir() if RUN_NAME.fullmatch(path.name) and _is_directory(path))


def sweep(root: Path) -> tuple[int, int]:
    """Remove the runs that have no process any more; return how many they were and their bytes. Raises `OSError`."""
    num_runs = num_bytes = 0
    for path in runs(root):
        with contextlib.suppress(OSError):  # somebody else's, or already gone
            lock = RunLock.alone(path)
            if lock is not None:
                found = size_bytes(path)
                remove_run(path, lock)
                num_runs, num_bytes = num_runs + 1, num_bytes + found
    return num_runs, num_bytes


def size_bytes(path: Path) -> int:
    """Return what the files under a directory take; those that go away meanwhile take nothing."""
    total = 0
    with contextlib.suppress(OSError):
        for entry in path.rglob("*"):
            with contextlib.suppress(OSError):
                total += entry.lstat().st_size if entry.is_file() else 0
    return total


def remove_run(path: Path, lock: RunLock) -> None:
    """Delete our files of a run whose lock is held alone, the lock last; anything else stays."""
    with contextlib.suppress(OSError):
        for store in path.glob(GENERATIONS):
            if _is_directory(store):
                remove_store(store)
        (path / LOCK_NAME).unlink()
        path.rmdir()
    lock.release()


def _begin(root: Path) -> tuple[Path, RunLock]:
    """Make the directory of a new run and lock it; one that sees it before it is locked may remove it, so try again."""
    for _ in range(ATTEMPTS):
        path = root / f"run-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        lock = RunLock.share(path)
        if lock is not None:
            try:
                lock.sign()
            except BaseException:  # such as a full disk
                remove_run(path, lock)
                raise
            return path, lock
        time.sleep(POLL_S)
    raise OSError("no run could be begun: another process keeps removing it")


def _join(root: Path, token: str, timeout_s: float) -> tuple[Path, RunLock]:
    path, deadline = root / f"run-{token}", time.monotonic() + timeout_s
    while RUN_NAME.fullmatch(path.name):
        lock = RunLock.share(path) if path.is_dir() else None
        if lock is not None:
            return path, lock
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    raise OSError(f"there is no run {token!r} to join")


def _leave(path: Path, lock: RunLock) -> None:
    """Let go of a run, and remove it if no other process holds it; in a forked child its parent does."""
    lock.release()
    with contextlib.suppress(OSError):
        last = RunLock.alone(path) if _is_directory(path) else None
        if last is not None:
            remove_run(path, last)


def _is_directory(path: Path) -> bool:
    """Tell whether the path is a directory of its own; a link could lead to anything."""
    return path.is_dir() and not path.is_symlink()
