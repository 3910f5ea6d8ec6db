"""Models whose parameters are in parts, one in each process: their own part, and copies that one process can run.

A copy is a plain model again, without the hooks and classes that `fully_shard` gives to a module.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Batch

_SHARDED = "FSDPModule"


def is_sharded(model: nn.Module) -> bool:
    """Tell whether the parameters of a model are in parts, so that no process can run it alone."""
    return any(_is_in_parts(parameter) for parameter in model.parameters())


def own_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor; all of it where it is not in parts."""
    part: Tensor = tensor.to_local() if _is_in_parts(tensor) else tensor  # type: ignore[attr-defined]
    return part


def reshard(model: nn.Module) -> None:
    """Put the parts back in place of whole parameters that a forward pass has left behind."""
    for module in model.modules():
        if _has_class_of_shards(module):
            module.reshard()  # type: ignore[operator]


def gather(model: nn.Module, *, keeps: bool) -> nn.Module:
    """Return the model as a plain one on the CPU, with all of its weights; one that is not in parts as it is.

    All processes call this together; parameters are gathered one by one, so that there is room for it.

    Args:
        model: the model in training.
        keeps: whether this process is to have the copy. Others get an empty one.

    Raises:
        Exception: the copy cannot be made. All parameters have been gathered then: no other process waits.
    """
    if not is_sharded(model):
        return model
    whole: dict[int, Tensor] = {}
    failed: Exception | None = None
    for parameter in model.parameters():
        weights = _whole(parameter)
        if not keeps or failed is not None:
            continue
        try:
            whole[id(parameter)] = weights.to("cpu", copy=True)
        except Exception as error:
            failed, whole = error, {}
    if failed is not None:
        raise failed
    if not keeps:
        return nn.Module()
    return _plain_copy(model, whole | {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in model.buffers()})


def outline(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """Return a model and a batch for a forward pass of which only shapes and gradient functions matter.

    Both as they are, but for a model in parts: a copy on the meta device then, which has no weights and takes no time.
    """
    if not is_sharded(model):
        return model, batch
    held = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)))
    empty = {id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in held}
    return _plain_copy(model, empty), batch.on("meta")


def _plain_copy(model: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Return a deep copy with these tensors, by the identity of those they stand for."""
    computed = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)) if not tensor.is_leaf)
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}  # they only copy once detached
    memo |= tensors
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(tensors[id(parameter)], requires_grad=parameter.requires_grad)
    shells = {
        module: _plain_class(module).__new__(_plain_class(module)) for module in model.modules() if _is_touched(module)
    }
    memo |= {id(module): shell for module, shell in shells.items()}
    for module, shell in shells.items():
        shell.__dict__.update(copy.deepcopy(_attributes(module), memo))
    return copy.deepcopy(model, memo)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without what `fully_shard` keeps there."""
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("__composable_api")}
    return {name: _without_torch(value) if name.endswith("_hooks") else value for name, value in attributes.items()}


def _whole(parameter: nn.Parameter) -> Tensor:
    detached = parameter.detach()
    whole: Tensor = detached.full_tensor() if _is_in_parts(detached) else detached  # type: ignore[attr-defined]
    return whole


def _is_in_parts(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _is_of_shards(kind: type) -> bool:
    return any(base.__name__ == _SHARDED for base in kind.__mro__)


def _has_class_of_shards(module: nn.Module) -> bool:
    return _is_of_shards(type(module))


def _is_touched(module: nn.Module) -> bool:
    """Tell whether `fully_shard` has changed the class of a module or given it hooks."""
    tables = (table for name, table in vars(module).items() if name.endswith("_hooks"))
    return _has_class_of_shards(module) or any(_without_torch(table) != table for table in tables)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return next(kind for kind in type(module).__mro__ if not _is_of_shards(kind))


def _without_torch(table: Any) -> Any:
    """Return a table of hooks without those of torch itself."""
    return type(table)((key, hook) for key, hook in table.items() if not _is_of_torch(hook))


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed")
