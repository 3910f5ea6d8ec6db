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

from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.undisturbed import undisturbed


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a forward pass keeps for the backward pass; a storage that several tensors share
    counts once.

    What it keeps is counted for the deepest layer module that asks for it: an activation is kept by
    what reads it. What a checkpoint computes again counts with its inputs alone, and what no longer
    has a graph not at all.

    Args:
        model: its own tensors are there anyway, and do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self.place = 0
        """Of the layer module that runs."""
        self._own = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._found: list[tuple[int, weakref.ref[_Held]]] = []
        super().__init__(self._hold, lambda held: held.tensor)

    def by_place(self, num_places: int) -> list[int]:
        """Return the bytes by layer module; ask while the output of the pass is there."""
        places: dict[int, tuple[int, int]] = {}
        for place, reference in self._found:
            held = reference()
            key = None if held is None else storage_of(held.tensor)
            if held is not None and key is not None and key not in self._own:
                before = places.get(key, (0, 0))[0]
                places[key] = max(before, place), held.tensor.untyped_storage().nbytes()
        found = [0] * num_places
        for place, size in places.values():
            found[min(place, num_places - 1)] += size
        return found

    def _hold(self, tensor: Tensor) -> _Held:
        # The tensor itself would hold on to the graph that holds on to it.
        held = _Held(tensor.detach())
        self._found.append((self.place, weakref.ref(held)))
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


def activation_bytes(model: nn.Module, modules: Sequence[LayerModule], batch: Batch) -> list[int]:
    """Return the bytes that each layer module's forward pass keeps for its backward pass, by one
    undisturbed pass.

    In inference mode, as all passes of ours before a freeze: what dropout keeps is not in them.

    With the first `d` layer modules frozen the first `d` entries are not kept.
    """
    copied = batch.first_rows(None)
    kept = Kept(model)

    def pass_on(_module: nn.Module, _args: Any, _output: Any) -> None:
        kept.place += 1

    with undisturbed(model, gradients=True), batch.autocast.context(), kept:
        handles = [
            model.get_submodule(module.tap).register_forward_hook(pass_on) for module in modules
        ]
        try:
            output = model(*copied.args, **copied.kwargs)
        finally:
            for handle in handles:
                handle.remove()
        found = kept.by_place(len(modules))
    del output
    return found


def kept_bytes(
    model: nn.Module,
    modules: Sequence[LayerModule],
    optimizers: Sequence[Optimizer],
    batch: Batch,
) -> dict[str, list[int]]:
    """Return what an iteration keeps for each layer module, by the names of the fields of
    `MemoryProfiled`; without weights that modules behind it use too, which train on.

    Args:
        model: in training.
        modules: front to back.
        optimizers: of the loop.
        batch: a whole mini-batch.
    """
    named = [
        [name for name in module.parameters if name not in module.shared_parameters]
        for module in modules
    ]
    parts = [[model.get_parameter(name) for name in names] for names in named]
    return {
        "activations": activation_bytes(model, modules, batch),
        "gradients": [gradient_bytes(part) for part in parts],
        "optimizer_state": [optimizer_bytes(optimizers, part) for part in parts],
    }


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
