"""The clock of a run: steps, intervals, losses and the time of an iteration."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egeria.errors import ConfigError

FEWEST_ITERATIONS = 7
"""Iterations that a median is taken of, where there are so many at a depth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What an interval showed in this process."""

    loss: float | None
    """Mean of the finite losses; None where there was none."""
    num_steps: int
    num_bad_losses: int
    wall_s: float
    """Median wall-clock seconds of an iteration; 0 where there was none."""
    cpu_s: float


class Clock:
    """Counts the steps of a run, ends intervals, and measures iterations without a device sync.

    An iteration lasts from the end of one `run.step` to the beginning of the next, so that our own
    work is not counted as the user's. Medians leave out the long iterations with a validation or a
    checkpoint. Losses stay on their device until an interval ends.

    Args:
        total_steps: optimizer steps of the whole training; None where unknown.
        interval_steps: `n`, steps of an interval.
    """

    def __init__(self, total_steps: int | None, interval_steps: int) -> None:
        self.total_steps, self.interval_steps = total_steps, interval_steps
        self.step = self.evaluation = self.began = 0
        """Steps so far, the number of intervals so far, and the step at which this one began."""
        self.overhead_wall_s = self.overhead_cpu_s = 0.0
        self.iteration_s = 0.0
        """Median seconds of an iteration in the newest interval with nothing frozen; 0: unknown."""
        self._losses: list[list[float | Tensor]] = []
        self._held: list[float | Tensor] = []
        self._iterations: list[tuple[float, float]] = []
        self._earlier: dict[int, list[tuple[float, float]]] = {}
        self._left: tuple[float, float] | None = None
        self._entered = (0.0, 0.0)

    @property
    def ends(self) -> int:
        """The step with which this interval ends."""
        return self.began + self.interval_steps

    def hold(self, loss: float | Tensor) -> None:
        """Keep the loss of a micro-batch for the step that it is part of."""
        self._held.append(loss)

    def enter(self, loss: float | Tensor) -> None:
        """Count a step: `run.step` has begun, with this loss."""
        self._entered = wall_s, cpu_s = time.perf_counter(), time.process_time()
        if self._left is not None:
            self._iterations.append((wall_s - self._left[0], cpu_s - self._left[1]))
        self._losses.append([*self._held, loss])
        if self._held:
            self._held = []
        self.step += 1

    def leave(self) -> None:
        """Note that `run.step` is about to return."""
        self._left = wall_s, cpu_s = time.perf_counter(), time.process_time()
        self.overhead_wall_s += wall_s - self._entered[0]
        self.overhead_cpu_s += cpu_s - self._entered[1]

    def spend(self, wall_s: float, cpu_s: float) -> None:
        """Count seconds that were ours within an iteration of the user's, and take them off it."""
        self.overhead_wall_s += wall_s
        self.overhead_cpu_s += cpu_s
        if self._left is not None:
            self._left = self._left[0] + wall_s, self._left[1] + cpu_s

    def spent(self) -> dict[str, float]:
        """Return our overhead so far, the call under way included, by fields of the journal."""
        wall_s = time.perf_counter() - self._entered[0]
        cpu_s = time.process_time() - self._entered[1]
        return {
            "overhead_wall_s": self.overhead_wall_s + wall_s,
            "overhead_cpu_s": self.overhead_cpu_s + cpu_s,
        }

    def end_interval(self, frozen: int) -> Measured:
        """End the interval and return what it showed; the next begins.

        Args:
            frozen: how many layer modules were frozen in it: iterations at one depth take alike.
        """
        losses, self._losses = to_floats(self._losses), []
        finite = [value for value in losses if math.isfinite(value)]
        own, self._iterations = self._iterations, []
        wall_s = cpu_s = 0.0
        if own:
            newest = [*self._earlier.get(frozen, []), *own][-max(len(own), FEWEST_ITERATIONS) :]
            self._earlier[frozen] = newest[-FEWEST_ITERATIONS:]
            wall_s, cpu_s = map(statistics.median, zip(*newest, strict=True))
        if not frozen:
            self.iteration_s = wall_s
        num_steps, self.began = self.step - self.began, self.step
        self.evaluation += 1
        return Measured(
            loss=statistics.fmean(finite) if finite else None,
            num_steps=num_steps,
            num_bad_losses=len(losses) - len(finite),
            wall_s=wall_s,
            cpu_s=cpu_s,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data."""
        names = ("step", "evaluation", "began", "interval_steps", "iteration_s")
        state: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {
            **state,
            "losses": to_floats(self._losses),
            "held": to_floats([[loss] for loss in self._held]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name in ("step", "evaluation", "began", "interval_steps"):
            setattr(self, name, int(state[name]))
        self.iteration_s = float(state["iteration_s"])
        self._losses = [[float(loss)] for loss in state["losses"]]
        self._held = [float(loss) for loss in state["held"]]


def read_loss(loss: Any) -> float | Tensor:
    """Return a loss as a number, or a 0-d tensor on its device.

    Raises:
        ConfigError: it is neither a number nor a tensor of one element.
    """
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
        raise ConfigError(
            "run.step(loss) takes the loss of the step as a number or a 0-d tensor, found "
            f"{found}. Reduce it first, for instance with loss.mean()."
        ) from error


def to_floats(steps: Sequence[Sequence[float | Tensor]]) -> list[float]:
    """Return the mean loss of each step, or nothing for one without a loss; synchronises the
    device.

    In single precision, as the losses of micro-batches are: not every device has doubles.
    """
    tensors = [loss.float() for losses in steps for loss in losses if isinstance(loss, Tensor)]
    on_device = [loss.to(tensors[0].device) for loss in tensors]
    numbers = iter(torch.stack(on_device).tolist() if tensors else [])
    values = [[next(numbers) if isinstance(x, Tensor) else x for x in losses] for losses in steps]
    return [own[0] if len(own) == 1 else sum(own) / len(own) for own in values if own]


def seconds_left(total_steps: int | None, step: int, iteration_s: float) -> float | None:
    """Return the seconds that unfrozen iterations to the end would take; None where unknown."""
    if total_steps is None or iteration_s <= 0:
        return None
    return iteration_s * max(0, total_steps - step)
