"""The paper's rule of the library, fed with numbers: the one place of the bench that knows the library's policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from egeria.config import Config
from egeria.policy import (
    EgeriaPolicy,
    EndBootstrapping,
    Freeze,
    Interval,
    Reading,
    Thaw,
    find_rule,
    rule_for_schedule,
)

SETTINGS = (
    "plasticity.window",
    "bootstrapping.change_threshold",
    "freezing.enabled",
    "freezing.tolerance_share",
    "freezing.tolerance_readings",
    "unfreezing.drop_factor",
    "unfreezing.minimum_window",
)
"""All that the rule decides by, as `group.key`."""
KINDS = {EndBootstrapping: "knowledge-guided", Freeze: "freeze", Thaw: "thaw"}


class PaperRule:
    """Decides by the losses, learning rates and readings of one run after the other.

    What it decides is given as text: 'knowledge-guided' (bootstrapping is over), 'freeze 0' (the first layer module),
    or 'thaw'.

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
        config = Config.from_dict(groups)
        self._policy = EgeriaPolicy(
            config,
            trainable=trainable,
            rule=find_rule(rule, config.unfreezing.drop_factor),
            total_steps=total_steps,
            deepest_freeze=deepest_freeze,
        )

    @property
    def frozen(self) -> int:
        """How many front layer modules are to be frozen."""
        return self._policy.frozen

    @property
    def window(self) -> int:
        """`W` as it stands now, in evaluations."""
        return self._policy.window

    @property
    def monitored(self) -> int | None:
        """The layer module of which a reading is wanted; None for none."""
        return self._policy.monitored

    def end_interval(self, step: int, evaluation: int, loss: float | None, learning_rate: float) -> list[str]:
        """Return what the rule decides at the end of an interval."""
        interval = Interval(step=step, evaluation=evaluation, loss=loss, learning_rate=learning_rate)
        return _texts(self._policy.observe_interval(interval))

    def read(self, step: int, evaluation: int, module: int, value: float) -> list[str]:
        """Return what the rule decides by a reading of a layer module."""
        reading = Reading(step=step, evaluation=evaluation, module=module, value=value)
        return _texts(self._policy.observe_reading(reading).decisions)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values to go on from."""
        return self._policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._policy.load_state_dict(state)


def rule_of(scheduler: Any) -> str:
    """Return the name of the rule for thaws that fits a scheduler."""
    return rule_for_schedule(_names(scheduler))


def _names(scheduler: Any) -> list[str]:
    """Return the names of a scheduler's class, of its functions and of the schedulers that it chains."""
    functions = [getattr(entry, "func", entry) for entry in getattr(scheduler, "lr_lambdas", ())]
    names = [getattr(entry, "__qualname__", type(entry).__name__) for entry in functions]
    inner = [name for part in getattr(scheduler, "_schedulers", ()) for name in _names(part)]
    return [type(scheduler).__name__, *names, *inner]


def _texts(decisions: Sequence[object]) -> list[str]:
    found = []
    for decision in decisions:
        kind = KINDS[type(decision)]
        found.append(f"{kind} {getattr(decision, 'module', '')}".strip())
    return found
