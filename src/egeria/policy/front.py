"""What most policies share: they hold a frozen front, and decide at the end of an interval."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from egeria.config import Config
from egeria.policy.schedules import UnfreezeRule
from egeria.policy.values import KNOWLEDGE_GUIDED, Decision, Freeze, Interval, Judgement, Reading, Thaw


class FrontPolicy(ABC):
    """A policy without bootstrapping, plasticity or thaw rules, to build others on.

    Args:
        config: the settings of the run.
        trainable: for each layer module, front to back, whether it has any parameter to train.
        rule: not used; they thaw by themselves, or never.
        total_steps: optimizer steps of the run, None where unknown.
        deepest_freeze: at most this many front modules freeze; the last one never does.
    """

    needs: frozenset[str] = frozenset()
    stage = KNOWLEDGE_GUIDED
    """There is no other where the source knows no critical period."""
    monitored: int | None = None

    def __init__(
        self,
        config: Config,
        *,
        trainable: Sequence[bool],
        rule: UnfreezeRule,
        total_steps: int | None = None,
        deepest_freeze: int | None = None,
    ) -> None:
        self._config = config
        self._trainable = tuple(trainable)
        self._total_steps = total_steps
        last = len(self._trainable) - 1
        self._deepest = last if deepest_freeze is None else min(deepest_freeze, last)
        self._frozen = 0

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen."""
        return self._frozen

    @property
    def window(self) -> int:
        """`W`, which most have no use for."""
        return self._config.plasticity.window

    @abstractmethod
    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Decide at the end of an interval."""

    def observe_reading(self, reading: Reading) -> Judgement:
        """Make nothing of a reading."""
        return Judgement(smoothed=reading.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return {"frozen": self._frozen, "trainable": list(self._trainable), "deepest_freeze": self._deepest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._frozen = state["frozen"]
        self._trainable = tuple(state["trainable"])
        self._deepest = state["deepest_freeze"]

    def _move_to(self, depth: int, reason: str) -> tuple[Decision, ...]:
        """Return what brings the frozen front to `depth` layer modules, as far as it may."""
        depth = min(depth, self._deepest)
        decisions: list[Decision] = []
        if not self._config.freezing.enabled or depth == self._frozen:
            return ()
        if depth < self._frozen:
            decisions.append(Thaw(reason=reason, window=self.window))
            self._frozen = 0
        decisions += (Freeze(module=module, reason=reason) for module in range(self._frozen, depth))
        self._frozen = depth
        return tuple(decisions)
