"""Encoding rows as the bytes of a store, and decoding them.

The bytes of a row are those of its values up to its true length, packed, leaf after leaf. bfloat16
and bool, which numpy does not know or stores otherwise, are handled as bytes, so that a row
comes back the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egeria.errors import EgeriaError

ALIGNMENT = 64


def _take(rows: Tensor, members: Integers) -> Tensor:
    """Return some rows [b, ...]; `members` rise, so that as many as there are, are all."""
    return (
        rows
        if len(members) == len(rows)
        else rows.index_select(0, torch.from_numpy(members).to(rows.device))
    )


Mask = NDArray[np.bool_]
Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


class StoreError(EgeriaError):
    """The store of activations cannot be made, read or written; training continues without it."""


@contextmanager
def as_store_error(what: str) -> Iterator[None]:
    """Turn what the operating system reports into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error}.") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """One leaf of a row: what crosses the boundary for one sample.

    Rows are kept in the order of their dimensions. For a tensor in another order of memory
    (channels_last) give the shape in that order, and permuted views to `read` and `write`.
    """

    shape: tuple[int, ...]
    """Of one row, without the batch axis. Along `length_axis` it is the longest that can be
    stored."""
    dtype: torch.dtype
    """Of the rows that come in and go out."""
    length_axis: int | None = None
    """Axis of the row that follows the length of the sample; what lies beyond the length is not
    stored."""

    def __post_init__(self) -> None:
        if self.length_axis is not None and not 0 <= self.length_axis < len(self.shape):
            raise StoreError(
                f"The length axis must be one of a row {self.shape}, found {self.length_axis}."
            )

    def shape_at(self, length: int | None) -> tuple[int, ...]:
        """Return the shape of a row of this length, of the longest for None; without a length axis
        the one there is.
        """
        axis = self.length_axis
        return (
            self.shape
            if axis is None or length is None
            else (*self.shape[:axis], length, *self.shape[axis + 1 :])
        )

    def room(self, rows: Tensor) -> int:
        """Return the greatest length that rows [b, ...] have room for; 0 without a length axis."""
        axis = self.length_axis
        return 0 if axis is None or rows.dim() <= axis + 1 else rows.shape[axis + 1]

    def is_of(self, rows: Tensor) -> bool:
        """Return whether rows [b, ...] are of this leaf, of whatever length."""
        return rows.dtype == self.dtype and tuple(rows.shape[1:]) == self.shape_at(self.room(rows))


@dataclass(frozen=True, slots=True)
class Rows:
    """What a store knows of `b` positions, without reading them."""

    valid: Mask
    """[b] whether a row is stored."""
    fingerprints: Floats
    """[b, 2] of the model's input it was computed from; zeros where there is none."""
    lengths: Integers
    """[b] along the length axis; zeros where there is none."""


def as_positions(positions: Any) -> Integers:
    """Return the positions as an array [b]."""
    return np.atleast_1d(np.asarray(positions, dtype=np.int64))


Bytes = NDArray[np.uint8]
Finish = Callable[[Mask], None]
"""Turns the bytes of the rows [b] where a mask is True into tensors; the other rows may hold
anything."""


class RowCodec:
    """Encodes and decodes whole rows: one tensor for each leaf."""

    def __init__(self, layouts: Sequence[RowLayout]) -> None:
        self._leaves = [_LeafCodec(layout) for layout in layouts]
        self.row_bytes = sum(leaf.slot_bytes for leaf in self._leaves)
        """Size of the longest row."""

    def sizes(self, lengths: Integers) -> Integers:
        """Return the sizes [b] of rows of these lengths [b]; a length that does not fit counts as
        the longest.
        """
        return np.asarray(
            sum(leaf.sizes(np.clip(lengths, 0, leaf.longest)) for leaf in self._leaves)
        )

    def room(self, tensors: Sequence[Tensor]) -> int:
        """Return the greatest length that all of the tensors [b, ...] have room for; 0 if no row
        has a length.
        """
        pairs = zip(self._leaves, tensors, strict=True)
        return min(
            (leaf.layout.room(tensor) for leaf, tensor in pairs if leaf.axis is not None), default=0
        )

    def fits(self, lengths: Integers, tensors: Sequence[Tensor]) -> Mask:
        """Return which lengths [b] are possible and fit into the tensors [b, ...]."""
        limits = [leaf.longest for leaf in self._leaves if leaf.axis is not None]
        if not limits:
            return np.ones(len(lengths), dtype=bool)
        return (lengths > 0) & (lengths <= min(*limits, self.room(tensors)))

    def check(self, tensors: Sequence[Tensor], num_rows: int) -> None:
        """Raise `StoreError` unless there is a tensor [num_rows, ...] for each leaf."""
        found = [len(tensor) if tensor.dim() else 0 for tensor in tensors]
        if found != [num_rows] * len(self._leaves):
            raise StoreError(
                f"A batch must have {len(self._leaves)} leaves of {num_rows} rows, found leaves "
                f"of {found} rows."
            )

    def encode(
        self, rows: Sequence[Tensor], lengths: Integers, chosen: Integers
    ) -> list[tuple[memoryview, ...]]:
        """Return for each of the chosen rows [n] of a batch the bytes of its leaves.

        They share memory with the rows where those are in one piece. Raises `StoreError` if the
        tensors [b, ...] are not for these rows.
        """
        pairs = zip(self._leaves, rows, strict=True)
        encoded = [leaf.encode(_take(tensor, chosen), lengths[chosen]) for leaf, tensor in pairs]
        return list(zip(*encoded, strict=True))

    def decode_into(
        self, out: Sequence[Tensor], lengths: Integers
    ) -> tuple[list[tuple[memoryview, ...]], tuple[Finish, ...]]:
        """Return where the bytes of rows of these lengths [b] are to be put, and what then makes
        rows of them in `out`.

        Raises `StoreError` if the tensors [b, ...] are not for these rows.
        """
        pairs = zip(self._leaves, out, strict=True)
        blocks, finishes = zip(
            *(leaf.decode_into(tensor.detach(), lengths) for leaf, tensor in pairs), strict=True
        )
        return list(zip(*blocks, strict=True)), finishes


