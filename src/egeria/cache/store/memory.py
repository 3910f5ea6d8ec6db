"""`RowMemory`: stored rows in the memory of the process, each known by the input that it was
computed from.

The key of a row is a cryptographic hash of the input itself, so no sample numbers are needed, and a
row is found for equal input alone, whoever hands out the batches and in whatever order. The length
that a batch is padded to is part of it, since a sentence comes out of another length equal to
rounding only, and so is the padding, which is not stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria.cache.fingerprint import describe
from egeria.cache.store.codec import Integers, Mask
from egeria.model.batch import Batch
from egeria.skipping.rows import DIGEST_BYTES, bytes_of

ROW_BYTES = 256
"""What is kept of a row beside its values: its key and its place."""
LOOK_BYTES = 64 * 2**20
"""Stored between two looks at how much may be."""
GROUP_FILES = ("memory.max", "memory.current", "inactive_file")
OLD_GROUP_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Limit and use of a control group, and the entry of its `memory.stat` with what can be reclaimed:
version 2, and 1."""

Place = tuple[int, int, int, int]
"""Of a row: the number of its block, its number in that, and from which position of the block to
which it reaches."""


def free_memory_bytes(system: Path = Path("/")) -> int:
    """Return how much memory this process could still be given; 0 where that is not known.

    The least of what the machine has, and of what the limits of the control groups leave in which
    the process is.

    Args:
        system: the folder in which `proc` and `sys` are.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in _read(system / "proc/meminfo").splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for folder, names in _control_groups(system):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            limit, used = (int(_read(folder / name)) for name in names[:2])
            found.append(max(0, limit - used + _reclaimable_bytes(folder, names[2])))
    if not found and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=0)


def _control_groups(system: Path) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield the folders of the control groups of this process, and the names of limit, use and what
    can be reclaimed.

    Each with its parents up to the root: in a container the path may be of the host, and its folder
    the root here.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        lines = _read(system / "proc/self/cgroup").splitlines()
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        own = PurePosixPath(path.strip("/"))
        if number == "0" and not controllers:
            yield from (
                (system / "sys/fs/cgroup" / folder, GROUP_FILES) for folder in (own, *own.parents)
            )
        elif "memory" in controllers.split(","):
            yield from (
                (system / "sys/fs/cgroup/memory" / folder, OLD_GROUP_FILES)
                for folder in (own, *own.parents)
            )


def _reclaimable_bytes(folder: Path, name: str) -> int:
    """Return what a control group has in pages of files that were not used lately: they can be
    given up.
    """
    with contextlib.suppress(OSError, ValueError, LookupError):
        return int(
            dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())[name]
        )
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def row_keys(batch: Batch, num_rows: int, shared: Collection[str] = ()) -> list[bytes] | None:
    """Return a key for each row of the model's input; None where it holds something whose contents
    cannot be read.

    Tensors whose first axis has `num_rows` entries count row by row, all else counts for every row,
    the type of mixed precision too. On an accelerator this waits for it.

    Args:
        batch: the model's input.
        num_rows: its samples B.
        shared: paths of tensors that are known to be shared by the samples, also where they are as
            long as the batch.
    """
    if batch.unreadable:
        return None
    description = describe(batch, num_rows, shapes=True, shared=shared)
    own, columns = hashlib.blake2b(description.encode(), digest_size=DIGEST_BYTES), []
    for name, value in batch.contents:
        if not isinstance(value, Tensor):
            continue
        if name not in shared and value.shape[:1] == (num_rows,):
            columns.append(bytes_of(value, num_rows))
        else:
            own.update(bytes_of(value).data)
    return [_row_key(own.copy(), columns, row) for row in range(num_rows)] if columns else None


def _row_key(own: Any, columns: Sequence[Any], row: int) -> bytes:
    for memory in columns:
        own.update(memory[row])
    return bytes(own.digest())


class RowMemory:
    """Rows by key, up to a size. A batch that was stored at once is one block of memory.

    Args:
        length_axes: for each leaf the axis of a row that follows the length of its sample, or None.
        find_limit: returns how many bytes may be stored, by how many are; asked again while it
            fills.
    """

    def __init__(self, length_axes: Sequence[int | None], find_limit: Callable[[int], int]) -> None:
        self._length_axes, self._find_limit = tuple(length_axes), find_limit
        self.limit_bytes, self.size_bytes, self.is_full = find_limit(0), 0, False
        self._next_look_bytes = LOOK_BYTES
        self._places: dict[bytes, Place] = {}
        self._blocks: list[list[Tensor]] = []

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._places)

    @property
    def has_length(self) -> bool:
        """Whether rows are cut to the lengths of their samples."""
        return any(axis is not None for axis in self._length_axes)

    def knows(self, keys: Sequence[bytes]) -> Mask:
        """Return which of these rows are stored [B]."""
        return np.fromiter((key in self._places for key in keys), dtype=bool, count=len(keys))

    def write(
        self, keys: Sequence[bytes], rows: Sequence[Tensor], lengths: Integers | None
    ) -> None:
        """Store copies of the rows of a batch, or nothing more where they do not fit.

        Args:
            keys: of the rows [b].
            rows: a tensor [b, ...] for each leaf.
            lengths: of the rows [b], where they have lengths.
        """
        if self.is_full:
            return
        if self.size_bytes >= self._next_look_bytes:
            self._next_look_bytes = self.size_bytes + LOOK_BYTES
            self.limit_bytes = min(self.limit_bytes, self._find_limit(self.size_bytes))
        block = [
            self._packed(leaf.detach(), axis, lengths)
            for leaf, axis in zip(rows, self._length_axes, strict=True)
        ]
        size_bytes = sum(leaf.nbytes for leaf in block) + ROW_BYTES * len(keys)
        if self.size_bytes + size_bytes > self.limit_bytes:
            self.is_full = True
            return
        ends = np.cumsum(
            np.zeros(len(keys), dtype=np.int64) if lengths is None else lengths
        ).tolist()
        begins = [0, *ends]
        for row, key in enumerate(keys):
            self._places[key] = len(self._blocks), row, begins[row], ends[row]
        self._blocks.append(block)
        self.size_bytes += size_bytes

    def read(self, keys: Sequence[bytes], known: Mask, padded_length: int | None) -> list[Tensor]:
        """Return a tensor [B, ...] for each leaf: stored rows with zeros for their padding, and
        anything elsewhere.

        Args:
            keys: of the rows [B].
            known: which of them are stored [B], at least one.
            padded_length: of the batch, where rows have lengths.
        """
        places = {row: self._places[keys[row]] for row in np.flatnonzero(known).tolist()}
        first = self._blocks[next(iter(places.values()))[0]]
        found = []
        for leaf, axis in enumerate(self._length_axes):
            inner = first[leaf].shape[1:]
            if axis is None:
                out = first[leaf].new_empty(len(keys), *inner)
                for row, (block, number, _, _) in places.items():
                    out[row].copy_(self._blocks[block][leaf][number])
            else:
                out = first[leaf].new_zeros(len(keys), padded_length or 0, *inner)
                for row, (block, _, begin, end) in places.items():
                    out[row, : end - begin].copy_(self._blocks[block][leaf][begin:end])
                out = out.movedim(1, axis + 1)
            found.append(out)
        return found

    def close(self) -> None:
        """Free the memory."""
        self._places.clear()
        self._blocks.clear()
        self.size_bytes, self._next_look_bytes = 0, LOOK_BYTES

    @staticmethod
    def _packed(rows: Tensor, axis: int | None, lengths: Integers | None) -> Tensor:
        """Return a copy of rows [b, ...] in the memory of the processor: without padding
        [positions, ...].
        """
        if axis is None or lengths is None:
            return torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(
                rows
            )  # whatever the default is
        own = rows.movedim(axis + 1, 1)
        is_own = torch.arange(own.shape[1], device="cpu") < torch.from_numpy(lengths)[:, None]
        return own[is_own.to(own.device)].cpu()
