"""The state of a run in one piece, for `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from egeria.errors import StateError

if TYPE_CHECKING:  # it takes half a second to import
    from torch.distributed.checkpoint.stateful import Stateful


class Packed:
    """The state of a run in one piece.

    `torch.distributed.checkpoint` takes states apart and loads them entry by entry into a state
    that has the same entries; those of a run come and go. In one piece there is one entry, and all
    processes load the same. It must be that of the first: save with
    `DefaultSavePlanner(dedup_save_to_lowest_rank=True)`. Others have the decisions, but not the
    reference model and what was measured since the last evaluation, which are made again then.
    """

    def __init__(self, run: Stateful) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one entry of bytes."""
        file = io.BytesIO()
        torch.save(self._run.state_dict(), file)
        return {"state": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            StateError: it is of another egeria, or of another model. Nothing has changed then.
        """
        try:
            loaded = torch.load(io.BytesIO(state["state"]), map_location="cpu", weights_only=True)
        except Exception as error:
            raise StateError(
                f"The state of a run is what run.packed saved; this one cannot be read ({error}). "
                f"Take an earlier checkpoint, or go on without loading it."
            ) from error
        self._run.load_state_dict(loaded)
