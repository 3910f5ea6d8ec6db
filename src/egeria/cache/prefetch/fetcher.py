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
from egeria.cache.prefetch.writer import DaemonWorker, RowsInMemory
from egeria.cache.store.disk import DiskStore
from egeria.cache.store.rows import Floats, Integers, Mask, RowLayout, Rows, as_positions
from egeria.errors import EgeriaError

DEPTH = 3
"""Batches read ahead: one is used, one is ready, one is being read."""
NUM_ADVISED = 2
"""Batches beyond them that the operating system is asked to fetch."""
NUM_KEPT = 5
"""Mini-batches that stay in memory (paper §4.3)."""
TIMEOUT_S = 5.0
"""A disk this late is broken: the gate has measured it before, and found it fast enough."""

BatchKey = tuple[int, bytes]
"""A batch by its number and its rows: two listings with the same key are the same batch."""


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
        """Put computed rows, a tensor [m, ...] for each leaf, in their places [m]."""
        for target, source in zip(self.rows, computed, strict=True):
            target.index_copy_(0, from_numpy(missing).to(target.device), source.detach())

    def fill_from(self, memory: RowsInMemory, here: Integers, there: Integers, layouts: Sequence[RowLayout]) -> None:
        """Copy rows from memory, with zeros behind their true lengths; those too long for this batch are left out."""
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

    One thread of the caller's uses it: the one that trains. That thread changes rows in place if anyone does, so what
    is found intact stays so while it is copied. What fails, fails here: only `keep` raises, for rows that are not
    of one batch. Nothing waits longer than the timeout. After a failure every batch comes back without rows; there
    is no second try.

    Args:
        store: what to read from. It is not closed here, and must stay open until this is closed.
        device: of the model; rows arrive there.
        pending: returns rows that wait to be written, newest first: they are as good as stored.
        timeout_s: longest wait for one batch.
    """

    def __init__(
        self,
        store: DiskStore,
        *,
        device: torch.device | None = None,
        pending: Callable[[], Sequence[RowsInMemory]] = tuple,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.waited_s = 0.0
        """Seconds that `take` had to wait, of all batches."""
        self._store = store
        self._reader = _Reader(store, device)
        self._listed: list[BatchKey] = []
        self._advised: set[BatchKey] = set()
        self._reads: dict[BatchKey, futures.Future[PrefetchedBatch]] = {}
        self._last: int | None = None
        self._pending = pending
        self._kept: dict[int, RowsInMemory] = {}
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

        They replace those expected before; the batch taken last is not expected again. So call it after `take`, or
        with the batch that is about to be taken.
        """
        if not self._worker.is_alive:
            return
        numbered: dict[int, Integers] = {}
        for number, positions in batches:
            if number != self._last:
                numbered.setdefault(number, as_positions(positions).copy())
        listed = {_key(number, positions): positions for number, positions in numbered.items()}
        self._listed = list(listed)
        self._drop([key for key in self._reads if key not in listed])
        for key in [key for key in self._listed if key not in self._reads][: DEPTH - len(self._reads)]:
            job = partial(self._reader.read, listed[key], advise=key not in self._advised)
            self._reads[key] = self._worker.submit(job)
        known = self._advised.union(self._reads)
        soon = [key for key in self._listed[: DEPTH + NUM_ADVISED] if key not in known]
        self._advised = self._advised.intersection(listed).union(soon)
        for key in soon:
            self._worker.submit(partial(self._store.advise, listed[key]))

    def take(self, number: int, positions: Integers, length: int | None = None) -> PrefetchedBatch:
        """Return what there is of a batch, which is needed now.

        Args:
            number: of the batch, as it was given to `ahead`; those listed before it are passed over.
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
        after `invalidate`, which forgets them. Arguments and errors are those of `Writer.put`.
        """
        # Of inference tensors nobody could find out whether they were changed.
        if self._worker.is_alive and not any(tensor.is_inference() for tensor in rows):
            self._kept.pop(number, None)
            self._kept[number] = RowsInMemory(positions, rows, fingerprints, lengths)
            for old in list(self._kept)[:-NUM_KEPT]:
                del self._kept[old]

    def invalidate(self, positions: Integers) -> None:
        """Serve these positions from memory no more: their input has changed."""
        for rows in self._kept.values():
            rows.invalidate(as_positions(positions))

    def close(self, timeout_s: float = 2.0) -> bool:
        """Release all memory; return whether the thread has ended, else it hangs in the store. May be repeated."""
        self._finalizer.detach()  # a thread that hangs is not waited for twice
        self._kept.clear()
        self._reads.clear()
        return self._worker.close(timeout_s)

    def _read(self, number: int, positions: Integers, length: int | None) -> PrefetchedBatch:
        """Return what was read of a batch, or is read now where there is need to.

        By the reader thread, though the caller waits: a disk that hangs would hang the caller for good.
        """
        self._last, wanted = number, _key(number, positions)
        place = next((place for place, key in enumerate(self._listed) if key[0] == number), -1)
        passed, self._listed = self._listed[: place + 1], self._listed[place + 1 :]
        self._drop([key for key in passed if key in self._reads and key != wanted])
        if wanted in self._reads:
            return self._wait(self._reads.pop(wanted))
        found = sum(len(here) for _, here, _ in self._find(positions))
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
        layouts = self._store.layouts
        self._reader.receive(batch.rows)
        if batch.rows and length is not None and self._reader.has_length:
            self._reader.lengths.observe(length)
            batch.mask &= batch.lengths <= length
            pairs = zip(batch.rows, layouts, strict=True)
            batch.rows = [_fit(tensor, layout.length_axis, length) for tensor, layout in pairs]
        missing = np.flatnonzero(~batch.mask)
        sources = self._find(positions[missing])
        if sources and not batch.rows:
            batch.rows = self._reader.empty(len(positions), length)
        for memory, here, there in sources:
            batch.fill_from(memory, missing[here], there, layouts)
        if not batch.mask.any():
            batch.rows = ()
        return batch

    def _find(self, positions: Integers) -> list[tuple[RowsInMemory, Integers, Integers]]:
        """Return where rows of these positions [b] are in memory, each at most once and the newest.

        Rows `there` of a batch in memory are rows `here` of those asked for.
        """
        self._kept = {number: rows for number, rows in self._kept.items() if rows.is_intact}
        sources, missing = [], np.arange(len(positions))
        for memory in (*reversed(self._kept.values()), *self._pending()):
            places = memory.find(positions[missing])
            found = places >= 0
            if found.any() and memory.is_intact:
                sources.append((memory, missing[found], places[found]))
                missing = missing[~found]
        return sources

    def _drop(self, keys: Sequence[BatchKey]) -> None:
        for key in keys:
            self._reads.pop(key).cancel()


