"""The paper's rule of the library, fed with numbers: the one place of the bench that knows the library's policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from egeria.config import Config
from egeria.policy import Interval, Reading, find_rule, rule_for_schedule
from egeria.policy.paper import EgeriaPolicy

SETTINGS = (
    "plasticity.window",
    "bootstrapping.change_threshold",
    "freezing.tolerance_share",
    "freezing.tolerance_readings",
    "unfreezing.drop_factor",
)
"""All that the rule decides by, as `group.key`."""


class PaperRule:
    """Decides by the losses, learning rates and readings of one run after the other.

    What it decides is given as text: 'knowledge-guided' (bootstrapping is over), 'freeze 0' (the first layer module),
    or 'thaw'. It is taken for done: what is decided next goes by it.

    Args:
        settings: by the names of `SETTINGS`; None and what is left out are the library's.
        trainable: for each layer module, whether it has anything to train.
        rule: name of the rule for thaws.
        total_steps: of the run; None where unknown.
        deepest_freeze: how many front layer modules may be frozen; None for all but the last.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        trainable: Sequence[bool],
        rule: str,
        total_steps: int | None,
        deepest_freeze: int | None = None,
    ) -> None:
        groups: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            group, _, key = name.partition(".")
            if value is not None:
                groups.setdefault(group, {})[key] = value
        config, last = Config.from_dict(groups), len(trainable) - 1
        self._policy = EgeriaPolicy(
            config,
            modules=tuple(map(str, range(len(trainable)))),
            trainable=tuple(trainable),
            deepest=last if deepest_freeze is None else min(deepest_freeze, last),
            total_steps=total_steps,
            lr_rule=find_rule(rule, config.unfreezing.drop_factor),
        )
        self.frozen = 0
        """How many front layer modules are to be frozen."""

    @property
    def window(self) -> int:
        """`W` as it stands now, in evaluations."""
        return self._policy.status.window

    @property
    def monitored(self) -> int | None:
        """The layer module of which a reading is wanted; None for none."""
        return self._policy.wants.plasticity_of

    def end_interval(self, step: int, loss: float | None, learning_rate: float) -> list[str]:
        """Return what the rule decides at the end of an interval."""
        stage = self._policy.status.stage
        interval = Interval(step=step, frozen=self.frozen, num_steps=1, loss=loss, learning_rate=learning_rate)
        decided = self._ask(interval)
        return decided if self._policy.status.stage == stage else [self._policy.status.stage, *decided]

    def read(self, step: int, evaluation: int, module: int, value: float) -> list[str]:
        """Return what the rule decides by a reading of a layer module."""
        reading = Reading(evaluation=evaluation, module=module, value=value)
        return self._ask(Interval(step=step, frozen=self.frozen, readings=(reading,)))

    def _ask(self, interval: Interval) -> list[str]:
        decided, before = self._policy.observe(interval), self.frozen
        if decided is None:
            return []
        self.frozen = decided.frozen
        is_thaw = decided.frozen < before
        freezes = [f"freeze {module}" for module in range(0 if is_thaw else before, decided.frozen)]
        return ["thaw", *freezes] if is_thaw else freezes

    def state_dict(self) -> dict[str, Any]:
        """Return plain values to go on from."""
        return {"policy": self._policy.state_dict(), "frozen": self.frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._policy.load_state_dict(state["policy"])
        self.frozen = state["frozen"]


def rule_of(scheduler: Any) -> str:
    """Return the name of the rule for thaws that fits a scheduler."""
    return rule_for_schedule(_names(scheduler))


def _names(scheduler: Any) -> list[str]:
    """Return the names of a scheduler's class, of its functions and of the schedulers that it chains."""
    functions = [getattr(entry, "func", entry) for entry in getattr(scheduler, "lr_lambdas", ())]
    names = [getattr(entry, "__qualname__", type(entry).__name__) for entry in functions]
    inner = [name for part in getattr(scheduler, "_schedulers", ()) for name in _names(part)]
    return [type(scheduler).__name__, *names, *inner]
