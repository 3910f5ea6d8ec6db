"""When the learning rate asks for a thaw: one rule, and the schedules it covers.

To the paper's rule for annealing in steps (thaw when the rate has fallen tenfold, §4.2.2) this adds
three limits: nothing freezes while the rate rises, a rate that rises again thaws, and a smooth
decay does not thaw too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from egeria.config.checks import require

# What the learning rate asks for: to freeze what is stationary; to freeze nothing for now; to thaw
# everything and freeze again with half the window; to thaw everything and go back to the full one.
UnfreezeAction = Literal["go", "hold", "thaw", "restart"]


@dataclass(frozen=True, slots=True)
class Moment:
    """What an unfreeze rule may look at, once in each interval."""

    step: int
    total_steps: int | None
    frozen: int
    learning_rate: float
    previous_learning_rate: float | None  # one interval ago
    freeze_learning_rate: float | None  # at the first freeze of anything to train; None: none is


class UnfreezeRule(Protocol):
    """Decides from the learning rate when to thaw."""

    def judge(self, moment: Moment) -> UnfreezeAction:
        """Return what to do, by the moment alone, so that a run can be replayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRule:
    """Thaws when the rate has fallen, or risen, far enough since the first freeze."""

    drop_factor: float | None = 10.0  # fall of the rate that thaws; None: no fall does
    rise_factor: float | None = 2.0  # rise that thaws and restores the full window; None: none does
    minimum_remaining: float = 0.0  # share of the run that must be left for a fall to thaw

    def judge(self, moment: Moment) -> UnfreezeAction:
        """Return what the rate asks for at this moment."""
        now, before = moment.learning_rate, moment.freeze_learning_rate
        # A rate that stays at 0 has neither risen nor fallen: 0 is twice 0, and a tenth of it.
        if moment.frozen and before is not None and now != before:
            if self.rise_factor is not None and now >= before * self.rise_factor:
                return "restart"
            remaining = max(0.0, 1 - moment.step / moment.total_steps) if moment.total_steps else 1
            # Schedulers multiply in floating point: 0.1 * 0.1 must be a fall by ten from 0.1.
            has_dropped = self.drop_factor and now * self.drop_factor <= before * (1 + 1e-6)
            if has_dropped and remaining >= self.minimum_remaining:
                return "thaw"
        previous = moment.previous_learning_rate
        return "hold" if previous is not None and now > previous else "go"


_SMOOTH, _UP_AND_DOWN = ScheduleRule(minimum_remaining=0.1), ScheduleRule(drop_factor=None)
RULES: dict[str, ScheduleRule] = {
    **dict.fromkeys(("step", "inverse_sqrt"), ScheduleRule()),
    **dict.fromkeys(("exponential", "linear", "cosine", "one_cycle"), _SMOOTH),
    **dict.fromkeys(("warm_restarts", "cyclic"), _UP_AND_DOWN),
    # The rate is flat until the short decay, in which every layer anneals: thaw when it has begun.
    "warmup_stable_decay": ScheduleRule(drop_factor=2.0, minimum_remaining=0.05),
    "never": ScheduleRule(drop_factor=None, rise_factor=None),
}

# Fragments of the names of schedulers, and of the functions LambdaLR is given, the most specific
# first, and the rules that they mean.
_FRAGMENTS = {
    "warmrestart": "warm_restarts",
    "hard_restart": "warm_restarts",
    "cyclic": "cyclic",
    "onecycle": "one_cycle",
    "wsd": "warmup_stable_decay",
    "stable_decay": "warmup_stable_decay",
    "inverse_sqrt": "inverse_sqrt",
    "cosine": "cosine",
    "exponential": "exponential",
    "polynomial": "linear",
    "linear": "linear",
    "steplr": "step",
    "plateau": "step",
}


def rule_for_schedule(names: Sequence[str]) -> str:
    """Return the name of the rule for a schedule, by the names of its classes and functions."""
    found = "step"  # the paper's; the last known name wins: sequences end with what anneals
    for name in map(str.lower, names):
        found = next((rule for part, rule in _FRAGMENTS.items() if part in name), found)
    return found


def find_rule(rule: Any, drop_factor: float | None = None) -> UnfreezeRule:
    """Return a built-in rule by its name, with its own or another factor, or the user's object."""
    if not isinstance(rule, str):
        return rule  # type: ignore[no-any-return]
    contract = f"'auto', {', '.join(map(repr, RULES))} or an object with a `judge` method"
    require(rule in RULES, "unfreezing.rule", contract, rule)
    return RULES[rule] if drop_factor is None else replace(RULES[rule], drop_factor=drop_factor)
