"""Copies of a model in parts that one process can run: plain models, without what `fully_shard` puts on modules."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from egeria import dist, tree
from egeria.layers.batch import Batch
from egeria.layers.shards import is_in_parts, is_sharded, is_touched, plain_class, policy_of, without_torch

ROOM_SHARE = 0.7
"""Share of free memory that a copy may take; the rest is for what its layers put out."""


def gather(model: nn.Module, *, keeps: bool, moves: bool = True) -> nn.Module:
    """Return the model as a plain one, with all of its weights; one that is not in parts as it is.

    All processes call this together; parameters are gathered one by one, so that there is room for it on their device.

    Args:
        model: the model in training.
        keeps: whether this process is to have the copy. Others get an empty one.
        moves: whether it goes to the CPU, or stays on its own device.

    Raises:
        Exception: the copy cannot be made. Where there is no room to keep it, all parameters have been gathered
            nevertheless, so that no other process waits; where there is none to gather even one, others do.
    """
    if not is_sharded(model):
        return model
    whole: dict[int, Tensor] = {}
    failed: Exception | None = None
    for parameter in model.parameters():
        weights = _whole(parameter)
        try:
            if keeps and failed is None:
                whole[id(parameter)] = _copied(weights, moves)
        except Exception as error:
            failed, whole = error, {}
        del weights
    if failed is not None:
        raise failed
    if not keeps:
        return nn.Module()
    rest = (tensor for tensor in _held(model) if id(tensor) not in whole)
    return _plain_copy(model, {id(tensor): _copied(tensor.detach(), moves) for tensor in rest} | whole)


def run_alone(model: nn.Module, *, keeps: bool) -> nn.Module:
    """Return a copy on the model's own device that computes what the parts compute together.

    In their number formats too: those that a mixed-precision policy gives to the parameters of a unit, and to what
    goes into it and comes out of it. All processes call this together.

    Args:
        model: the model in training.
        keeps: whether this process is to have the copy. Others get an empty one.

    Raises:
        Exception: as for `gather`; ask `lack_of_room` first.
    """
    copied = gather(model, keeps=keeps, moves=False)
    if keeps and copied is not model:
        _take_formats(model, copied)
    return copied


def lack_of_room(model: nn.Module) -> str:
    """Return why there is no room for a whole copy of a model on its own device; empty if there is."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    device = next(model.parameters()).device
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
    else:
        free = psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", dist.world_size()))
    if needed <= ROOM_SHARE * free:
        return ""
    return f"the whole model takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free for trials"


def outline(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """Return a model and a batch for a forward pass of which only shapes and gradient functions matter.

    Both as they are, but for a model in parts: a copy on the meta device then, which has no weights and takes no time.
    """
    if not is_sharded(model):
        return model, batch
    empty = {id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in _held(model)}
    return _plain_copy(model, empty), batch.on("meta")


def _plain_copy(model: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Return a deep copy with these tensors, by the identity of those they stand for."""
    memo: dict[int, Any] = dict(tensors)
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(tensors[id(parameter)], requires_grad=parameter.requires_grad)
    shells = {
        module: plain_class(module).__new__(plain_class(module)) for module in model.modules() if is_touched(module)
    }
    memo |= {id(module): shell for module, shell in shells.items()}
    for module, shell in shells.items():
        shell.__dict__.update(copy.deepcopy(_attributes(module), memo))
    return copy.deepcopy(model, memo)


def _copied(tensor: Tensor, moves: bool) -> Tensor:
    return tensor.to("cpu" if moves else tensor.device, copy=True)


def _held(model: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors that the modules hold: parameters, buffers, and those in plain attributes."""
    return (tensor for module in model.modules() for tensor in tree.leaves(vars(module)))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without what `fully_shard` keeps there."""
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("__composable_api")}
    return {name: without_torch(value) if name.endswith("_hooks") else value for name, value in attributes.items()}


def _whole(parameter: nn.Parameter) -> Tensor:
    detached = parameter.detach()
    whole: Tensor = detached.full_tensor() if is_in_parts(detached) else detached  # type: ignore[attr-defined]
    return whole


def _take_formats(model: nn.Module, copied: nn.Module) -> None:
    """Let a copy compute in the number formats of the units that the model is cut into."""
    policies = {name: policy for name, module in model.named_modules() if (policy := policy_of(module)) is not None}
    units: dict[str, str | None] = {}
    for name, module in copied.named_modules():
        units[name] = name if name in policies else units.get(name.rpartition(".")[0]) if name else None
        policy = policies.get(units[name] or "") if units[name] is not None else None
        if policy is not None and policy.param_dtype is not None:
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_floating_point():
                    parameter.data = parameter.data.to(policy.param_dtype)
        if name in policies and policy is not None:
            taken = policy.param_dtype if policy.cast_forward_inputs else None
            if taken or policy.output_dtype:
                vars(module)["forward"] = _Converting(module, taken, policy.output_dtype)


class _Converting:
    """A forward method whose arguments and outputs are converted."""

    def __init__(self, module: nn.Module, taken: torch.dtype | None, given: torch.dtype | None) -> None:
        self._module, self._taken, self._given = weakref.ref(module), taken, given  # it keeps this, and all its weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _converted((args, kwargs), self._taken)
        module = self._module()
        assert module is not None, "who calls it holds it"
        return _converted(type(module).forward(module, *args, **kwargs), self._given)


def _converted(tensors: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tensors
    return tree.map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tensors)
