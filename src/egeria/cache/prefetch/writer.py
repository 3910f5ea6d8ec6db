"""Writing computed rows to the store behind the training loop's back."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from egeria.cache.prefetch.crew import Crew, Job
from egeria.cache.prefetch.recent import Chunk
from egeria.cache.store.rows import Floats, Integers, Store, StoreError, as_positions

QUEUE_LENGTH = 4


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
        self._queue = _Queue(store, queue_length)
        self._finalizer = weakref.finalize(
            self, self._queue.close
        )  # also before the interpreter goes: threads must not outlive it

    @property
    def failure(self) -> Exception | None:
        """Why nothing is written any more; None while all is well."""
        self._queue.crew.check()
        return self._queue.crew.failure

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the thread."""
        return self._queue.crew.cpu_s

    @property
    def write_s(self) -> float:
        """Seconds spent writing."""
        return self._queue.wall_s

    @property
    def num_rows_written(self) -> int:
        """Rows that the store took."""
        return self._queue.num_rows

    @property
    def num_bytes_written(self) -> int:
        """Bytes of those rows, as tensors."""
        return self._queue.num_bytes

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
        if not self._queue.crew.is_alive:
            return False
        chunk = Chunk.of(as_positions(positions).copy(), rows, fingerprints, lengths)
        taken = self._queue.put(chunk)
        self.num_dropped += not taken
        return taken

    def pending(self) -> list[Chunk]:
        """Return what is not written yet, newest first."""
        return self._queue.pending()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything is written; False if that takes too long or writing has failed."""
        return self._queue.wait_until_empty(timeout_s)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop writing; what waits is given up. More than once is no error.

        Returns:
            Whether the thread has ended. If not, it hangs in the store, and closing that might not be safe.
        """
        self._finalizer.detach()  # a thread that hangs is not waited for twice
        return self._queue.close(timeout_s)


class _Queue:
    """What the writer shares with its thread; it knows no owner."""

    def __init__(self, store: Store, length: int) -> None:
        self.wall_s = 0.0
        self.num_rows = 0
        self.num_bytes = 0
        self.crew = Crew("egeria-cache-writer", 1, self._next_job)
        self._store = store
        self._length = length
        self._waiting: deque[tuple[Chunk, torch.cuda.Event | None]] = deque()
        self._current: Chunk | None = None
        self.crew.start()

    def put(self, chunk: Chunk) -> bool:
        with self.crew.changed:
            if len(self._waiting) >= self._length:
                return False
            self._waiting.append((chunk, _computed(chunk.rows)))
            self.crew.changed.notify_all()
            return True

    def pending(self) -> list[Chunk]:
        if not self.crew.is_alive:
            return []
        with self.crew.changed:
            waiting = [chunk for chunk, _ in reversed(self._waiting)]
            return waiting if self._current is None else [*waiting, self._current]

    def wait_until_empty(self, timeout_s: float) -> bool:
        if not self.crew.is_ours:
            return False
        deadline = time.monotonic() + timeout_s
        with self.crew.changed:
            while self._waiting or self._current is not None:
                self.crew.check()
                left_s = deadline - time.monotonic()
                if not self.crew.is_alive or left_s <= 0:
                    return False
                self.crew.changed.wait(min(left_s, 0.2))
        return self.crew.failure is None

    def close(self, timeout_s: float = 2.0) -> bool:
        ended = self.crew.close(timeout_s)
        if self.crew.is_ours:
            self._waiting.clear()
        return ended

    def _next_job(self) -> Job | None:
        if not self._waiting:
            return None
        chunk, event = self._waiting.popleft()
        self._current = chunk
        return partial(self._write, chunk, event)

    def _write(self, chunk: Chunk, event: torch.cuda.Event | None) -> None:
        started = time.perf_counter()
        if event is not None:
            event.synchronize()
        if chunk.is_intact:
            rows = [tensor.cpu() for tensor in chunk.rows]
            stored = self._store.write(chunk.positions, rows, chunk.fingerprints, chunk.lengths)
            self.num_rows += stored
            self.num_bytes += sum(tensor.nbytes for tensor in rows) * stored // max(1, len(chunk.positions))
        if not chunk.is_intact:
            raise StoreError("rows must not be changed after they were given to be written, and were")
        with self.crew.changed:
            self.wall_s += time.perf_counter() - started
            self._current = None
            self.crew.changed.notify_all()


def _computed(rows: Sequence[Tensor]) -> torch.cuda.Event | None:
    """Return an event after which rows on an accelerator are there; None for rows that are."""
    device = next((tensor.device for tensor in rows if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
