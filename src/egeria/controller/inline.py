"""The controller that evaluates at once, in the training process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from egeria.controller.assessor import Assessor
from egeria.controller.protocol import Report, Request
from egeria.layers.batch import Batch


class InlineController:
    """Runs the reference model inside `submit`; a failed evaluation becomes a result with an error.

    Args:
        assessor: the reference model and how to compare with it.
    """

    is_waiting = False
    is_apart = False
    cpu_s = 0.0

    def __init__(self, assessor: Assessor) -> None:
        self._assessor = assessor
        self._reports: list[Report] = []

    def warm_up(self) -> None:
        """Do nothing: what is not needed is not paid for."""

    def refresh(self, evaluation: int, model: nn.Module, batch: Batch | None) -> bool:
        """Bring the reference model up to date with the training weights.

        Raises:
            ReferenceModelError: the model cannot be copied.
        """
        self._reports += self._assessor.refresh(evaluation, model, batch)
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

    def poll(self) -> list[Report]:
        """Return what has happened since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> list[Report]:
        """Return what has not been polled."""
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return the assessor's state."""
        return self._assessor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> bool:
        """Go on from a saved state; one that a controller process saved has no reference in it."""
        if "reference" not in state:
            return False
        self._assessor.load_state_dict(state, model)
        return True
