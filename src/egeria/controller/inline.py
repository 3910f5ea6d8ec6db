"""The interface of controllers, and the one that evaluates in the calling process."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from egeria.errors import brief
from egeria.events import Event, ReferenceRefreshed
from egeria.model.passes import Batch
from egeria.plasticity import gram, pool_map, sp_loss_of_grams
from egeria.reference import Reference

Saved: TypeAlias = Mapping[str, Any]  # what `state_dict` of a controller returned


class Ticket(NamedTuple):
    """Identifies an evaluation."""

    evaluation: int
    module: int
    tap: str  # the submodule whose output is the layer module's activation


class Answer(NamedTuple):
    """The result of an evaluation, or why there is none."""

    ticket: Ticket
    value: float | None  # plasticity; not finite if it failed, None if it was not made
    reason: str = ""


Reports: TypeAlias = list[Answer | Event]


class Controller:
    """Evaluates plasticity; this base class evaluates nothing.

    No call takes longer than the evaluation that it makes itself.
    """

    cpu_s: float = 0.0  # spent outside of the training process so far

    def refresh(self, model: nn.Module, batch: Batch | None, state: Saved | None = None) -> bool:
        """Bring the reference model up to date; return whether that is or will be done.

        Args:
            model: the model in training, with all of its weights.
            batch: the newest batch, to calibrate the reference model on.
            state: what `state_dict` returned, if a run is resumed; used instead of the batch.

        Raises:
            RuntimeError: the model cannot be copied.
        """
        return False

    def submit(self, ticket: Ticket, batch: Batch, training_BB: Tensor) -> None:
        """Ask for an evaluation on a batch.

        `training_BB` is the `gram` of the training model's activation, for its first rows.
        """

    def poll(self) -> Reports:
        """Return answers and events since the last call, events without steps and costs."""
        return []

    def close(self) -> Reports:
        """Release everything for good; return what was not polled, and what is lost."""
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {}


class InlineController(Controller):
    """Evaluates within the call."""

    def __init__(self, taps: Sequence[str], largest_map: int, precision: str, device: str) -> None:
        self._reference = Reference(taps, precision=precision, device=device)
        self._largest_map = largest_map
        self._readings: dict[str, list[float]] = {}  # by tap, since the last refresh
        self._reports: Reports = []

    def refresh(self, model: nn.Module, batch: Batch | None, state: Saved | None = None) -> bool:
        """Take the reference model from the training weights, or from a saved state."""
        if state and state["reference"]:
            self._reference.load_state_dict(state["reference"], model)
            self._readings = {tap: list(values) for tap, values in state["readings"].items()}
        if state is not None or batch is None:
            return bool(self._reference.precision)
        means = {tap: statistics.fmean(values) for tap, values in self._readings.items()}
        self._reference.refresh(model, batch, means)
        self._readings, builder = {}, self._reference.builder
        made = ReferenceRefreshed(step=0, evaluation=0, builder=builder, wall_s=0, cpu_s=0)
        self._reports += [*self._reference.take_events(), made]
        return True

    def submit(self, ticket: Ticket, batch: Batch, training_BB: Tensor) -> None:
        """Evaluate now; `poll` returns the answer."""
        try:
            activation = self._reference.activation(ticket.tap, batch)
            with torch.no_grad():
                reference_BB = gram(pool_map(activation[: len(training_BB)], self._largest_map))
                value = float(sp_loss_of_grams(training_BB, reference_BB.to(training_BB.device)))
        except Exception as error:
            self._reports.append(Answer(ticket, math.nan, brief(error)))
            return
        if math.isfinite(value):
            self._readings.setdefault(ticket.tap, []).append(value)
        # The format changes during an evaluation if it cannot run the batch.
        self._reports += [Answer(ticket, value), *self._reference.take_events()]

    def poll(self) -> Reports:
        """Return answers and events since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's state, and the readings that were compared with it."""
        readings = {tap: list(values) for tap, values in self._readings.items()}
        return {"reference": self._reference.state_dict(), "readings": readings}
