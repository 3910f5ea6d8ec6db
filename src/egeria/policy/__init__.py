"""Deciding: plain Python, numbers in and values out; no torch, threads, clocks or files.

`forecast` is the default policy, `engine.EgeriaPolicy` the paper's: `history` judges one layer module (algorithm 1),
`schedules` says when to thaw. Both end the critical period by `bootstrap`. The policies of others are in `rivals`,
all are named in `catalogue`, and `protocol` is what any policy must be.
"""

from egeria.policy.bootstrap import Bootstrap
from egeria.policy.catalogue import (
    POLICIES,
    evaluations_of_policy,
    find_policy,
    first_stage,
    harmless_error,
    with_metric_of_policy,
)
from egeria.policy.engine import EgeriaPolicy
from egeria.policy.history import ModuleHistory, least_squares_slope
from egeria.policy.interval import choose_interval
from egeria.policy.protocol import (
    FORESIGHT,
    GRADIENTS,
    NOISE,
    PLASTICITY,
    WEIGHTS,
    Annealing,
    Foreseeing,
    Policy,
    PolicyMaker,
)
from egeria.policy.schedules import RULES, Moment, ScheduleRule, UnfreezeRule, Verdict, find_rule, rule_for_schedule
from egeria.policy.values import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    Decision,
    EndBootstrapping,
    Freeze,
    Interval,
    Judgement,
    Reading,
    Thaw,
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
    "Bootstrap",
    "Decision",
    "EgeriaPolicy",
    "EndBootstrapping",
    "Foreseeing",
    "Freeze",
    "Interval",
    "Judgement",
    "ModuleHistory",
    "Moment",
    "Policy",
    "PolicyMaker",
    "Reading",
    "ScheduleRule",
    "Thaw",
    "UnfreezeRule",
    "Verdict",
    "choose_interval",
    "evaluations_of_policy",
    "find_policy",
    "find_rule",
    "first_stage",
    "harmless_error",
    "least_squares_slope",
    "rule_for_schedule",
    "with_metric_of_policy",
]
