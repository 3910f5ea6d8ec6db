"""Giving the training loop the stored rows of a batch: read ahead, or still in memory (paper §4.3)."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, from_numpy

from egeria.cache.prefetch.buffers import BufferPool, LengthGuess
from egeria.cache.prefetch.plan import BatchKey, PrefetchPlan, batch_key
from egeria.cache.prefetch.writer import DaemonWorker, RecentRows, RowsInMemory, RowSource
from egeria.cache.store.rows import Floats, Integers, Mask, RowLayout, Rows, Store, as_positions
from egeria.errors import EgeriaError

DEPTH = 3
"""Batches read ahead: one is used, one is ready, one is being read."""
TIMEOUT_S = 5.0
"""A disk this late is broken: the gate has measured it before, and found it fast enough."""


class FetchError(EgeriaError):
    """Stored activations do not come, or not in time; training goes on without them."""


@dataclass(eq=False, slots=True)
class PrefetchedBatch:
    """What there is of one batch of `b` rows.

    The tensors belong to whoever took them: they stay as they are for as long as anything refers to
    them, autograd included, and may be changed in place.
    """

    mask: Mask
    """[b] rows that are there; what `rows`, `fingerprints` and `lengths` hold of others means nothing."""
    rows: Sequence[Tensor]
    """One [b, ...] for each leaf; empty if no row is there."""
    fingerprints: Floats
    """[b, 2] of the input each row was computed from, to be compared with the input it shall be used for."""
    lengths: Integers
    """[b] true lengths, where rows have lengths."""
    waited_s: float = 0.0
    """How long the caller was kept waiting for the disk."""

    @classmethod
    def empty(cls, num_rows: int) -> PrefetchedBatch:
        """Return a batch of which nothing is there."""
        prints, lengths = np.zeros((num_rows, 2), dtype=np.float32), np.zeros(num_rows, dtype=np.int64)
        return cls(np.zeros(num_rows, dtype=np.bool_), (), prints, lengths)

    def fill(self, missing: Integers, computed: Sequence[Tensor]) -> None:
        """Put computed rows in their places.

        Args:
            missing: the places [m].
            computed: a tensor [m, ...] for each leaf.
        """
        for target, source in zip(self.rows, computed, strict=True):
            target.index_copy_(0, from_numpy(missing).to(target.device), source.detach())

    def fill_from(self, source: RowSource, layouts: Sequence[RowLayout]) -> None:
        """Copy rows from memory, with zeros behind their true lengths; those too long for this batch are left out.

        Args:
            source: the rows.
            layouts: of their leaves.
        """
        memory, here, there = source.memory, source.here, source.there
        lengths = _lengths_of(memory, layouts)
        if lengths is not None:
            axes = [(layout.length_axis, target) for layout, target in zip(layouts, self.rows, strict=True)]
            room = min(target.shape[axis + 1] for axis, target in axes if axis is not None)
            fits = lengths[there] <= room
            here, there = here[fits], there[fits]
            self.lengths[here] = lengths[there]
        for layout, target, kept in zip(layouts, self.rows, memory.rows, strict=True):
            if layout.length_axis is None or lengths is None:
                chosen = kept.index_select(0, from_numpy(there).to(kept.device)).to(target.device)
                target.index_copy_(0, from_numpy(here).to(target.device), chosen)
                continue
            for place, row in zip(here.tolist(), there.tolist(), strict=True):
                own = kept[row].narrow(layout.length_axis, 0, int(lengths[row]))
                target[place].zero_().narrow(layout.length_axis, 0, int(lengths[row])).copy_(own)
        self.mask[here] = True
        self.fingerprints[here] = memory.fingerprints[there]


class Fetcher:
    """Reads batches ahead in a thread of its own, and keeps the last mini-batches.

    One thread of the caller's uses it: the one that trains. What fails, fails here: only `keep` raises,
    for rows that are not of one batch. Nothing waits longer than the timeout. After a failure every
    batch comes back without rows; there is no second try.

    Args:
        store: what to read from. It is not closed here, and must stay open until this is closed.
        buffers: the memory; must not lead back to the owner of this.
        device: of the model; rows arrive there.
        pending: returns rows that wait to be written, newest first: they are as good as stored.
        timeout_s: longest wait for one batch.
    """

    def __init__(
        self,
        store: Store,
        buffers: BufferPool,
        *,
        device: torch.device | None = None,
        pending: Callable[[], Sequence[RowsInMemory]] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.waited_s = 0.0
        """Seconds that `take` had to wait, of all batches."""
        self._store, self._buffers = store, buffers
        self._upload = _Upload(device)
        self._reader = _Reader(store, buffers, self._upload)
        self._plan = PrefetchPlan(depth=DEPTH)
        self._recent = RecentRows(pending)
        self._reads: dict[BatchKey, futures.Future[PrefetchedBatch]] = {}
        self._worker = DaemonWorker("egeria-cache-reader")
        self._timeout_s = timeout_s
        self._finalizer = weakref.finalize(self, self._worker.close)  # also at exit: threads must not outlive it

    @property
    def failure(self) -> Exception | None:
        """Why no row comes any more; None while all is well."""
        return self._worker.failure

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the reader thread."""
        return self._worker.cpu_s

    @property
    def num_bytes_read(self) -> int:
        """Bytes of the rows that came from the store, as tensors, whether they were used or not."""
        return self._reader.num_bytes

    def ahead(self, batches: Iterable[tuple[int, Integers]]) -> None:
        """Have the next batches read, in order: (number, positions [b]) each. Never waits for a disk.

        They replace those expected before. So call it after `take`, or with the batch that is about to be taken.
        """
        if not self._worker.is_alive:
            return
        step = self._plan.expect([(number, as_positions(positions).copy()) for number, positions in batches])
        self._drop(step.dropped)
        for planned in step.reads:
            job = partial(self._reader.read, planned.positions, advise=not planned.was_hinted)
            self._reads[planned.key] = self._worker.submit(job)
        for hinted in step.hints:
            self._worker.submit(partial(self._store.advise, hinted))

    def take(self, number: int, positions: Integers, length: int | None = None) -> PrefetchedBatch:
        """Return what there is of a batch, which is needed now.

        Args:
            number: of the batch, as it was given to `ahead`.
            positions: [b]; if they are others than given to `ahead`, the batch is read now.
            length: of the padded batch, where rows have lengths.
        """
        positions, waited_s = as_positions(positions), self.waited_s
        result = PrefetchedBatch.empty(len(positions))
        if self._worker.is_alive:
            try:
                result = self._completed(self._read(number, positions, length), positions, length)
            except Exception as error:  # such as an accelerator without memory: the training must not end here
                self._worker.fail(error)
        result.waited_s = self.waited_s - waited_s
        return result

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
        after `invalidate`, which forgets them.

        Args:
            number: of the batch.
            positions: [b]
            rows: a tensor [b, ...] for each leaf.
            fingerprints: [b, 2]
            lengths: [b] true lengths, where rows have lengths.

        Raises:
            StoreError: these are not rows of one batch.
        """
        # Of inference tensors nobody could find out whether they were changed.
        if self._worker.is_alive and not any(tensor.is_inference() for tensor in rows):
            self._recent.keep(number, RowsInMemory.of(positions, rows, fingerprints, lengths))

    def invalidate(self, positions: Integers) -> None:
        """Serve these positions from memory no more: their input has changed."""
        self._recent.invalidate(as_positions(positions))

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop reading and release all memory; more than once is no error.

        Returns:
            Whether the thread has ended. If not, it hangs in the store, and closing that might not be safe.
        """
        self._finalizer.detach()  # a thread that hangs is not waited for twice
        self._recent.clear()
        self._reads.clear()
        return self._worker.close(timeout_s)

    def _read(self, number: int, positions: Integers, length: int | None) -> PrefetchedBatch:
        """Return what was read of a batch, or is read now where there is need to.

        By the reader thread, though the caller waits: a disk that hangs would hang the caller for good.
        """
        is_planned, dropped = self._plan.take(number, positions)
        self._drop(dropped)
        if is_planned:
            return self._wait(self._reads.pop(batch_key(number, positions)))
        found = sum(len(source.here) for source in self._recent.find(positions))
        if found == len(positions) or not self._store.lookup(positions).valid.any():
            return PrefetchedBatch.empty(len(positions))
        job = partial(self._reader.read, positions, length=length, advise=True)
        return self._wait(self._worker.submit(job, first=True))

    def _wait(self, future: futures.Future[PrefetchedBatch]) -> PrefetchedBatch:
        if future.done():  # nothing was waited for
            return future.result()
        started = time.monotonic()
        try:
            return future.result(self._timeout_s)
        except futures.TimeoutError as error:
            raise FetchError(f"stored activations must come within {self._timeout_s:g} s, and did not") from error
        finally:
            self.waited_s += time.monotonic() - started

    def _completed(self, batch: PrefetchedBatch, positions: Integers, length: int | None) -> PrefetchedBatch:
        """Return what was read, cut or padded to the batch, with rows from memory where none was read."""
        layouts = self._buffers.layouts
        self._upload.receive(batch.rows)
        if batch.rows and length is not None and self._buffers.has_length:
            self._reader.lengths.observe(length)
            batch.mask &= batch.lengths <= length
            pairs = zip(batch.rows, layouts, strict=True)
            batch.rows = [_fit(tensor, layout.length_axis, length) for tensor, layout in pairs]
        missing = np.flatnonzero(~batch.mask)
        sources = self._recent.find(positions[missing]) if len(missing) else []
        if sources and not batch.rows:
            batch.rows = self._upload.empty(self._buffers.make(len(positions), length))
        for source in sources:
            batch.fill_from(RowSource(source.memory, missing[source.here], source.there), layouts)
        if not batch.mask.any():
            batch.rows = ()
        return batch

    def _drop(self, keys: Sequence[BatchKey]) -> None:
        for key in keys:
            self._reads.pop(key).cancel()


