"""One process: the twin of the strategies for several."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from egeria.layers.shards import without_wrapper
from egeria.parallel.refusals import refuse_model


class SingleProcess:
    """Decides for itself and calls the model as it is.

    Args:
        refused: why nothing is frozen, where the model trains in a way that cannot be followed.
    """

    rank = 0
    num_ranks = 1

    def __init__(self, refused: str | None = None) -> None:
        self._refused = refused
        self._called: nn.Module = nn.Module()

    def take(self, model: nn.Module) -> nn.Module:
        """Return the model, without what `torch.compile` put around it."""
        self._called = model
        return without_wrapper(model)

    def refusal(self) -> str | None:
        """Refuse what this strategy was made to refuse, and models whose layers cannot be watched."""
        return self._refused or refuse_model(without_wrapper(self._called))

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the one row."""
        return [list(row)]

    def settle(self) -> None:
        """Nothing is in another form."""

    def rewrap(self, frozen: Collection[str] = ()) -> nn.Module:
        """Return what was given to `take`."""
        return self._called
