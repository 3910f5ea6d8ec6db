"""'none': training as it is."""

from __future__ import annotations

from egeria.policy.front import FrontPolicy
from egeria.policy.values import Decision, Interval


class NeverFreeze(FrontPolicy):
    """Freezes nothing, reads nothing, evaluates nothing: the plain run to compare with."""

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Decide nothing."""
        return ()
