"""Where reader threads put what they read and the training loop takes it from."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from egeria.cache.prefetch.crew import Crew, Job
from egeria.cache.prefetch.plan import Planned, PrefetchPlan, Taken
from egeria.cache.prefetch.reading import Read, Reading
from egeria.cache.store.rows import Integers
from egeria.errors import EgeriaError

POLL_S = 0.2
"""How often a caller who waits looks whether there still is a thread to wait for."""


class FetchError(EgeriaError):
    """Stored activations do not come, or not in time; training continues without them."""


class Shelf:
    """The batches read ahead and the threads that read them; reachable from the threads, so it knows no owner.

    Args:
        reading: reads one batch.
        plan: says which.
        num_readers: threads.
    """

    def __init__(self, reading: Reading, plan: PrefetchPlan, num_readers: int) -> None:
        self.reading = reading
        self.plan = plan
        self.crew = Crew("egeria-cache-reader", num_readers, self._next_job)
        self.waited_s = 0.0
        """Seconds callers were kept waiting."""
        self._reads: dict[Planned, Read] = {}
        self._urgent: tuple[Planned, int | None] | None = None
        self._awaited: Planned | None = None
        self.crew.start()

    def expect(self, batches: Iterable[tuple[int, Integers]]) -> None:
        """Read these batches in the background."""
        with self.crew.changed:
            self._forget(self.plan.expect(batches))
            self.crew.changed.notify_all()

    def take(self, number: int, positions: Integers) -> Taken:
        """Note that a batch is needed now."""
        with self.crew.changed:
            taken = self.plan.take(number, positions)
            self._forget(taken.dropped)
            self.crew.changed.notify_all()
        return taken

    def collect(self, planned: Planned, timeout_s: float) -> Read | None:
        """Wait for a batch that was planned; None if it does not come, and the failure says why."""
        try:
            return self._wait(planned, timeout_s)
        finally:
            with self.crew.changed:
                self.plan.hand_over(planned)
                self.crew.changed.notify_all()

    def fetch(self, positions: Integers, length: int | None, timeout_s: float) -> Read | None:
        """Have a batch read that was not planned, before all others, and wait for it.

        By a reader thread, though the caller waits: a disk that hangs would hang the caller for good.
        """
        planned = Planned(-1, positions)
        with self.crew.changed:
            self._urgent = (planned, length)
            self._awaited = planned
            self.crew.changed.notify_all()
        try:
            return self._wait(planned, timeout_s)
        finally:
            self._urgent = self._awaited = None

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop reading and let go of what was read; tell whether all threads have ended."""
        ended = self.crew.close(timeout_s)
        if self.crew.is_ours:
            self._reads.clear()
        return ended

    def _wait(self, planned: Planned, timeout_s: float) -> Read | None:
        started = time.monotonic()
        with self.crew.changed:
            waited_s, read = 0.0, self._reads.pop(planned, None)
            while read is None and self.crew.failure is None and not self.crew.is_closed:
                left_s = started + timeout_s - time.monotonic()
                if left_s <= 0:
                    self.crew.fail(FetchError(f"stored activations must come within {timeout_s:g} s, and did not"))
                    break
                self.crew.changed.wait(min(left_s, POLL_S))
                self.crew.check()
                read = self._reads.pop(planned, None)
                waited_s = time.monotonic() - started
            self.waited_s += waited_s  # nothing for a batch that was there: looking takes no time
            return read

    def _next_job(self) -> Job | None:
        if self._urgent is not None:
            (planned, length), self._urgent = self._urgent, None
            return partial(self._read_urgent, planned, length)
        next_one = self.plan.start()
        if next_one is not None:
            return partial(self._read_ahead, next_one, advise=not self.plan.was_hinted(next_one))
        hints = self.plan.hints()
        return partial(self._advise, hints) if hints else None

    def _read_ahead(self, planned: Planned, *, advise: bool) -> None:
        read = self.reading.read(planned.positions, advise=advise)
        with self.crew.changed:
            if self.plan.finish(planned) and not self.crew.is_closed:
                self._reads[planned] = read
            self.crew.changed.notify_all()

    def _read_urgent(self, planned: Planned, length: int | None) -> None:
        read = self.reading.read(planned.positions, length=length, advise=True)
        with self.crew.changed:
            if self._awaited is planned:
                self._reads[planned] = read
            self.crew.changed.notify_all()

    def _advise(self, hints: list[Planned]) -> None:
        for planned in hints:
            self.reading.store.advise(planned.positions)

    def _forget(self, useless: Iterable[Planned]) -> None:
        for planned in useless:
            self._reads.pop(planned, None)
