"""Turning rows into the bytes of a store and back.

The bytes of a row are those of its values up to its true length, packed. bfloat16 and bool, which numpy
does not know or stores otherwise, travel as bytes, so that a natively kept row is the same to the last bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egeria.cache.store.rows import Integers, Mask, RowLayout, StoreError

SCALE_BYTES = 4
ALIGNMENT = 64
LARGEST_INT8 = 127


class Encoded(NamedTuple):
    """The rows of one leaf as bytes."""

    blocks: list[memoryview]
    """[b] the bytes of each row; they share memory with the rows where those are kept as they are."""
    storable: Mask
    """[b] False where the storage cannot hold the values of a row."""


class Codec:
    """Encodes and decodes one leaf.

    'fp16' rounds (relative error up to 5e-4); 'int8' rounds to 1/127 of the largest value for each sample and
    index of the row's first dimension, which is a channel of a feature map or a token of a sequence. Both
    refuse rows with values that they cannot hold (infinite, NaN, or over 65504 in fp16).
    """

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.storage = _storage(layout)
        self.slot_bytes = self.encoded_bytes(layout.longest or 0)
        self.stays_in_place = self.storage == "native" and layout.length_axis in (None, 0)
        """A row's bytes are its own memory, from the front on."""

    def encoded_bytes(self, length: int) -> int:
        """Return the size of a row of this length."""
        shape = self.layout.shape_at(length)
        if self.storage == "native":
            return math.prod(shape) * self.layout.dtype.itemsize
        if self.storage == "fp16":
            return math.prod(shape) * torch.float16.itemsize
        return math.prod(shape) + _channels(shape) * SCALE_BYTES

    def sizes(self, lengths: Integers) -> Integers:
        """Return the sizes of rows of these lengths [b]; they grow linearly."""
        if self.layout.length_axis is None:
            return np.full(len(lengths), self.slot_bytes, dtype=np.int64)
        empty = self.encoded_bytes(0)
        return empty + lengths.astype(np.int64) * (self.encoded_bytes(1) - empty)

    def memory(self, lengths: Integers) -> tuple[NDArray[np.uint8], list[memoryview]]:
        """Return room for rows of these lengths [b], as a whole [b, stride] and the block [b] of each row."""
        stride = -(-self.slot_bytes // ALIGNMENT) * ALIGNMENT
        room = np.empty((len(lengths), stride), dtype=np.uint8)
        return room, _slices(room.reshape(-1), stride, self.sizes(lengths))

    def encode(self, rows: Tensor, lengths: Integers) -> Encoded:
        """Return the bytes of rows [b, ...]; those beyond the lengths [b] are left out.

        Raises:
            StoreError: the rows are not of this leaf.
        """
        self.check(rows, int(lengths.max(initial=0)))
        rows = rows.detach().cpu()
        if self.stays_in_place:
            held = rows.contiguous()
            block_bytes = math.prod(held.shape[1:]) * held.element_size()
            blocks = _slices(_as_bytes(held), block_bytes, self.sizes(lengths))
            return Encoded(blocks, np.ones(len(rows), dtype=bool))
        found: list[memoryview] = [memoryview(b"")] * len(rows)
        storable = np.zeros(len(rows), dtype=bool)
        for length, members in self.by_length(lengths):
            packed, storable[members] = self._pack(self._cut(_take(rows, members), length))
            sizes = np.full(len(members), packed.shape[1])
            for index, block in zip(members, _slices(_as_bytes(packed), packed.shape[1], sizes), strict=True):
                found[index] = block
        return Encoded(found, storable)

    def check(self, rows: Tensor, length: int) -> None:
        """Raise `StoreError` unless the tensor [b, ...] is of this leaf and has room for rows of this length."""
        axis = self.layout.length_axis
        there = rows.shape[axis + 1] if axis is not None and rows.dim() > axis + 1 else 0
        if rows.dtype != self.layout.dtype or tuple(rows.shape[1:]) != self.layout.shape_at(there):
            raise StoreError(
                f"Rows must be {self.layout.dtype} of shape {self.layout.shape}"
                f"{'' if axis is None else f' with any length along axis {axis}'}, found {rows.dtype} of shape "
                f"{tuple(rows.shape[1:])}. A boundary that changed needs a new store."
            )
        if axis is not None and there < length:
            raise StoreError(f"Rows of length {length} need as much room along axis {axis}, found {there}.")

    def landing(self, out: Tensor, lengths: Integers) -> Landing:
        """Return where the bytes of rows of these lengths [b] are to go, so that they become rows of `out` [b, ...].

        Raises:
            StoreError: `out` is not of this leaf.
        """
        self.check(out, int(lengths.max(initial=0)))
        if self.stays_in_place and out.is_contiguous() and out.device.type == "cpu":
            return _InPlace(self, out.detach(), lengths)
        return _Unpacked(self, out.detach(), lengths)

    def unpack(self, packed: Tensor, length: int) -> Tensor:
        """Return rows [n, ...] of one length from their bytes [n, size], in the type nearest to how they are kept."""
        shape = (len(packed), *self.layout.shape_at(length))
        if self.storage == "native":
            return packed.view(self.layout.dtype).view(shape)
        if self.storage == "fp16":
            return packed.view(torch.float16).view(shape)
        channels = _channels(shape[1:])
        scales = packed[:, : channels * SCALE_BYTES].view(torch.float32)
        values = packed[:, channels * SCALE_BYTES :].view(torch.int8).view(len(packed), channels, -1)
        return torch.mul(values, scales.unsqueeze(2)).view(shape)

    def _pack(self, rows: Tensor) -> tuple[Tensor, Mask]:
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        if self.storage == "native":
            return flat.contiguous().view(torch.uint8), np.ones(len(rows), dtype=bool)
        if self.storage == "fp16":
            halves = flat.to(torch.float16).contiguous()
            return halves.view(torch.uint8), _finite(halves)
        values = flat.float().view(len(rows), _channels(tuple(rows.shape[1:])), -1)
        scales = values.abs().amax(dim=2) / LARGEST_INT8
        small = (values / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2)).round_().to(torch.int8)
        packed = torch.cat([scales.contiguous().view(torch.uint8), small.flatten(1).view(torch.uint8)], dim=1)
        return packed, np.asarray(scales.isfinite().all(dim=1))

    def _cut(self, rows: Tensor, length: int) -> Tensor:
        axis = self.layout.length_axis
        return rows if axis is None else rows.narrow(axis + 1, 0, length)

    def by_length(self, lengths: Integers) -> Iterator[tuple[int, Integers]]:
        """Yield every length and the rows that have it; one group where lengths do not matter."""
        if self.layout.length_axis is None:
            yield 0, np.arange(len(lengths))
            return
        for length in np.unique(lengths):
            yield int(length), np.flatnonzero(lengths == length)


