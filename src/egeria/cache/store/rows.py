"""What a store holds: the layout of a row, and what is known of stored rows
without reading them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egeria.errors import EgeriaError

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
