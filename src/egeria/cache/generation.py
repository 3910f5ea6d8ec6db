"""One generation: the activations of one boundary stored on the disk, and the training forwards
that use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria.cache.fetcher import DEPTH, Fetcher, PrefetchedBatch
from egeria.cache.fingerprint import agree
from egeria.cache.forward_modes import StaleError, UserForward
from egeria.cache.layout import BatchKeys, Layouts
from egeria.cache.loader import SampleFeed
from egeria.cache.samples import BatchIndices
from egeria.cache.store.codec import Integers, Mask
from egeria.cache.store.disk import DiskStore
from egeria.cache.stored import LEAST_ROWS, SERVED_SHARE, StoredForward, take_rows
from egeria.cache.writer import RowsInMemory, Writer
from egeria.errors import EgeriaError
from egeria.events import CacheUsed
from egeria.model.batch import Batch

LEAST_CHANGED, MOST_CHANGED = 32, 0.1
"""Rows found that were stored for another input, at least, and their share of all rows found, above
which inputs are taken to be augmented at random."""
CHANGED = (
    "samples come with other inputs than those that their activations were stored for, as where "
    "inputs are augmented at random"
)


@dataclass(kw_only=True, eq=False)
class Generation(StoredForward):
    """Serves training forwards from the disk, and fills it."""

    layouts: Layouts
    """How what crosses is laid out in the store."""
    store: DiskStore
    """The rows; closed with the generation."""
    feed: SampleFeed
    """Knows the samples of the next batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.writer = Writer(self.store)
        self.fetcher = Fetcher(self.store, device=self._device, pending=self.writer.pending)
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
            ignores_padding=self.prefix.ignores_padding,
        )
        if keys is None:  # the model is called with something else than the batch
            return call(plain=True)
        held = self.fetcher.take(keys.number, keys.positions, keys.padded_length)
        self.fetcher.ahead(
            [(entry.number, entry.samples) for entry in self.feed.upcoming(DEPTH + 2)]
        )
        hits = self._judge(held, keys)
        fits = bool(hits.any()) and self._can_replay(batch, held, hits)
        self.payback.note(fits and hits.mean() >= SERVED_SHARE)
        if not fits:
            return self._record(call, keys)
        self._prepare(batch, held, hits, keys)
        return self._replay(call, batch, self.layouts.from_store(held.rows), hits)

    def used(self, step: int, **own: Any) -> CacheUsed:
        """Return what it did so far, for the journal."""
        return super().used(
            step,
            stall_s=self.fetcher.waited_s,
            bytes_read=self.fetcher.reader.num_bytes,
            bytes_written=self.writer.num_bytes_written,
            size_bytes=self.store.size_bytes,
            damaged=self.store.num_damaged,
            thread_cpu_s=self.fetcher.worker.cpu_s + self.writer.worker.cpu_s,
            **own,
        )

    def close(self) -> None:
        """Stop the threads and free the store; more than once is no error."""
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
            whole = self.prefix.compute(batch)
            self._check_rows(batch, whole, self.layouts.from_store(held.rows), hits, keys.lengths)
        self._until_check -= 1
        if len(missing):
            found = (
                self._compute(batch, missing, len(hits))
                if whole is None
                else take_rows(whole, missing)
            )
            computed = self.layouts.to_store(found)
            held.fill(missing, computed)
            self._store_rows(keys.take(missing), computed)
        self.fetcher.keep(
            keys.number, RowsInMemory(keys.positions, held.rows, keys.prints, keys.lengths)
        )

    def _compute(self, batch: Batch, missing: Integers, num_rows: int) -> list[Tensor]:
        """Return some rows [b] of a batch of `num_rows`."""
        padded = np.resize(missing, max(len(missing), min(num_rows, LEAST_ROWS)))  # repeats them
        found = self.prefix.compute(batch, torch.from_numpy(padded))
        return [leaf[: len(missing)] for leaf in found]

    def _record(self, call: UserForward, keys: BatchKeys) -> Any:
        """Let the user's forward run as it is, and store what it computed."""
        self.use.misses += len(keys.positions)
        with self.prefix.recording() as trial:
            output = call(plain=True)
        try:
            rows = self.layouts.to_store(self.prefix.recorded(trial))
            if self.layouts.fits_store(rows):
                self.fetcher.keep(keys.number, self._store_rows(keys, rows))
        except Exception as error:
            self._failure = error
        return output

    def _store_rows(self, keys: BatchKeys, rows: Sequence[Tensor]) -> RowsInMemory:
        memory = RowsInMemory(keys.positions, rows, keys.prints, keys.lengths)
        self.fetcher.invalidate(keys.positions)
        self.writer.put(memory)
        return memory

    def _check(self) -> None:
        failure = self._failure or self.fetcher.worker.failure or self.writer.worker.failure
        if failure is not None:
            raise (
                failure if isinstance(failure, EgeriaError) else StaleError(str(failure))
            ) from failure
        super()._check()
