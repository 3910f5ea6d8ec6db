"""The seam for training in several processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import nn


class ParallelStrategy(Protocol):
    """What changes when several processes train one model.

    All of them make the same calls, in the same order.
    """

    rank: int
    """Which of the processes this is; 0 evaluates, keeps the journal and leads."""
    num_ranks: int

    def take(self, model: nn.Module) -> nn.Module:
        """Take over what was given to `attach`; return the model itself, without any wrapper."""
        ...

    def refusal(self) -> str | None:
        """Return why nothing can be frozen under the strategy, with the way out; None if it can."""
        ...

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all processes, by rank; they have the same length.

        Raises:
            RuntimeError: a process did not answer within the time that the job allows.
        """
        ...

    def settle(self) -> None:
        """Put parameters into the form in which what trains can be changed."""
        ...

    def rewrap(self, frozen: Collection[str] = ()) -> nn.Module:
        """Return what the loop is to call, now that gradients may have been switched on or off.

        Args:
            frozen: names of the submodules that are frozen now.
        """
        ...
