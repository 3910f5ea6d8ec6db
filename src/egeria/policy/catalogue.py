"""All policies by name, under the same session: who decides is `policy.name`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from egeria.config import Config
from egeria.errors import ConfigError
from egeria.policy.engine import EgeriaPolicy
from egeria.policy.forecast import Forecast
from egeria.policy.protocol import PolicyMaker
from egeria.policy.rivals.autofreeze import AutoFreeze
from egeria.policy.rivals.freezeout import FreezeOut
from egeria.policy.rivals.linear import LinearSchedule
from egeria.policy.rivals.never import NeverFreeze
from egeria.policy.rivals.random_times import RandomTimes
from egeria.policy.rivals.static import StaticSchedule
from egeria.policy.rivals.weight_change import WeightChange
from egeria.policy.values import BOOTSTRAPPING, KNOWLEDGE_GUIDED

POLICIES: dict[str, PolicyMaker] = {
    "egeria": EgeriaPolicy,
    "forecast": Forecast,
    "none": NeverFreeze,
    "static": StaticSchedule,
    "linear": LinearSchedule,
    "freezeout": FreezeOut,
    "autofreeze": AutoFreeze,
    "skipconv": EgeriaPolicy,
    "weight_change": WeightChange,
    "random": RandomTimes,
}

_METRICS = {"skipconv": "input_norm", "forecast": "relative_sp"}
"""What a policy means by plasticity, where that is not the paper's SP loss."""
HARMLESS_SHARE = 0.0125
"""Share of the limit of 'forecast' that a reading may be wrong by: a law is followed up to five times as far as it was
seen, the limit may be a quarter, and of what is left a quarter may be error."""


def find_policy(name: Any) -> PolicyMaker:
    """Return what makes the policy a setting means: by its name, or the callable itself.

    Raises:
        ConfigError: no policy has that name.
    """
    if not isinstance(name, str):
        return name  # type: ignore[no-any-return]
    if name not in POLICIES:
        raise ConfigError(
            f"policy.name must be {', '.join(map(repr, POLICIES))} or a callable that makes a policy, found {name!r}. "
            f"Name one of them."
        )
    return POLICIES[name]


def with_metric_of_policy(config: Config) -> Config:
    """Return the settings with the metric of the policy, unless they name one of their own; Skip-Conv is its metric."""
    name = config.policy.name if isinstance(config.policy.name, str) else ""
    if config.plasticity.metric is not None and name != "skipconv":
        return config
    return replace(config, plasticity=replace(config.plasticity, metric=_METRICS.get(name, "sp")))


def harmless_error(config: Config) -> float:
    """Return the error of a reading that no decision of the policy turns on; 0 where each digit may matter."""
    return HARMLESS_SHARE * config.policy.limit if config.policy.name == "forecast" else 0.0


def first_stage(name: Any) -> str:
    """Return the stage in which a run under this policy begins; rivals that know no critical period are past it."""
    maker = POLICIES.get(name) if isinstance(name, str) else None
    return KNOWLEDGE_GUIDED if getattr(maker, "stage", None) == KNOWLEDGE_GUIDED else BOOTSTRAPPING


def evaluations_of_policy(config: Config) -> int | None:
    """Return how many evaluations a run is to have by its policy; None for the paper's guideline."""
    return config.policy.evaluations if config.policy.name == "autofreeze" else None


__all__ = [
    "POLICIES",
    "evaluations_of_policy",
    "find_policy",
    "first_stage",
    "harmless_error",
    "with_metric_of_policy",
]
