"""Writing computed rows to the store in the background, by a thread that nobody has to wait for."""

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

from egeria.cache.store.codec import Floats, Integers, StoreError, as_positions
from egeria.cache.store.disk import DiskStore
from egeria.errors import EgeriaError

QUEUE_LENGTH = 4


class ThreadError(EgeriaError):
    """A background thread of the cache has ended early, or was closed while
    somebody waited for it.
    """


class DaemonWorker:
    """A daemon thread that does one job after the other, until it is closed or a job fails.

    Not a `ThreadPoolExecutor`: the interpreter waits for its threads before it ends, for good where
    a disk hangs. The first failure ends the thread and stays in `failure`. A forked child has no
    such thread, and perhaps a lock that stays held: there `is_alive` is False and `close` does
    nothing. The owner must not be reachable from its jobs; it closes the worker in a finalizer.
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
    def is_alive(self) -> bool:
        """Whether jobs will be done."""
        return os.getpid() == self._pid and not self._is_closed and self.failure is None

    def submit(self, job: Callable[[], Any], *, first: bool = False) -> Future[Any]:
        """Return the future result of a job, which may go before all that wait."""
        future: Future[Any] = Future()
        with self._changed:
            if self.is_alive:
                (self._jobs.appendleft if first else self._jobs.append)((future, job))
            else:
                future.cancel()
            self._changed.notify_all()
        return future

    def fail(self, failure: Exception) -> None:
        """End all work; the first failure is the one that stays."""
        with self._changed:
            if self.failure is None and not self._is_closed:
                self.failure = failure.with_traceback(None)  # its frames hold on to buffers
            self._give_up(failure)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Give up what waits; return whether the thread has ended. A job that hangs is left behind
        in it.
        """
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._is_closed = True
            self._give_up(ThreadError("the cache was closed"))
        if (
            self._thread.is_alive() and self._thread is not threading.current_thread()
        ):  # a finalizer may run anywhere
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _give_up(self, reason: Exception) -> None:
        futures = [future for future, _ in self._jobs] + (
            [] if self._current is None else [self._current]
        )
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
            wrapped = (
                error
                if isinstance(error, Exception)
                else ThreadError(f"a cache thread was ended by {error!r}")
            )
            self.fail(wrapped)

    def _do_next(self) -> bool:
        """Wait for one job and do it; a function of its own, so that nothing of the job is held
        while waiting.
        """
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


@dataclass(eq=False)
class RowsInMemory:
    """Rows of some positions, shared with whoever handed them in, and what they were like then.

    Raises `StoreError` where these are not rows of one batch.
    """

    positions: Integers
    """[b]"""
    rows: Sequence[Tensor]
    """A tensor [b, ...] for each leaf, on any device; not copied."""
    fingerprints: Floats
    """[b, 2] of the input they were computed from."""
    lengths: Integers | None = None
    """[b] true lengths, where rows have lengths."""

    def __post_init__(self) -> None:
        self.positions = as_positions(self.positions).copy()
        counts = {len(self.positions), len(self.fingerprints), *map(len, self.rows)}
        if self.lengths is not None:
            counts.add(len(self.lengths))
        if len(counts) != 1:
            raise StoreError(
                f"positions, rows, fingerprints and lengths must be of one batch, found {counts} "
                "rows"
            )
        # Detached tensors share memory and version, but not the graph that an in-place operation
        # would bring.
        self.rows = tuple(tensor.detach() for tensor in self.rows)
        self._versions = [
            None if tensor.is_inference() else tensor._version for tensor in self.rows
        ]
        last = len(self.positions) - 1  # of several rows for one position the first counts
        self._places = {
            position: last - place
            for place, position in enumerate(reversed(self.positions.tolist()))
        }

    @property
    def is_intact(self) -> bool:
        """Whether nobody changed the rows in place, as models may; they are good for nothing then.

        Of inference tensors nobody could find that out.
        """
        pairs = zip(self.rows, self._versions, strict=True)
        return all(version is not None and tensor._version == version for tensor, version in pairs)

    def find(self, positions: Integers) -> Integers:
        """Return the place of each position [b] among the rows, -1 where it is not there."""
        return np.array(
            [self._places.get(position, -1) for position in positions.tolist()], dtype=np.int64
        )

    def invalidate(self, positions: Integers) -> None:
        """Find these positions no more."""
        for position in positions.tolist():
            self._places.pop(position, None)


class Writer:
    """Stores the rows of batches in a thread of its own.

    A queue that is full refuses: the rows are computed and offered again when their samples come
    next. A store that fails ends the writing for good, and `worker.failure` says why.

    The store is not closed here, and must stay open until this is closed.
    """

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self.worker = DaemonWorker("egeria-cache-writer")
        self._pending: deque[tuple[RowsInMemory, Future[int]]] = deque()
        self._num_bytes = 0
        self._finalizer = weakref.finalize(
            self, self.worker.close
        )  # also at exit: threads must not outlive it

    @property
    def num_bytes_written(self) -> int:
        """Bytes of the rows that the store took, as tensors."""
        self._forget_written()
        return self._num_bytes

    def put(self, memory: RowsInMemory) -> bool:
        """Have rows written, which must not be changed any more; False where the queue is full or
        writing has ended.
        """
        if not self.worker.is_alive:
            return False
        self._forget_written()
        if sum(not future.running() for _, future in self._pending) >= QUEUE_LENGTH:
            return False
        job = partial(_write, self._store, memory, _computed(memory.rows))
        self._pending.append((memory, self.worker.submit(job)))
        return True

    def pending(self) -> list[RowsInMemory]:
        """Return what is not written yet, newest first."""
        if not self.worker.is_alive:
            return []
        self._forget_written()
        return [memory for memory, _ in reversed(self._pending)]

    def close(self, timeout_s: float = 2.0) -> bool:
        """Give up what waits; return whether the thread has ended, else it hangs in the store. May
        be repeated.
        """
        self._finalizer.detach()  # a thread that hangs is not waited for twice
        return self.worker.close(timeout_s)

    def _forget_written(self) -> None:
        while self._pending and self._pending[0][1].done():
            future = self._pending.popleft()[1]
            self._num_bytes += future.result() if future.exception() is None else 0


def _write(store: DiskStore, memory: RowsInMemory, computed: torch.cuda.Event | None) -> int:
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
