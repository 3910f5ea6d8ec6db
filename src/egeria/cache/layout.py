"""How a batch becomes rows of a store: what its rows are known by, and in which order their
dimensions are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from egeria.cache.fingerprint import describe, described, fingerprints
from egeria.cache.samples import BatchIndices
from egeria.cache.store.codec import Floats, Integers, RowLayout
from egeria.model.batch import Batch
from egeria.skipping.crossing import Leaf
from egeria.skipping.rows import true_lengths


@dataclass(frozen=True, slots=True)
class Layouts:
    """How the leaves that cross a boundary become rows of a store, and back.

    A feature map in channels_last is stored with its channels last: a convolution that gets it back
    in another order of memory would take another way, to other last bits, and more slowly.
    """

    stored: tuple[RowLayout, ...]
    orders: tuple[tuple[int, ...], ...]
    """For each leaf the dimensions of a batch [B, ...] from the outermost in memory to the
    innermost."""

    @classmethod
    def of(cls, leaves: Sequence[Leaf], rows: Sequence[Tensor], *, longest: int | None) -> Layouts:
        """Lay out what crosses.

        Args:
            leaves: what crosses.
            rows: an example of each [B, ...].
            longest: the greatest padded length seen so far; None where samples have no length.
        """
        orders = tuple(_order(tensor) for tensor in rows)
        stored = []
        for leaf, tensor, order in zip(leaves, rows, orders, strict=True):
            shape = list(tensor.shape[1:])
            if leaf.length_axis is not None and longest is not None:
                shape[leaf.length_axis] = max(shape[leaf.length_axis], longest)
            axis = None if leaf.length_axis is None else order.index(leaf.length_axis + 1) - 1
            shuffled = tuple(shape[dimension - 1] for dimension in order[1:])
            stored.append(RowLayout(shape=shuffled, dtype=tensor.dtype, length_axis=axis))
        return cls(tuple(stored), orders)

    @property
    def has_length(self) -> bool:
        """Whether rows are cut to the lengths of their samples."""
        return any(layout.length_axis is not None for layout in self.stored)

    def fits_store(self, rows: Sequence[Tensor]) -> bool:
        """Tell whether rows [B, ...] in the order of the store are of these layouts, but for their
        length.
        """
        return len(rows) == len(self.stored) and all(map(RowLayout.is_of, self.stored, rows))

    def to_store(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return views of rows [B, ...] in the order of the store."""
        return [tensor.permute(order) for tensor, order in zip(rows, self.orders, strict=True)]

    def from_store(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return views of stored rows in the order of the model [B, ...]."""
        return [
            tensor.permute([order.index(dimension) for dimension in range(len(order))])
            for tensor, order in zip(rows, self.orders, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """What the rows of a batch, or some of them, are known by in the store."""

    number: int
    """Of the batch."""
    positions: Integers
    """[B] in the store: the numbers of the samples."""
    prints: Floats
    """[B, 2] of the model's input, and of how the model is called."""
    lengths: Integers | None
    """[B] without padding, where rows have lengths."""
    padded_length: int | None
    """With padding."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        indices: BatchIndices,
        *,
        has_length: bool,
        ignores_padding: bool,
    ) -> BatchKeys | None:
        """Return those of a batch, or None if the model is called with something else than its
        samples.

        Args:
            batch: arguments of the call.
            indices: the samples that the loader handed out last.
            has_length: whether rows have lengths.
            ignores_padding: whether rows are the same whatever length the batch is padded to; else
                that counts.
        """
        num_rows = len(indices.samples)
        prints = fingerprints(batch.args, batch.kwargs, num_rows)
        if np.isnan(prints).any():
            return None
        prints = described(prints, describe(batch, num_rows, shapes=not ignores_padding))
        lengths = true_lengths(batch.kwargs, num_rows) if has_length else None
        padded_length = None if lengths is None else int(batch.kwargs["attention_mask"].shape[1])
        return cls(indices.number, indices.samples, prints, lengths, padded_length)

    def take(self, rows: Integers) -> BatchKeys:
        """Return those of some rows [b]."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return BatchKeys(
            self.number, self.positions[rows], self.prints[rows], lengths, self.padded_length
        )


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions by falling stride, the batch first."""
    strides = tensor.stride()
    return (0, *sorted(range(1, tensor.dim()), key=lambda dimension: -strides[dimension]))