class _LeafCodec:
    """Encodes and decodes one leaf."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout, self.axis = layout, layout.length_axis
        self.longest = 0 if self.axis is None else layout.shape[self.axis]
        self.slot_bytes = self._size(self.longest)
        self._is_verbatim = self.axis in (None, 0)
        """A row's bytes are its own memory, from the front on."""

    def sizes(self, lengths: Integers) -> Integers:
        """Return the sizes of rows of these lengths [b]; they grow linearly."""
        return self._size(0) + lengths.astype(np.int64) * (self._size(1) - self._size(0))

    def encode(self, rows: Tensor, lengths: Integers) -> list[memoryview]:
        """Return the bytes [b] of rows [b, ...] up to their lengths [b]."""
        self._check(rows, lengths)
        rows = rows.detach().cpu()
        if self._is_verbatim:
            return _blocks(_as_bytes(rows.contiguous()), self.sizes(lengths))
        found: list[memoryview] = [memoryview(b"")] * len(rows)
        for length, members in self._by_length(lengths):
            packed = self._cut(_take(rows, members), length).contiguous()
            for index, block in zip(members, _as_bytes(packed), strict=True):
                found[index] = block.data
        return found

    def decode_into(self, out: Tensor, lengths: Integers) -> tuple[list[memoryview], Finish]:
        self._check(out, lengths)
        sizes = self.sizes(lengths)
        if self._is_verbatim and out.is_contiguous() and out.device.type == "cpu":
            memory = _as_bytes(out)  # the bytes go straight into the rows
            return _blocks(memory, sizes), partial(_clear_padding, memory, sizes)
        memory = np.empty((len(out), -(-self.slot_bytes // ALIGNMENT) * ALIGNMENT), dtype=np.uint8)
        return _blocks(memory, sizes), partial(self._unpack, torch.from_numpy(memory), lengths, out)

    def _size(self, length: int) -> int:
        return math.prod(self.layout.shape_at(length)) * self.layout.dtype.itemsize

    def _check(self, rows: Tensor, lengths: Integers) -> None:
        """Raise `StoreError` unless the tensor [b, ...] is of this leaf and has room for rows of
        these lengths.
        """
        room, longest = self.layout.room(rows), int(lengths.max(initial=0))
        if not self.layout.is_of(rows):
            raise StoreError(
                f"Rows must be {self.layout.dtype} of shape {self.layout.shape}"
                f"{'' if self.axis is None else f' with any length along axis {self.axis}'}, "
                f"found {rows.dtype} of "
                f"shape {tuple(rows.shape[1:])}. A boundary that changed needs a new store."
            )
        if self.axis is not None and room < longest:
            raise StoreError(
                f"Rows of length {longest} need as much room along axis {self.axis}, found {room}."
            )

    def _unpack(self, memory: Tensor, lengths: Integers, out: Tensor, good: Mask) -> None:
        """Put the rows whose bytes lie in `memory` [b, stride] into `out` [b, ...], zeros behind
        their lengths [b].
        """
        chosen = np.flatnonzero(good)
        for length, members in self._by_length(lengths[chosen]):
            rows = chosen[members]
            packed = _take(memory, rows)[:, : self._size(length)].view(self.layout.dtype)
            decoded = packed.view(len(rows), *self.layout.shape_at(length))
            if len(rows) == len(out) and self.axis is None:
                out.copy_(decoded)
                continue
            index = torch.from_numpy(rows).to(out.device)
            if self.axis is not None:
                out.index_fill_(0, index, 0)
            self._cut(out, length).index_copy_(0, index, decoded.to(out.device))

    def _cut(self, rows: Tensor, length: int) -> Tensor:
        """Return a view of rows [b, ...] up to a length."""
        return rows if self.axis is None else rows.narrow(self.axis + 1, 0, length)

    def _by_length(self, lengths: Integers) -> Iterator[tuple[int, Integers]]:
        """Yield every length and the rows that have it; one group where lengths do not matter."""
        for length in np.unique(lengths) if self.axis is not None else (0,):
            yield int(length), np.flatnonzero((lengths == length) | (self.axis is None))


def _as_bytes(rows: Tensor) -> Bytes:
    """Return the memory of contiguous rows, as bytes [b, n]."""
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    found: Bytes = rows.view(-1).view(torch.uint8).numpy().reshape(len(rows), row_bytes)
    return found


def _blocks(memory: Bytes, sizes: Integers) -> list[memoryview]:
    """Return the front of each row of memory [b, n], of these sizes [b]."""
    view, stride = memory.reshape(-1).data, memory.shape[1]
    return [
        view[index * stride : index * stride + size] for index, size in enumerate(sizes.tolist())
    ]


def _clear_padding(memory: Bytes, sizes: Integers, good: Mask) -> None:
    for index in np.flatnonzero(good & (sizes < memory.shape[1])):
        memory[index, sizes[index] :] = 0
