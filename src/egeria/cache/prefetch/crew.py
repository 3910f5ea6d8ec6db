"""Daemon threads that work for one owner, and never outlive or endanger it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from egeria.errors import EgeriaError

Job = Callable[[], None]


class ThreadError(EgeriaError):
    """A background thread of the cache has ended before its time."""


class Crew:
    """Threads that do the jobs they are given, until closed or until one job fails.

    The first failure ends all of them and stays in `failure`. Processes forked off have no such
    threads, and a lock that may be held for good: there `is_alive` is False, and `close` does nothing.
    The owner must not be reachable from its jobs; it closes the crew in a finalizer.

    Args:
        name: of the threads.
        num_threads: how many.
        next_job: returns what to do next, or None; called with `changed` held, so it must be quick.
    """

    def __init__(self, name: str, num_threads: int, next_job: Callable[[], Job | None]) -> None:
        self.changed = threading.Condition()
        """Held to look at or change what threads share; notify it when there may be a new job."""
        self.failure: Exception | None = None
        self.is_closed = False
        self._next_job = next_job
        self._cpu_s = [0.0] * num_threads
        self._process = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]

    @property
    def is_ours(self) -> bool:
        """Tell whether this is the process that made the threads."""
        return os.getpid() == self._process

    @property
    def is_alive(self) -> bool:
        """Tell whether jobs will be done."""
        return self.is_ours and not self.is_closed and self.failure is None and any(map(_is_alive, self._threads))

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all threads, up to the last job done."""
        return sum(self._cpu_s)

    def start(self) -> None:
        """Start the threads; a system that gives none is a failure like any other."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.fail(error)

    def fail(self, failure: Exception) -> None:
        """End all work; the first failure is the one that stays."""
        with self.changed:
            self.failure = self.failure or failure.with_traceback(None)  # its frames hold on to buffers
            self.changed.notify_all()

    def check(self) -> None:
        """Turn threads that ended without a word into a failure."""
        if self.is_ours and not self.is_closed and self.failure is None and not self.is_alive:
            self.fail(ThreadError(f"the thread {self._threads[0].name} has ended; storing activations stops"))

    def close(self, timeout_s: float = 2.0) -> bool:
        """Let the threads end and wait for them; more than once is no error.

        Returns:
            Whether all have ended; a job that hangs is left behind in its daemon thread.
        """
        if not self.is_ours:
            return True
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():  # a finalizer may run in any thread
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(map(_is_alive, self._threads))

    def _work(self, index: int) -> None:
        try:
            while self._do_next():
                self._cpu_s[index] = time.thread_time()
        except BaseException as error:
            wrapped = error if isinstance(error, Exception) else ThreadError(f"a cache thread was ended by {error!r}")
            self.fail(wrapped)

    def _do_next(self) -> bool:
        """Wait for one job and do it; a function of its own, so that nothing of the job is held while waiting."""
        with self.changed:
            while (job := None if self._is_over else self._next_job()) is None:
                if self._is_over:
                    return False
                self.changed.wait()
        job()
        return True

    @property
    def _is_over(self) -> bool:
        return self.is_closed or self.failure is not None


def _is_alive(thread: threading.Thread) -> bool:
    return thread.is_alive()
