"""Giving the training loop the stored rows of a batch: read ahead, or still in memory (paper §4.3)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from egeria.cache.prefetch.buffers import BufferPool, fitted
from egeria.cache.prefetch.plan import PrefetchPlan
from egeria.cache.prefetch.reading import Read, Reading
from egeria.cache.prefetch.recent import Chunk, Filling, Recent
from egeria.cache.prefetch.shelf import Shelf
from egeria.cache.prefetch.upload import Upload
from egeria.cache.store.rows import Floats, Integers, Mask, Store, as_positions

DEPTH = 3
"""Batches read ahead: one is used, one is ready, one is being read."""
NUM_REMEMBERED = 5
"""Mini-batches that stay in memory (paper §4.3)."""
TIMEOUT_S = 5.0
"""A disk this late is broken: the gate has measured it before, and found it fast enough."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Held:
    """What there is of one batch of `b` rows.

    The tensors belong to whoever took them: they stay as they are for as long as anything refers to
    them, autograd included, and may be changed in place.
    """

    number: int
    mask: Mask
    """[b] rows that are there; what `rows`, `fingerprints` and `lengths` hold of others means nothing."""
    rows: tuple[Tensor, ...] = ()
    """One [b, ...] for each leaf; empty if no row is there."""
    fingerprints: Floats
    """[b, 2] of the input each row was computed from, to be compared with the input it shall be used for."""
    lengths: Integers
    """[b] true lengths, where rows have lengths."""
    from_memory: Mask
    """[b] rows that were still in memory; the others were read."""
    waited_s: float = 0.0
    """How long the caller was kept waiting for the disk."""
    failure: Exception | None = None
    """Why nothing is there, and never will be again."""

    def fill(self, missing: Integers, computed: Sequence[Tensor]) -> None:
        """Put computed rows [m, ...] in the places `missing` [m]."""
        for target, source in zip(self.rows, computed, strict=True):
            target.index_copy_(0, torch.from_numpy(missing).to(target.device), source.detach())


