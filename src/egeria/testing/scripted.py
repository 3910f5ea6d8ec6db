"""A controller that reads from a script instead of a reference model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from egeria.controller import Request, Result


class ScriptedController:
    """Gives the readings it is told to give.

    Args:
        readings: called with the number of the evaluation and the layer module; returns the
            plasticity, or raises what a failing evaluation would.
        refreshing: called at each refresh with the model; may raise.
    """

    builder = "script"

    def __init__(
        self,
        readings: Callable[[int, int], float] = lambda evaluation, module: 1.0,
        refreshing: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        self.requests: list[Request] = []
        self.closed = False
        self._readings = readings
        self._refreshing = refreshing
        self._results: list[Result] = []

    def refresh(self, model: nn.Module) -> None:
        """Do what the script does at a refresh."""
        self._refreshing(model)

    def submit(self, request: Request) -> None:
        """Note the request and read the script."""
        self.requests.append(request)
        value = self._readings(request.evaluation, request.module)
        self._results.append(
            Result(evaluation=request.evaluation, step=request.step, module=request.module, value=value)
        )

    def poll(self) -> list[Result]:
        """Return what was read since the last call."""
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        """Note that the run let go."""
        self.closed = True

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the script is its own state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Do nothing."""
