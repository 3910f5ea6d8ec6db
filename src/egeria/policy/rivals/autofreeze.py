"""'autofreeze': freezing by how much gradients change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from egeria.config import Config
from egeria.policy.front import FrontPolicy
from egeria.policy.protocol import GRADIENTS
from egeria.policy.schedules import UnfreezeRule
from egeria.policy.values import Decision, Interval


class AutoFreeze(FrontPolicy):
    """Freezes the front modules whose gradients change less than those of the others.

    At evaluation `k`, the end of an interval, `G_l(k)` is the L1 norm of the gradients of module `l` added up over the
    interval, and `eta_l = |G_l(k-1) - G_l(k)| / G_l(k-1)`. With the percentile of `eta` over the modules that are
    still active as the threshold, the first of them with `eta >= threshold` becomes the first one in training.
    So the earliest freeze is at the second evaluation. Nothing thaws.

    Source: Liu et al., "AutoFreeze" (arXiv 2102.01386), and its code.
    """

    needs = frozenset({GRADIENTS})

    def __init__(
        self,
        config: Config,
        *,
        trainable: Sequence[bool],
        rule: UnfreezeRule,
        total_steps: int | None = None,
        deepest_freeze: int | None = None,
    ) -> None:
        super().__init__(config, trainable=trainable, rule=rule, total_steps=total_steps, deepest_freeze=deepest_freeze)
        self._previous: tuple[float | None, ...] | None = None

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Compare the gradients of this interval with those of the one before."""
        before, self._previous = self._previous, interval.gradients
        if before is None or interval.gradients is None:
            return ()
        active = [module for module in range(self._frozen, len(self._trainable)) if self._trainable[module]]
        changes = [_change(before[module], interval.gradients[module]) for module in active]
        if not changes or any(math.isnan(change) for change in changes):
            return ()  # a gradient that is not finite says nothing, and nothing may freeze past it
        threshold = percentile(changes, self._config.policy.percentile)
        first = next(module for module, change in zip(active, changes, strict=True) if change >= threshold)
        if first <= self._frozen:
            return ()
        change = changes[active.index(first)]
        where = f"{self._config.policy.percentile:g}th percentile {threshold:.3g}"
        return self._move_to(first, f"its gradients change less than the {where}; those of the next by {change:.3g}")

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the steps to the next evaluation."""
        return float(interval_steps) if self._frozen < self._deepest else None

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return {**super().state_dict(), "previous": None if self._previous is None else list(self._previous)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self._previous = None if state["previous"] is None else tuple(state["previous"])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of values, on the straight line between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    lower = math.floor(place)
    if place == lower or ordered[lower] == ordered[lower + 1]:
        return ordered[lower]
    between = ordered[lower] + (place - lower) * (ordered[lower + 1] - ordered[lower])
    return min(between, ordered[lower + 1])


def _change(before: float | None, now: float | None) -> float:
    """Return the relative change; not a number where one of the two is missing or not finite."""
    if before is None or now is None or not (math.isfinite(before) and math.isfinite(now)):
        return math.nan
    if before == now:
        return 0.0
    return abs(before - now) / before if before else math.inf
