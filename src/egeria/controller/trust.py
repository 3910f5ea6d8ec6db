"""How far a controller process is trusted: when it counts as lost, and how often it is replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

RESTARTS_WITHOUT_A_READING = 10
ATTEMPTS_TO_START = 3
LONGEST_WORK = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a controller process may take, and what is put up with from it."""

    queue_length: int = 4
    """Evaluations under way at a time."""
    timeout_s: float = 120.0
    """Seconds without a sign of life, while it has work, after which it is replaced.

    A process that computes is alive, but nothing may take it more than ten times as long.
    """
    restarts: int = 20
    """How often it is replaced in a run."""
    load_limit: float = 0.5
    """Load of the rest of the machine above which it waits."""
    patience_s: float = 10.0
    """Longest wait for the load to fall."""


class Trust:
    """Keeps count of silences and restarts.

    Args:
        limits: how far it goes.
        clock: seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_up = False
        """Whether the process has come up."""
        self.num_restarts = 0
        self._limits = limits
        self._clock = clock
        self._heard_at_s = self._worked_at_s = clock()
        self._num_mute = 0
        self._was_up = False

    def begin(self) -> None:
        """Note that a process was started."""
        self.is_up = False
        self.hear()

    def hear_up(self) -> None:
        """Note that it has imported what it needs."""
        self.is_up = self._was_up = True

    def hear(self) -> None:
        """Note that it has done something, or that there was nothing to do."""
        self._heard_at_s = self._worked_at_s = self._clock()

    def hear_breath(self) -> None:
        """Note that it is alive."""
        self._heard_at_s = self._clock()

    def hear_reading(self) -> None:
        """Note that it does what it is there for."""
        self._num_mute = 0

    @property
    def is_lost(self) -> bool:
        """Tell whether it has been silent, or without a result, for too long, given that it has work."""
        now, limit_s = self._clock(), self._limits.timeout_s
        silence_s = limit_s if self.is_up else LONGEST_WORK * limit_s  # it cannot speak before it is up
        return now - self._heard_at_s > silence_s or now - self._worked_at_s > LONGEST_WORK * limit_s

    @property
    def has_proved_impossible(self) -> bool:
        """Tell whether no process has come up, however often it was tried."""
        return not self._was_up and self._num_mute == ATTEMPTS_TO_START

    def allow_restart(self) -> bool:
        """Count a restart; return False where it would be one too many, in the run or without a reading between."""
        self.num_restarts += 1
        self._num_mute += 1
        return self._num_mute <= RESTARTS_WITHOUT_A_READING and self.num_restarts <= self._limits.restarts
