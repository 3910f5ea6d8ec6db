"""Reading the arguments of `attach`: each is checked, and refused with a way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from egeria.config import Config
from egeria.errors import ConfigError
from egeria.policy import UnfreezeRule, find_policy, find_rule, rule_for_schedule, with_metric_of_policy


def check_model(model: Any) -> nn.Module:
    """Return the model.

    Raises:
        ConfigError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"attach takes a torch.nn.Module to train, found {type(model).__name__}. Pass the model itself."
        )
    return model


def check_optimizers(model: nn.Module, optimizer: Any) -> list[Optimizer]:
    """Return the optimizers as a list.

    Raises:
        ConfigError: one is no optimizer, or none of them trains the model.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for entry in optimizers:
        if not hasattr(entry, "param_groups"):
            raise ConfigError(
                f"attach takes a torch optimizer, or a list of them, found {type(entry).__name__}. "
                f"Pass what your loop calls .step() on."
            )
    known = {id(parameter) for parameter in model.parameters()}
    held = (parameter for entry in optimizers for group in entry.param_groups for parameter in group["params"])
    if not any(id(parameter) in known for parameter in held):
        raise ConfigError(
            "attach takes an optimizer that trains parameters of the model, found one that holds none of them. "
            "Build it from model.parameters() of this very model, after moving it to its device."
        )
    return optimizers


def check_total_steps(total_steps: Any) -> None:
    """Check the length of the run.

    Raises:
        ConfigError: it is neither None nor a whole number above 0.
    """
    whole = isinstance(total_steps, int) and not isinstance(total_steps, bool)
    if total_steps is not None and not (whole and total_steps > 0):
        raise ConfigError(
            f"total_steps is the number of optimizer steps of the whole run, a whole number above 0, "
            f"found {total_steps!r}. Pass len(loader) * epochs, or leave it out."
        )


def read_config(config: Any, controller: Any = None, policy: Any = None) -> Config:
    """Return the configuration, whatever form it came in, with the controller and the policy if they are named apart.

    Raises:
        ConfigError: it is malformed, or of an unknown form.
    """
    settings = _read_config(config)
    if policy is not None:
        settings = dataclasses.replace(settings, policy=dataclasses.replace(settings.policy, name=policy))
    if isinstance(controller, str):
        settings = dataclasses.replace(settings, controller=dataclasses.replace(settings.controller, kind=controller))
    return with_metric_of_policy(settings)


def for_parts(config: Config) -> Config:
    """Return the settings for a model in parts.

    Plasticity is read in the training pass, the only one that all processes make. The reference has all of the
    weights, for which an accelerator may have no room.
    """
    device = "cpu" if config.reference.device == "auto" else config.reference.device
    return dataclasses.replace(
        config,
        plasticity=dataclasses.replace(config.plasticity, mode="train"),
        reference=dataclasses.replace(config.reference, device=device),
    )


def _read_config(config: Any) -> Config:
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return Config.from_dict(config)
    if isinstance(config, (str, Path)):
        return Config.load(config)
    raise ConfigError(
        f"config is an egeria.Config, a dictionary or the path of a TOML file, found {type(config).__name__}. "
        f"Build one with egeria.Config(...)."
    )


def check_policy(config: Config, rule: UnfreezeRule, total_steps: int | None) -> None:
    """Check that the policy can be had, before anything is made; one of the user's own is not made for that.

    Raises:
        ConfigError: no policy has that name, or it needs what it was not given.
    """
    maker = find_policy(config.policy.name)
    if isinstance(config.policy.name, str):
        maker(config, trainable=(True, True), rule=rule, total_steps=total_steps, deepest_freeze=None)


def choose_rule(config: Config, scheduler: Any) -> tuple[str, UnfreezeRule]:
    """Return the name of the unfreeze rule and the rule, by the scheduler where the setting is 'auto'.

    Raises:
        ConfigError: no rule has that name.
    """
    rule = config.unfreezing.rule
    if rule == "auto":
        rule = rule_for_schedule(_schedule_names(scheduler))
    name = rule if isinstance(rule, str) else type(rule).__name__
    return name, find_rule(rule, config.unfreezing.drop_factor)


def _schedule_names(scheduler: Any) -> list[str]:
    """Return the names of a scheduler's class, of the schedules it chains and of the functions it was given."""
    if scheduler is None:
        return []
    names = [type(scheduler).__name__]
    for entry in getattr(scheduler, "lr_lambdas", ()):
        function = getattr(entry, "func", entry)
        names.append(getattr(function, "__qualname__", type(function).__name__))
    for part in getattr(scheduler, "_schedulers", ()):
        names += _schedule_names(part)
    return names
