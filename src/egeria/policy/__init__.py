"""Deciding what is frozen: plain Python, numbers in and a depth out.

`base` is the contract, which a policy of the user's own fulfils as well. `plan` has the default
policy, `paper` that of the paper, with its rules for thawing.
"""

from functools import partial

from egeria.config import Config, require
from egeria.policy.base import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    Depth,
    Interval,
    Maker,
    Policy,
    Reading,
    Status,
    Wants,
)
from egeria.policy.paper import (
    EgeriaPolicy,
    Moment,
    UnfreezeAction,
    UnfreezeRule,
    find_rule,
    rule_for_schedule,
)
from egeria.policy.plan import PLANNED, Plan, PlanPolicy, draw_up, find_plan

__all__ = ["BOOTSTRAPPING", "KNOWLEDGE_GUIDED", "PLANNED", "POLICIES", "Depth", "EgeriaPolicy"]
__all__ += ["Interval", "Maker", "Moment", "Plan", "PlanPolicy", "Policy", "Reading", "Status"]
__all__ += ["UnfreezeAction", "UnfreezeRule", "Wants", "draw_up", "find_maker", "find_plan"]
__all__ += ["find_rule", "first_stage", "rule_for_schedule"]

POLICIES: dict[str, Maker] = {
    **dict.fromkeys((*PLANNED, "none"), PlanPolicy),
    "egeria": EgeriaPolicy,
}


def find_maker(config: Config) -> Maker:
    """Return what makes the policy of `policy.name`: a built-in one, or the user's own."""
    name = config.policy.name
    if not isinstance(name, str):
        return name  # type: ignore[no-any-return]
    contract = f"{', '.join(map(repr, POLICIES))} or a callable that makes a policy"
    require(name in POLICIES, "policy.name", contract, name)
    return partial(POLICIES[name], config)


def first_stage(name: object) -> str:
    """Return the stage in which a run under this policy begins."""
    return BOOTSTRAPPING if name == "egeria" else KNOWLEDGE_GUIDED
