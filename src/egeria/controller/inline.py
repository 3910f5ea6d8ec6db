"""Evaluating plasticity: comparing the training model with the reference, in the process that asks
for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria.controller.protocol import Controller, ControllerStatus, Report, Request, Ticket
from egeria.errors import brief
from egeria.events import Declined, FidelityChecked, ReferenceRefreshed
from egeria.layers.batch import Batch
from egeria.plasticity import flatten_rows, gram, pool_map, sp_loss, sp_loss_of_grams
from egeria.reference import QuantizedReference

MOST_UNCHECKED = 3
"""Readings before the reference is checked: fewer than any policy decides by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedOutput:
    """An activation ready to be compared: pooled [B, ...], or the gram of its rows [B, B]."""

    tensor: Tensor
    is_gram: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """How to evaluate; travels to the controller process."""

    taps: tuple[str, ...]
    largest_map: int
    window: int
    precision: str
    device: str
    fidelity_share: float

    def reduce(self, activation: Tensor, *, as_gram: bool | None = None) -> ComparedOutput:
        """Pool an activation [B, ...]; take its gram where that is smaller, or as told."""
        pooled = pool_map(activation.detach(), self.largest_map)
        rows = pooled.shape[0]
        if as_gram is None:
            as_gram = pooled.numel() > rows * rows
        return ComparedOutput(
            tensor=gram(flatten_rows(pooled)) if as_gram else pooled, is_gram=as_gram
        )

    def compare(self, training: ComparedOutput, activation: Tensor) -> float:
        """Return the SP loss between an output and another model's activation [B, ...] for the same
        rows.
        """
        reference = self.reduce(activation, as_gram=training.is_gram)
        metric = sp_loss_of_grams if training.is_gram else sp_loss
        with torch.no_grad():
            return float(metric(training.tensor, reference.tensor.to(training.tensor.device)))


class InlineController(Controller):
    """Runs the reference model inside `submit`; the controller process does so in `evaluate`.

    Once in the life of a snapshot, after the first readings of a tap, the error of the reference is
    measured: the SP loss between the full-precision snapshot and its quantized form may be at most
    `fidelity_share` of the mean of those readings. Otherwise the activation ranges are
    found again, or the next format is taken.
    """

    def __init__(self, plan: EvaluationPlan, reference: QuantizedReference | None = None) -> None:
        self._plan = plan
        self._reference = reference or QuantizedReference(
            plan.taps, precision=plan.precision, device=plan.device
        )
        self._checks_at = min(MOST_UNCHECKED, max(2, plan.window // 2))
        self._readings: dict[str, list[float]] = {}
        self._checked: set[str] = set()
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
            self._checked = set(state["checked"])
            return True
        self._reference.refresh(model, batch)
        self._readings, self._checked = {}, set()
        builder = self._reference.builder
        refreshed = ReferenceRefreshed(
            step=0, evaluation=evaluation, builder=builder, wall_s=0.0, cpu_s=0.0
        )
        self._reports += [*self._reference.take_changes(), refreshed]
        return True

    def submit(self, request: Request) -> None:
        """Evaluate now; `poll` returns the reading, or that the evaluation failed."""
        try:
            training = self._plan.reduce(request.activation)
        except Exception as error:
            self._reports.append(request.ticket.failed(error))
        else:
            self.evaluate(request.ticket, request.batch, training)

    def evaluate(self, ticket: Ticket, batch: Batch, training: ComparedOutput) -> None:
        """Compare the training model's output for the batch, or the first rows of it, with the
        reference's.
        """
        try:
            activation = self._reference.activation(ticket.tap, batch)
            if activation is None:
                raise ValueError(f"the reference gave no activation at {ticket.tap}")
            value = self._plan.compare(training, activation[: training.tensor.shape[0]])
        except Exception as error:
            self._reports.append(ticket.failed(error))
            return
        self._reports.append(ticket.reading(value))
        try:
            self._check_fidelity(ticket.tap, value)
        except Exception as error:
            what = "checking the reference against its full-precision form"
            self._reports.append(Declined(step=0, what=what, reason=brief(error)))

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call."""
        reports, self._reports = self._reports, []
        return ControllerStatus(reports=reports)

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's state and the readings of this snapshot."""
        readings = {tap: list(values) for tap, values in self._readings.items()}
        return {
            "reference": self._reference.state_dict(),
            "readings": readings,
            "checked": sorted(self._checked),
        }

    def _check_fidelity(self, tap: str, value: float) -> None:
        readings = self._readings.setdefault(tap, [])
        if math.isfinite(value):
            readings.append(value)
        rung = self._reference.number_format
        if len(readings) != self._checks_at or rung == "fp32" or tap in self._checked:
            return
        self._checked.add(tap)
        plasticity, error = statistics.fmean(readings), self._reference.error(tap, self._metric)
        if error is None:
            return
        outcome, error = self._improve(tap, error, plasticity)
        checked = FidelityChecked(
            step=0, tap=tap, rung=rung, error=error, plasticity=plasticity, outcome=outcome
        )
        self._reports += [checked, *self._reference.take_changes()]

    def _improve(self, tap: str, error: float, plasticity: float) -> tuple[str, float]:
        """Return what was made of an error, and the error after it."""
        largest = self._plan.fidelity_share * plasticity
        if error <= largest:
            return "kept", error
        if self._reference.recalibrate():
            again = self._reference.error(tap, self._metric)
            if again is not None and again <= largest:
                return "recalibrated", again
        reason = (
            f"at {tap} its own error of {error:.1e} is above {self._plan.fidelity_share:.0%} of "
            "the recent "
            f"plasticity of {plasticity:.1e}"
        )
        return ("escalated" if self._reference.escalate(reason) else "exhausted"), error

    def _metric(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.tensor(self._plan.compare(self._plan.reduce(first), second))


class AbsentController(Controller):
    """The controller of a policy that reads no plasticity: evaluates nothing."""

    def submit(self, request: Request) -> None:
        """Ignore the request."""
