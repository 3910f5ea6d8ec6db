"""Settings: one frozen dataclass per group, checked when built, TOML in and out."""

from egeria.config.config import Config
from egeria.config.groups import (
    BootstrappingConfig,
    CacheConfig,
    ControllerConfig,
    FreezingConfig,
    ModulesConfig,
    PlasticityConfig,
    PolicyConfig,
    ReferenceConfig,
    UnfreezingConfig,
)

__all__ = ["BootstrappingConfig", "CacheConfig", "Config", "ControllerConfig", "FreezingConfig"]
__all__ += ["ModulesConfig", "PlasticityConfig", "PolicyConfig", "ReferenceConfig"]
__all__ += ["UnfreezingConfig"]
