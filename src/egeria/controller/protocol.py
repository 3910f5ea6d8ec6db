"""The seam between the training loop and the evaluation of plasticity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from egeria.errors import brief
from egeria.events import Event, ReadingDropped
from egeria.model.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFailed(ReadingDropped):
    """A dropped reading whose evaluation raised: after three in a row there are no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """Plasticity of one layer module at one evaluation, and what it cost."""

    step: int
    evaluation: int
    module: int
    value: float
    age: int | None = None
    """Evaluations since the snapshot that it was compared with."""
    wall_s: float = 0.0
    """Seconds in the training process."""
    cpu_s: float = 0.0
    controller_cpu_s: float = 0.0
    """CPU seconds in the controller process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Which evaluation it is, and the submodule whose output is the module's activation."""

    evaluation: int
    step: int
    module: int
    tap: str

    def reading(self, value: float) -> EvaluationResult:
        """Return the reading of this evaluation."""
        return EvaluationResult(
            step=self.step, evaluation=self.evaluation, module=self.module, value=value
        )

    def failed(self, error: Exception) -> EvaluationFailed:
        """Return the event of an evaluation that raised."""
        return EvaluationFailed(
            step=self.step, evaluation=self.evaluation, module=self.module, reason=brief(error)
        )

    def lost(self, reason: str) -> ReadingDropped:
        """Return the event of an evaluation that never took place, though nothing is wrong."""
        return ReadingDropped(
            step=self.step, evaluation=self.evaluation, module=self.module, reason=reason
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One evaluation to make."""

    ticket: Ticket
    batch: Batch
    activation: Tensor
    """The training model's activation for the batch, or for the first rows of it [B, ...]."""


Report = EvaluationResult | Event


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerStatus:
    """What happened since the last poll, and the state of the controller now."""

    reports: list[Report] = field(default_factory=list)
    """Readings and journal events in order. The session fills in the `step` of the events and what
    it spent itself.

    `ReadingDropped` stands for an evaluation that was not made, `EvaluationFailed` for one that
    raised."""
    is_asynchronous: bool = False
    """Whether reports come at any time, so that it must be polled after every step."""
    cpu_s: float = 0.0
    """CPU seconds spent outside the training process so far."""


class Controller(Protocol):
    """Evaluates plasticity. No call blocks for longer than the evaluation it makes itself.

    What a subclass leaves out, all but `submit`, does nothing.
    """

    def refresh(
        self,
        evaluation: int,
        model: nn.Module,
        batch: Batch | None,
        state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Bring the reference model up to date with the training weights.

        Args:
            evaluation: the number of the newest evaluation.
            model: the model in training, with all of its weights.
            batch: the newest batch, to calibrate the reference model on; None if there is none.
            state: of a run that is resumed: take the reference model from there and leave the
                weights.

        Returns:
            Whether the reference model can be compared with from here on. If not, refresh again.
        """
        return False

    def submit(self, request: Request) -> None:
        """Ask for one evaluation."""

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call."""
        return ControllerStatus()

    def close(self) -> ControllerStatus:
        """Release everything held, for good; return what was not polled yet, and
        what is lost now.
        """
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {}
