"""Encoding rows as the bytes of a store, and decoding them.

The bytes of a row are those of its values up to its true length, packed, leaf after leaf. bfloat16 and bool, which
numpy does not know or stores otherwise, are handled as bytes, so that a natively kept row is the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egeria.cache.store.rows import Floats, Integers, Mask, RowLayout, StoreError, as_positions

SCALE_BYTES = 4
ALIGNMENT = 64
LARGEST_INT8 = 127

Finish = Callable[[Mask], None]
"""Turns the bytes of the rows [b] where a mask is True into tensors; the other rows may hold anything."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows of a batch that can be stored, by rising position, each position once."""

    positions: Integers
    """[n]"""
    fingerprints: Floats
    """[n, 2]"""
    lengths: Integers
    """[n]"""
    blocks: list[tuple[memoryview, ...]]
    """[n] for each row the bytes of its leaves; they share memory with the rows where those are kept as they are."""


class RowCodec:
    """Encodes and decodes whole rows: one tensor for each leaf.

    Args:
        layouts: of the leaves.
    """

    def __init__(self, layouts: Sequence[RowLayout]) -> None:
        self.layouts = tuple(layouts)
        self._leaves = [_LeafCodec(layout) for layout in layouts]
        self.row_bytes = sum(leaf.slot_bytes for leaf in self._leaves)
        """Size of the longest row."""

    def sizes(self, lengths: Integers) -> Integers:
        """Return the sizes [b] of rows of these lengths [b]; a length that does not fit counts as the longest."""
        total = np.zeros(len(lengths), dtype=np.int64)
        for leaf in self._leaves:
            total += leaf.sizes(np.clip(lengths, 0, leaf.layout.longest))
        return total

    def fits(self, lengths: Integers, tensors: Sequence[Tensor] | None = None) -> Mask:
        """Return which lengths [b] are possible and, if tensors [b, ...] are given, fit into them."""
        fits = np.ones(len(lengths), dtype=bool)
        for index, leaf in enumerate(self._leaves):
            if leaf.layout.longest is not None:
                room = leaf.layout.longest if tensors is None else min(leaf.room(tensors[index]), leaf.layout.longest)
                fits &= (lengths > 0) & (lengths <= room)
        return fits

    def check(self, tensors: Sequence[Tensor], num_rows: int) -> None:
        """Check that there is a tensor [num_rows, ...] for each leaf.

        Raises:
            StoreError: there is not.
        """
        found = [len(tensor) if tensor.dim() else 0 for tensor in tensors]
        if found != [num_rows] * len(self._leaves):
            raise StoreError(
                f"A batch must have {len(self._leaves)} leaves of {num_rows} rows, found leaves of {found} rows."
            )

    def encode(
        self, positions: Any, rows: Sequence[Tensor], fingerprints: Any, lengths: Any, *, capacity: int
    ) -> EncodedRows:
        """Return what of a batch of `b` rows can be stored. Of several rows for one position the last counts.

        Args:
            positions: [b]; rows of positions not in 0 ... `capacity` - 1 are left out.
            rows: a tensor [b, ...] for each leaf.
            fingerprints: [b, 2]
            lengths: [b]; None for as long as the tensors are. Rows that are too long are left out.
            capacity: positions of the store.

        Raises:
            StoreError: the rows are not what the store is for.
        """
        places, prints = as_positions(positions), np.asarray(fingerprints, dtype=np.float32)
        self.check(rows, len(places))
        if prints.shape != (len(places), 2):
            raise StoreError(f"Fingerprints must be of shape {(len(places), 2)}, found {prints.shape}.")
        sizes = self._lengths(rows, lengths)
        chosen = _last_of_each(places, (places >= 0) & (places < capacity) & self.fits(sizes, rows))
        kept = [leaf if len(chosen) == len(leaf) else leaf[torch.from_numpy(chosen).to(leaf.device)] for leaf in rows]
        encoded = [codec.encode(leaf, sizes[chosen]) for codec, leaf in zip(self._leaves, kept, strict=True)]
        order = np.flatnonzero(np.logical_and.reduce([storable for _, storable in encoded]))
        order = order[np.argsort(places[chosen[order]], kind="stable")]
        found = chosen[order]
        blocks = [tuple(blocks[index] for blocks, _ in encoded) for index in order]
        return EncodedRows(places[found], prints[found], sizes[found], blocks)

    def room(self, lengths: Integers) -> list[tuple[memoryview, ...]]:
        """Return memory for rows of these lengths [b]: for each row a block for each leaf."""
        return list(zip(*(leaf.room_for(lengths)[1] for leaf in self._leaves), strict=True))

    def decode_into(self, out: Sequence[Tensor], lengths: Integers) -> tuple[list[tuple[memoryview, ...]], Finish]:
        """Return where the bytes of rows of these lengths [b] are to be put, and what then makes rows of them.

        Args:
            out: a tensor [b, ...] for each leaf.
            lengths: [b]

        Raises:
            StoreError: `out` is not for these rows.
        """
        parts = [leaf.decode_into(tensor.detach(), lengths) for leaf, tensor in zip(self._leaves, out, strict=True)]

        def finish(good: Mask) -> None:
            for _, finish_leaf in parts:
                finish_leaf(good)

        return list(zip(*(blocks for blocks, _ in parts), strict=True)), finish

    def _lengths(self, rows: Sequence[Tensor], lengths: Any) -> Integers:
        """Return the lengths [b]: those given, else what the rows are padded to, else zeros."""
        if lengths is not None:
            return np.broadcast_to(np.asarray(lengths, dtype=np.int64), (len(rows[0]),))
        pairs = zip(self._leaves, rows, strict=True)
        padded = [leaf.room(tensor) for leaf, tensor in pairs if leaf.layout.length_axis is not None]
        return np.full(len(rows[0]), min(padded, default=0), dtype=np.int64)


