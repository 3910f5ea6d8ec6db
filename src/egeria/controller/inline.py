"""Evaluating plasticity: comparing the training model with the reference, and the controller that does it at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria.controller.protocol import ControllerStatus, Report, Request, Ticket, brief
from egeria.events import Declined, FidelityChecked, ReferenceRefreshed
from egeria.layers.batch import Batch
from egeria.plasticity import GRAM_FORMS, Metric, flatten_rows, gram, pool_map
from egeria.reference import QuantizedReference

MOST_UNCHECKED = 3
"""Readings before the reference is checked: fewer than any policy decides by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedOutput:
    """What is left of an activation once it is ready to be compared."""

    tensor: Tensor
    """Pooled activation [B, ...], or the gram of its rows [B, B]."""
    is_gram: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """How to evaluate; travels to the controller process."""

    taps: tuple[str, ...]
    metric: Metric
    largest_map: int
    window: int
    precision: str
    device: str
    fidelity_share: float
    harmless_error: float = 0.0
    """Error of a reading that no decision turns on, however small plasticity is."""

    def reduce(self, activation: Tensor, *, as_gram: bool | None = None) -> ComparedOutput:
        """Pool an activation [B, ...], and take its gram [B, B] where the metric allows it and it is smaller.

        Args:
            activation: what a tap gave.
            as_gram: as the output to compare with; None decides here.
        """
        pooled = pool_map(activation.detach(), self.largest_map)
        rows = pooled.shape[0]
        if as_gram is None:
            as_gram = self.metric in GRAM_FORMS and pooled.numel() > rows * rows
        return ComparedOutput(tensor=gram(flatten_rows(pooled)) if as_gram else pooled, is_gram=as_gram)

    def compare(self, training: ComparedOutput, reference: ComparedOutput) -> float:
        """Return the metric between two outputs of the same form."""
        metric = GRAM_FORMS[self.metric] if training.is_gram else self.metric
        with torch.no_grad():
            return float(metric(training.tensor, reference.tensor.to(training.tensor.device)))