class _Reader:
    """Reads batches into fresh buffers: what the reader thread does.

    Args:
        store: what to read from.
        buffers: where the memory comes from.
        upload: brings it to the device.
    """

    def __init__(self, store: Store, buffers: BufferPool, upload: _Upload) -> None:
        self.lengths = LengthGuess()
        self.num_bytes = 0
        self._store, self._buffers, self._upload = store, buffers, upload

    def read(self, positions: Integers, *, length: int | None = None, advise: bool = False) -> PrefetchedBatch:
        """Return what the store has of the positions [b]. Raises `StoreError` and whatever a device raises.

        Args:
            positions: [b]
            length: of the padded batch; None for a guess.
            advise: whether the store must be told of the positions first.
        """
        if advise:
            self._store.advise(positions)
        known = self._store.lookup(positions)
        if not known.valid.any():
            return PrefetchedBatch.empty(len(positions))
        rows = self._buffers.make(len(positions), self._length(known, length))
        mask = self._store.read(positions, rows, known)
        self.num_bytes += int(sum(tensor.nbytes for tensor in rows) * mask.mean())
        return PrefetchedBatch(mask, self._upload.send(rows), known.fingerprints, known.lengths)

    def _length(self, known: Rows, length: int | None) -> int | None:
        if not self._buffers.has_length or length is not None:
            return length
        return self.lengths.length(int(known.lengths[known.valid].max()))