class _LeafCodec:
    """Encodes and decodes one leaf.

    'fp16' rounds (relative error up to 5e-4); 'int8' rounds to 1/127 of the largest value for each sample and
    index of the row's first dimension, which is a channel of a feature map or a token of a sequence. Both
    refuse rows with values that they cannot hold (infinite, NaN, or over 65504 in fp16).
    """

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.storage = _storage(layout)
        self.slot_bytes = self.encoded_bytes(layout.longest or 0)
        self.is_verbatim = self.storage == "native" and layout.length_axis in (None, 0)
        """A row's bytes are its own memory, from the front on."""

    def encoded_bytes(self, length: int) -> int:
        shape = self.layout.shape_at(length)
        if self.storage == "native":
            return math.prod(shape) * self.layout.dtype.itemsize
        if self.storage == "fp16":
            return math.prod(shape) * torch.float16.itemsize
        return math.prod(shape) + _num_scales(shape) * SCALE_BYTES

    def sizes(self, lengths: Integers) -> Integers:
        """Return the sizes of rows of these lengths [b]; they grow linearly."""
        if self.layout.length_axis is None:
            return np.full(len(lengths), self.slot_bytes, dtype=np.int64)
        empty = self.encoded_bytes(0)
        return empty + lengths.astype(np.int64) * (self.encoded_bytes(1) - empty)

    def room(self, rows: Tensor) -> int:
        """Return the greatest length that rows [b, ...] have room for; 0 without a length axis."""
        axis = self.layout.length_axis
        return rows.shape[axis + 1] if axis is not None and rows.dim() > axis + 1 else 0

    def encode(self, rows: Tensor, lengths: Integers) -> tuple[list[memoryview], Mask]:
        """Return the bytes [b] of rows [b, ...] up to their lengths [b], and which rows can be stored."""
        self._check(rows, int(lengths.max(initial=0)))
        rows = rows.detach().cpu()
        if self.is_verbatim:
            held = rows.contiguous()
            row_bytes = math.prod(held.shape[1:]) * held.element_size()
            return _slices(_as_bytes(held), row_bytes, self.sizes(lengths)), np.ones(len(rows), dtype=bool)
        found: list[memoryview] = [memoryview(b"")] * len(rows)
        storable = np.zeros(len(rows), dtype=bool)
        for length, members in self._by_length(lengths):
            axis, chosen = self.layout.length_axis, _take(rows, members)
            packed, storable[members] = self._pack(chosen if axis is None else chosen.narrow(axis + 1, 0, length))
            sizes = np.full(len(members), packed.shape[1])
            for index, block in zip(members, _slices(_as_bytes(packed), packed.shape[1], sizes), strict=True):
                found[index] = block
        return found, storable

    def room_for(self, lengths: Integers) -> tuple[NDArray[np.uint8], list[memoryview]]:
        """Return memory for rows of these lengths [b], as a whole [b, stride] and the block [b] of each row."""
        stride = -(-self.slot_bytes // ALIGNMENT) * ALIGNMENT
        room = np.empty((len(lengths), stride), dtype=np.uint8)
        return room, _slices(room.reshape(-1), stride, self.sizes(lengths))

    def decode_into(self, out: Tensor, lengths: Integers) -> tuple[list[memoryview], Finish]:
        self._check(out, int(lengths.max(initial=0)))
        if self.is_verbatim and out.is_contiguous() and out.device.type == "cpu":
            # The bytes go straight into the rows.
            memory, row_bytes = _as_bytes(out), math.prod(out.shape[1:]) * out.element_size()
            sizes = self.sizes(lengths)
            return _slices(memory, row_bytes, sizes), partial(_clear_padding, memory, row_bytes, sizes)
        room, blocks = self.room_for(lengths)
        return blocks, partial(self._unpack, torch.from_numpy(room), lengths, out)

    def _check(self, rows: Tensor, length: int) -> None:
        """Raise `StoreError` unless the tensor [b, ...] is of this leaf and has room for rows of this length."""
        axis, room = self.layout.length_axis, self.room(rows)
        if rows.dtype != self.layout.dtype or tuple(rows.shape[1:]) != self.layout.shape_at(room):
            raise StoreError(
                f"Rows must be {self.layout.dtype} of shape {self.layout.shape}"
                f"{'' if axis is None else f' with any length along axis {axis}'}, found {rows.dtype} of shape "
                f"{tuple(rows.shape[1:])}. A boundary that changed needs a new store."
            )
        if axis is not None and room < length:
            raise StoreError(f"Rows of length {length} need as much room along axis {axis}, found {room}.")

    def _pack(self, rows: Tensor) -> tuple[Tensor, Mask]:
        """Return the bytes [n, size] of rows of one length, and which of them the storage can hold."""
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        if self.storage == "native":
            return flat.contiguous().view(torch.uint8), np.ones(len(rows), dtype=bool)
        if self.storage == "fp16":
            halves = flat.to(torch.float16).contiguous()
            return halves.view(torch.uint8), _finite(halves)
        values = flat.float().view(len(rows), _num_scales(tuple(rows.shape[1:])), -1)
        scales = values.abs().amax(dim=2) / LARGEST_INT8
        small = (values / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2)).round_().to(torch.int8)
        packed = torch.cat([scales.contiguous().view(torch.uint8), small.flatten(1).view(torch.uint8)], dim=1)
        return packed, np.asarray(scales.isfinite().all(dim=1))

    def _unpack(self, room: Tensor, lengths: Integers, out: Tensor, good: Mask) -> None:
        """Put the rows whose bytes lie in `room` [b, stride] into `out` [b, ...], zeros behind their lengths [b]."""
        chosen = np.flatnonzero(good)
        for length, members in self._by_length(lengths[chosen]):
            rows, target, axis = chosen[members], out, self.layout.length_axis
            decoded = self._values(_take(room, rows)[:, : self.encoded_bytes(length)], length)
            if axis is not None:
                target = out.narrow(axis + 1, 0, length)
                padding = out.narrow(axis + 1, length, out.shape[axis + 1] - length)
                _put(padding, rows, torch.zeros((), dtype=out.dtype).expand(len(rows), *padding.shape[1:]))
            _put(target, rows, decoded)

    def _values(self, packed: Tensor, length: int) -> Tensor:
        """Return rows [n, ...] of one length from their bytes [n, size], in the type nearest to how they are kept."""
        shape = (len(packed), *self.layout.shape_at(length))
        if self.storage == "native":
            return packed.view(self.layout.dtype).view(shape)
        if self.storage == "fp16":
            return packed.view(torch.float16).view(shape)
        num_scales = _num_scales(shape[1:])
        scales = packed[:, : num_scales * SCALE_BYTES].view(torch.float32)
        values = packed[:, num_scales * SCALE_BYTES :].view(torch.int8).view(len(packed), num_scales, -1)
        return torch.mul(values, scales.unsqueeze(2)).view(shape)

    def _by_length(self, lengths: Integers) -> Iterator[tuple[int, Integers]]:
        """Yield every length and the rows that have it; one group where lengths do not matter."""
        if self.layout.length_axis is None:
            yield 0, np.arange(len(lengths))
            return
        for length in np.unique(lengths):
            yield int(length), np.flatnonzero(lengths == length)


