"""Deciding: plain Python, numbers in and values out; no torch, threads, clocks or files.

`protocol` is what goes in and out of a policy. `plan` is the default one, `paper` that of the paper
(with `schedules`, its rules for thawing). Both are built on `base`; here they have their names.
"""

from __future__ import annotations

from typing import Any

from egeria.config import Config
from egeria.config.checks import require
from egeria.policy.base import FrontPolicy
from egeria.policy.paper import EgeriaPolicy
from egeria.policy.plan import Plan, PlanPolicy, draw_up
from egeria.policy.protocol import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    PLASTICITY,
    Decision,
    EndBootstrapping,
    Foreseeing,
    Freeze,
    Interval,
    Judgement,
    Policy,
    PolicyMaker,
    Reading,
    Thaw,
)
from egeria.policy.schedules import (
    RULES,
    Moment,
    UnfreezeAction,
    UnfreezeRule,
    find_rule,
    rule_for_schedule,
)

__all__ = [
    "BOOTSTRAPPING",
    "KNOWLEDGE_GUIDED",
    "PLASTICITY",
    "POLICIES",
    "RULES",
    "Decision",
    "EgeriaPolicy",
    "EndBootstrapping",
    "Foreseeing",
    "Freeze",
    "Interval",
    "Judgement",
    "Moment",
    "Plan",
    "PlanPolicy",
    "Policy",
    "PolicyMaker",
    "Reading",
    "Thaw",
    "UnfreezeAction",
    "UnfreezeRule",
    "choose_interval",
    "draw_up",
    "find_policy",
    "find_rule",
    "first_stage",
    "rule_for_schedule",
]

POLICIES: dict[str, PolicyMaker] = {
    "plan": PlanPolicy,
    "static": PlanPolicy,
    "linear": PlanPolicy,
    "none": FrontPolicy,
    "egeria": EgeriaPolicy,
}
DEFAULT_INTERVAL_STEPS = 100
PASSES = 1 + 0.5 + 0.25
"""Bootstrapping, smoothing delay and the halved window after a thaw, in passes over all modules
(paper §4.2.2)."""


def find_policy(name: Any) -> PolicyMaker:
    """Return what makes the policy that a setting means: by its name, or the callable itself."""
    if not isinstance(name, str):
        return name  # type: ignore[no-any-return]
    contract = f"{', '.join(map(repr, POLICIES))} or a callable that makes a policy"
    require(name in POLICIES, "policy.name", contract, name)
    return POLICIES[name]


def first_stage(name: Any) -> str:
    """Return the stage in which a run under this policy begins; 'bootstrapping' for an unknown
    one.
    """
    maker = POLICIES.get(name) if isinstance(name, str) else None
    return BOOTSTRAPPING if getattr(maker, "has_bootstrapping", True) else KNOWLEDGE_GUIDED


def choose_interval(
    config: Config, *, total_steps: int | None, num_modules: int
) -> tuple[int, str]:
    """Return `n`, the optimizer steps between evaluations, and the reason: by the guideline of the
    paper, §4.2.2.

    Args:
        config: the settings of the run.
        total_steps: optimizer steps of the whole run, None where unknown.
        num_modules: layer modules of the model.
    """
    window = config.plasticity.window
    if config.plasticity.interval_steps is not None:
        return config.plasticity.interval_steps, "set in plasticity.interval_steps"
    if total_steps is None:
        reason = "default: give attach total_steps to derive it from the length of the run"
        return DEFAULT_INTERVAL_STEPS, reason
    steps = round(total_steps / (2 * window) / num_modules / PASSES)
    reason = f"guideline: {total_steps} steps / (2 x {window}) / {num_modules} modules / {PASSES}"
    return max(1, steps), reason