class _Upload:
    """Copies rows to a CUDA device on a stream of its own, beside the computing; on the CPU it does nothing.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None  # type: ignore[no-untyped-call]

    def send(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return rows on the device, there already: the memory they came from is free for the next batch.

        Called by the reader thread, which has nothing better to do than to wait for the copy.
        """
        if self._stream is None:
            return list(rows)
        with torch.cuda.stream(self._stream):
            sent = [tensor.to(self._device, non_blocking=True) for tensor in rows]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()
        return sent

    def receive(self, rows: Sequence[Tensor]) -> None:
        """Have the allocator know that rows sent are used by the stream of the caller from here on."""
        if self._stream is not None:
            for tensor in rows:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def empty(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors on the device like these, with undefined contents."""
        return [tensor if self._device is None else torch.empty_like(tensor, device=self._device) for tensor in rows]


def _lengths_of(memory: RowsInMemory, layouts: Sequence[RowLayout]) -> Integers | None:
    """Return the lengths [b] of rows in memory, as long as their tensors if unknown; None if rows have no length."""
    for layout, tensor in zip(layouts, memory.rows, strict=True):
        if layout.length_axis is not None:
            whole = np.full(len(memory.positions), tensor.shape[layout.length_axis + 1], dtype=np.int64)
            return whole if memory.lengths is None else np.minimum(memory.lengths, whole)
    return None


def _fit(tensor: Tensor, row_axis: int | None, length: int) -> Tensor:
    """Return rows [b, ...] cut or padded with zeros to a length; contiguous, for models view them in other shapes."""
    if row_axis is None or tensor.shape[row_axis + 1] == length:
        return tensor
    axis = row_axis + 1
    common = min(tensor.shape[axis], length)
    result = tensor.new_zeros((*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]))
    result.narrow(axis, 0, common).copy_(tensor.narrow(axis, 0, common))
    return result