class Landing(ABC):
    """Where the bytes of one leaf of a batch arrive, and how they become rows."""

    blocks: list[memoryview]
    """[b] to be filled with the bytes of each row."""

    @abstractmethod
    def settle(self, good: Mask) -> None:
        """Make rows of the blocks that were filled; the others may hold anything."""


class _InPlace(Landing):
    """The bytes go straight into the rows; what is left to do is to clear the padding."""

    def __init__(self, codec: Codec, out: Tensor, lengths: Integers) -> None:
        self._row_bytes = math.prod(out.shape[1:]) * out.element_size()
        self._bytes = _as_bytes(out)
        self._sizes = codec.sizes(lengths)
        self.blocks = _slices(self._bytes, self._row_bytes, self._sizes)

    def settle(self, good: Mask) -> None:
        for index in np.flatnonzero(good & (self._sizes < self._row_bytes)):
            begin, end = index * self._row_bytes + self._sizes[index], (index + 1) * self._row_bytes
            self._bytes[begin:end] = 0


class _Unpacked(Landing):
    """The bytes wait in memory of their own until all of them can be decoded together."""

    def __init__(self, codec: Codec, out: Tensor, lengths: Integers) -> None:
        self._codec, self._out, self._lengths = codec, out, lengths
        self._waiting, self.blocks = codec.memory(lengths)

    def settle(self, good: Mask) -> None:
        chosen = np.flatnonzero(good)
        for length, members in self._codec.by_length(self._lengths[chosen]):
            self._place(chosen[members], length)

    def _place(self, rows: Integers, length: int) -> None:
        size = self._codec.encoded_bytes(length)
        packed = _take(torch.from_numpy(self._waiting), rows)[:, :size]
        decoded = self._codec.unpack(packed, length)
        target, axis = self._out, self._codec.layout.length_axis
        if axis is not None:
            target = self._out.narrow(axis + 1, 0, length)
            padding = self._out.narrow(axis + 1, length, self._out.shape[axis + 1] - length)
            _put(padding, rows, torch.zeros((), dtype=self._out.dtype).expand(len(rows), *padding.shape[1:]))
        _put(target, rows, decoded)


def _storage(layout: RowLayout) -> str:
    """Return how the leaf is kept: natively where nothing would shrink."""
    kept_bytes = {"native": 0, "fp16": torch.float16.itemsize, "int8": torch.int8.itemsize}[layout.storage]
    shrinks = layout.dtype.is_floating_point and layout.dtype.itemsize > kept_bytes and math.prod(layout.shape) > 0
    return layout.storage if shrinks else "native"


def _channels(shape: tuple[int, ...]) -> int:
    """Return how many scales a row has: one for each index of the first dimension, one alone for a vector."""
    return shape[0] if len(shape) > 1 else 1


def _finite(halves: Tensor) -> Mask:
    """Return which rows hold finite numbers alone: those with all bits of an exponent set are none."""
    exponent = 0x7C00
    bits = halves.view(torch.int16).numpy() & exponent
    return np.asarray(bits.max(axis=1, initial=0) < exponent)


def _as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the memory of a contiguous tensor."""
    found: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return found


def _slices(memory: NDArray[np.uint8], stride: int, sizes: Integers) -> list[memoryview]:
    view = memory.data
    return [view[index * stride : index * stride + size] for index, size in enumerate(sizes.tolist())]


def _take(rows: Tensor, members: Integers) -> Tensor:
    return rows if len(members) == len(rows) else rows.index_select(0, torch.from_numpy(members))


def _put(target: Tensor, members: Integers, rows: Tensor) -> None:
    if len(members) == len(target):
        target.copy_(rows)
    else:
        target.index_copy_(0, torch.from_numpy(members).to(target.device), rows.to(target.device, target.dtype))
