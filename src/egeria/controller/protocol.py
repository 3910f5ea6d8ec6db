"""The seam between the training loop and the evaluation of plasticity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from egeria.layers.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One evaluation to make."""

    evaluation: int
    step: int
    module: int
    tap: str
    """The submodule whose output is the module's activation."""
    batch: Batch
    activation: Tensor
    """The training model's activation for the batch, or for the first rows of it [B, ...]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One evaluation made."""

    evaluation: int
    step: int
    module: int
    value: float | None
    """Plasticity; None where the evaluation failed."""
    error: str = ""


class Controller(Protocol):
    """Evaluates plasticity. No call blocks for longer than the evaluation it makes itself."""

    @property
    def builder(self) -> str:
        """How its reference model is made, for the journal."""
        ...

    def refresh(self, model: nn.Module) -> None:
        """Bring the reference model up to date with the training weights."""
        ...

    def submit(self, request: Request) -> None:
        """Ask for one evaluation."""
        ...

    def poll(self) -> list[Result]:
        """Return the evaluations finished since the last call."""
        ...

    def close(self) -> None:
        """Let go of everything held; further calls are errors."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Go on from a saved state."""
        ...
