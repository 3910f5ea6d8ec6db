"""Models whose parameters are in parts, one in each process: what is whose, and what `fully_shard` puts on modules."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from egeria import dist

_SHARDED = "FSDPModule"


def is_sharded(model: nn.Module) -> bool:
    """Tell whether the parameters of a model are in parts, so that no process can run it alone."""
    in_parts = any(is_in_parts(parameter) for parameter in model.parameters())
    return in_parts or any(_has_class_of_shards(module) for module in model.modules())  # whole for the moment


def own_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor; all of it where it is not in parts."""
    part: Tensor = tensor.to_local() if is_in_parts(tensor) else tensor  # type: ignore[attr-defined]
    return part


def counted(model: nn.Module) -> dict[str, float]:
    """Return by which share each process counts what it finds in its own part of a parameter, by the names of those.

    Shares of all processes add up to 1 for each element: some may be in several processes. In a model that is not in
    parts a process counts all.
    """
    if not is_sharded(model):
        return {name: 1.0 for name, _ in model.named_parameters()}
    world = dist.world_size()
    return {name: _num_parts(parameter) / world for name, parameter in model.named_parameters()}


def _num_parts(parameter: nn.Parameter) -> int:
    """Return into how many different parts a parameter is cut."""
    if not is_in_parts(parameter):
        return 1
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())


def reshard(model: nn.Module) -> None:
    """Put the parts back in place of whole parameters that a forward pass has left behind."""
    for module in model.modules():
        if _has_class_of_shards(module):
            module.reshard()  # type: ignore[operator]


def choose_dtypes_again(module: nn.Module) -> None:
    """Let a unit that was all frozen at its first forward pass find the number formats that its gradients come in.

    `fully_shard` looks for them once, among what trains then.
    """
    for group in _groups_of(module):
        if getattr(group, "_orig_dtype", ...) is None:
            group._init_mp_dtypes()


def is_in_parts(tensor: Tensor) -> bool:
    """Tell whether this process holds a part of a tensor only."""
    return hasattr(tensor, "full_tensor")


def is_touched(module: nn.Module) -> bool:
    """Tell whether `fully_shard` has changed the class of a module or given it hooks."""
    tables = (table for name, table in vars(module).items() if name.endswith("_hooks"))
    return _has_class_of_shards(module) or any(without_torch(table) != table for table in tables)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was made a unit."""
    return next(kind for kind in type(module).__mro__ if not _is_of_shards(kind))


def without_torch(table: Any) -> Any:
    """Return a table of hooks without those of `torch.distributed`; anything else as it is."""
    if not isinstance(table, dict):
        return table
    return type(table)((key, hook) for key, hook in table.items() if not _is_of_torch(hook))


def _state_of(module: nn.Module) -> Any:
    return module._get_fsdp_state() if _has_class_of_shards(module) else None  # type: ignore[operator]


def _groups_of(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that a unit puts together; nothing for what is none."""
    state = _state_of(module)
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _is_of_shards(kind: type) -> bool:
    return any(base.__name__ == _SHARDED for base in kind.__mro__)


def _has_class_of_shards(module: nn.Module) -> bool:
    return _is_of_shards(type(module))


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed")
