"""The controller that evaluates at once, in the training process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from egeria.controller.protocol import Request, Result
from egeria.plasticity import Metric, pool_map
from egeria.reference import Reference


class InlineController:
    """Runs the reference model inside `submit`; a failed evaluation becomes a result with an error.

    Args:
        reference: the model to compare with.
        metric: how to compare.
        largest_map: side in pixels above which feature maps are pooled first.
    """

    def __init__(self, reference: Reference, metric: Metric, largest_map: int) -> None:
        self._reference = reference
        self._metric = metric
        self._largest_map = largest_map
        self._results: list[Result] = []

    @property
    def builder(self) -> str:
        """How its reference model is made."""
        return self._reference.builder

    def refresh(self, model: nn.Module) -> None:
        """Bring the reference model up to date with the training weights."""
        self._reference.refresh(model)

    def submit(self, request: Request) -> None:
        """Evaluate now; `poll` hands the result out."""
        value, error = None, ""
        try:
            value = self._evaluate(request)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        self._results.append(
            Result(evaluation=request.evaluation, step=request.step, module=request.module, value=value, error=error)
        )

    def poll(self) -> list[Result]:
        """Return the evaluations finished since the last call."""
        finished, self._results = self._results, []
        return finished

    def close(self) -> None:
        """Forget what has not been polled."""
        self._results.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the reference's state."""
        return {"reference": self._reference.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Go on from a saved state."""
        self._reference.load_state_dict(state["reference"], model)

    def _evaluate(self, request: Request) -> float:
        reference = self._reference.activation(request.tap, request.batch)
        if reference is None:
            raise ValueError(f"the reference gave no activation at {request.tap}")
        # The training activation may stand for the first rows of the batch alone.
        reference = reference[: request.activation.shape[0]]
        return float(self._metric(self._pooled(request.activation), self._pooled(reference)))

    def _pooled(self, activation: Tensor) -> Tensor:
        return pool_map(activation, self._largest_map)