class _Reader:
    """Reads batches into fresh buffers, and brings them to the device: what the reader thread does.

    To a CUDA device on a stream of its own, beside the computing.
    """

    def __init__(self, store: DiskStore, device: torch.device | None) -> None:
        self.lengths = LengthGuess()
        self.has_length = any(layout.length_axis is not None for layout in store.layouts)
        self.num_bytes = 0
        self._store = store
        self._device = device if device is not None and device.type == "cuda" else None
        self._buffers = BufferPool(store.layouts, pinned=self._device is not None)
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None  # type: ignore[no-untyped-call]

    def read(self, positions: Integers, *, length: int | None = None, advise: bool = False) -> PrefetchedBatch:
        """Return what the store has of the positions [b], padded to a length or a guess of it.

        Raises `StoreError` and whatever a device raises.
        """
        if advise:
            self._store.advise(positions)
        known = self._store.lookup(positions)
        if not known.valid.any():
            return PrefetchedBatch.empty(len(positions))
        rows = self._buffers.make(len(positions), self._length(known, length))
        mask = self._store.read(positions, rows, known)
        self.num_bytes += int(sum(tensor.nbytes for tensor in rows) * mask.mean())
        return PrefetchedBatch(mask, self._send(rows), known.fingerprints, known.lengths)

    def receive(self, rows: Sequence[Tensor]) -> None:
        """Have the allocator know that rows sent are used by the stream of the caller from here on."""
        if self._stream is not None:
            for tensor in rows:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def empty(self, num_rows: int, length: int | None) -> list[Tensor]:
        """Return tensors on the device for the rows of a batch, with undefined contents."""
        rows = self._buffers.make(num_rows, length)
        return [tensor if self._device is None else torch.empty_like(tensor, device=self._device) for tensor in rows]

    def _length(self, known: Rows, length: int | None) -> int | None:
        if not self.has_length or length is not None:
            return length
        return self.lengths.length(int(known.lengths[known.valid].max()))

    def _send(self, rows: list[Tensor]) -> list[Tensor]:
        """Return rows on the device, there already: the memory they came from is free for the next batch.

        The reader thread has nothing better to do than to wait for the copy.
        """
        if self._stream is None:
            return rows
        with torch.cuda.stream(self._stream):
            sent = [tensor.to(self._device, non_blocking=True) for tensor in rows]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()
        return sent


def _key(number: int, positions: Integers) -> BatchKey:
    return number, positions.tobytes()


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
