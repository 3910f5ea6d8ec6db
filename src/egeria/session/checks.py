"""Checks the arguments of `attach`, also against other ranks, and what cannot be frozen."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from egeria import tree
from egeria.config import Config, PolicyConfig, check, count, optional
from egeria.distributed import ddp, fsdp2
from egeria.distributed.ranks import LostError, RankError, exchange
from egeria.errors import ConfigError, StateError
from egeria.model.cut import is_mostly_trained
from egeria.moves import resolve
from egeria.policy import UnfreezeRule, find_maker, find_plan, find_rule, rule_for_schedule
from egeria.session.clock import has_hooks

STATE_SCHEMA = 8  # of what `run.state_dict` returns
GO_ON = "Take an earlier checkpoint, or go on without loading it."
# Wrappers of frameworks by class name, and the attribute with the user's own object.
_INNER = {
    "_FabricModule": "_forward_module",
    "_FabricOptimizer": "optimizer",
    "_FabricDataLoader": "_dataloader",
    "LightningOptimizer": "optimizer",
    "LRSchedulerConfig": "scheduler",
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "DataLoaderAdapter": "base_dataloader",
}


def read_config(config: Any, controller: Any, policy: Any, plan: Any = None) -> Config:
    """Return the configuration, with the controller, policy and plan given to `attach`."""
    if config is None or isinstance(config, Mapping):
        config = Config.from_dict(config or {})
    elif isinstance(config, (str, Path)):
        config = Config.load(config)
    if not isinstance(config, Config):
        what = "config is an egeria.Config, a dictionary or the path of a TOML file"
        raise ConfigError(f"{what}, found {type(config).__name__}. Build an egeria.Config(...).")
    name = config.policy.name if policy is None else policy
    plan = config.policy.plan if plan is None else plan
    decides = replace(config.policy, name=name, plan=plan)
    is_controller = all(hasattr(controller, name) for name in ("refresh", "submit", "poll"))
    if not (isinstance(controller, str | None) or is_controller):
        what = "controller is 'auto', 'process', 'inline' or an object with the calls of one"
        raise ConfigError(f"{what}, found {_describe(controller)}. Leave it out for 'auto'.")
    kind = controller if isinstance(controller, str) else config.controller.kind
    return replace(config, policy=decides, controller=replace(config.controller, kind=kind))


def check_training(
    model: Any, optimizer: Any, total_steps: Any
) -> tuple[nn.Module, nn.Module, list[Optimizer]]:
    """Return the model as the loop calls it, and model and optimizers without wrappers."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"attach takes a torch.nn.Module, found {type(model).__name__}. Pass the model itself."
        )
    given: nn.Module = _unwrap(model)
    inner = ddp.unwrap(given)
    check("total_steps", total_steps, optional(count()))
    entries = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [_unwrap(entry) for entry in entries]
    for entry in optimizers:
        if not hasattr(entry, "param_groups"):
            what = "attach takes a torch optimizer, or a list of them"
            raise ConfigError(f"{what}, found {type(entry).__name__}. Pass what your loop steps.")
    held = {p for entry in optimizers for group in entry.param_groups for p in group["params"]}
    # Under ZeRO, which is declined, an optimizer may hold other tensors than the parameters.
    if held.isdisjoint(inner.parameters()) and reason_to_decline(inner, optimizers) is None:
        raise ConfigError(
            "attach takes an optimizer of the model's parameters, found one that holds none of "
            "them. Build it from model.parameters(), after moving the model to its device."
        )
    return given, inner, optimizers


def _unwrap(given: Any) -> Any:
    """Return the object within the wrappers of frameworks, however many there are."""
    # `type`, since some wrappers give the class of their content as `__class__`.
    while names := [kind.__name__ for kind in type(given).__mro__ if kind.__name__ in _INNER]:
        given = getattr(given, _INNER[names[0]])
    return given


def unwrap_loader(loader: Any) -> Any:
    """Return the user's own loader, without the wrappers of frameworks, or None."""
    found = _unwrap(loader)
    is_iterable = hasattr(type(found), "__iter__") or hasattr(type(found), "__getitem__")
    if found is None or (is_iterable and not isinstance(found, (str, bytes, type, nn.Module))):
        return found
    raise ConfigError(
        f"loader is what the loop takes batches from, found {_describe(loader)}. Pass the "
        "DataLoader, or leave it out; a learning-rate scheduler goes to scheduler=..."
    )


