"""The controller of a policy that reads no plasticity: there is nothing to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from egeria.controller.protocol import Report, Request
from egeria.layers.batch import Batch


class AbsentController:
    """Makes no reference model and evaluates nothing."""

    is_waiting = False
    is_apart = False
    cpu_s = 0.0

    def warm_up(self) -> None:
        """Do nothing."""

    def refresh(self, evaluation: int, model: nn.Module, batch: Batch | None) -> bool:
        """Take no weights."""
        return False

    def submit(self, request: Request) -> None:
        """Answer nothing."""

    def poll(self) -> list[Report]:
        """Return nothing."""
        return []

    def close(self) -> list[Report]:
        """Return nothing."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> bool:
        """Have no reference to go on with."""
        return False
