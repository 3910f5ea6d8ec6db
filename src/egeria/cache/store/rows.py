"""What a store holds: the layout of a row, what is known of stored rows, and the contract of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egeria.errors import EgeriaError

STORAGES = ("native", "fp16", "int8")

Mask = NDArray[np.bool_]
Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


class StoreError(EgeriaError):
    """The store of activations cannot be made, read or written; training continues without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """One leaf of a row: what crosses the boundary for one sample, and how it is kept.

    Rows are kept in the order of their dimensions. For a tensor in another order of memory
    (channels_last) give the shape in that order, and permuted views to `read` and `write`.
    """

    shape: tuple[int, ...]
    """Of one row, without the batch axis. Along `length_axis` it is the longest that can be stored."""
    dtype: torch.dtype
    """Of the rows that come in and go out."""
    storage: str = "native"
    """'native' keeps every bit, 'fp16' half of float32, 'int8' a byte a value and a scale for each index of the first
    dimension. Values that are no floating-point numbers, or that would not shrink, are always kept natively."""
    length_axis: int | None = None
    """Axis of the row that follows the length of the sample; what lies beyond the length is not stored."""

    def __post_init__(self) -> None:
        if self.storage not in STORAGES:
            raise StoreError(f"The storage of a row must be one of {', '.join(STORAGES)}, found {self.storage!r}.")
        if self.length_axis is not None and not 0 <= self.length_axis < len(self.shape):
            raise StoreError(f"The length axis must be one of a row {self.shape}, found {self.length_axis}.")

    @property
    def longest(self) -> int | None:
        """The greatest length that fits; None where rows have no length."""
        return None if self.length_axis is None else self.shape[self.length_axis]

    def shape_at(self, length: int) -> tuple[int, ...]:
        """Return the shape of a row of this length; without a length axis the one there is."""
        axis = self.length_axis
        return self.shape if axis is None else (*self.shape[:axis], length, *self.shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Rows:
    """What a store knows of `b` positions, without reading them."""

    valid: Mask
    """[b] whether a row is stored."""
    fingerprints: Floats
    """[b, 2] of the model's input it was computed from; zeros where there is none."""
    lengths: Integers
    """[b] along the length axis; zeros where there is none."""


class Store(Protocol):
    """Rows by position. A store may forget any row at any time, and never returns a wrong one."""

    def lookup(self, positions: Any) -> Rows:
        """Return what is known of the positions [b]; never waits for a disk."""

    def advise(self, positions: Any) -> None:
        """Get ready for these positions: they will be looked up and read soon. May wait for a disk."""

    def read(self, positions: Any, out: Sequence[Tensor], known: Rows | None = None) -> Mask:
        """Fill `out[k][i]` for each leaf; return a mask [b] of the rows that are there."""

    def write(self, positions: Any, rows: Sequence[Tensor], fingerprints: Any, lengths: Any = None) -> int:
        """Store rows, one tensor [b, ...] a leaf; return how many were."""

    def close(self, *, remove: bool = True) -> None:
        """Let go of everything; with `remove` nothing of it stays on the disk."""


def as_positions(positions: Any) -> Integers:
    """Return the positions as an array [b]."""
    return np.atleast_1d(np.asarray(positions, dtype=np.int64))


def unchanged(known: Rows, valid: Mask, fingerprints: Floats, lengths: Integers) -> Mask:
    """Return which rows are still those of an earlier lookup; one with a NaN for a fingerprint never is."""
    same = known.valid & valid & (known.lengths == lengths)
    return np.asarray(same & (known.fingerprints == fingerprints).all(axis=1))
