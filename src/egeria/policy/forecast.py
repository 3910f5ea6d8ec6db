"""'forecast': freezing what would hardly change any more, by plasticity and the learning rate still to come."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from egeria.config import Config
from egeria.policy.bootstrap import Bootstrap
from egeria.policy.protocol import FORESIGHT, PLASTICITY
from egeria.policy.rivals.base import Rival
from egeria.policy.schedules import UnfreezeRule
from egeria.policy.values import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    Decision,
    EndBootstrapping,
    Interval,
    Judgement,
    Reading,
)

NUM_DRIFTS = 5
"""Readings whose median is the drift of a layer module."""


class Forecast(Rival):
    """Freezes the frontmost active module once what it would still change is too little to matter.

    Activations move away from the reference in proportion to the *way*: the learning rate, added up over the steps
    since the snapshot. Plasticity is a square, so `sqrt(P) / way` is the drift of a module, and the median of a
    few such readings, times the way that the schedule still has ahead, squared, is the plasticity the module
    would show at the end of the run against itself now: what a freeze takes from it. Under `policy.limit` for
    `policy.patience` readings in a row, it freezes.

    At a constant high rate the way ahead is long, however stationary plasticity is; behind the last decay of a step
    schedule, or late in a cosine, it is short. Nothing freezes while the way ahead is unknown, and nothing thaws.

    Source: our own, from the observation that stationary plasticity at a high rate is the noise of SGD.

    Args:
        config: the settings of the run.
        trainable: for each layer module, front to back, whether it has any parameter to train.
        rule: not used.
        total_steps: optimizer steps of the run, None where unknown.
        deepest_freeze: at most this many front modules freeze; the last one never does.
    """

    needs = frozenset({PLASTICITY, FORESIGHT})

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
        self._bootstrap = Bootstrap(change_threshold=config.bootstrapping.change_threshold)
        self._step = 0
        self._ways: dict[int, float] = {}
        """By evaluation, the way from the one before."""
        self._way_ahead: float | None = None
        self._drifts: tuple[float, ...] = ()
        self._num_under = 0

    @property
    def stage(self) -> str:  # type: ignore[override]
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return KNOWLEDGE_GUIDED if self._bootstrap.is_over else BOOTSTRAPPING

    @property
    def monitored(self) -> int | None:  # type: ignore[override]
        """The frontmost active module, or None: bootstrapping, or nothing left to freeze."""
        return None if self.stage == BOOTSTRAPPING or self._frozen >= self._deepest else self._frozen

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Take in the loss, the way that was gone and the way ahead."""
        self._ways[interval.evaluation] = interval.learning_rate * (interval.step - self._step)
        self._ways = {key: way for key, way in self._ways.items() if key > interval.evaluation - self._longest_memory()}
        self._step, self._way_ahead = interval.step, interval.way_ahead
        if self._bootstrap.is_over:
            return self._pass_over_untrainable()
        self._bootstrap = self._bootstrap.observe(interval.loss)
        if not self._bootstrap.is_over:
            return ()
        reason = f"the loss changed by {self._bootstrap.change:.1%} in an interval"
        return (EndBootstrapping(reason=reason), *self._pass_over_untrainable())

    def observe_reading(self, reading: Reading) -> Judgement:
        """Take in one reading; readings of a module no longer monitored change nothing."""
        drift = self._drift(reading)
        if reading.module != self.monitored or drift is None:
            return Judgement(smoothed=reading.value)
        self._drifts = (*self._drifts, drift)[-NUM_DRIFTS:]
        change = self._change_ahead()
        is_under = change is not None and change < self._config.policy.limit
        self._num_under = self._num_under + 1 if is_under else 0
        stationary = self._num_under
        decisions: tuple[Decision, ...] = ()
        if change is not None and self._num_under >= self._config.policy.patience:
            decisions = self._freeze(f"to the end of the run its plasticity would come to {change:.1e} only")
        return Judgement(smoothed=reading.value, slope=change, stationary=stationary, decisions=decisions)

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the steps that the next freeze takes at least."""
        return None if self.monitored is None else float(self._config.policy.patience * interval_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return {
            **super().state_dict(),
            "bootstrap": asdict(self._bootstrap),
            "step": self._step,
            "ways": list(self._ways.items()),
            "way_ahead": self._way_ahead,
            "drifts": list(self._drifts),
            "num_under": self._num_under,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self._bootstrap = Bootstrap(**state["bootstrap"])
        self._step = state["step"]
        self._ways = {int(evaluation): way for evaluation, way in state["ways"]}
        self._way_ahead = state["way_ahead"]
        self._drifts = tuple(state["drifts"])
        self._num_under = state["num_under"]

    def _longest_memory(self) -> int:
        """Return the evaluations that a reading can reach back, to the snapshot and by coming late."""
        return 2 * (self._config.reference.refresh_evaluations or self.window) + self._config.controller.queue_length

    def _drift(self, reading: Reading) -> float | None:
        """Return how far the activations came for each unit of the way since the snapshot; None where unknown."""
        if reading.age is None:
            return None
        since = [self._ways.get(reading.evaluation - back) for back in range(reading.age)]
        if not since or any(way is None for way in since):
            return None
        way = math.fsum(way for way in since if way is not None)
        return math.sqrt(max(0.0, reading.value)) / way if way > 0 else None

    def _change_ahead(self) -> float | None:
        """Return the plasticity against now that the module would reach by the end; None while that is unknown."""
        if self._way_ahead is None or len(self._drifts) < min(NUM_DRIFTS, self._config.policy.patience):
            return None
        return (statistics.median(self._drifts) * self._way_ahead) ** 2

    def _freeze(self, reason: str) -> tuple[Decision, ...]:
        self._drifts, self._num_under = (), 0
        return (*self._move_to(self._frozen + 1, reason), *self._pass_over_untrainable())

    def _pass_over_untrainable(self) -> tuple[Decision, ...]:
        depth = self._frozen
        while depth < self._deepest and not self._trainable[depth]:
            depth += 1
        return self._move_to(depth, "it has no parameters to train")