def _describe(found: Any) -> str:
    """Return a few words about an object, for a message."""
    if isinstance(found, (str, int, float)):
        return repr(found)
    return f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__


def _scheduler_names(scheduler: Any) -> list[str]:
    """Return the names of the classes and functions of the user's schedulers."""
    if isinstance(scheduler, (list, tuple)):
        return [name for entry in scheduler for name in _scheduler_names(entry)]
    scheduler = _unwrap(scheduler)
    if scheduler is None:
        return []
    is_another = isinstance(scheduler, type) or hasattr(scheduler, "param_groups")
    if is_another or not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            "scheduler is an object like those of torch.optim.lr_scheduler, found "
            f"{_describe(scheduler)}. Pass the one that your loop calls .step() on, a list where "
            "several optimizers have one each, or leave it out."
        )
    functions = [getattr(entry, "func", entry) for entry in getattr(scheduler, "lr_lambdas", ())]
    names = [getattr(each, "__qualname__", type(each).__name__) for each in functions]
    chained = getattr(scheduler, "_schedulers", None)
    inner = _scheduler_names(chained if isinstance(chained, (list, tuple)) else None)
    return [type(scheduler).__name__, *names, *inner]


def is_pretrained(config: Config, model: nn.Module) -> bool:
    """Return whether the weights come from an earlier training, as told or by the model."""
    told = config.policy.pretrained
    return is_mostly_trained(model) if told == "auto" else bool(told)


def choose_rule(config: Config, scheduler: Any = None) -> tuple[str, UnfreezeRule]:
    """Return the unfreeze rule by name and as an object; check that the policy can be made."""
    find_maker(config)
    rule, names = config.unfreezing.rule, _scheduler_names(scheduler)
    rule = rule_for_schedule(names) if rule == "auto" else rule
    name = rule if isinstance(rule, str) else type(rule).__name__
    return name, find_rule(rule, config.unfreezing.drop_factor)


def check_plan(
    settings: PolicyConfig, model: nn.Module, loader: Any, total_steps: int | None
) -> None:
    """Raise ConfigError if the plan of the settings does not fit the training."""
    has_epochs = "epoch" in (settings.plan or "").split()
    if settings.plan is not None:
        names = [(name,) for name, _ in model.named_modules()]
        settings = replace(settings, plan=resolve(settings.plan, names, length_of(loader)))
    if not has_epochs:  # their length is known at the first step
        # With three layer modules, the fewest of which a plan freezes one.
        facts = {"pretrained": True, "adaptive": False, "convolutional": True, "adapted": False}
        find_plan(settings, ("",) * 3, total_steps, **facts)


def agree(
    config: Config, total_steps: int | None, pretrained: bool, directory: Path | None
) -> tuple[bool, Path | None]:
    """Return whether a rank found trained weights, since one may hold few, and rank 0's directory.

    Raises ConfigError unless all ranks have the same settings and total steps.
    """
    # No decision depends on controller and cache. Addresses of objects differ by rank.
    settings = str({**config.to_dict(), "controller": None, "cache": None})
    own = total_steps, re.sub(" at 0x[0-9A-Fa-f]+", "", settings)
    rows = exchange((own, pretrained, directory), "attach")
    if apart := [number for number, row in enumerate(rows) if row[0] != rows[0][0]]:
        raise ConfigError(
            "All processes of a job attach with the same total_steps and settings; rank "
            f"{apart[0]} has others than rank 0, total_steps being {[row[0][0] for row in rows]}. "
            "Give attach those of rank 0 on every rank."
        )
    return any(row[1] for row in rows), rows[0][2]


def check_state(state: Any) -> None:
    """Raise StateError on all ranks unless a saved state is whole, and the same moment on all."""
    damage = _find_damage(state)
    moment = None if damage else (state["clock"]["step"], (state["engine"] or {}).get("frozen"))
    try:
        rows = exchange((damage, moment), "run.load_state_dict")
    except (RankError, LostError) as error:
        raise StateError(f"A run's state is loaded on all ranks; {error}.") from error
    if texts := [text for text, _ in rows if text]:
        raise StateError(damage or texts[0])
    if any(row != rows[0] for row in rows):
        steps = ", ".join(f"{at[0]} on rank {place}" for place, (_, at) in enumerate(rows))
        raise StateError(f"All ranks load the state of one moment, found step {steps}. {GO_ON}")


