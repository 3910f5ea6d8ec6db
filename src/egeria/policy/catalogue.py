"""All policies by name, and what the session has to know of one before it makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from egeria.config import Config
from egeria.config.checks import require
from egeria.policy import rivals
from egeria.policy.base import FrontPolicy
from egeria.policy.forecast import Forecast
from egeria.policy.paper import EgeriaPolicy
from egeria.policy.protocol import BOOTSTRAPPING, KNOWLEDGE_GUIDED, PolicyMaker
from egeria.policy.smartfrz import SmartFrz
from egeria.policy.worth import Worth

POLICIES: dict[str, PolicyMaker] = {
    "worth": Worth,
    "egeria": EgeriaPolicy,
    "forecast": Forecast,
    "none": FrontPolicy,
    "static": rivals.StaticSchedule,
    "linear": rivals.LinearSchedule,
    "freezeout": rivals.FreezeOut,
    "autofreeze": rivals.AutoFreeze,
    "smartfrz": SmartFrz,
    "skipconv": EgeriaPolicy,
    "weight_change": rivals.WeightChange,
    "random": rivals.RandomTimes,
}

_METRICS = {"skipconv": "input_norm", "forecast": "relative_sp", "worth": "relative_sp"}
"""What a policy means by plasticity, where that is not the paper's SP loss."""
HARMLESS_SHARE = 0.0125
"""Share of the limit of 'forecast' that a reading may be wrong by: a law is followed up to five
times as far as it was seen, the limit may be a quarter, and of what is left a quarter may be
error."""
DEFAULT_INTERVAL_STEPS = 100
_LEAST_STEPS = {"autofreeze": 1, "smartfrz": 30}
"""Of an interval of the policies with so many evaluations in a run; the predictor looks at 30
snapshots."""
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


def with_metric_of_policy(config: Config) -> Config:
    """Return the settings with the metric of the policy, unless they name another; Skip-Conv is its
    metric.
    """
    name = config.policy.name if isinstance(config.policy.name, str) else ""
    if config.plasticity.metric is not None and name != "skipconv":
        return config
    return replace(config, plasticity=replace(config.plasticity, metric=_METRICS.get(name, "sp")))


def harmless_error(config: Config) -> float:
    """Return the error of a reading that changes no decision of the policy; 0 where each digit may
    matter.
    """
    return (
        HARMLESS_SHARE * config.policy.limit if config.policy.name in ("forecast", "worth") else 0.0
    )


def first_stage(name: Any) -> str:
    """Return the stage in which a run under this policy begins; 'bootstrapping'
    for an unknown one.
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
    window, evaluations = config.plasticity.window, config.policy.evaluations
    if config.plasticity.interval_steps is not None:
        return config.plasticity.interval_steps, "set in plasticity.interval_steps"
    if total_steps is None:
        return (
            DEFAULT_INTERVAL_STEPS,
            "default: give attach total_steps to derive it from the length of the run",
        )
    least = _LEAST_STEPS.get(config.policy.name) if isinstance(config.policy.name, str) else None
    if least is not None:
        return max(
            least, total_steps // evaluations
        ), f"{total_steps} steps / {evaluations} evaluations of the policy"
    steps = round(total_steps / (2 * window) / num_modules / PASSES)
    return max(
        1, steps
    ), f"guideline: {total_steps} steps / (2 x {window}) / {num_modules} modules / {PASSES}"
