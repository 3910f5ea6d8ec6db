"""Giving the training loop the stored rows of a batch: read ahead, or still in
memory (paper §4.3).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import KW_ONLY, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, from_numpy

from egeria.cache.store.codec import Floats, Integers, Mask, RowLayout, as_positions
from egeria.cache.store.disk import DiskStore
from egeria.cache.writer import DaemonWorker, RowsInMemory
from egeria.errors import EgeriaError
from egeria.skipping.rows import cut_padding

DEPTH = 3
"""Batches read ahead: one is used, one is ready, one is being read."""
NUM_ADVISED = 2
"""Batches beyond them that the operating system is asked to fetch."""
NUM_KEPT = 5
"""Mini-batches that stay in memory (paper §4.3)."""
LENGTH_STEP = 8
"""Padding to a multiple, where a tokenizer does that, is to a multiple of this."""
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
    """[b] rows that are there; what `rows`, `fingerprints` and `lengths` hold of others means
    nothing."""
    rows: Sequence[Tensor]
    """One [b, ...] for each leaf; empty if no row is there."""
    fingerprints: Floats
    """[b, 2] of the input each row was computed from, to be compared with the input it shall be
    used for."""
    lengths: Integers
    """[b] true lengths, where rows have lengths."""
    waited_s: float = 0.0
    """How long the caller was kept waiting for the disk."""

    @classmethod
    def empty(cls, num_rows: int) -> PrefetchedBatch:
        """Return a batch of which nothing is there."""
        prints, lengths = (
            np.zeros((num_rows, 2), dtype=np.float32),
            np.zeros(num_rows, dtype=np.int64),
        )
        return cls(np.zeros(num_rows, dtype=np.bool_), (), prints, lengths)

    def fill(self, missing: Integers, computed: Sequence[Tensor]) -> None:
        """Put computed rows, a tensor [m, ...] for each leaf, in their places [m]."""
        for target, source in zip(self.rows, computed, strict=True):
            target.index_copy_(0, from_numpy(missing).to(target.device), source.detach())

    def fill_from(
        self, memory: RowsInMemory, here: Integers, there: Integers, layouts: Sequence[RowLayout]
    ) -> None:
        """Copy rows from memory, with zeros behind their true lengths; those too long for this
        batch are left out.
        """
        if any(layout.length_axis is not None for layout in layouts):
            room, longest = (
                min(
                    layout.room(leaf)
                    for layout, leaf in zip(layouts, rows, strict=True)
                    if layout.length_axis is not None
                )
                for rows in (self.rows, memory.rows)
            )
            given = (
                np.full(len(memory.positions), longest)
                if memory.lengths is None
                else memory.lengths
            )
            lengths = given[there].clip(max=longest)
            fits = lengths <= room
            here, there = here[fits], there[fits]
            self.lengths[here] = lengths[fits]
        for layout, target, kept in zip(layouts, self.rows, memory.rows, strict=True):
            chosen = kept.index_select(0, from_numpy(there).to(kept.device))
            if layout.length_axis is not None:
                fitted = _fit(chosen, layout.length_axis, target.shape[layout.length_axis + 1])
                chosen = cut_padding(fitted, layout.length_axis, self.lengths[here].tolist())
            target.index_copy_(0, from_numpy(here).to(target.device), chosen.to(target.device))
        self.mask[here] = True
        self.fingerprints[here] = memory.fingerprints[there]


@dataclass(eq=False)
class Fetcher:
    """Reads batches ahead in a thread of its own, and keeps the last mini-batches.

    One thread of the caller's uses it: the one that trains. That thread changes rows in place if
    anyone does, so what is found intact stays so while it is copied. What fails, fails here, and
    `worker.failure` says why. Nothing waits longer than the timeout. After a failure every batch
    comes back without rows; there is no second try.
    """

    store: DiskStore
    """What to read from. It is not closed here, and must stay open until this is closed."""
    _: KW_ONLY
    device: torch.device | None = None
    """Of the model; rows arrive there."""
    pending: Callable[[], Sequence[RowsInMemory]] = tuple
    """Returns rows that wait to be written, newest first: they are as good as stored."""
    timeout_s: float = TIMEOUT_S
    """Longest wait for one batch."""

    def __post_init__(self) -> None:
        self.waited_s = 0.0
        """Seconds that `take` had to wait, of all batches."""
        self.reader = Reader(self.store, self.device)
        self._listed: list[BatchKey] = []
        self._advised: set[BatchKey] = set()
        self._reads: dict[BatchKey, futures.Future[PrefetchedBatch]] = {}
        self._last: int | None = None
        self._kept: dict[int, RowsInMemory] = {}
        self.worker = DaemonWorker("egeria-cache-reader")
        self._finalizer = weakref.finalize(
            self, self.worker.close
        )  # also at exit: threads must not outlive it

    def ahead(self, batches: Iterable[tuple[int, Integers]]) -> None:
        """Have the next batches read, in order: (number, positions [b]) each. Never waits for a
        disk.

        They replace those expected before; the batch taken last is not expected again. So call it
        after `take`, or with the batch that is about to be taken.
        """
        if not self.worker.is_alive:
            return
        numbered: dict[int, Integers] = {}
        for number, positions in batches:
            if number != self._last:
                numbered.setdefault(number, as_positions(positions).copy())
        listed = {_key(number, positions): positions for number, positions in numbered.items()}
        self._listed = list(listed)
        self._drop([key for key in self._reads if key not in listed])
        for key in [key for key in self._listed if key not in self._reads][
            : DEPTH - len(self._reads)
        ]:
            job = partial(self.reader.read, listed[key], advise=key not in self._advised)
            self._reads[key] = self.worker.submit(job)
        known = self._advised.union(self._reads)
        soon = [key for key in self._listed[: DEPTH + NUM_ADVISED] if key not in known]
        self._advised = self._advised.intersection(listed).union(soon)
        for key in soon:
            self.worker.submit(partial(self.store.advise, listed[key]))

    def take(self, number: int, positions: Integers, length: int | None = None) -> PrefetchedBatch:
        """Return what there is of a batch, which is needed now.

        Args:
            number: of the batch, as it was given to `ahead`; those listed before it are passed
                over.
            positions: [b]; if they are others than given to `ahead`, the batch is read now.
            length: of the padded batch, where rows have lengths.
        """
        positions, waited_s = as_positions(positions), self.waited_s
        result = PrefetchedBatch.empty(len(positions))
        if self.worker.is_alive:
            try:
                result = self._completed(self._read(number, positions, length), positions, length)
            except (
                Exception
            ) as error:  # such as an accelerator without memory: the training must not end here
                self.worker.fail(error)
        result.waited_s = self.waited_s - waited_s
        return result

    def keep(self, number: int, rows: RowsInMemory) -> None:
        """Keep the complete rows of a batch among the last mini-batches, without a copy.

        Call it before the model is given the rows: rows that it changes in place are then not
        served again. And after `invalidate`, which forgets them.
        """
        if self.worker.is_alive:
            self._kept.pop(number, None)
            self._kept[number] = rows
            for old in list(self._kept)[:-NUM_KEPT]:
                del self._kept[old]

    def invalidate(self, positions: Integers) -> None:
        """Serve these positions from memory no more: their input has changed."""
        for rows in self._kept.values():
            rows.invalidate(as_positions(positions))

    def close(self, timeout_s: float = 2.0) -> bool:
        """Release all memory; return whether the thread has ended, else it hangs in the store. May
        be repeated.
        """
        self._finalizer.detach()  # a thread that hangs is not waited for twice
        self._kept.clear()
        self._reads.clear()
        return self.worker.close(timeout_s)

    def _read(self, number: int, positions: Integers, length: int | None) -> PrefetchedBatch:
        """Return what was read of a batch, or is read now where there is need to.

        By the reader thread, though the caller waits: a disk that hangs would hang the caller for
        good.
        """
        self._last, wanted = number, _key(number, positions)
        place = next((place for place, key in enumerate(self._listed) if key[0] == number), -1)
        passed, self._listed = self._listed[: place + 1], self._listed[place + 1 :]
        self._drop([key for key in passed if key in self._reads and key != wanted])
        if wanted in self._reads:
            return self._wait(self._reads.pop(wanted))
        found = sum(len(here) for _, here, _ in self._find(positions))
        if found == len(positions) or not self.store.lookup(positions).valid.any():
            return PrefetchedBatch.empty(len(positions))
        job = partial(self.reader.read, positions, length=length, advise=True)
        return self._wait(self.worker.submit(job, first=True))

    def _wait(self, future: futures.Future[PrefetchedBatch]) -> PrefetchedBatch:
        if future.done():  # nothing was waited for
            return future.result()
        started = time.monotonic()
        try:
            return future.result(self.timeout_s)
        except futures.TimeoutError as error:
            raise FetchError(
                f"stored activations must come within {self.timeout_s:g} s, and did not"
            ) from error
        finally:
            self.waited_s += time.monotonic() - started

    def _completed(
        self, batch: PrefetchedBatch, positions: Integers, length: int | None
    ) -> PrefetchedBatch:
        """Return what was read, cut or padded to the batch, with rows from memory where none was
        read.
        """
        layouts = self.store.layouts
        self.reader.receive(batch.rows)
        if batch.rows and length is not None and self.reader.has_length:
            self.reader.note_length(length)
            batch.mask &= batch.lengths <= length
            pairs = zip(batch.rows, layouts, strict=True)
            batch.rows = [_fit(tensor, layout.length_axis, length) for tensor, layout in pairs]
        missing = np.flatnonzero(~batch.mask)
        sources = self._find(positions[missing])
        if sources and not batch.rows:
            batch.rows = self.reader.empty(len(positions), length)
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
        for memory in (*reversed(self._kept.values()), *self.pending()):
            places = memory.find(positions[missing])
            found = places >= 0
            if found.any() and memory.is_intact:
                sources.append((memory, missing[found], places[found]))
                missing = missing[~found]
        return sources

    def _drop(self, keys: Sequence[BatchKey]) -> None:
        for key in keys:
            self._reads.pop(key).cancel()


class Reader:
    """Reads batches into memory of their own, and brings them to the device: what the reader thread
    does.

    To a CUDA device on a stream of its own, beside the computing.
    """

    def __init__(self, store: DiskStore, device: torch.device | None) -> None:
        self.has_length = any(layout.length_axis is not None for layout in store.layouts)
        self.num_bytes = 0
        """Of the rows that came from the store, as tensors, whether they were used or not."""
        self._store = store
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None  # type: ignore[no-untyped-call]
        self._last_length: int | None = None
        self._is_constant, self._is_rounded = False, True

    def read(
        self, positions: Integers, *, length: int | None = None, advise: bool = False
    ) -> PrefetchedBatch:
        """Return what the store has of the positions [b], padded to a length or a guess of it.

        Raises `StoreError` and whatever a device raises.
        """
        if advise:
            self._store.advise(positions)
        known = self._store.lookup(positions)
        if not known.valid.any():
            return PrefetchedBatch.empty(len(positions))
        if self.has_length and length is None:
            length = self.guess_length(int(known.lengths[known.valid].max()))
        rows = self._empty(len(positions), length, device=None)
        mask = self._store.read(positions, rows, known)
        self.num_bytes += int(sum(tensor.nbytes for tensor in rows) * mask.mean())
        return PrefetchedBatch(mask, self._send(rows), known.fingerprints, known.lengths)

    def receive(self, rows: Sequence[Tensor]) -> None:
        """Have the allocator know that rows sent are used by the stream of the
        caller from here on.
        """
        if self._stream is not None:
            for tensor in rows:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def empty(self, num_rows: int, length: int | None) -> list[Tensor]:
        """Return tensors on the device for the rows of a batch, with undefined contents."""
        return self._empty(num_rows, length, device=self._device)

    def note_length(self, length: int) -> None:
        """Take note of the length that a batch turned out to have."""
        self._is_constant = length == self._last_length
        self._is_rounded = self._is_rounded and length % LENGTH_STEP == 0
        self._last_length = length

    def guess_length(self, longest: int) -> int:
        """Return the length to expect for a batch whose longest row is `longest`; a wrong guess
        costs a copy.
        """
        if self._last_length is None:
            return longest
        if self._is_constant and self._last_length >= longest:
            return self._last_length
        return -(-longest // LENGTH_STEP) * LENGTH_STEP if self._is_rounded else longest

    def _empty(
        self, num_rows: int, length: int | None, *, device: torch.device | None
    ) -> list[Tensor]:
        """Return uninitialized tensors on a device, or in memory from which copies to ours can
        overlap with computing.

        Memory of their own, not a ring of it: autograd may hold on to them until a backward pass
        that comes much later (gradient accumulation), and a model may change them in place.
        """
        is_pinned = device is None and self._device is not None
        return [
            torch.empty(
                (num_rows, *layout.shape_at(length)),
                dtype=layout.dtype,
                device=device or "cpu",
                pin_memory=is_pinned,
            )
            for layout in self._store.layouts
        ]

    def _send(self, rows: list[Tensor]) -> list[Tensor]:
        """Return rows on the device, there already: the memory they came from is free for the next
        batch.

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


def _fit(tensor: Tensor, row_axis: int | None, length: int) -> Tensor:
    """Return rows [b, ...] cut or padded with zeros to a length; contiguous, for models view them
    in other shapes.
    """
    if row_axis is None or tensor.shape[row_axis + 1] == length:
        return tensor
    axis = row_axis + 1
    common = min(tensor.shape[axis], length)
    result = tensor.new_zeros((*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]))
    result.narrow(axis, 0, common).copy_(tensor.narrow(axis, 0, common))
    return result