def _storage(layout: RowLayout) -> str:
    """Return how the leaf is kept: natively where nothing would shrink."""
    kept_bytes = {"native": 0, "fp16": torch.float16.itemsize, "int8": torch.int8.itemsize}[layout.storage]
    shrinks = layout.dtype.is_floating_point and layout.dtype.itemsize > kept_bytes and math.prod(layout.shape) > 0
    return layout.storage if shrinks else "native"


def _num_scales(shape: tuple[int, ...]) -> int:
    """Return how many scales a row has: one for each index of the first dimension, one alone for a vector."""
    return shape[0] if len(shape) > 1 else 1


def _finite(halves: Tensor) -> Mask:
    """Return which rows hold only finite numbers; the others have all bits of an exponent set."""
    exponent = 0x7C00
    bits = halves.view(torch.int16).numpy() & exponent
    return np.asarray(bits.max(axis=1, initial=0) < exponent)


def _last_of_each(places: Integers, fits: Mask) -> Integers:
    """Return which rows to store, in their order: the last for each position, if it fits."""
    _, from_the_end = np.unique(places[::-1], return_index=True)
    last = np.sort(len(places) - 1 - from_the_end)
    return np.asarray(last[fits[last]], dtype=np.int64)


def _clear_padding(memory: NDArray[np.uint8], row_bytes: int, sizes: Integers, good: Mask) -> None:
    for index in np.flatnonzero(good & (sizes < row_bytes)):
        memory[index * row_bytes + sizes[index] : (index + 1) * row_bytes] = 0


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
