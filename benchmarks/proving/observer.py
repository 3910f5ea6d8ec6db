"""The bench's own policy for egeria: has everything measured that might foretell what a freeze costs."""

from __future__ import annotations

from egeria.policy import GRADIENTS, PLASTICITY, WEIGHTS, WORTH, Decision, Interval
from egeria.policy.base import FrontPolicy

ROUNDS = 2
"""Readings of each layer module against one snapshot: at two distances from it, the same in the whole run."""


class Observer(FrontPolicy):
    """Freezes nothing; worth, weights, gradients and plasticity of the layer modules are in the journal afterwards.

    Plasticity is read of one layer module at the end of each interval, of one after the other.
    """

    needs = frozenset({PLASTICITY, WORTH, WEIGHTS, GRADIENTS})
    _saved = (*FrontPolicy._saved, "turn")

    def _prepare(self) -> None:
        self._turn = 0

    @property
    def window(self) -> int:
        """Evaluations that a snapshot is kept for."""
        return max(2, ROUNDS * self._deepest_freeze)

    @property
    def _candidate(self) -> int | None:
        return self._turn % self._deepest_freeze if self._deepest_freeze else None

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Go on to the next layer module."""
        self._turn += 1
        return ()
