"""'weight_change': the paper's rule, told how far the weights move instead of the activations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from egeria.config import Config
from egeria.policy.engine import EgeriaPolicy
from egeria.policy.protocol import WEIGHTS
from egeria.policy.schedules import UnfreezeRule
from egeria.policy.values import Decision, Freeze, Interval, Judgement, Reading


class WeightChange:
    """Judges the frontmost active module by `||w_now - w_then|| / ||w_then||` between evaluations.

    Bootstrapping, smoothing, slope, tolerance, patience and thawing are the paper's. What it saves is the reference
    model and every pass through it.

    Source: our own control, for what activations tell beyond weights.

    Args:
        config: the settings of the run.
        trainable: for each layer module, front to back, whether it has any parameter to train.
        rule: when to thaw.
        total_steps: optimizer steps of the run, None where unknown.
        deepest_freeze: at most this many front modules freeze; the last one never does.
    """

    needs = frozenset({WEIGHTS})
    monitored: int | None = None
    """No plasticity is wanted."""

    def __init__(
        self,
        config: Config,
        *,
        trainable: Sequence[bool],
        rule: UnfreezeRule,
        total_steps: int | None = None,
        deepest_freeze: int | None = None,
    ) -> None:
        self._rule = EgeriaPolicy(
            config, trainable=trainable, rule=rule, total_steps=total_steps, deepest_freeze=deepest_freeze
        )

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen."""
        return self._rule.frozen

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return self._rule.stage

    @property
    def window(self) -> int:
        """`W` as it stands now, in evaluations."""
        return self._rule.window

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Take in an interval, and the change of the weights in it as a reading."""
        decisions = self._rule.observe_interval(interval)
        module = self._rule.monitored
        if decisions or module is None or interval.loss is None or interval.weight_changes is None:
            return decisions  # over an interval that ended with a thaw the front did not move: that is no reading
        change = interval.weight_changes[module]
        if change is None or not math.isfinite(change):
            return ()
        reading = Reading(step=interval.step, evaluation=interval.evaluation, module=module, value=change)
        judgement = self._rule.observe_reading(reading)
        reason = f"the change of its weights was stationary for {judgement.stationary} evaluations"
        return tuple(
            replace(decision, reason=reason) if isinstance(decision, Freeze) and decision.module == module else decision
            for decision in judgement.decisions
        )

    def observe_reading(self, reading: Reading) -> Judgement:
        """Make nothing of a reading of plasticity."""
        return Judgement(smoothed=reading.value)

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the steps that the next freeze takes at least."""
        return None if self._rule.monitored is None else float((2 * self.window - 1) * interval_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return self._rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._rule.load_state_dict(state)
