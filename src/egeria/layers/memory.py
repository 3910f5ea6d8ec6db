"""What a training iteration keeps in memory beside the weights: activations, gradients, optimizer
state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a forward pass keeps for the backward pass; a storage that several tensors share
    counts once.

    What a checkpoint computes again counts with its inputs alone, and what no longer has a graph
    not at all.

    Args:
        model: its own tensors are there anyway, and do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._found: list[weakref.ref[_Held]] = []
        super().__init__(self._hold, lambda held: held.tensor)

    def size_bytes(self) -> int:
        """Return the bytes; ask while the output of the pass is there."""
        sizes = {}
        for reference in self._found:
            held = reference()
            key = None if held is None else storage_of(held.tensor)
            if held is not None and key is not None and key not in self._own:
                sizes[key] = held.tensor.untyped_storage().nbytes()
        return sum(sizes.values())

    def _hold(self, tensor: Tensor) -> _Held:
        # The tensor itself would hold on to the graph that holds on to it.
        held = _Held(tensor.detach())
        self._found.append(weakref.ref(held))
        return held


class _Held:
    """A tensor for the backward pass; lives as long as the graph does."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def storage_of(tensor: Tensor) -> int | None:
    """Return what tells storages apart; None for a tensor without one, as a sparse one is."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # of sparse, lazy and nested ones
        return None


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the gradients of what trains among these."""
    return num_bytes(parameter for parameter in parameters if parameter.requires_grad)


def optimizer_bytes(optimizers: Sequence[Optimizer], parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of what optimizers hold for parameters, on their own devices."""
    held = 0
    for parameter in parameters:
        for optimizer in optimizers:
            # `state` makes an entry of what is only asked for.
            values = optimizer.state[parameter].values() if parameter in optimizer.state else ()
            held += num_bytes(
                value
                for value in values
                if not isinstance(value, Tensor) or value.device == parameter.device
            )
    return held


def num_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among values."""
    return sum(
        value.numel() * value.element_size() for value in values if isinstance(value, Tensor)
    )
