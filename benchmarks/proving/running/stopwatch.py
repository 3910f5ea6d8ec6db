"""The time that training takes: wall clock and CPU, with all that egeria does, without the evaluations."""

import time
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class _Moment:
    """What the clocks show."""

    wall_s: float
    own_cpu_s: float
    """Of this process, all threads."""
    reaped_cpu_s: float
    """Of child processes that have ended."""
    children: dict[psutil.Process, float]
    """CPU seconds of those that run, such as a controller or a loader's workers."""

    @property
    def cpu_s(self) -> float:
        return self.own_cpu_s + self.reaped_cpu_s + sum(self.children.values())


class Stopwatch:
    """Goes while there is training, halts during evaluations on held-out data.

    Wall clock stands still in a halt. So does the CPU time of this process and of what an evaluation
    starts; a child from before, such as egeria's controller, may work on in the halt, and that counts.

    Args:
        device: its queue is waited for at each reading.
    """

    def __init__(self, device: torch.device) -> None:
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._device = device
        self._began: _Moment | None = None
        self._halted: _Moment | None = None

    def add(self, wall_s: float, cpu_s: float) -> None:
        """Take in what the watch of an earlier process of the same run showed."""
        self.wall_s += wall_s
        self.cpu_s += cpu_s

    def go(self) -> None:
        """Begin, or go on."""
        children = _children()
        if self._halted is not None:
            self.cpu_s += _grown(self._halted.children, children)
        self._synchronize()
        self._began = _Moment(time.perf_counter(), time.process_time(), _reaped_cpu_s(), children)

    def halt(self) -> None:
        """Stop counting."""
        assert self._began is not None, "only a watch that goes can be halted"
        self._synchronize()
        now = _Moment(time.perf_counter(), time.process_time(), _reaped_cpu_s(), _children())
        self.wall_s += now.wall_s - self._began.wall_s
        self.cpu_s += max(0.0, now.cpu_s - self._began.cpu_s)
        self._began, self._halted = None, now

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _grown(before: dict[psutil.Process, float], after: dict[psutil.Process, float]) -> float:
    return sum(max(0.0, cpu_s - before[child]) for child, cpu_s in after.items() if child in before)


def _reaped_cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return times.children_user + times.children_system


def _children() -> dict[psutil.Process, float]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it has ended since
            continue
        found[child] = times.user + times.system + times.children_user + times.children_system
    return found
