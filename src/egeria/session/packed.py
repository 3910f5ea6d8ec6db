"""The state of a run as `torch.distributed.checkpoint` takes it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    """What has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        ...


class Packed:
    """The state of a run in one piece.

    `torch.distributed.checkpoint` takes states apart and loads them entry by entry into a state that has the same
    entries; those of a run come and go. In one piece there is one entry, and all processes load the same:
    of the first, with `DefaultSavePlanner(dedup_save_to_lowest_rank=True)`. The state of another one has all but
    the reference model, which is made anew then.

    Args:
        run: whose state.
    """

    def __init__(self, run: Stateful) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one entry of bytes."""
        file = io.BytesIO()
        torch.save(self._run.state_dict(), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: it is of a newer egeria, or of another model. Nothing has changed then.
        """
        self._run.load_state_dict(torch.load(io.BytesIO(state["state"]), weights_only=True))
