"""Rows of activations: their keys, and where they are stored.

The key of a row is a digest of all that the model gets for one sample, without its padding.
"""

import hashlib
import os
import tempfile
import weakref
import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria import tree
from egeria.model.passes import Batch

DIGEST_BYTES = 16
ROW_BYTES = 256  # of a row beside its values: its key and its place
DISK_SHARE = 0.5  # of the free disk space may be used; the other half is for others
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that products lose nothing
_SEED = 20  # of the factors of words


def count_rows(batch: Batch) -> int:
    """Return the number of samples B: the length of the first tensor with an axis, or 0."""
    return next((tensor.shape[0] for tensor in tree.leaves(batch.arguments) if tensor.dim()), 0)


@torch.no_grad()
def true_lengths(batch: Batch) -> list[int] | None:
    """Return the length of each row without its padding [B], from the argument `attention_mask`.

    None unless that is a mask [B, T] of zeros and ones, padded on the right, with at least one true
    element in each row: only then can rows be cut.
    """
    mask: Any = batch.kwargs.get("attention_mask")
    is_mask = isinstance(mask, Tensor) and not mask.is_floating_point() and mask.dim() == 2
    if not (is_mask and mask.numel()):
        return None
    lengths = (mask != 0).sum(1)
    expected = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    is_regular = (mask == expected).all() & (lengths > 0).all()
    found = torch.cat([is_regular[None].long(), lengths]).tolist()
    return found[1:] if found[0] else None


def true_positions(batch: Batch) -> Tensor | None:
    """Return which positions are no padding, bool [B, T]; None if all are, or that is unknown."""
    if (lengths := true_lengths(batch)) is None:
        return None
    width = batch.kwargs["attention_mask"].shape[1]
    return torch.arange(width) < torch.tensor(lengths)[:, None] if min(lengths) < width else None


def is_cut(tensor: Tensor, batch: Batch) -> bool:
    """Return whether an argument with a row for each sample is as long as the attention mask."""
    return tensor.dim() > 1 and tensor.shape[1] == batch.kwargs["attention_mask"].shape[1]


def row_keys(
    batch: Batch, lengths: Sequence[int] | None = None, cut_names: Collection[str] = ()
) -> list[bytes] | None:
    """Return a key for each row of the model's input; None if it has no rows.

    Tensors with an entry for each sample count row by row, those in `cut_names` up to the `lengths`
    [B]. All else counts for every row, also the type of mixed precision.
    """
    num_rows, columns = count_rows(batch), []
    shared = hashlib.blake2b(repr(batch.autocast).encode())
    for name, value in batch.contents:
        is_row = isinstance(value, Tensor) and value.shape[:1] == (num_rows,)
        cut = is_row and lengths is not None and name in cut_names and is_cut(value, batch)
        told = (value.dtype, value.shape[is_row + cut :]) if isinstance(value, Tensor) else value
        shared.update(f"{name}={told!r};".encode())
        if is_row:
            columns.append(_bytes(digests(value, lengths if cut else None)).reshape(num_rows, -1))
        elif isinstance(value, Tensor):
            shared.update(_bytes(value).data)
    if not columns or not num_rows:
        return None
    rows, prefix = np.concatenate(columns, axis=1), shared.digest()
    hashes = [hashlib.blake2b(prefix + row.tobytes(), digest_size=DIGEST_BYTES) for row in rows]
    return [each.digest() for each in hashes]


def take(batch: Batch, rows: Sequence[int], length: int | None = None) -> Batch:
    """Return a copy of these rows, detached; tensors as long as the mask are cut to `length`."""
    num_rows = count_rows(batch)

    def pick(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] != (num_rows,):
            return tensor.detach().clone()
        found = tensor.detach()[torch.tensor(rows, device=tensor.device)]
        is_long = length is not None and is_cut(tensor, batch)
        return found[:, :length].contiguous() if is_long else found

    args, kwargs = tree.map_tensors(pick, batch.arguments)
    return replace(batch, args=args, kwargs=kwargs)


@torch.no_grad()
def digests(tensor: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """Return 128 bits for each row of a tensor, computed on its device, as int64 [B, 2].

    Words of eight bytes are mixed, multiplied by two factors each, and added up as integers, which
    is exact and the same on every device. What is beyond a row's length counts as zero.
    """
    rows = _plain(tensor).reshape(len(tensor), -1).view(torch.uint8)
    if lengths is not None:
        width = rows.shape[1] // tensor.shape[1]
        ends = torch.tensor(lengths, device=rows.device)[:, None]
        rows = rows * (torch.arange(rows.shape[1], device=rows.device) < ends * width)
    words = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8)).view(torch.int64)
    words = (words ^ ((words >> 32) & 0xFFFFFFFF)).mul_(_FACTOR)  # the mask: `>>` repeats the sign
    words ^= (words >> 29).bitwise_and_(0x7FFFFFFFF)
    sums = [(words * weights).sum(1) for weights in _weights(words.shape[1], words.device)]
    if lengths is not None:
        sums[0] = sums[0] + torch.tensor(lengths, device=rows.device)
    return torch.stack(sums, dim=1)