def _find_damage(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"A state is what run.state_dict() returned, found {_describe(state)}. {GO_ON}"
    if (schema := str(state.get("schema"))) != str(STATE_SCHEMA):
        return (
            f"This egeria reads run states of schema {STATE_SCHEMA}, found {schema[:40]}. "
            "Load it with the egeria that wrote it, or load the model and the optimizer alone."
        )
    with suppress(Exception):  # what is damaged may be anything
        whole = {name: entry for name, entry in state.items() if name != "checksum"}
        if tree.checksum(whole) == state["checksum"]:
            return ""
    return f"The run's state is damaged: it does not fit its checksum. {GO_ON}"


def length_of(thing: Any) -> int | None:
    """Return the length of a loader; None if it has none, whatever `len` raises."""
    try:
        return len(thing)
    except Exception:
        return None


# --- what is declined: models and optimizers that freezing would break --------------------------

_SHARD = "Use fully_shard (FSDP2), or DistributedDataParallel where a replica fits"
IN_BACKWARD = "the optimizer steps within the backward pass. Call optimizer.step() in the loop"


def reason_to_decline(model: nn.Module, optimizers: Iterable[Any]) -> str | None:
    """Return why the layers of a model, maybe wrapped, cannot be frozen; None if they can."""
    wrapper = ddp.find_wrapper(model)
    return (
        _refuse_modules(model)
        or _refuse_parameters(list(model.parameters()))
        or _refuse_optimizers(list(optimizers))
        or (ddp.refuse(wrapper) if wrapper is not None else None)
        or (fsdp2.refuse(model) if fsdp2.is_sharded(model) else None)
    )


_DEEPSPEED = f"DeepSpeed (ZeRO) never trains a parameter that thaws later. {_SHARD}"
# By the name of a class, so that none has to be imported.
_WRAPPERS = {
    "FullyShardedDataParallel": f"FSDP1 keeps the parameters of a unit in one tensor. {_SHARD}",
    "DeepSpeedEngine": _DEEPSPEED,
    "DataParallel": "DataParallel copies the model. Use DDP, with one process for each device",
}


def _refuse_modules(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if wrappers := [kind for kind in kinds if kind in _WRAPPERS]:
            return _WRAPPERS[wrappers[0]]
        if isinstance(module, torch.jit.ScriptModule):
            what = f"{name or 'the model'} is a TorchScript module, which cannot be watched"
            return f"{what}. Use the module that it was made from"
        if hasattr(module, "update_and_allocate"):
            return "`update_and_allocate` of AdaLoRA reads the gradient of every adapter. Use LoRA"
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            return "prompts (PEFT) need the whole backward pass, so that freezing saves nothing"
    return None


def _refuse_parameters(parameters: list[nn.Parameter]) -> str | None:
    if any(is_lazy(entry) for entry in parameters):
        return "it has lazy parameters, whose shapes are unknown. Call it once before attach"
    if any(hasattr(entry, "ds_id") for entry in parameters):
        return _DEEPSPEED
    hooks = [h for p in parameters for h in (p._post_accumulate_grad_hooks or {}).values()]
    codes = [getattr(getattr(h, "func", h), "__code__", None) for h in hooks]  # `func` of partials
    calls_step = any("step" in getattr(code, "co_names", ()) for code in codes)
    is_stepped = any(hasattr(entry, "_in_backward_optimizers") for entry in parameters)
    return IN_BACKWARD if is_stepped or calls_step else None


def _refuse_optimizers(optimizers: list[Any]) -> str | None:
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        return "LBFGS moves parameters by its history, also those without a gradient"
    if any(getattr(optimizer, "_overlap_with_ddp", False) for optimizer in optimizers):
        return "overlap_with_ddp=True steps by buckets that are made once. Leave it out"
    if not all(map(has_hooks, optimizers)):
        return "one of the optimizers has no step hooks. Derive it from torch.optim.Optimizer"
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(group.get("lr") is None for group in groups):
        return "lr of the optimizer is None. Give it one (Adafactor: relative_step=False, lr=...)"
    return None
