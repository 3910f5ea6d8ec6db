"""`fully_shard` (FSDP2): each rank holds a part of every parameter and gathers them for each pass.

A parameter without a gradient has none to reduce, so nothing has to be wrapped again.
"""

from typing import Any

from torch import nn

from egeria.distributed.ranks import world_size

_WAY_OUT = "Shard it by fully_shard alone, over one mesh of all ranks"
NO_PLASTICITY = (
    "the model is sharded by fully_shard, and plasticity needs a copy of all of it. "
    "Follow a plan, such as attach(..., plan='0.5:1'), or use DistributedDataParallel"
)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a process holds only parts of the parameters."""
    return bool(_units(model)) or any(hasattr(p, "full_tensor") for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Replace whole parameters, on which changes would not last, by this rank's parts."""
    for unit in _units(model):
        unit.reshard()


def prepare_units(model: nn.Module) -> None:
    """Choose the dtypes of gradients for units that were frozen in their first forward pass.

    `fully_shard` does that only once, by `requires_grad`. Call this after each change of it.
    """
    for unit in _units(model):
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # of torch 2.13
        for group in groups or [getattr(state, "_fsdp_param_group", None)]:
            if getattr(group, "_orig_dtype", ...) is None:
                group._init_mp_dtypes()


def refuse(model: nn.Module) -> str | None:
    """Return why layers of a sharded model cannot be frozen; None if they can."""
    parts: list[Any] = [p for p in model.parameters() if hasattr(p, "full_tensor")]
    if not _units(model):
        return f"parameters of the model are DTensors that fully_shard did not make. {_WAY_OUT}"
    if any(sum(not entry.is_replicate() for entry in part.placements) > 1 for part in parts):
        return f"parameters of the model are split twice, as by tensor parallelism. {_WAY_OUT}"
    if any(part.device_mesh.size() != world_size() for part in parts):
        return f"the model is sharded over some ranks of the job only. {_WAY_OUT}"
    return None


def _units(model: nn.Module) -> list[Any]:
    kinds = ((module, type(module).__mro__) for module in model.modules())
    return [part for part, bases in kinds if any(b.__name__ == "FSDPModule" for b in bases)]
