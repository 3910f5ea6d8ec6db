"""What an interval of training showed: its losses and the time of an iteration."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egeria.errors import ConfigError
from egeria.events import IntervalMeasured
from egeria.layers.modules import LayerModule
from egeria.policy import Interval
from egeria.report.wording import plural
from egeria.session.following import Training
from egeria.session.ranks import Subject, fingerprint
from egeria.session.timing import IntervalClock, IterationTimer


@dataclass(eq=False)
class IntervalMeter:
    """Gathers losses and times over an interval, and journals them; all processes see the same
    interval.
    """

    training: Training
    timer: IterationTimer

    def __post_init__(self) -> None:
        self.ranks, self.recorder = self.training.ranks, self.training.recorder
        self._losses: list[float | Tensor] = []
        """One for each step, on its device: that is asked once, when the interval ends."""
        self._held: list[float | Tensor] = []
        """Of the micro-batches of a step that is still to come."""

    def add(self, loss: float | Tensor) -> None:
        """Take in the loss of one step, as `read` returned it, with those held for it."""
        losses, self._held = [*self._held, loss], []
        self._losses.append(_mean(losses))

    def hold(self, loss: float | Tensor) -> None:
        """Keep the loss of a micro-batch, as `read` returned it, for the step it is part of."""
        self._held.append(loss)

    def read(self, loss: Any) -> float | Tensor:
        """Return a loss as a number, or a 0-d tensor on its device.

        Raises:
            ConfigError: it is neither a number nor a tensor of one element.
        """
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.detach().reshape(()).clone()
        try:
            if isinstance(loss, (Tensor, str)):
                raise TypeError
            return float(loss)
        except TypeError as error:
            found = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"{loss!r}"
            )
            raise ConfigError(
                "run.step(loss) takes the loss of the step as a number or a 0-d tensor, found "
                f"{found}. "
                f"Reduce it first, for instance with loss.mean()."
            ) from error

    def take(
        self,
        clock: IntervalClock,
        modules: Sequence[LayerModule],
        num_frozen: int,
        rate: float,
    ) -> Interval:
        """Return the interval that has ended, and begin the next."""
        losses, self._losses = to_floats(self._losses), []
        finite = [value for value in losses if math.isfinite(value)]
        loss, num_bad = (statistics.fmean(finite) if finite else None), len(losses) - len(finite)
        wall_s, cpu_s = self.timer.take_medians()
        if num_frozen == 0:  # what evaluations may cost is measured against training without egeria
            self.timer.iteration_s = wall_s
        if not self.ranks.is_alone:
            cut = fingerprint(" ".join(module.name for module in modules))
            loss, num_bad = self.ranks.mean_loss(cut, loss, num_bad)
            rate = self.ranks.from_leader(Subject.RATE, rate)
        event = IntervalMeasured(
            step=clock.step,
            evaluation=clock.evaluation,
            loss=loss,
            num_steps=clock.interval_steps,
            num_bad_losses=num_bad,
            learning_rate=rate,
            frozen=num_frozen,
            iteration_wall_s=wall_s,
            iteration_cpu_s=cpu_s,
            **self.timer.spent(),
        )
        self.recorder.write(event)
        if loss is None:
            reason = (
                f"the training loss was not finite for {plural(num_bad, 'step')}; nothing is "
                "judged meanwhile"
            )
            self.recorder.decline("freezing while the loss is not finite", reason)
        return Interval.of(event)

    def end_interval(self) -> None:
        """Keep nothing of an interval that is over, where a fault kept it from being taken."""
        self._losses = []
        self.timer.end_interval()

    def state_dict(self) -> dict[str, Any]:
        """Return what the interval under way has gathered."""
        return {
            "iteration_s": self.timer.iteration_s,
            "losses": to_floats(self._losses),
            "held_losses": to_floats(self._held),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.timer.iteration_s = float(state["iteration_s"])
        self._losses, self._held = list(state["losses"]), list(state["held_losses"])


def to_floats(losses: Sequence[float | Tensor]) -> list[float]:
    """Return losses as numbers; synchronises the device."""
    tensors = [value.float() for value in losses if isinstance(value, Tensor)]
    on_device = [value.to(tensors[0].device) for value in tensors]
    numbers = iter(torch.stack(on_device).tolist() if tensors else [])
    return [next(numbers) if isinstance(value, Tensor) else value for value in losses]


def _mean(losses: Sequence[float | Tensor]) -> float | Tensor:
    """Return the mean of the losses of a step, without asking the device for them; that of one is
    the loss itself.
    """
    if len(losses) == 1:
        return losses[0]
    total: float | Tensor = sum(
        (value.float() if isinstance(value, Tensor) else value for value in losses), 0.0
    )
    return total / len(
        losses
    )  # single precision, which `to_floats` has too: not every device has a double one
