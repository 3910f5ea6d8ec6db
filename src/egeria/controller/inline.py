"""What a controller is, and the one that evaluates in the process that asks for it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egeria.errors import brief
from egeria.events import Event, ReferenceRefreshed
from egeria.model.passes import Batch
from egeria.plasticity import gram, pool_map, sp_loss_of_grams
from egeria.reference import Reference


class Ticket(NamedTuple):
    """Which evaluation it is."""

    evaluation: int
    module: int
    tap: str  # the submodule whose output is the layer module's activation


class Answer(NamedTuple):
    """What became of an evaluation, and why there is no value where there is none."""

    ticket: Ticket
    value: float | None  # the plasticity; not finite if the evaluation failed, None if not made
    reason: str = ""


class Controller:
    """Evaluates plasticity; this base class evaluates nothing.

    No call takes longer than the evaluation that it makes itself.
    """

    cpu_s: float = 0.0  # spent outside of the training process so far

    def refresh(
        self, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None
    ) -> bool:
        """Bring the reference model up to date; return whether that is done, or will be.

        Args:
            model: the model in training, with all of its weights.
            batch: the newest batch, to calibrate the reference model on.
            state: what `state_dict` gave, where a run is resumed; it is taken instead of the batch.

        Raises:
            UnsupportedModelError: the model cannot be copied.
        """
        return False

    def submit(self, ticket: Ticket, batch: Batch, training_BB: Tensor) -> None:
        """Ask for an evaluation on a batch.

        `training_BB` is the `gram` of the training model's activation for the first of its rows.
        """

    def poll(self) -> list[Answer | Event]:
        """Return what happened since the last call, events without steps and costs."""
        return []

    def close(self) -> list[Answer | Event]:
        """Release everything held, for good; return what was not polled, and what is lost."""
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {}


class InlineController(Controller):
    """Evaluates in the call that asks for it."""

    def __init__(self, taps: Sequence[str], largest_map: int, precision: str, device: str) -> None:
        self._reference = Reference(taps, precision=precision, device=device)
        self._largest_map = largest_map
        self._readings: dict[str, list[float]] = {}  # by tap, since the last refresh
        self._reports: list[Answer | Event] = []

    def refresh(
        self, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None
    ) -> bool:
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
            if activation is None:
                raise ValueError(f"the reference gave no activation at {ticket.tap}")
            with torch.no_grad():
                reference_BB = gram(pool_map(activation[: len(training_BB)], self._largest_map))
                value = float(sp_loss_of_grams(training_BB, reference_BB.to(training_BB.device)))
        except Exception as error:
            self._reports.append(Answer(ticket, math.nan, brief(error)))
            return
        if math.isfinite(value):
            self._readings.setdefault(ticket.tap, []).append(value)
        # The format changes while it is asked where it cannot run a batch.
        self._reports += [Answer(ticket, value), *self._reference.take_events()]

    def poll(self) -> list[Answer | Event]:
        """Return what happened since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's state, and the readings that were compared with it."""
        readings = {tap: list(values) for tap, values in self._readings.items()}
        return {"reference": self._reference.state_dict(), "readings": readings}
