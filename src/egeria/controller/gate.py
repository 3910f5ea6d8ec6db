"""The CPU-load gate: the reference runs while the rest of the machine leaves room (paper §4.1.2)."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

HYSTERESIS = 0.05
SAMPLE_S = 0.2


class LoadGate:
    """Closed while the rest of the machine is busier than `limit`, but never for longer than `patience_s`.

    Args:
        limit: share of all processors, 0 to 1; 1 keeps it open.
        patience_s: seconds of waiting after which one evaluation goes through all the same.
        load: returns the share of all processors that others are using.
        clock: seconds.
    """

    def __init__(
        self,
        limit: float,
        patience_s: float,
        load: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._load = load or RestOfMachine()
        self._clock = clock
        self._sampled_at = clock()
        self._is_open = limit >= 1
        self._waiting_since: float | None = None

    def lets_through(self) -> bool:
        """Tell whether an evaluation that is waiting may run now."""
        if self._limit >= 1:
            return True
        now = self._clock()
        if now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            # Once closed it takes a little less load to open, so that it does not flutter.
            self._is_open = self._load() <= (self._limit if self._is_open else self._limit - HYSTERESIS)
        if self._is_open:
            self._waiting_since = None
            return True
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < self._patience_s:
            return False
        self._waiting_since = None
        return True


class RestOfMachine:
    """The load of all other processes since the last call, as a share of all processors."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._own_s, self._at_s = self._read()
        psutil.cpu_percent(interval=None)

    def __call__(self) -> float:
        """Return the load, 0 to 1."""
        everyone = psutil.cpu_percent(interval=None) / 100
        own_s, at_s = self._read()
        elapsed_s = max(at_s - self._at_s, 1e-6) * (psutil.cpu_count() or 1)
        own = (own_s - self._own_s) / elapsed_s
        self._own_s, self._at_s = own_s, at_s
        return min(1.0, max(0.0, everyone - own))

    def _read(self) -> tuple[float, float]:
        times = self._process.cpu_times()
        return times.user + times.system, time.monotonic()
