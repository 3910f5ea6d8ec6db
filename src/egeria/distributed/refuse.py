"""What is declined before anything is touched: models and optimizers that freezing would break."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from egeria.distributed import ddp, fsdp2

_SHARD = "Use fully_shard (FSDP2), or DistributedDataParallel where a replica fits"
IN_BACKWARD = (
    "the optimizer steps within the backward pass, which leaves no moment at which all gradients "
    "are there. Call optimizer.step() in the loop"
)


def reason_to_decline(model: nn.Module, optimizers: Iterable[Any]) -> str | None:
    """Return why layers of a model are not frozen; None if they can be.

    Args:
        model: what was given to `attach`, maybe wrapped.
        optimizers: what trains it, without the wrappers of frameworks.

    Returns:
        What follows "egeria will not freeze this model: ".
    """
    wrapper = ddp.find_wrapper(model)
    return (
        _refuse_modules(model)
        or _refuse_parameters(list(model.parameters()))
        or _refuse_optimizers(list(optimizers))
        or (ddp.refuse(wrapper) if wrapper is not None else None)
        or (fsdp2.refuse(model) if fsdp2.is_sharded(model) else None)
    )


_DEEPSPEED = (
    "DeepSpeed (ZeRO) divides parameters into partitions once, by what trains at the beginning, "
    f"and never trains one that thaws later. {_SHARD}"
)
_WRAPPERS = {
    "FullyShardedDataParallel": (
        "FSDP1 (FullyShardedDataParallel) keeps the parameters of a unit in one tensor and cannot "
        f"freeze a part of it. {_SHARD}"
    ),
    "DeepSpeedEngine": _DEEPSPEED,
    "DataParallel": ddp.REPLICATED,
}
"""By the name of a class, so that none has to be imported."""


def _refuse_modules(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if wrappers := [kind for kind in kinds if kind in _WRAPPERS]:
            return _WRAPPERS[wrappers[0]]
        if isinstance(module, torch.jit.ScriptModule):
            return (
                f"{name or 'the model'} is a TorchScript module, which cannot be watched. Use the "
                "module that it was made from"
            )
        if hasattr(module, "update_and_allocate"):
            return (
                "AdaLoRA (update_and_allocate) reads the gradient of every adapter after each "
                "step, and frozen ones have none. Use LoRA"
            )
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            return (
                "it trains prompts (PEFT prompt learning), which are in front of all layers: the "
                "backward pass goes through every frozen layer to them, so that freezing saves "
                "nothing"
            )
    return None


def _refuse_parameters(parameters: list[nn.Parameter]) -> str | None:
    if any(is_lazy(entry) for entry in parameters):
        return "it has lazy parameters, whose shapes are unknown. Call it once before attach"
    if any(hasattr(entry, "ds_id") for entry in parameters):
        return _DEEPSPEED
    hooks = [h for p in parameters for h in (p._post_accumulate_grad_hooks or {}).values()]
    if any(map(_calls_step, hooks)) or any(
        hasattr(p, "_in_backward_optimizers") for p in parameters
    ):
        return IN_BACKWARD
    return None


def _calls_step(hook: Any) -> bool:
    """Return whether a hook on a parameter looks like an optimizer in the backward pass."""
    function = getattr(hook, "func", hook)  # of functools.partial
    return "step" in getattr(getattr(function, "__code__", None), "co_names", ())


def _refuse_optimizers(optimizers: list[Any]) -> str | None:
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        return "LBFGS moves parameters by its history, also those without a gradient"
    if any(getattr(optimizer, "_overlap_with_ddp", False) for optimizer in optimizers):
        return (
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps by buckets that are made once. "
            "Leave that out"
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(group.get("lr") is None for group in groups):
        return (
            "the optimizer chooses its learning rate itself (lr is None), and decisions depend on "
            "it. Give it one (Adafactor: relative_step=False, lr=...)"
        )
    return None