class Assessor:
    """Runs the reference, compares, and checks whether the reference is exact enough.

    Once in the life of a snapshot, after `checks_at` readings of a tap, its error is compared with
    what it is there to show: the metric between the full-precision snapshot and its quantized form
    may be at most `fidelity_share` of the mean of those readings, or harmless. Above that the activation ranges are
    taken again, and if that does not help the next, more exact number format is taken.
    """

    def __init__(self, plan: EvaluationPlan, reference: QuantizedReference | None = None) -> None:
        self.plan = plan
        self.reference = reference or QuantizedReference(plan.taps, precision=plan.precision, device=plan.device)
        self.checks_at = min(MOST_UNCHECKED, max(2, plan.window // 2))
        self._readings: dict[str, list[float]] = {}
        self._checked: set[str] = set()

    def refresh(self, evaluation: int, model: nn.Module, batch: Batch | None) -> list[Report]:
        """Take over the weights of the model; return that, and the changes of number format."""
        self.reference.refresh(model, batch)
        self._readings, self._checked = {}, set()
        builder = self.reference.builder
        refreshed = ReferenceRefreshed(step=0, evaluation=evaluation, builder=builder, wall_s=0.0, cpu_s=0.0)
        return [*self.reference.take_changes(), refreshed]

    def run_reference(self, tap: str, batch: Batch, num_rows: int, *, as_gram: bool) -> ComparedOutput:
        """Return the reference's output for the first rows of the batch.

        Raises:
            ValueError: the reference has nothing to compare at this tap.
        """
        activation = self.reference.activation(tap, batch)
        if activation is None:
            raise ValueError(f"the reference gave no activation at {tap}")
        return self.plan.reduce(activation[:num_rows], as_gram=as_gram)

    def conclude(
        self, ticket: Ticket, training: ComparedOutput, reference: ComparedOutput, cpu_s: float = 0.0
    ) -> list[Report]:
        """Compare the two outputs of an evaluation, and check the reference's fidelity when it is time to."""
        try:
            value = self.plan.compare(training, reference)
        except Exception as error:
            return [ticket.failed(error)]
        reading = ticket.reading(value, cpu_s)
        try:
            return [reading, *self._check_fidelity(ticket.tap, value)]
        except Exception as error:
            what = "checking the reference against its full-precision form"
            return [reading, Declined(step=0, what=what, reason=brief(error))]

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's state and the readings of this snapshot."""
        readings = {tap: list(values) for tap, values in self._readings.items()}
        return {"reference": self.reference.state_dict(), "readings": readings, "checked": sorted(self._checked)}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Continue from a saved state."""
        self.reference.load_state_dict(state["reference"], model)
        self._readings = {tap: list(values) for tap, values in state["readings"].items()}
        self._checked = set(state["checked"])

    def _check_fidelity(self, tap: str, value: float) -> list[Report]:
        readings = self._readings.setdefault(tap, [])
        if math.isfinite(value):
            readings.append(value)
        if len(readings) != self.checks_at or self.reference.number_format == "fp32" or tap in self._checked:
            return []
        self._checked.add(tap)
        plasticity = statistics.fmean(readings)
        rung, error = self.reference.number_format, self.reference.error(tap, self._metric)
        if error is None:
            return []
        outcome = "kept"
        if not error <= self._limit(plasticity):
            outcome, error = self._improve(tap, error, plasticity)
        checked = FidelityChecked(step=0, tap=tap, rung=rung, error=error, plasticity=plasticity, outcome=outcome)
        return [checked, *self.reference.take_changes()]

    def _improve(self, tap: str, error: float, plasticity: float) -> tuple[str, float]:
        if self.reference.is_stale and self.reference.recalibrate():
            again = self.reference.error(tap, self._metric)
            if again is not None and again <= self._limit(plasticity):
                return "recalibrated", again
        reason = (
            f"at {tap} its own error of {error:.1e} is above {self.plan.fidelity_share:.0%} of the recent "
            f"plasticity of {plasticity:.1e}"
        )
        return ("escalated" if self.reference.escalate(reason) else "exhausted"), error

    def _limit(self, plasticity: float) -> float:
        return max(self.plan.fidelity_share * plasticity, self.plan.harmless_error)

    def _metric(self, first: Tensor, second: Tensor) -> Tensor:
        training = self.plan.reduce(first)
        return torch.tensor(self.plan.compare(training, self.plan.reduce(second, as_gram=training.is_gram)))


class InlineController:
    """Runs the reference model inside `submit`, in the training process.

    Args:
        plan: how to evaluate.
    """

    def __init__(self, plan: EvaluationPlan) -> None:
        self._assessor = Assessor(plan)
        self._reports: list[Report] = []

    def refresh(
        self, evaluation: int, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None
    ) -> bool:
        """Bring the reference model up to date with the training weights.

        Raises:
            ReferenceModelError: the model cannot be copied.
        """
        if state is None:
            self._reports += self._assessor.refresh(evaluation, model, batch)
        elif "reference" not in state:  # saved by a controller process
            return False
        else:
            self._assessor.load_state_dict(state, model)
        return True

    def submit(self, request: Request) -> None:
        """Evaluate now; `poll` returns the reading, or that the evaluation failed."""
        ticket, activation = request.ticket, request.activation
        try:
            training = self._assessor.plan.reduce(activation)
            reference = self._assessor.run_reference(
                ticket.tap, request.batch, activation.shape[0], as_gram=training.is_gram
            )
            self._reports += self._assessor.conclude(ticket, training, reference)
        except Exception as error:
            self._reports.append(ticket.failed(error))

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call."""
        reports, self._reports = self._reports, []
        return ControllerStatus(reports=reports)

    close = poll

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's state and the readings of this snapshot."""
        return self._assessor.state_dict()


class AbsentController:
    """The controller of a policy that reads no plasticity: evaluates nothing."""

    def refresh(
        self, evaluation: int, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None
    ) -> bool:
        """Take no weights."""
        return False

    def submit(self, request: Request) -> None:
        """Ignore the request."""

    def poll(self) -> ControllerStatus:
        """Return nothing."""
        return ControllerStatus()

    close = poll

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}
