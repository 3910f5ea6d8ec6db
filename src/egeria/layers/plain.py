"""Copies of a model in parts that one process can run: plain models, without what `fully_shard` puts on modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.shards import is_in_parts, is_sharded, is_touched, plain_class, without_torch


def gather(model: nn.Module, *, keeps: bool) -> nn.Module:
    """Return the model as a plain one, with all of its weights; one that is not in parts as it is.

    All processes call this together; parameters are gathered one by one, so that there is room for it on their device.

    Args:
        model: the model in training.
        keeps: whether this process is to have the copy. Others get an empty one.

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
                whole[id(parameter)] = weights.to("cpu", copy=True)
        except Exception as error:
            failed, whole = error, {}
        del weights
    if failed is not None:
        raise failed
    if not keeps:
        return nn.Module()
    rest = (tensor for tensor in _held(model) if id(tensor) not in whole)
    return _plain_copy(model, {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in rest} | whole)


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
