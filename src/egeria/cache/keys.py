"""What the rows of a batch are known by in the store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from egeria.cache.fingerprint import fingerprints
from egeria.cache.samples import BatchIndices
from egeria.cache.store.rows import Floats, Integers
from egeria.layers.batch import Batch
from egeria.skipping.rows import true_lengths


@dataclass(frozen=True, slots=True)
class Keys:
    """Of one batch, or of some of its rows."""

    number: int
    """Of the batch."""
    positions: Integers
    """[B] in the store."""
    prints: Floats
    """[B, 2] of the model's input."""
    lengths: Integers | None
    """[B] without padding, where rows have lengths."""
    padded_length: int | None
    """With padding."""

    @classmethod
    def of(cls, batch: Batch, indices: BatchIndices, positions: Integers, *, has_length: bool) -> Keys | None:
        """Return those of a batch, or None if the model is called with something else than its samples.

        Args:
            batch: arguments of the call.
            indices: the samples that the loader handed out last.
            positions: of these in the store [B].
            has_length: whether rows have lengths.
        """
        prints = fingerprints(batch.args, batch.kwargs, len(indices.samples))
        if np.isnan(prints).any():
            return None
        lengths = true_lengths(batch.kwargs, len(indices.samples)) if has_length else None
        padded_length = None if lengths is None else int(batch.kwargs["attention_mask"].shape[1])
        return cls(indices.number, positions, prints, lengths, padded_length)

    def take(self, rows: Integers) -> Keys:
        """Return those of some rows [b]."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return Keys(self.number, self.positions[rows], self.prints[rows], lengths, self.padded_length)
