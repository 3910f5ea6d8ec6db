"""Writing computed rows to the store in the background, and finding rows that are in memory anyway."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria.cache.store.rows import Floats, Integers, Mask, Store, StoreError, as_positions
from egeria.errors import EgeriaError

QUEUE_LENGTH = 4
NUM_REMEMBERED = 5
"""Mini-batches that stay in memory (paper §4.3)."""


class ThreadError(EgeriaError):
    """A background thread of the cache has ended early, or was closed while somebody waited for it."""


class DaemonWorker:
    """A daemon thread that does one job after the other, until it is closed or a job fails.

    Not a `ThreadPoolExecutor`: the interpreter waits for its threads before it ends, for good where a disk hangs.
    The first failure ends the thread and stays in `failure`. A forked child has no such thread, and perhaps a
    lock that stays held: there `is_alive` is False and `close` does nothing. The owner must not be reachable from its
    jobs; it closes the worker in a finalizer.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.failure: Exception | None = None
        self.cpu_s = 0.0
        """Processor seconds, up to the last job done."""
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._current: Future[Any] | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no more threads
            self.fail(error)

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made the thread."""
        return os.getpid() == self._pid

    @property
    def is_alive(self) -> bool:
        """Whether jobs will be done."""
        return self.is_ours and not self._is_closed and self.failure is None

    def submit(self, job: Callable[[], Any], *, first: bool = False) -> Future[Any]:
        """Return the future result of a job.

        Args:
            job: what to do.
            first: whether it goes before all that wait.
        """
        future: Future[Any] = Future()
        with self._changed:
            if not self.is_alive:
                future.cancel()
            elif first:
                self._jobs.appendleft((future, job))
            else:
                self._jobs.append((future, job))
            self._changed.notify_all()
        return future

    def fail(self, failure: Exception) -> None:
        """End all work; the first failure is the one that stays."""
        with self._changed:
            if self.failure is None and not self._is_closed:
                self.failure = failure.with_traceback(None)  # its frames hold on to buffers
            self._give_up(failure)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Give up what waits, and wait for the thread to end; more than once is no error.

        Returns:
            Whether it has ended; a job that hangs is left behind in its daemon thread.
        """
        if not self.is_ours:
            return True
        with self._changed:
            self._is_closed = True
            self._give_up(ThreadError("the cache was closed"))
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # a finalizer may run anywhere
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _give_up(self, reason: Exception) -> None:
        futures = [future for future, _ in self._jobs] + ([] if self._current is None else [self._current])
        self._jobs.clear()
        for future in futures:
            with contextlib.suppress(InvalidStateError):  # cancelled
                future.set_exception(reason)
        self._changed.notify_all()

    def _work(self) -> None:
        try:
            while self._do_next():
                self.cpu_s = time.thread_time()
        except BaseException as error:
            wrapped = error if isinstance(error, Exception) else ThreadError(f"a cache thread was ended by {error!r}")
            self.fail(wrapped)

    def _do_next(self) -> bool:
        """Wait for one job and do it; a function of its own, so that nothing of the job is held while waiting."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or not self.is_alive)
            if not self.is_alive:
                return False
            future, job = self._jobs.popleft()
            if not future.set_running_or_notify_cancel():
                return True
            self._current = future
        result = job()
        with self._changed:
            self._current = None
            with contextlib.suppress(InvalidStateError):  # given up meanwhile
                future.set_result(result)
        return True


@dataclass(frozen=True, eq=False, slots=True)
class RowsInMemory:
    """Rows of some positions, and what they were like when they were handed in."""

    positions: Integers
    rows: tuple[Tensor, ...]
    """One [b, ...] for each leaf; shared with whoever handed them in, not copied."""
    fingerprints: Floats
    lengths: Integers | None
    _versions: tuple[int, ...]
    _order: Integers
    """[b] by rising position"""
    _is_valid: Mask

    @classmethod
    def of(
        cls, positions: Integers, rows: Sequence[Tensor], fingerprints: Floats, lengths: Integers | None
    ) -> RowsInMemory:
        """Return rows as they are now.

        Args:
            positions: [b]
            rows: a tensor [b, ...] for each leaf.
            fingerprints: [b, 2]
            lengths: [b] true lengths, where rows have lengths.

        Raises:
            StoreError: these are not rows of one batch.
        """
        positions = as_positions(positions).copy()
        counts = {len(positions), len(fingerprints), *(len(tensor) for tensor in rows)}
        if lengths is not None:
            counts.add(len(lengths))
        if len(counts) != 1:
            raise StoreError(f"positions, rows, fingerprints and lengths must be of one batch, found {counts} rows")
        # Detached tensors share memory and version, but not the graph that an in-place operation would bring.
        kept = tuple(tensor.detach() for tensor in rows)
        versions = tuple(tensor._version for tensor in kept)
        order, is_valid = np.argsort(positions, kind="stable"), np.ones(len(positions), dtype=np.bool_)
        return cls(positions, kept, fingerprints, lengths, versions, order, is_valid)

    @property
    def is_intact(self) -> bool:
        """Whether nobody changed the rows in place, as models may; they are good for nothing then."""
        return all(tensor._version == version for tensor, version in zip(self.rows, self._versions, strict=True))

    def find(self, positions: Integers) -> tuple[Integers, Mask]:
        """Return the place of each position [b] among the rows, and whether it is there."""
        if not len(self.positions):
            return np.zeros(len(positions), dtype=np.int64), np.zeros(len(positions), dtype=np.bool_)
        index = np.searchsorted(self.positions, positions, sorter=self._order)
        places = self._order[np.minimum(index, len(self.positions) - 1)]
        return places, (self.positions[places] == positions) & self._is_valid[places]

    def invalidate(self, positions: Integers) -> None:
        """Find these positions no more."""
        self._is_valid[np.isin(self.positions, positions)] = False


@dataclass(frozen=True, eq=False, slots=True)
class RowSource:
    """Rows `there` of a batch in memory that are rows `here` of the batch asked for."""

    memory: RowsInMemory
    here: Integers
    there: Integers


class RecentRows:
    """The last mini-batches, and what waits to be written; asked by the training thread alone.

    That thread changes rows in place if anyone does, so what it finds intact stays so while it copies.

    Args:
        pending: returns rows that wait to be written, newest first.
    """

    def __init__(self, pending: Callable[[], Sequence[RowsInMemory]] | None) -> None:
        self._pending = pending
        self._batches: dict[int, RowsInMemory] = {}

    def keep(self, number: int, rows: RowsInMemory) -> None:
        """Keep the rows of a mini-batch as the newest.

        Args:
            number: of the batch.
            rows: of the batch.
        """
        self._batches.pop(number, None)
        self._batches[number] = rows
        for old in list(self._batches)[:-NUM_REMEMBERED]:
            del self._batches[old]

    def invalidate(self, positions: Integers) -> None:
        """Find these positions no more among the last mini-batches."""
        for rows in self._batches.values():
            rows.invalidate(positions)

    def clear(self) -> None:
        """Keep nothing."""
        self._batches.clear()

    def find(self, positions: Integers) -> list[RowSource]:
        """Return where rows of these positions [b] are, each at most once and the newest."""
        self._batches = {number: rows for number, rows in self._batches.items() if rows.is_intact}
        sources, missing = [], np.arange(len(positions))
        pending = self._pending() if self._pending is not None else ()
        for memory in (*reversed(self._batches.values()), *pending):
            places, found = memory.find(positions[missing])
            if found.any() and memory.is_intact:
                sources.append(RowSource(memory, missing[found], places[found]))
                missing = missing[~found]
        return sources


class Writer:
    """Stores the rows of batches in a thread of its own.

    A queue that is full refuses: the rows are computed and offered again when their samples come next.
    A store that fails ends the writing for good, and `failure` says why.

    Args:
        store: what to write to. It is not closed here, and must stay open until this is closed.
        queue_length: batches that may wait, the one being written not counted.
    """

    def __init__(self, store: Store, *, queue_length: int = QUEUE_LENGTH) -> None:
        self.num_dropped = 0
        """Batches that the queue had no room for."""
        self._store = store
        self._queue_length = queue_length
        self._worker = DaemonWorker("egeria-cache-writer")
        self._pending: deque[tuple[RowsInMemory, Future[int]]] = deque()
        self._num_bytes = 0
        self._finalizer = weakref.finalize(self, self._worker.close)  # also at exit: threads must not outlive it

    @property
    def failure(self) -> Exception | None:
        """Why nothing is written any more; None while all is well."""
        return self._worker.failure

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the thread."""
        return self._worker.cpu_s

    @property
    def num_bytes_written(self) -> int:
        """Bytes of the rows that the store took, as tensors."""
        self._forget_written()
        return self._num_bytes

    def put(
        self, positions: Integers, rows: Sequence[Tensor], fingerprints: Floats, lengths: Integers | None = None
    ) -> bool:
        """Have rows written; they are not copied and must not be changed any more.

        Args:
            positions: [b]
            rows: a tensor [b, ...] for each leaf, on any device.
            fingerprints: [b, 2] of the input they were computed from.
            lengths: [b] true lengths, where rows have lengths.

        Returns:
            False if they are not: the queue is full, or writing has ended.

        Raises:
            StoreError: these are not rows of one batch.
        """
        if not self._worker.is_alive:
            return False
        memory = RowsInMemory.of(positions, rows, fingerprints, lengths)
        self._forget_written()
        if sum(not future.running() for _, future in self._pending) >= self._queue_length:
            self.num_dropped += 1
            return False
        job = partial(_write, self._store, memory, _computed(memory.rows))
        self._pending.append((memory, self._worker.submit(job)))
        return True

    def pending(self) -> list[RowsInMemory]:
        """Return what is not written yet, newest first."""
        if not self._worker.is_alive:
            return []
        self._forget_written()
        return [memory for memory, _ in reversed(self._pending)]

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything is written; False if that takes too long or writing has failed."""
        if not self._worker.is_alive:
            return False
        with contextlib.suppress(Exception):
            self._worker.submit(bool).result(timeout_s)
            return self.failure is None
        return False

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop writing; what waits is given up. More than once is no error.

        Returns:
            Whether the thread has ended. If not, it hangs in the store, and closing that might not be safe.
        """
        self._finalizer.detach()  # a thread that hangs is not waited for twice
        return self._worker.close(timeout_s)

    def _forget_written(self) -> None:
        while self._pending and self._pending[0][1].done():
            future = self._pending.popleft()[1]
            self._num_bytes += future.result() if future.exception() is None else 0


def _write(store: Store, memory: RowsInMemory, computed: torch.cuda.Event | None) -> int:
    """Write rows and return how many bytes of them, as tensors, the store took."""
    if computed is not None:
        computed.synchronize()
    stored = num_bytes = 0
    if memory.is_intact:
        rows = [tensor.cpu() for tensor in memory.rows]
        stored = store.write(memory.positions, rows, memory.fingerprints, memory.lengths)
        num_bytes = sum(tensor.nbytes for tensor in rows)
    if not memory.is_intact:
        raise StoreError("rows must not be changed after they were given to be written, and were")
    return num_bytes * stored // max(1, len(memory.positions))


def _computed(rows: Sequence[Tensor]) -> torch.cuda.Event | None:
    """Return an event after which rows on an accelerator are there; None for rows that are."""
    device = next((tensor.device for tensor in rows if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
