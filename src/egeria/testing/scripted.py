"""A controller that reads from a script instead of a reference model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from egeria.controller import Refreshed, Report, Request, Result
from egeria.layers.batch import Batch


class ScriptedController:
    """Gives the readings it is told to give.

    Args:
        readings: called with the number of the evaluation and the layer module; returns the
            plasticity, or raises what a failing evaluation would.
        refreshing: called at each refresh with the model; may raise.
    """

    is_waiting = False
    is_apart = False
    cpu_s = 0.0

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

    def warm_up(self) -> None:
        """Do nothing."""

    def refresh(self, evaluation: int, model: nn.Module, batch: Batch | None) -> bool:
        """Do what the script does at a refresh."""
        self._refreshing(model)
        self._reports.append(Refreshed(evaluation=evaluation, builder="script"))
        return True

    def submit(self, request: Request) -> None:
        """Note the request and read the script."""
        self.requests.append(request)
        ticket = request.ticket
        value = self._readings(ticket.evaluation, ticket.module)
        self._reports.append(Result(evaluation=ticket.evaluation, step=ticket.step, module=ticket.module, value=value))

    def poll(self) -> list[Report]:
        """Return what was read since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> list[Report]:
        """Note that the run let go."""
        self.closed = True
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the script is its own state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> bool:
        """Do nothing."""
        return True
