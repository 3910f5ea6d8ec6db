"""Deciding: plain Python, numbers in and values out; no torch, threads, clocks or files.

`protocol` is what goes in and out of a policy. `worth` is the default one: in a
fine-tuning by itself, else as `forecast` (with `evidence`). `paper` is the
paper's (with `schedules`), `rivals` and `smartfrz` are those of others; all are built on `base`,
and `catalogue` names them.
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
    PREDICTION,
    WEIGHTS,
    WORTH,
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
    SetPeriods,
    Thaw,
    Unhurried,
)
from egeria.policy.rivals import ordinal
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
    "FORESIGHT",
    "GRADIENTS",
    "KNOWLEDGE_GUIDED",
    "NOISE",
    "PLASTICITY",
    "POLICIES",
    "PREDICTION",
    "RULES",
    "WEIGHTS",
    "WORTH",
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
    "SetPeriods",
    "Thaw",
    "UnfreezeAction",
    "UnfreezeRule",
    "Unhurried",
    "choose_interval",
    "find_policy",
    "find_rule",
    "first_stage",
    "harmless_error",
    "ordinal",
    "rule_for_schedule",
    "with_metric_of_policy",
]
