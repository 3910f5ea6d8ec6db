"""Deciding: plain Python, numbers in and values out; no torch, threads, clocks or files.

`protocol` is the interface of a policy and what goes in and out. `forecast` is the default policy (with `law` and
`guard`), `paper` the paper's, whose thaws `schedules` decides; both are built on `base`. `rivals` holds the policies of
others, and `catalogue` names all.
"""

from egeria.policy.catalogue import (
    POLICIES,
    choose_interval,
    find_policy,
    first_stage,
    harmless_error,
    with_metric_of_policy,
)
from egeria.policy.paper import EgeriaPolicy
from egeria.policy.protocol import (
    BOOTSTRAPPING,
    FORESIGHT,
    GRADIENTS,
    KNOWLEDGE_GUIDED,
    NOISE,
    PLASTICITY,
    WEIGHTS,
    Annealing,
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
    ScheduleRule,
    UnfreezeAction,
    UnfreezeRule,
    find_rule,
    rule_for_schedule,
)

__all__ = [
    "BOOTSTRAPPING",
    "FORESIGHT",
    "GRADIENTS",
    "KNOWLEDGE_GUIDED",
    "NOISE",
    "PLASTICITY",
    "POLICIES",
    "RULES",
    "WEIGHTS",
    "Annealing",
    "Decision",
    "EgeriaPolicy",
    "EndBootstrapping",
    "Foreseeing",
    "Freeze",
    "Interval",
    "Judgement",
    "Moment",
    "Policy",
    "PolicyMaker",
    "Reading",
    "ScheduleRule",
    "Thaw",
    "UnfreezeAction",
    "UnfreezeRule",
    "choose_interval",
    "find_policy",
    "find_rule",
    "first_stage",
    "harmless_error",
    "rule_for_schedule",
    "with_metric_of_policy",
]
