"""Settings: one frozen dataclass per group, checked when built, TOML in and out."""

from egeria.config.config import Config
from egeria.config.groups import (
    Bootstrapping,
    Cache,
    Controller,
    Freezing,
    Modules,
    Plasticity,
    Policy,
    Reference,
    Unfreezing,
)

__all__ = [
    "Bootstrapping",
    "Cache",
    "Config",
    "Controller",
    "Freezing",
    "Modules",
    "Plasticity",
    "Policy",
    "Reference",
    "Unfreezing",
]
