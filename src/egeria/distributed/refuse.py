"""What is declined before anything is touched: models and optimizers that freezing would break."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from egeria.distributed import ddp, fsdp2

_SHARD = "Use fully_shard (FSDP2), or DistributedDataParallel where a replica fits"
IN_BACKWARD = "the optimizer steps within the backward pass. Call optimizer.step() in the loop"


def reason_to_decline(model: nn.Module, optimizers: Iterable[Any]) -> str | None:
    """Return why layers of a model, maybe wrapped, are not frozen; None if they can be."""
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


def has_hooks(optimizer: Any) -> bool:
    """Return whether an optimizer tells when it steps, as those of torch do."""
    return hasattr(optimizer, "register_step_post_hook")


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
