"""What a controller is, and the one that evaluates in the process that asks for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from egeria.errors import brief
from egeria.events import Event, ReferenceRefreshed
from egeria.model.passes import Batch
from egeria.plasticity import flatten_rows, gram, pool_map, sp_loss_of_grams
from egeria.reference import Reference

State: TypeAlias = Mapping[str, Any]


class Ticket(NamedTuple):
    """Which evaluation it is, and the submodule whose output is the layer module's activation."""

    evaluation: int
    module: int
    tap: str


class Answer(NamedTuple):
    """What became of an evaluation.

    Attributes:
        ticket: which one it is.
        value: the plasticity; not finite where the evaluation failed, None where it was not made.
        reason: why there is no value.
    """

    ticket: Ticket
    value: float | None
    reason: str = ""


# In order. The session fills in the steps of events, and what it spent itself.
Report: TypeAlias = Answer | Event


class Controller:
    """Evaluates plasticity; this base class evaluates nothing.

    No call takes longer than the evaluation that it makes itself.

    Attributes:
        is_apart: whether answers come at any time, so that it is polled between evaluations.
        cpu_s: CPU seconds spent outside of the training process so far.
    """

    is_apart: bool = False
    cpu_s: float = 0.0

    def refresh(self, model: nn.Module, batch: Batch | None, state: State | None = None) -> bool:
        """Bring the reference model up to date with the training weights.

        Args:
            model: the model in training, with all of its weights.
            batch: the newest batch, to calibrate the reference model on; None if there is none.
            state: what `state_dict` gave, where a run is resumed: the reference is taken from it.

        Returns:
            Whether there is a reference model from here on. If not, refresh again.

        Raises:
            ReferenceModelError: the model cannot be copied.
        """
        return False

    def submit(self, ticket: Ticket, batch: Batch, activation: Tensor) -> None:
        """Ask for an evaluation.

        Args:
            ticket: which one.
            batch: what the reference model is run on.
            activation: of the training model for its first rows, or for all of them [B, ...].
        """

    def poll(self) -> list[Report]:
        """Return what happened since the last call."""
        return []

    def close(self) -> list[Report]:
        """Release everything held, for good; return what was not polled, and what is lost."""
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {}


class EvaluationPlan(NamedTuple):
    """How to evaluate; travels to the controller process."""

    taps: tuple[str, ...]
    largest_map: int
    precision: str
    device: str

    def reduce(self, activation: Tensor) -> Tensor:
        """Return the inner products [B, B] of the rows of an activation [B, ...]."""
        return gram(flatten_rows(pool_map(activation.detach(), self.largest_map)))


class InlineController(Controller):
    """Evaluates in the call that asks for it."""

    def __init__(self, plan: EvaluationPlan) -> None:
        self._plan = plan
        self._reference = Reference(plan.taps, precision=plan.precision, device=plan.device)
        self._readings: dict[str, list[float]] = {}  # by tap, since the last refresh
        self._reports: list[Report] = []

    def refresh(self, model: nn.Module, batch: Batch | None, state: State | None = None) -> bool:
        """Take the reference model from the training weights, or from a saved state."""
        if state is not None:
            if "reference" not in state:  # saved by a controller process
                return False
            self._reference.load_state_dict(state["reference"], model)
            self._readings = {tap: list(values) for tap, values in state["readings"].items()}
            return True
        means = {tap: statistics.fmean(values) for tap, values in self._readings.items()}
        self._reference.refresh(model, batch, means)
        self._readings, builder = {}, self._reference.builder
        made = ReferenceRefreshed(step=0, evaluation=0, builder=builder, wall_s=0, cpu_s=0)
        self._reports += [*self._reference.take_events(), made]
        return True

    def submit(self, ticket: Ticket, batch: Batch, activation: Tensor) -> None:
        """Evaluate now; `poll` returns the answer."""
        self.evaluate(ticket, batch, self._plan.reduce(activation))

    def evaluate(self, ticket: Ticket, batch: Batch, training_BB: Tensor) -> None:
        """Compare what `EvaluationPlan.reduce` gave for the training model with the reference."""
        try:
            activation = self._reference.activation(ticket.tap, batch)
            if activation is None:
                raise ValueError(f"the reference gave no activation at {ticket.tap}")
            with torch.no_grad():
                reference_BB = self._plan.reduce(activation[: len(training_BB)])
                loss = sp_loss_of_grams(training_BB, reference_BB.to(training_BB.device))
            value = float(loss)
        except Exception as error:
            self._reports.append(Answer(ticket, math.nan, brief(error)))
            return
        if math.isfinite(value):
            self._readings.setdefault(ticket.tap, []).append(value)
        # The format changes while it is asked where it cannot run a batch.
        self._reports += [Answer(ticket, value), *self._reference.take_events()]

    def poll(self) -> list[Report]:
        """Return what happened since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's state, and the readings that were compared with it."""
        readings = {tap: list(values) for tap, values in self._readings.items()}
        return {"reference": self._reference.state_dict(), "readings": readings}
