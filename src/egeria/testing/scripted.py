"""A controller that reads from a script instead of a reference model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from egeria.controller import ControllerStatus, Report, Request
from egeria.events import ReferenceRefreshed
from egeria.layers.batch import Batch


class ScriptedController:
    """Gives the readings that it is given.

    Args:
        readings: called with the number of the evaluation and the layer module; returns the
            plasticity, or raises what a failing evaluation would.
        refreshing: called at each refresh with the model; may raise.
    """

    def __init__(
        self,
        readings: Callable[[int, int], float] = lambda evaluation, module: 1.0,
        refreshing: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        self.requests: list[Request] = []
        self.closed = False
        self._readings = readings
        self._refreshing = refreshing
        self._reports: list[Report] = []

    def refresh(
        self, evaluation: int, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None
    ) -> bool:
        """Do what the script does at a refresh; nothing for a run that is resumed."""
        if state is None:
            self._refreshing(model)
            made = ReferenceRefreshed(step=0, evaluation=evaluation, builder="script", wall_s=0.0, cpu_s=0.0)
            self._reports.append(made)
        return True

    def submit(self, request: Request) -> None:
        """Note the request and read the script."""
        self.requests.append(request)
        ticket = request.ticket
        self._reports.append(ticket.reading(self._readings(ticket.evaluation, ticket.module)))

    def poll(self) -> ControllerStatus:
        """Return what was read since the last call."""
        reports, self._reports = self._reports, []
        return ControllerStatus(reports=reports)

    def close(self) -> ControllerStatus:
        """Note that the run let go."""
        self.closed = True
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the script is its own state."""
        return {}
