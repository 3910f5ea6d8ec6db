"""When the learning rate asks for a thaw: one rule type, and a dictionary of the schedules it
covers.

To the paper's rule for annealing in steps (thaw when the rate has fallen tenfold, §4.2.2) this adds
three limits: nothing freezes while the rate rises, a rate that rises again thaws, and a smooth
decay does not thaw too late.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from egeria.config.checks import require


class UnfreezeAction(enum.Enum):
    """What the learning rate asks for."""

    GO = "go"  # freeze what is stationary
    HOLD = "hold"  # freeze nothing for now
    THAW = "thaw"  # thaw everything and freeze again with half the window
    RESTART = "restart"  # thaw everything and go back to the full window


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What an unfreeze rule may look at, once every interval."""

    step: int
    total_steps: int | None
    frozen: int
    learning_rate: float
    previous_learning_rate: float | None  # one interval ago
    freeze_learning_rate: float | None
    """The rate when the first module with anything to train froze; None while none is frozen."""


@runtime_checkable
class UnfreezeRule(Protocol):
    """Decides from the learning rate when to thaw, by the moment alone, so that a run can be
    replayed.
    """

    def judge(self, moment: Moment) -> UnfreezeAction:
        """Return what to do at this moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRule:
    """Thaws when the rate has fallen, or risen, far enough since the first freeze."""

    drop_factor: float | None = 10.0  # fall of the rate that thaws; None: no fall does
    rise_factor: float | None = (
        2.0  # rise of the rate that thaws and restores the full window; None: no rise does
    )
    minimum_remaining: float = (
        0.0  # share of the run that must be left for a fall to thaw; needs `total_steps`
    )

    def judge(self, moment: Moment) -> UnfreezeAction:
        """Return what the rate asks for at this moment."""
        before = moment.freeze_learning_rate
        if (
            moment.frozen and before is not None and moment.learning_rate != before
        ):  # 0 is twice 0, and a tenth of it
            if self.rise_factor is not None and moment.learning_rate >= before * self.rise_factor:
                return UnfreezeAction.RESTART
            if self._has_dropped(moment, before):
                return UnfreezeAction.THAW
        rising = (
            moment.previous_learning_rate is not None
            and moment.learning_rate > moment.previous_learning_rate
        )
        return UnfreezeAction.HOLD if rising else UnfreezeAction.GO

    def _has_dropped(self, moment: Moment, before: float) -> bool:
        # Schedulers multiply in floating point: 0.1 * 0.1 must count as a fall by ten from 0.1.
        if self.drop_factor is None or moment.learning_rate * self.drop_factor > before * (
            1 + 1e-6
        ):
            return False
        return (
            moment.total_steps is None
            or max(0.0, 1 - moment.step / moment.total_steps) >= self.minimum_remaining
        )


RULES: dict[str, ScheduleRule] = {
    "step": ScheduleRule(),
    "exponential": ScheduleRule(minimum_remaining=0.1),
    "linear": ScheduleRule(minimum_remaining=0.1),
    "inverse_sqrt": ScheduleRule(),
    "cosine": ScheduleRule(minimum_remaining=0.1),
    "one_cycle": ScheduleRule(minimum_remaining=0.1),
    "warm_restarts": ScheduleRule(drop_factor=None),
    "cyclic": ScheduleRule(drop_factor=None),
    # The rate is flat until the short decay, in which every layer anneals: thaw when it has begun.
    "warmup_stable_decay": ScheduleRule(drop_factor=2.0, minimum_remaining=0.05),
    "never": ScheduleRule(drop_factor=None, rise_factor=None),
}

# Fragments of the names of schedulers, and of the functions LambdaLR is given, the most specific
# first.
_FRAGMENTS = {
    "warm_restarts": ("warmrestart", "hard_restart"),
    "cyclic": ("cyclic",),
    "one_cycle": ("onecycle",),
    "warmup_stable_decay": ("wsd", "stable_decay"),
    "inverse_sqrt": ("inverse_sqrt",),
    "cosine": ("cosine",),
    "exponential": ("exponential",),
    "linear": ("polynomial", "linear"),
    "step": ("steplr", "plateau"),
}


def rule_for_schedule(names: Sequence[str]) -> str:
    """Return the name of the rule for a schedule described by the names of its classes and
    functions.

    The last name that is known wins: a sequence of schedules ends with the one that anneals. What
    is unknown gets the paper's rule.
    """
    found = "step"
    for name in map(str.lower, names):
        fitting = (
            rule
            for rule, fragments in _FRAGMENTS.items()
            if any(part in name for part in fragments)
        )
        found = next(fitting, found)
    return found


def find_rule(rule: Any, drop_factor: float | None = None) -> UnfreezeRule:
    """Return the rule a setting means.

    Args:
        rule: the name of a built-in rule, or an object with a `judge` method, returned as it is.
        drop_factor: replaces the built-in rule's own.
    """
    if not isinstance(rule, str):
        return rule  # type: ignore[no-any-return]
    contract = f"'auto', {', '.join(map(repr, RULES))} or an object with a `judge` method"
    require(rule in RULES, "unfreezing.rule", contract, rule)
    return RULES[rule] if drop_factor is None else replace(RULES[rule], drop_factor=drop_factor)
