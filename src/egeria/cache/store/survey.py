"""Looking at a cache directory from outside: what is there, whether it is whole, and what may go."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egeria.cache.store.directory import GENERATIONS, runs, size_bytes
from egeria.cache.store.disk import DiskStore
from egeria.cache.store.lock import is_live, read_note
from egeria.cache.store.manifest import FILE_NAME
from egeria.cache.store.rows import StoreError


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One store of a run."""

    path: Path
    size_bytes: int
    boundary: str = ""
    capacity: int = 0
    num_stored: int = 0
    num_damaged: int | None = None
    """Stored rows with a wrong checksum; None where nobody looked."""
    problem: str = ""
    """Why it cannot be opened; empty where it can."""

    @property
    def is_damaged(self) -> bool:
        """Tell whether something is wrong with it."""
        return bool(self.problem or self.num_damaged)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """What a run keeps in a cache directory, or left there."""

    path: Path
    is_live: bool
    size_bytes: int
    note: dict[str, Any]
    """Who began it: 'pid', 'boot_id' and 'created'; empty where that cannot be read."""
    generations: tuple[Generation, ...]


def survey(root: Path, *, verify: bool = False) -> list[FoundRun]:
    """Return the runs in a cache directory; nothing is changed.

    Args:
        root: the cache directory.
        verify: whether to read every stored row and compare its checksum.

    Raises:
        StoreError: the directory cannot be read.
    """
    try:
        found = runs(root)
    except OSError as error:
        raise StoreError(f"The cache directory {root} cannot be read: {error}.") from error
    return [
        FoundRun(
            path=path,
            is_live=is_live(path),
            size_bytes=size_bytes(path),
            note=read_note(path),
            generations=tuple(_generation(store, verify) for store in sorted(path.glob(GENERATIONS))),
        )
        for path in found
    ]


def _generation(path: Path, verify: bool) -> Generation:
    size = size_bytes(path)
    try:
        store = DiskStore.join(path, read_only=True)
    except StoreError as error:
        # Without a manifest it is still being made, just being removed, or was never finished: no damage.
        return Generation(path=path, size_bytes=size, problem=str(error) if (path / FILE_NAME).exists() else "")
    with contextlib.closing(store):
        try:
            num_stored, num_damaged = store.verify() if verify else (store.num_stored, None)
            problem = ""
        except StoreError as error:
            num_stored, num_damaged, problem = store.num_stored, None, str(error)
        return Generation(
            path=path,
            size_bytes=size,
            boundary=store.boundary,
            capacity=store.capacity,
            num_stored=num_stored,
            num_damaged=num_damaged,
            problem=problem,
        )
