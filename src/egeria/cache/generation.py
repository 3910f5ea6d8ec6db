"""One generation: the stored activations of one boundary, and the training
forwards that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria.cache.fetcher import DEPTH, Fetcher, PrefetchedBatch
from egeria.cache.fingerprint import agree
from egeria.cache.forward_modes import PaybackCheck, StaleError, Unchanged, UserForward
from egeria.cache.layout import BatchKeys, Layouts
from egeria.cache.loader import SampleFeed
from egeria.cache.samples import BatchIndices
from egeria.cache.store.disk import DiskStore
from egeria.cache.store.rows import Integers, Mask
from egeria.cache.writer import RowsInMemory, Writer
from egeria.errors import EgeriaError
from egeria.events import CacheUsed
from egeria.layers.batch import Batch
from egeria.skipping.prefix import Prefix
from egeria.skipping.probe import tolerance

LEAST_ROWS = 16
"""Rows that are computed together at least: a matrix product of very few rows takes another way, to
other last bits."""
LEAST_CHANGED, MOST_CHANGED = 32, 0.1
"""Rows found that were stored for another input, at least, and their share of all rows found, above
which inputs are taken to be augmented at random."""
CHANGED = (
    "samples come with other inputs than those that their activations were stored for, as where "
    "inputs are augmented at random"
)


@dataclass(slots=True)
class Use:
    """What a generation did so far; samples, but for the batches."""

    hits: int = 0
    misses: int = 0
    mismatches: int = 0
    batches: int = 0
    stalls: int = 0
    checks: int = 0
    largest_error: float = 0.0


@dataclass(kw_only=True, eq=False)
class Generation:
    """Serves training forwards from a store, and fills it."""

    prefix: Prefix
    """The frozen front."""
    layouts: Layouts
    """How what it puts out is laid out in the store."""
    store: DiskStore
    """The rows; closed with the generation."""
    feed: SampleFeed
    """Knows the samples of the next batches."""
    number: int
    verify_batches: int
    """Batches from the store between two checks."""
    payback: PaybackCheck

    def __post_init__(self) -> None:
        self.use = Use()
        self.writer = Writer(self.store)
        self._device = next(self.prefix.model.parameters()).device
        self.fetcher = Fetcher(self.store, device=self._device, pending=self.writer.pending)
        self._front = Unchanged(self.prefix)
        self._failure: Exception | None = None
        self._until_check = 0
        self._num_found = 0

    def forward(self, call: UserForward, batch: Batch, indices: BatchIndices | None) -> Any:
        """Make a training forward: replayed where the store has the samples, computed and recorded
        where not.

        Args:
            call: the user's forward of the model.
            batch: its arguments.
            indices: the samples of the batch; None where they are not known.

        Raises:
            EgeriaError: nothing stored can be used any more. What the call itself raises passes
                through.
        """
        self._check()
        if indices is None:
            return call(plain=True)
        keys = BatchKeys.of(
            batch,
            indices,
            has_length=self.layouts.has_length,
            ignores_padding=self.store.ignores_padding,
        )
        if keys is None:  # the model is called with something else than the batch
            return call(plain=True)
        held = self.fetcher.take(keys.number, keys.positions, keys.padded_length)
        self.fetcher.ahead(
            [(entry.number, entry.samples) for entry in self.feed.upcoming(DEPTH + 2)]
        )
        hits = self._judge(held, keys)
        fits = bool(hits.any()) and self._can_replay(batch, held, hits)
        self.payback.note(fits and bool(hits.all()))
        if not fits:
            return self._record(call, keys)
        self._prepare(batch, held, hits, keys)
        self.use.hits += int(hits.sum())
        self.use.misses += int((~hits).sum())
        return call.replayed(self.prefix.replaying(self.layouts.from_store(held.rows), batch))

    def used(self, step: int) -> CacheUsed:
        """Return what it did so far, for the journal."""
        return CacheUsed(
            step=step,
            boundary=self.store.boundary,
            generation=self.number,
            **asdict(self.use),
            stall_s=self.fetcher.waited_s,
            bytes_read=self.fetcher.reader.num_bytes,
            bytes_written=self.writer.num_bytes_written,
            size_bytes=self.store.size_bytes,
            damaged=self.store.num_damaged,
            dropped_writes=self.writer.num_dropped,
            thread_cpu_s=self.fetcher.worker.cpu_s + self.writer.worker.cpu_s,
        )

    def close(self) -> None:
        """Stop the threads and delete the store; more than once is no error."""
        ended = self.writer.close()
        if self.fetcher.close() and ended:
            self.store.close()

    def _judge(self, held: PrefetchedBatch, keys: BatchKeys) -> Mask:
        """Return which rows are there and stem from this very input; notice when inputs have
        changed.
        """
        self.use.batches += 1
        self.use.stalls += held.waited_s > 0
        same = agree(held.fingerprints, keys.prints)
        if keys.lengths is not None:
            same &= held.lengths == keys.lengths
        strange = held.mask & (held.fingerprints[:, 0] != keys.prints[:, 0])
        self.use.mismatches += int(strange.sum())
        self._num_found += int(held.mask.sum())
        if self.use.mismatches >= max(LEAST_CHANGED, MOST_CHANGED * self._num_found):
            raise StaleError(CHANGED)
        return np.asarray(held.mask & same)

    def _can_replay(self, batch: Batch, held: PrefetchedBatch, hits: Mask) -> bool:
        """Return whether the rows fit this batch, and missing ones can be computed."""
        if not hits.all() and not self.prefix.can_split:
            return False
        if not self.prefix.knows(batch):
            self.prefix.learn(batch)
        return self.prefix.fits(batch, self.layouts.from_store(held.rows))

    def _prepare(self, batch: Batch, held: PrefetchedBatch, hits: Mask, keys: BatchKeys) -> None:
        """Complete the rows of a batch: those that were not there are computed and stored. Now and
        then check them.
        """
        missing, whole = np.flatnonzero(~hits), None
        if self._until_check <= 0:
            whole = self.layouts.to_store(self.prefix.compute(batch))
            self._check_rows(batch, whole, held.rows, hits, keys.lengths)
        self._until_check -= 1
        if len(missing):
            computed = (
                self._compute(batch, missing, len(hits))
                if whole is None
                else take_rows(whole, missing)
            )
            held.fill(missing, computed)
            self._store_rows(keys.take(missing), computed)
        self.fetcher.keep(
            keys.number, RowsInMemory(keys.positions, held.rows, keys.prints, keys.lengths)
        )

    def _compute(self, batch: Batch, missing: Integers, num_rows: int) -> list[Tensor]:
        """Return some rows [b] of a batch of `num_rows`, in the order of the store."""
        padded = np.resize(missing, max(len(missing), min(num_rows, LEAST_ROWS)))  # repeats them
        found = self.prefix.compute(batch, torch.from_numpy(padded))
        return self.layouts.to_store([leaf[: len(missing)] for leaf in found])

    def _record(self, call: UserForward, keys: BatchKeys) -> Any:
        """Let the user's forward run as it is, and store what it computed."""
        self.use.misses += len(keys.positions)
        with self.prefix.recording() as trial:
            output = call(plain=True)
        try:
            rows = self.layouts.to_store(self.prefix.recorded(trial))
            if self.layouts.fits_store(rows):
                self.fetcher.keep(keys.number, self._store_rows(keys, rows))
        except (
            Exception
        ) as error:  # the forward is done and right; the next one will not be recorded
            self._failure = error
        return output

    def _store_rows(self, keys: BatchKeys, rows: Sequence[Tensor]) -> RowsInMemory:
        memory = RowsInMemory(keys.positions, rows, keys.prints, keys.lengths)
        self.fetcher.invalidate(keys.positions)
        self.writer.put(memory)
        return memory

    def _check_rows(
        self,
        batch: Batch,
        computed: Sequence[Tensor],
        rows: Sequence[Tensor],
        known: Mask,
        lengths: Integers | None,
    ) -> None:
        """Compare the rows [B, ...] that the store had with computed ones, both in its order."""
        self._until_check, some = self.verify_batches, np.flatnonzero(known)
        own, stored = (self.layouts.from_store(take_rows(side, some)) for side in (computed, rows))
        error = self.prefix.error(own, stored, None if lengths is None else lengths[some].tolist())
        self.use.checks += 1
        self.use.largest_error = max(self.use.largest_error, error)
        limit = tolerance(batch, self._device)
        if not error <= limit:
            raise StaleError(
                f"stored activations differ from computed ones by {error:.1e}, more than "
                f"{limit:.1e}"
            )

    def _check(self) -> None:
        """Raise what has failed since the last forward, in a thread or behind a
        recorded forward.
        """
        failure = self._failure or self.fetcher.worker.failure or self.writer.worker.failure
        if failure is not None:
            raise (
                failure if isinstance(failure, EgeriaError) else StaleError(str(failure))
            ) from failure
        self._front.check()


def take_rows(leaves: Sequence[Tensor], rows: Integers) -> list[Tensor]:
    """Return copies of some rows [b] of each tensor [B, ...]."""
    return [leaf[torch.from_numpy(rows).to(leaf.device)] for leaf in leaves]
