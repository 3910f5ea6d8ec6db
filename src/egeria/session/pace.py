"""Measuring the user's own iterations, without a device synchronisation and without our overhead."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stopwatch:
    """Wall-clock and CPU seconds since it was made."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def read(self) -> tuple[float, float]:
        """Return wall-clock and CPU seconds so far."""
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


class Pace:
    """Durations of iterations, and what egeria added to them.

    An iteration lasts from the end of one `run.step` to the start of the next, so that our own work
    is never counted as the user's. The median of an interval leaves out the long ones that held a
    validation or a checkpoint. On an accelerator work is queued, so a single duration means little
    and the median of many is what the queue lets through.
    """

    def __init__(self) -> None:
        self.overhead_wall_s = 0.0
        self.overhead_cpu_s = 0.0
        self._walls: list[float] = []
        self._cpus: list[float] = []
        self._outside: Stopwatch | None = None
        self._inside: Stopwatch | None = None

    def enter(self) -> None:
        """Note that `run.step` has begun."""
        if self._outside is not None:
            wall, cpu = self._outside.read()
            self._walls.append(wall)
            self._cpus.append(cpu)
        self._inside = Stopwatch()

    def leave(self) -> None:
        """Note that `run.step` is about to return."""
        if self._inside is not None:
            self.add_overhead(*self._inside.read())
        self._inside = None
        self._outside = Stopwatch()

    def add_overhead(self, wall_s: float, cpu_s: float) -> None:
        """Count seconds that egeria took."""
        self.overhead_wall_s += wall_s
        self.overhead_cpu_s += cpu_s

    def take_out(self, wall_s: float, cpu_s: float) -> None:
        """Count seconds that egeria took in the midst of the user's iteration, and take them out of that."""
        self.add_overhead(wall_s, cpu_s)
        if self._outside is not None:
            self._outside.wall += wall_s
            self._outside.cpu += cpu_s

    def take_medians(self) -> tuple[float, float]:
        """Return the median wall-clock and CPU seconds of the iterations since the last call; 0 for none."""
        walls, self._walls = self._walls, []
        cpus, self._cpus = self._cpus, []
        return (statistics.median(walls), statistics.median(cpus)) if walls else (0.0, 0.0)
