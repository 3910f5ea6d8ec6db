"""Deciding: plain Python, numbers in and values out; no torch, threads, clocks or files.

Start with `engine.EgeriaPolicy` (the stages and the frozen prefix); `history` judges one layer
module (algorithm 1), `bootstrap` ends the critical period, `schedules` says when to thaw.
"""

from egeria.policy.bootstrap import Bootstrap
from egeria.policy.engine import EgeriaPolicy, Policy
from egeria.policy.history import ModuleHistory, least_squares_slope
from egeria.policy.interval import choose_interval
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
    "KNOWLEDGE_GUIDED",
    "RULES",
    "Bootstrap",
    "Decision",
    "EgeriaPolicy",
    "EndBootstrapping",
    "Freeze",
    "Interval",
    "Judgement",
    "ModuleHistory",
    "Moment",
    "Policy",
    "Reading",
    "ScheduleRule",
    "Thaw",
    "UnfreezeRule",
    "Verdict",
    "choose_interval",
    "find_rule",
    "least_squares_slope",
    "rule_for_schedule",
]
