"""The clock of a run: steps, intervals, losses and the time of an iteration."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from egeria.errors import ConfigError

FEWEST = 7
"""Iterations that a median is taken of, where there are so many at a depth."""
Loss: TypeAlias = float | Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What an interval showed in this process."""

    loss: float | None  # mean of the finite losses; None where there was none
    num_steps: int
    num_bad_losses: int
    iteration_wall_s: float  # median; 0 where there was no iteration
    iteration_cpu_s: float


class Clock:
    """Counts the steps of a run, ends intervals, and measures iterations without a device sync.

    An iteration lasts from the end of one `run.step` to the beginning of the next, so that our own
    work is not counted as the user's. Medians leave out the long iterations with a validation or a
    checkpoint. CPU time, a system call, is asked for at some steps of an interval only; a call that
    does nothing but count is taken to need as much of it as time. Losses stay on their device until
    an interval of `interval_steps` ends.
    """

    def __init__(self, total_steps: int | None, interval_steps: int) -> None:
        self.total_steps, self.interval_steps = total_steps, interval_steps
        self.step = self.evaluation = self.began = 0
        """Steps so far, the number of intervals so far, and the step at which this one began."""
        self.overhead_wall_s = self.overhead_cpu_s = 0.0
        self.iteration_s = 0.0
        """Median seconds of an iteration in the newest interval with nothing frozen; 0: unknown."""
        self._losses: list[Loss | list[Loss]] = []
        self._held: list[Loss] = []
        self._wall, self._cpu = Medians(), Medians()
        self._entered = 0.0
        self._left: float | None = None
        """When the newest call of `run.step` began, and when it returned."""
        self._entered_cpu: float | None = None
        self._left_cpu: float | None = None
        """The same in CPU time, where it was asked for."""
        self._cpu_due = 0

    @property
    def ends(self) -> int:
        """The step with which this interval ends."""
        return self.began + self.interval_steps

    def hold(self, loss: Loss) -> None:
        """Keep the loss of a micro-batch for the step that it is part of."""
        self._held.append(loss)

    def enter(self, loss: Loss) -> None:
        """Count a step: `run.step` has begun, with this loss."""
        self._entered = now = time.perf_counter()
        if self._left is not None:
            self._wall.own.append(now - self._left)
        if self._left_cpu is not None:
            self._cpu.own.append(time.process_time() - self._left_cpu)
        self._losses.append([*self._held, loss] if self._held else loss)
        self._held.clear()
        self.step += 1

    def begin_work(self) -> None:
        """Note that this call of `run.step` is to do more than counting."""
        self._entered_cpu = time.process_time() - (time.perf_counter() - self._entered)
        self._cpu_due = self.step

    def leave(self) -> None:
        """Note that `run.step` is about to return."""
        self._left = now = time.perf_counter()
        wall_s = cpu_s = now - self._entered
        self._left_cpu = None
        if self.step >= self._cpu_due:
            self._left_cpu = time.process_time()
            self._cpu_due = self.step + max(1, self.interval_steps // FEWEST)
            if self._entered_cpu is not None:
                cpu_s, self._entered_cpu = self._left_cpu - self._entered_cpu, None
        self.overhead_wall_s += wall_s
        self.overhead_cpu_s += cpu_s

    def spend(self, wall_s: float, cpu_s: float) -> None:
        """Count seconds that were ours within an iteration of the user's, and take them off it."""
        self.overhead_wall_s += wall_s
        self.overhead_cpu_s += cpu_s
        if self._left is not None:
            self._left += wall_s
        if self._left_cpu is not None:
            self._left_cpu += cpu_s

    def spent(self) -> dict[str, float]:
        """Return our overhead so far, the call under way included, by fields of the journal."""
        wall_s = cpu_s = time.perf_counter() - self._entered
        if self._entered_cpu is not None:
            cpu_s = time.process_time() - self._entered_cpu
        wall_s, cpu_s = self.overhead_wall_s + wall_s, self.overhead_cpu_s + cpu_s
        return {"overhead_wall_s": wall_s, "overhead_cpu_s": cpu_s}

    def end_interval(self, frozen: int) -> Measured:
        """End the interval, at this frozen depth, and return what it showed; the next begins."""
        losses, self._losses = to_floats(self._losses), []
        finite = [value for value in losses if math.isfinite(value)]
        wall_s, cpu_s = self._wall.end_interval(frozen), self._cpu.end_interval(frozen)
        if not frozen:
            self.iteration_s = wall_s
        num_steps, self.began = self.step - self.began, self.step
        self.evaluation += 1
        return Measured(
            loss=statistics.fmean(finite) if finite else None,
            num_steps=num_steps,
            num_bad_losses=len(losses) - len(finite),
            iteration_wall_s=wall_s,
            iteration_cpu_s=cpu_s,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data."""
        names = ("step", "evaluation", "began", "interval_steps", "iteration_s")
        state: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {**state, "losses": to_floats(self._losses), "held": to_floats(self._held)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name in ("step", "evaluation", "began", "interval_steps"):
            setattr(self, name, int(state[name]))
        self.iteration_s = float(state["iteration_s"])
        self._losses = [float(loss) for loss in state["losses"]]
        self._held = [float(loss) for loss in state["held"]]
        self._cpu_due = 0


class Medians:
    """Medians of what iterations took, for each frozen depth."""

    def __init__(self) -> None:
        self.own = array("d")
        """Durations of this interval, in seconds."""
        self._earlier: dict[int, array[float]] = {}

    def end_interval(self, frozen: int) -> float:
        """Return the median of the interval, 0 where there was no iteration; the next begins."""
        own, self.own = self.own, array("d")
        if not own:
            return 0.0
        newest = (self._earlier.get(frozen, array("d")) + own)[-max(len(own), FEWEST) :]
        self._earlier[frozen] = newest[-FEWEST:]
        return statistics.median(newest)


def read_loss(loss: Any) -> Loss:
    """Return a loss as a number, or a 0-d tensor on its device; else raise ConfigError."""
    if type(loss) is Tensor and loss.is_cpu and not loss.ndim:
        number: Any = loss.tolist()
        if type(number) is float:
            return number
    if isinstance(loss, Tensor) and loss.numel() == 1:
        value = loss.detach()
        return (value.reshape(()) if value.ndim else value).clone()
    try:
        if isinstance(loss, (Tensor, str)):
            raise TypeError
        return float(loss)
    except TypeError as error:
        is_tensor = isinstance(loss, Tensor)
        found = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"{loss!r}"
        what = "run.step takes a loss as a number or a 0-d tensor"
        raise ConfigError(f"{what}, found {found}. Reduce it, as by loss.mean().") from error


def to_floats(steps: Sequence[Loss | list[Loss]]) -> list[float]:
    """Return the loss of each step, the mean of its micro-batches; synchronises the device.

    In single precision, as the losses of micro-batches are: not every device has doubles.
    """
    losses = [loss for step in steps for loss in (step if isinstance(step, list) else [step])]
    tensors = [loss.float() for loss in losses if isinstance(loss, Tensor)]
    on_device = [loss.to(tensors[0].device) for loss in tensors]
    read = iter(torch.stack(on_device).tolist() if tensors else [])
    numbers = iter([next(read) if isinstance(loss, Tensor) else loss for loss in losses])
    counts = [len(step) if isinstance(step, list) else 1 for step in steps]
    return [statistics.fmean(itertools.islice(numbers, count)) for count in counts]


def seconds_left(total_steps: int | None, step: int, iteration_s: float) -> float | None:
    """Return the seconds that unfrozen iterations to the end would take; None where unknown."""
    if total_steps is None or iteration_s <= 0:
        return None
    return iteration_s * max(0, total_steps - step)
