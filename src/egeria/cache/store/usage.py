"""Closing a thing that several threads use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from egeria.cache.store.rows import StoreError


class Usage:
    """Counts who is inside, so that nothing is taken away under their hands.

    A descriptor that is closed while a thread is about to read or write through it may be another file by then.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_inside = 0
        self._ended = False
        self._changed = threading.Condition()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Use the thing in the block.

        Raises:
            StoreError: it is closed.
        """
        with self._changed:
            if self._ended:
                raise StoreError(f"{self._what} is closed.")
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Let nobody in any more and wait for those inside; False if some still are."""
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: self._num_inside == 0, timeout_s)
