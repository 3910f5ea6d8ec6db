"""Evaluating plasticity in the process that asks for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria.controller.protocol import Controller, ControllerStatus, Report, Request, Ticket
from egeria.events import ReferenceRefreshed
from egeria.model.batch import Batch
from egeria.plasticity import flatten_rows, gram, pool_map, sp_loss_of_grams
from egeria.reference import Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """How to evaluate; travels to the controller process."""

    taps: tuple[str, ...]
    largest_map: int
    precision: str
    device: str
    fidelity_share: float

    def reduce(self, activation: Tensor) -> Tensor:
        """Return the inner products [B, B] of the rows of an activation [B, ...]: all that the
        metric needs.
        """
        return gram(flatten_rows(pool_map(activation.detach(), self.largest_map)))

    def compare(self, training_BB: Tensor, activation: Tensor) -> float:
        """Return the SP loss between what `reduce` gave for an activation and that of another model
        [B, ...], for the same rows or more.
        """
        reference_BB = self.reduce(activation[: len(training_BB)]).to(training_BB.device)
        with torch.no_grad():
            return float(sp_loss_of_grams(training_BB, reference_BB))


class InlineController(Controller):
    """Runs the reference model inside `submit`; the controller process does so in `evaluate`."""

    def __init__(self, plan: EvaluationPlan) -> None:
        self._plan, share = plan, plan.fidelity_share
        self._reference = Reference(
            plan.taps, precision=plan.precision, device=plan.device, fidelity_share=share
        )
        self._readings: dict[str, list[float]] = {}
        self._reports: list[Report] = []

    def refresh(
        self,
        evaluation: int,
        model: nn.Module,
        batch: Batch | None,
        state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Bring the reference model up to date with the training weights.

        Raises:
            ReferenceModelError: the model cannot be copied.
        """
        if state is not None:
            if "reference" not in state:  # saved by a controller process
                return False
            self._reference.load_state_dict(state["reference"], model)
            self._readings = {tap: list(values) for tap, values in state["readings"].items()}
            return True
        means = {tap: statistics.fmean(values) for tap, values in self._readings.items()}
        self._reference.refresh(model, batch, means)
        self._readings = {}
        builder = self._reference.builder
        refreshed = ReferenceRefreshed(
            step=0, evaluation=evaluation, builder=builder, wall_s=0.0, cpu_s=0.0
        )
        self._reports += [*self._reference.take_events(), refreshed]
        return True

    def submit(self, request: Request) -> None:
        """Evaluate now; `poll` returns the reading, or that the evaluation failed."""
        training_BB = self._plan.reduce(request.activation)
        self.evaluate(request.ticket, request.batch, training_BB)

    def evaluate(self, ticket: Ticket, batch: Batch, training_BB: Tensor) -> None:
        """Compare the training model's output for the batch, or the first rows of it, with the
        reference's.
        """
        try:
            activation = self._reference.activation(ticket.tap, batch)
            if activation is None:
                raise ValueError(f"the reference gave no activation at {ticket.tap}")
            value = self._plan.compare(training_BB, activation)
        except Exception as error:
            self._reports.append(ticket.failed(error))
            return
        if math.isfinite(value):
            self._readings.setdefault(ticket.tap, []).append(value)
        # The format changes while it is asked where it cannot run a batch.
        self._reports += [ticket.reading(value), *self._reference.take_events()]

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call."""
        reports, self._reports = self._reports, []
        return ControllerStatus(reports=reports)

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's state and the readings of this snapshot."""
        readings = {tap: list(values) for tap, values in self._readings.items()}
        return {"reference": self._reference.state_dict(), "readings": readings}


class AbsentController(Controller):
    """The controller of a policy that reads no plasticity: evaluates nothing."""

    def submit(self, request: Request) -> None:
        """Ignore the request."""