@lru_cache(maxsize=32)
def _weights(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count, 2), generator=generator)
    return (drawn.T.contiguous() | 1).to(device)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bytes(tensor: Tensor) -> Any:
    return _plain(tensor).cpu().reshape(-1).view(torch.uint8).numpy()


class Store:
    """Rows in the memory of this process, of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rows: dict[bytes, Any] = {}  # the rows, or where they are
        self.size_bytes, self.is_full, self.error, self.damaged = 0, False, "", 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def write(self, keys: Sequence[bytes], rows: Sequence[Tensor]) -> None:
        """Store copies of rows; if they do not fit, the store is full."""
        num_bytes = sum(row.nbytes + ROW_BYTES for row in rows)
        self.is_full = self.is_full or self.size_bytes + num_bytes > self._limit_bytes
        if not self.is_full:
            self._rows.update(zip(keys, [row.clone() for row in rows], strict=True))
            self.size_bytes += num_bytes

    def read(self, keys: Sequence[bytes]) -> list[Tensor | None]:
        """Return rows; None for one that is missing or damaged."""
        return [self._rows.get(key) for key in keys]

    def close(self) -> None:
        """Free the memory, or the file; can be called again."""
        self._rows, self.is_full = {}, True


class FileStore(Store):
    """Rows in one file of this process, one after the other; checksums tell damaged ones.

    The file has no name, so that it is gone with the process, however that ends. It may take
    `limit_bytes`, but never more than a share of the free space.

    Raises:
        OSError: no file can be made in the directory.
    """

    def __init__(self, directory: Path, limit_bytes: int | None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        system = os.statvfs(directory)
        free_bytes = int(system.f_bavail * system.f_frsize * DISK_SHARE)
        super().__init__(free_bytes if limit_bytes is None else min(limit_bytes, free_bytes))
        self._file, name = tempfile.mkstemp(prefix="egeria-activations-", dir=directory)
        # Once: another file may get its number.
        self._close_file = weakref.finalize(self, os.close, self._file)
        Path(name).unlink()

    def write(self, keys: Sequence[bytes], rows: Sequence[Tensor]) -> None:
        """Append rows; if they do not fit, the store is full."""
        parts, offset = [_bytes(row) for row in rows], self.size_bytes
        data = np.concatenate(parts)
        self.is_full = self.is_full or offset + data.nbytes > self._limit_bytes
        if self.is_full:
            return
        try:
            os.posix_fallocate(self._file, offset, data.nbytes)
            os.pwrite(self._file, data.data, offset)
        except OSError as error:
            self.is_full, self.error = True, str(error)
            return
        for key, row, part in zip(keys, rows, parts, strict=True):
            self._rows[key] = offset, part.nbytes, row.shape, row.dtype, zlib.crc32(part.data)
            offset += part.nbytes
        self.size_bytes = offset

    def read(self, keys: Sequence[bytes]) -> list[Tensor | None]:
        """Return rows; None for one that is missing or damaged."""
        # The system reads all of them at once, while the first ones are copied.
        for offset, num_bytes, *_ in [self._rows[key] for key in keys if key in self._rows]:
            os.posix_fadvise(self._file, offset, num_bytes, os.POSIX_FADV_WILLNEED)
        return [self._read(key) for key in keys]

    def close(self) -> None:
        """Free the file."""
        super().close()
        self._close_file()

    def _read(self, key: bytes) -> Tensor | None:
        if key not in self._rows:
            return None
        offset, num_bytes, shape, dtype, checksum = self._rows[key]
        memory: Any = np.empty(num_bytes, dtype=np.uint8)
        with suppress(OSError):
            is_whole = os.preadv(self._file, [memory.data], offset) == num_bytes
            if is_whole and zlib.crc32(memory.data) == checksum:
                return torch.from_numpy(memory).view(dtype).reshape(shape)
        del self._rows[key]
        self.damaged += 1
        return None


def free_memory_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return what the machine has free, or its container if that is less."""
    import psutil  # noqa: PLC0415  (few runs need it)

    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, LookupError):  # "max" where there is no limit
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, max(0, limit - used + int(stat["inactive_file"])))
    return int(free)
