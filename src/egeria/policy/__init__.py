"""Deciding: plain Python, numbers in and values out; no torch, threads, clocks or files.

`protocol` is what goes in and out of a policy. `plan` is the default one, `paper` that of the paper
(with `schedules`, its rules for thawing). Both are built on `base`, and `catalogue` names them.
"""

from egeria.policy.catalogue import POLICIES, choose_interval, find_policy, first_stage
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
