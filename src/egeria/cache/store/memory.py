"""`RowMemory`: stored rows in the memory of the process, each known by the input that it was computed from.

The key of a row is a cryptographic hash of the input itself, so no sample numbers are needed, and a row is found for
equal input alone, whoever hands out the batches and in whatever order. The length that a batch is padded to is part of
it, since a sentence comes out of another length equal to rounding only; the padding itself is not, and is not stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria import tree
from egeria.cache.fingerprint import OF_THE_LOSS
from egeria.cache.store.rows import Integers, Mask
from egeria.layers.batch import Batch

DIGEST_BYTES = 16
ROW_BYTES = 256
"""What is kept of a row beside its values: its key and its place."""
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

Place = tuple[int, int, int, int]
"""Of a row: the number of its block, its number in that, and from which position of the block to which it reaches."""


def free_memory_bytes() -> int:
    """Return how much memory this machine, or this container on it, could still give; 0 where that is not known."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = (int((CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        found.append(max(0, limit - used))
    if not found and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=0)


def row_keys(batch: Batch, num_rows: int, lengths: Integers | None) -> list[bytes] | None:
    """Return a key for each row of the model's input; None where it holds a tensor whose elements cannot be read.

    Tensors whose first axis has `num_rows` entries count row by row, all else counts for every row, the type of mixed
    precision too. On an accelerator this waits for it.

    Args:
        batch: the model's input.
        num_rows: its samples B.
        lengths: of the samples without padding [B]; of what is as long as the attention mask only that part is read.
    """
    shared, columns = hashlib.blake2b(repr(batch.autocast).encode(), digest_size=DIGEST_BYTES), []
    mask = batch.kwargs.get("attention_mask")
    padded_length = mask.shape[1] if lengths is not None and isinstance(mask, Tensor) else None
    for name, value in sorted(tree.contents(batch.arguments), key=_by_name):
        if OF_THE_LOSS in name:
            continue
        shared.update(name.encode())
        if not isinstance(value, Tensor):
            shared.update((repr(value) if tree.is_plain(value) else type(value).__qualname__).encode())
            continue
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return None
        is_row = value.dim() > 0 and value.shape[0] == num_rows
        is_cut = is_row and value.dim() > 1 and value.shape[1] == padded_length
        shared.update(f"{value.dtype}{tuple(value.shape[is_row:])}".encode())
        memory = _as_bytes(value, num_rows if is_row else 1)
        if is_row:
            columns.append((memory, memory.shape[1] // value.shape[1] if is_cut else None))
        else:
            shared.update(memory.data)
    return [_row_key(shared.copy(), columns, row, lengths) for row in range(num_rows)] if columns else None


def _by_name(entry: tuple[str, Any]) -> str:
    return entry[0]  # the order in which a caller names arguments means nothing


def _row_key(own: Any, columns: Sequence[tuple[Any, int | None]], row: int, lengths: Integers | None) -> bytes:
    for memory, position_bytes in columns:
        if position_bytes is None or lengths is None:
            own.update(memory[row])
        else:
            own.update(memory[row, : position_bytes * int(lengths[row])])
    return bytes(own.digest())


def _as_bytes(value: Tensor, num_rows: int) -> Any:
    """Return the memory of a tensor as bytes [num_rows, ...]."""
    if value.numel() == 0:
        return np.zeros((num_rows, 0), dtype=np.uint8)
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(num_rows, -1).view(torch.uint8).numpy()


class RowMemory:
    """Rows by key, up to a size. A batch that was stored at once is one block of memory.

    Args:
        length_axes: for each leaf the axis of a row that follows the length of its sample, or None.
        limit_bytes: how much may be stored.
    """

    def __init__(self, length_axes: Sequence[int | None], limit_bytes: int) -> None:
        self._length_axes = tuple(length_axes)
        self.limit_bytes, self.size_bytes, self.is_full = limit_bytes, 0, False
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

    def write(self, keys: Sequence[bytes], rows: Sequence[Tensor], lengths: Integers | None) -> None:
        """Store copies of the rows of a batch, or nothing more where they do not fit.

        Args:
            keys: of the rows [b].
            rows: a tensor [b, ...] for each leaf.
            lengths: of the rows [b], where they have lengths.
        """
        if self.is_full:
            return
        block = [self._packed(leaf.detach(), axis, lengths) for leaf, axis in zip(rows, self._length_axes, strict=True)]
        size_bytes = sum(leaf.nbytes for leaf in block) + ROW_BYTES * len(keys)
        if self.size_bytes + size_bytes > self.limit_bytes:
            self.is_full = True
            return
        ends = np.cumsum(np.zeros(len(keys), dtype=np.int64) if lengths is None else lengths).tolist()
        begins = [0, *ends]
        for row, key in enumerate(keys):
            self._places[key] = len(self._blocks), row, begins[row], ends[row]
        self._blocks.append(block)
        self.size_bytes += size_bytes

    def read(self, keys: Sequence[bytes], known: Mask, padded_length: int | None) -> list[Tensor]:
        """Return a tensor [B, ...] for each leaf: stored rows with zeros for their padding, and anything elsewhere.

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
        self.size_bytes = 0

    @staticmethod
    def _packed(rows: Tensor, axis: int | None, lengths: Integers | None) -> Tensor:
        """Return a copy of rows [b, ...] in the memory of the processor: without padding [positions, ...]."""
        if axis is None or lengths is None:
            return torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)
        own = rows.movedim(axis + 1, 1)
        is_own = torch.arange(own.shape[1]) < torch.from_numpy(lengths)[:, None]
        return own[is_own.to(own.device)].cpu()
