"""The seam between the controller and whatever stands for the model as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from egeria.layers.batch import Batch


class Reference(Protocol):
    """A model like the one in training, with the weights of some evaluations ago."""

    @property
    def builder(self) -> str:
        """How it is made, for the journal ("int8 static, x86 engine, 53 of 54 weighted layers")."""
        ...

    def refresh(self, model: nn.Module, batch: Batch | None = None) -> None:
        """Take over the weights of the training model as they are now.

        Args:
            model: the training model.
            batch: the newest training batch, detached and of a few rows, to calibrate on.
        """
        ...

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the output of submodule `tap` for the batch [B, ...]; None if it gives no tensor."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to go on, empty before the first refresh."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Go on from a saved state, giving the same activations to the bit; `model` gives the architecture."""
        ...
