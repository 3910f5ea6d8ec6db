"""What an interval of training showed: losses, pace, and whatever else the policy goes by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from egeria.errors import ConfigError
from egeria.events import IntervalMeasured
from egeria.layers.modules import LayerModule
from egeria.policy import Interval
from egeria.report.wording import plural
from egeria.session.following import Training
from egeria.session.measuring.measures import Measures
from egeria.session.measuring.optimizer_steps import to_numbers
from egeria.session.measuring.timing import IntervalClock, IterationTimer
from egeria.session.ranks import Subject, fingerprint


@dataclass(eq=False)
class IntervalMeter:
    """Gathers losses, times and measures over an interval, and journals them; all processes see the
    same interval.
    """

    training: Training
    measures: Measures
    """What the policy needs beside the loss."""
    timer: IterationTimer

    def __post_init__(self) -> None:
        self.ranks, self.recorder = self.training.ranks, self.training.recorder
        self._losses: list[float | Tensor] = []
        """One for each step, on its device: that is asked once, when the interval ends."""
        self._held: list[float | Tensor] = []
        """Of the micro-batches of a step that is still to come."""

    def add(self, loss: float | Tensor) -> float | Tensor:
        """Take in the loss of one step, as `read` returned it; return the mean of it and of those
        held for it.
        """
        losses, self._held = [*self._held, loss], []
        self._losses.append(_mean(losses))
        self.measures.end_step()
        return self._losses[-1]

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
        periods: Sequence[int] = (),
        *,
        work_shares: Sequence[float] | None = None,
    ) -> Interval:
        """Return the interval that has ended, and begin the next."""
        is_full = num_frozen == 0 and max(periods, default=1) == 1
        losses, self._losses = to_floats(self._losses), []
        finite = [value for value in losses if math.isfinite(value)]
        loss, num_bad = (statistics.fmean(finite) if finite else None), len(losses) - len(finite)
        wall_s, cpu_s = self.timer.take_medians()
        if is_full:  # what evaluations may cost is measured against training without egeria
            self.timer.iteration_s = wall_s
        measured: dict[str, Any] = self.measures.take(clock.step, rate, modules, num_frozen)
        if measured["worth"] is not None and work_shares is not None:
            measured["time_shares"] = self.measures.time_shares(wall_s, modules, work_shares)
            measured["num_pretrained"] = self.training.count_pretrained(modules)
        if not self.ranks.is_alone:
            cut = fingerprint(" ".join(module.name for module in modules))
            loss, num_bad = self.ranks.mean_loss(cut, loss, num_bad)
            if (
                self.training.is_sharded
            ):  # each process has these sums for its part of the parameters
                measured |= {
                    name: self.ranks.sums(measured[name])
                    for name in ("gradients", "noise", "worth")
                }
            rate, measured = self.ranks.from_leader(Subject.MEASURES, (rate, measured))
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
            periods=list(periods) if max(periods, default=1) > 1 else None,
            **measured,
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

    def close(self) -> None:
        """Measure nothing more, and leave the optimizers as they were found."""
        self.measures.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what the interval under way has gathered."""
        return {
            "iteration_s": self.timer.iteration_s,
            "losses": to_floats(self._losses),
            "held_losses": to_floats(self._held),
            "measures": self.measures.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.timer.iteration_s = float(state["iteration_s"])
        self._losses, self._held = list(state["losses"]), list(state["held_losses"])
        self.measures.load_state_dict(state["measures"])


def to_floats(losses: Sequence[float | Tensor]) -> list[float]:
    """Return losses as numbers; synchronises the device."""
    numbers = iter(to_numbers([value.float() for value in losses if isinstance(value, Tensor)]))
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