class Fetcher:
    """Reads batches ahead in threads of its own, and keeps the last mini-batches.

    One thread of the caller's uses it: the one that trains. What fails, fails here: only `keep` raises,
    for rows that are not of one batch. Nothing waits longer than the timeout. After a failure every
    batch comes back without rows; there is no second try.

    Args:
        store: what to read from. It is not closed here, and must stay open until this is closed.
        buffers: the memory; must not lead back to the owner of this.
        depth: batches read ahead.
        num_readers: threads.
        device: of the model; rows arrive there.
        pending: returns rows that wait to be written, newest first: they are as good as stored.
        timeout_s: longest wait for one batch.
    """

    def __init__(
        self,
        store: Store,
        buffers: BufferPool,
        *,
        depth: int = DEPTH,
        num_readers: int = 1,
        device: torch.device | None = None,
        pending: Callable[[], Sequence[Chunk]] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.num_rows_recalled = 0
        """Rows that came from memory."""
        self._buffers = buffers
        self._upload = Upload(device)
        self._reading = Reading(store, buffers, self._upload)
        plan = PrefetchPlan(depth=depth, num_remembered=NUM_REMEMBERED)
        self._recent = Recent(plan, pending)
        self._shelf = Shelf(self._reading, plan, num_readers)
        self._timeout_s = timeout_s
        self._finalizer = weakref.finalize(
            self, self._shelf.close
        )  # also before the interpreter goes: threads must not outlive it

    @property
    def failure(self) -> Exception | None:
        """Why no row comes any more; None while all is well."""
        return self._shelf.crew.failure

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the reader threads."""
        return self._shelf.crew.cpu_s

    @property
    def waited_s(self) -> float:
        """Seconds that `take` had to wait, of all batches."""
        return self._shelf.waited_s

    @property
    def read_s(self) -> float:
        """Seconds spent reading, in all threads."""
        return self._reading.wall_s

    @property
    def num_rows_read(self) -> int:
        """Rows that came from the store, whether they were used or not."""
        return self._reading.num_rows

    @property
    def num_bytes_read(self) -> int:
        """Bytes of those rows, as tensors."""
        return self._reading.num_bytes

    def ahead(self, batches: Iterable[tuple[int, Integers]]) -> None:
        """Tell which batches come next, in order: (number, positions [b]) each. Never waits for a disk.

        It replaces what was told before: what is missing now is not wanted any more. So call it after
        `take`, or with the batch that is about to be taken.
        """
        if self._shelf.crew.is_alive:
            self._shelf.expect([(number, as_positions(positions).copy()) for number, positions in batches])

    def take(self, number: int, positions: Integers, length: int | None = None) -> Held:
        """Return what there is of a batch, which is needed now.

        Args:
            number: of the batch, as it was told ahead.
            positions: [b]; if they are others than told ahead, the batch is read now.
            length: of the padded batch, where rows have lengths.
        """
        positions = as_positions(positions)
        crew, waited_s = self._shelf.crew, self._shelf.waited_s
        if not crew.is_ours:
            return _nothing(number, len(positions))
        try:
            crew.check()
            read = self._read(number, positions, length) if crew.is_alive else None
            if crew.is_alive:
                held = self._put_together(number, positions, length, read)
                return replace(held, waited_s=self._shelf.waited_s - waited_s)
        except Exception as error:  # such as an accelerator without memory: the training must not end here
            crew.fail(error)
        return replace(_nothing(number, len(positions), crew.failure), waited_s=self._shelf.waited_s - waited_s)

    def keep(
        self,
        number: int,
        positions: Integers,
        rows: Sequence[Tensor],
        fingerprints: Floats,
        lengths: Integers | None = None,
    ) -> None:
        """Keep the complete rows of a batch among the last mini-batches, without a copy.

        Call it before the model is given the rows: rows that it changes in place are then not served again. And
        after `invalidate`, which forgets them. Raises `StoreError` for rows that are not of one batch.
        """
        if not self._shelf.crew.is_alive:
            return
        if not any(tensor.is_inference() for tensor in rows):  # nobody could tell whether those were changed
            self._recent.keep(number, Chunk.of(as_positions(positions).copy(), rows, fingerprints, lengths))

    def invalidate(self, positions: Integers) -> None:
        """Serve these positions from memory no more: their input has changed."""
        self._recent.invalidate(as_positions(positions))

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop reading and let go of all memory; more than once is no error.

        Returns:
            Whether the threads have ended. If not, one hangs in the store, and closing that might not be safe.
        """
        self._finalizer.detach()  # a thread that hangs is not waited for twice
        self._recent.clear()
        return self._shelf.close(timeout_s)

    def _read(self, number: int, positions: Integers, length: int | None) -> Read | None:
        """Return what was read of a batch, or is read now; None if there is no need to."""
        taken = self._shelf.take(number, positions)
        if taken.planned is not None:
            return self._shelf.collect(taken.planned, self._timeout_s)
        found = sum(len(source.here) for source in self._recent.find(positions))
        if found == len(positions) or not self._reading.store.lookup(positions).valid.any():
            return None
        return self._shelf.fetch(positions, length, self._timeout_s)

    def _put_together(self, number: int, positions: Integers, length: int | None, read: Read | None) -> Held:
        """Return what was read, cut or padded to the batch, with rows from memory where none was read."""
        filling = self._begin(len(positions), length, read)
        missing = np.flatnonzero(~filling.mask)
        sources = self._recent.find(positions[missing]) if len(missing) else []
        if sources and not filling.rows:
            filling.rows = self._upload.empty(self._buffers.make(len(positions), length))
        for source in sources:
            filling.fill(replace(source, here=missing[source.here]))
        self.num_rows_recalled += int(filling.from_memory.sum())
        return Held(
            number=number,
            mask=filling.mask,
            rows=tuple(filling.rows) if filling.mask.any() else (),
            fingerprints=filling.fingerprints,
            lengths=filling.lengths,
            from_memory=filling.from_memory,
        )

    def _begin(self, num_rows: int, length: int | None, read: Read | None) -> Filling:
        if read is None:
            return Filling.nothing(self._buffers.layouts, num_rows)
        self._upload.receive(read.rows)
        mask, rows = read.mask.copy(), read.rows
        if length is not None and self._buffers.has_length:
            self._reading.lengths.observe(length)
            mask &= read.lengths <= length
            rows = fitted(rows, self._buffers.layouts, length) if rows else rows
        return Filling(
            self._buffers.layouts, mask, rows, read.fingerprints.copy(), read.lengths.copy(), np.zeros_like(mask)
        )


def _nothing(number: int, num_rows: int, failure: Exception | None = None) -> Held:
    empty = Filling.nothing((), num_rows)
    return Held(
        number=number,
        mask=empty.mask,
        fingerprints=empty.fingerprints,
        lengths=empty.lengths,
        from_memory=empty.from_memory,
        failure=failure,
    )
