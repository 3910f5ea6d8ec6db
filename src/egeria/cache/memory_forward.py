"""`MemoryForward`: training forwards that are served from memory where the input was there before,
and fill it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria import tree
from egeria.cache.forward_modes import StaleError, UserForward
from egeria.cache.samples import BatchIndices
from egeria.cache.store.codec import Integers, Mask
from egeria.cache.store.memory import RowMemory, row_keys
from egeria.cache.stored import LEAST_ROWS, SERVED_SHARE, StoredForward, take_rows
from egeria.errors import without_frames
from egeria.events import CacheUsed
from egeria.model.batch import Batch
from egeria.skipping.rows import true_lengths

LEAST_POSITIONS = 128
"""Positions of sequences that are computed together at least, where only some samples of a batch
are missing. With half as many MiniLM came to the same last bits as with all, in float32 and
bfloat16 (record 0041, one processor)."""
MORE_BATCHES = 32
"""Batches more than an epoch has between two looks at how many samples came again."""
REPEATED_BATCHES = 8
"""Of these, so many must have come again at the first look, or inputs are taken to be random."""
LEAST_SHARE = 0.05
"""Share of the samples that must have come again at each later look."""
HARMLESS = 8
"""Passes before which an attribute around the frozen layers was set otherwise, and stored rows were
right all the same, after which that is no reason to check them: it may be a counter of steps."""


@dataclass(kw_only=True, eq=False)
class MemoryForward(StoredForward):
    """Serves training forwards from memory, and fills it."""

    memory: RowMemory
    """Freed with this."""
    epoch_batches: int
    """Batches in which every sample should have come again."""
    expected_share: float
    """Share of the samples that should be found from then on, if inputs come again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_set_otherwise = False
        """Whether an attribute around the frozen layers was, before this pass."""
        self._num_agreed = 0
        """Checks for that in which nothing differed."""
        self._looked = (0, 0, 0)
        """Batches, hits and samples at the last look at how many came again."""

    def forward(self, call: UserForward, batch: Batch, _: BatchIndices | None = None) -> Any:
        """Make a training forward: replayed where all samples, or most, are known; else computed
        and recorded.

        Args:
            call: the user's forward of the model.
            batch: its arguments.

        Raises:
            EgeriaError: nothing stored can be used any more. What the call itself raises passes
                through.
        """
        self._check()
        self._check_repeats()
        if self._num_agreed < HARMLESS:
            self._is_set_otherwise = self.prefix.is_set_otherwise_around()
            self._until_check = 0 if self._is_set_otherwise else self._until_check
        num_rows = count_rows(batch)
        lengths = true_lengths(batch.kwargs, num_rows) if self.memory.has_length else None
        keys = row_keys(batch, num_rows, self.prefix.shared_arguments)
        if keys is None or (lengths is None and self.memory.has_length):
            return call(plain=True)
        self.use.batches += 1
        known = self.memory.knows(keys)
        self.payback.note(known.mean() >= SERVED_SHARE)
        is_served = (
            bool(known.any())
            and (bool(known.all()) or self.prefix.can_split)
            and self.prefix.knows(batch)
        )
        rows = self._rows(batch, keys, known, lengths) if is_served else None
        if rows is None:
            return self._record(call, batch, keys, lengths)
        return self._replay(call, batch, rows, known)

    def used(self, step: int, **own: Any) -> CacheUsed:
        """Return what it did so far, for the journal."""
        return super().used(step, size_bytes=self.memory.size_bytes, **own)

    def close(self) -> None:
        """Free the memory; more than once is no error."""
        self.memory.close()

    def _rows(
        self, batch: Batch, keys: Sequence[bytes], known: Mask, lengths: Integers | None
    ) -> list[Tensor] | None:
        """Return what crosses for a batch, computed where it is not known; None where it does not
        fit.

        Where a check is due the whole batch is computed, and what is known compared.
        """
        padded_length = None if lengths is None else int(batch.kwargs["attention_mask"].shape[1])
        rows = self.memory.read(keys, known, padded_length)
        if not self.prefix.fits(batch, rows):
            return None
        missing, whole = np.flatnonzero(~known), None
        if self._until_check <= 0:
            whole = self.prefix.compute(batch)
            self._check_rows(batch, whole, rows, known, lengths)
            self._num_agreed += self._is_set_otherwise
        self._until_check -= 1
        if len(missing):
            found = self._compute(batch, missing) if whole is None else take_rows(whole, missing)
            for leaf, own in zip(rows, found, strict=True):
                leaf[torch.from_numpy(missing)] = own.to(leaf.device)
            own_lengths = None if lengths is None else lengths[missing]
            self.memory.write([keys[row] for row in missing.tolist()], found, own_lengths)
        return rows

    def _compute(self, batch: Batch, missing: Integers) -> list[Tensor]:
        """Return some rows [b] of a batch, computed together with repeats of them where they are
        few.
        """
        mask = batch.kwargs.get("attention_mask")
        length = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 1
        least = min(LEAST_ROWS, -(-LEAST_POSITIONS // max(1, length)))
        together = np.resize(missing, max(len(missing), min(count_rows(batch), least)))
        return [
            leaf[: len(missing)] for leaf in self.prefix.compute(batch, torch.from_numpy(together))
        ]

    def _record(
        self, call: UserForward, batch: Batch, keys: Sequence[bytes], lengths: Integers | None
    ) -> Any:
        """Let the user's forward run as it is, and store what it computed."""
        self.use.misses += len(keys)
        if self.memory.is_full and self.prefix.knows(batch):
            return call(plain=True)
        if self.prefix.is_to_be_tried(batch):
            # Now, while no graph of the user's waits for its backward pass.
            self.prefix.learn(batch)
        with self.prefix.recording() as trial:
            output = call(plain=True)
        try:
            rows = self.prefix.recorded(trial)
            if not self.prefix.knows(batch):
                self.prefix.learn_from(trial, batch)
            new = np.flatnonzero(~self.memory.knows(keys))
            if len(new) and self.prefix.fits(batch, rows):
                rows = rows if len(new) == len(keys) else take_rows(rows, new)
                self.memory.write(
                    [keys[row] for row in new.tolist()],
                    rows,
                    None if lengths is None else lengths[new],
                )
        except Exception as error:
            self._failure = without_frames(error)
        return output

    def _check_repeats(self) -> None:
        """Raise `StaleError`, at a look, where too few samples have come again.

        Where the first pass over the data began in the middle of an epoch, some 32 batches have
        come again at the first look.
        """
        (batches, hits, rows), use = self._looked, self.use
        num_batches = use.batches - batches
        if num_batches < self.epoch_batches + MORE_BATCHES:
            return
        self._looked = use.batches, use.hits, use.hits + use.misses
        found, looked_up = use.hits - hits, use.hits + use.misses - rows
        least = LEAST_SHARE if batches else REPEATED_BATCHES / num_batches
        if found < least * looked_up * self.expected_share:
            raise StaleError(
                f"inputs do not come again: of the last {looked_up} samples {found} had been "
                "there before"
            )


def count_rows(batch: Batch) -> int:
    """Return the number of samples: the first axis of the first tensor that has
    one; 0 without any.
    """
    return next((tensor.shape[0] for tensor in tree.leaves(batch.arguments) if tensor.dim()), 0)
