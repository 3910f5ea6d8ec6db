"""The controller of a policy that reads no plasticity: there is nothing to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from egeria.controller.protocol import ControllerStatus, Request
from egeria.layers.batch import Batch


class AbsentController:
    """Makes no reference model and evaluates nothing."""

    def refresh(
        self, evaluation: int, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None
    ) -> bool:
        """Take no weights."""
        return False

    def submit(self, request: Request) -> None:
        """Answer nothing."""

    def poll(self) -> ControllerStatus:
        """Return nothing."""
        return ControllerStatus()

    close = poll

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}
