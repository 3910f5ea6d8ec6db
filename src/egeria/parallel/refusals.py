"""What cannot be frozen safely where several processes train, or something wraps the model: why,
and the way out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from egeria import dist
from egeria.layers.shards import is_compiled, is_sharded, without_wrapper

_DDP = "Build DistributedDataParallel without it, or give attach the bare model, which it wraps"
_FSDP2 = (
    "Use fully_shard (FSDP2), or DistributedDataParallel where a replica fits: egeria can "
    "freeze both"
)
_SHARDS = "Shard it by fully_shard alone, over one mesh, which egeria can freeze"
COMPILED_SHARDS = (
    "the model is sharded and compiled: its layers can only be watched in the training pass, and "
    "hooks do not fire in "
    "compiled code. Leave out torch.compile, or use DistributedDataParallel"
)

JOINED = (
    "the loop trains in `join()`, for processes that have not equally many batches: whoever has "
    "none left would take "
    "no part in what all have to agree on. Give all equally many, as DistributedSampler does"
)
COPIES = (
    "DataParallel copies the model anew in every forward, and layers cannot be watched in copies. "
    "Use DistributedDataParallel, one process for each device"
)


def refuse_wrapper(model: nn.Module) -> str | None:
    """Return why a model in such a wrapper cannot be frozen; None if it is in none of these."""
    names = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in names:
        return (
            "FSDP1 (FullyShardedDataParallel) keeps the parameters of a unit in one flat tensor, "
            "and cannot freeze a "
            f"part of it. {_FSDP2}"
        )
    if "DeepSpeedEngine" in names or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    ):
        return (
            "DeepSpeed (ZeRO) sorts parameters into partitions once, by what trains when it "
            "begins, and never trains "
            f"one that thaws later. {_FSDP2}"
        )
    return COPIES if isinstance(model, nn.DataParallel) else None


def refuse_model(model: nn.Module) -> str | None:
    """Return why the layers of a model cannot be watched; None if they can."""
    if isinstance(model, torch.jit.ScriptModule):
        return (
            "the model is a TorchScript module, whose layers cannot be read. Attach the module "
            "it was made from"
        )
    if any(without_wrapper(module) is not module for module in model.modules()):
        return (
            "a part of the model is wrapped by torch.compile, which hides its layers. Compile it "
            "in place instead, "
            "part.compile(), or the whole model"
        )
    return None


def refuse_shards(model: nn.Module) -> str | None:
    """Return why a model whose parameters are in parts cannot be frozen; None if it can."""
    if is_compiled(model) or without_wrapper(model) is not model:
        return COMPILED_SHARDS
    if not any(
        "FSDPModule" in (kind.__name__ for kind in type(module).__mro__)
        for module in model.modules()
    ):
        return f"parameters of the model are DTensors that fully_shard did not make. {_SHARDS}"
    placements = [getattr(parameter, "placements", ()) for parameter in model.parameters()]
    if any(sum(not placement.is_replicate() for placement in entry) > 1 for entry in placements):
        return (
            "parameters of the model are split twice, as by tensor parallelism under "
            f"fully_shard. {_SHARDS}"
        )
    if any(
        entry.device_mesh.size() != dist.world_size()
        for entry in model.parameters()
        if hasattr(entry, "device_mesh")
    ):
        return (
            "the model is sharded over some processes of the job only, and all must train it. "
            f"{_SHARDS}"
        )
    return None


def refuse_plasticity(model: nn.Module) -> str | None:
    """Return why no reading of plasticity can be made of a model; None if it can."""
    if not is_sharded(model):
        return None
    return (
        "the model is sharded by fully_shard, so that no process can run it alone, and the policy "
        "compares its activations with those of a copy. Follow a plan, such as "
        "attach(..., plan='0.5:1'), or use DistributedDataParallel where a replica fits"
    )


def refuse_options(wrapper: DistributedDataParallel) -> str | None:
    """Return what a wrapper was built with that a change of the trained parameters would break;
    None for nothing.
    """
    held: Any = wrapper
    steps_early = any(
        hasattr(parameter, "_in_backward_optimizers") for parameter in wrapper.module.parameters()
    )
    refused = {
        "DistributedDataParallel(static_graph=True) fixes which parameters are reduced at its "
        "first iteration. "
        "Build it without static_graph; find_unused_parameters is kept": held.static_graph,
        "DistributedDataParallel(mixed_precision=...) keeps a second copy of what it reduces. "
        f"{_DDP}; autocast does the same": held.mixed_precision is not None,
        "DistributedDataParallel(delay_all_reduce_named_params=...) reduces by views made once. "
        f"{_DDP}": held._delay_all_reduce_params,
        "compiled autograd (optimize_ddp='python_reducer') reduces by hooks made once. "
        f"{_DDP}": held._use_python_reducer,
        "optimizers that step within the backward pass leave no step to follow. "
        "Call optimizer.step() in the loop": steps_early,
        "a built-in communication hook cannot be registered anew, since DistributedDataParallel "
        "does not tell which. "
        "Register its twin of torch.distributed.algorithms.ddp_comm_hooks.default_hooks by "
        "register_comm_hook": (
            not held._comm_hooks and held._get_ddp_logging_data().get("comm_hook")
        ),
    }
    return next((reason for reason, applies in refused.items() if applies), None)
