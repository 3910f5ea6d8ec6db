"""The controller that evaluates at once, in the training process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from egeria.controller.assessor import Assessor
from egeria.controller.protocol import ControllerStatus, Report, Request
from egeria.layers.batch import Batch


class InlineController:
    """Runs the reference model inside `submit`; a failed evaluation becomes a result with an error.

    Args:
        assessor: the reference model and how to compare with it.
    """

    def __init__(self, assessor: Assessor) -> None:
        self._assessor = assessor
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
        """Evaluate now; `poll` hands the result out."""
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
        """Return the assessor's state."""
        return self._assessor.state_dict()
