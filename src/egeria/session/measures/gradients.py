"""Gradients added up over an interval, and their size for each layer module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.layers.modules import LayerModule
from egeria.layers.shards import element_shares, own_part


class GradientSums:
    """Adds up the gradient of each parameter, one for each optimizer step, on its own device.

    Gradients are taken just before the step, because a loop may clear them before it calls `run.step`.
    They are what the optimizer is given: clipped, and summed over accumulated batches, where the loop does
    that. `GradScaler` has unscaled them by then and skips steps that overflow, but for optimizers that
    unscale within their own step (`fused=True`): there the sums carry the scale, and its changes too.
    Takes memory for one more copy of the parameters in training.

    Args:
        model: the model in training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counted = element_shares(model)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def take_in(self, optimizer: Optimizer) -> None:
        """Add the gradients that an optimizer is about to use."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None or parameter.grad is None:
                    continue
                if name not in self._sums:
                    self._sums[name] = torch.zeros_like(own_part(parameter), dtype=_wide(parameter.dtype))
                self._sums[name].add_(own_part(parameter.grad))

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule], num_frozen: int) -> list[float | None]:
        """Return the L1 norm of each layer module, None for the frozen ones, and reset it; synchronises the device.

        A module whose parameters had no gradient has 0. Of parameters in parts it is that of this process' part.
        """
        sums, self._sums = self._sums, {}
        norms = _read({name: total.abs().sum() * self._counted[name] for name, total in sums.items()})
        sizes = [sum(norms.get(name, 0.0) for name in module.parameters) for module in modules]
        return [None if index < num_frozen else size for index, size in enumerate(sizes)]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        return {name: total.clone() for name, total in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved sums."""
        self._sums = {
            name: total.to(self._model.get_parameter(name).device, copy=True) for name, total in state.items()
        }


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a number format in which many gradients can be added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _read(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return 0-d tensors as numbers, with one question to the device."""
    if not values:
        return {}
    tensors = list(values.values())
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return dict(zip(values, torch.stack(tensors).tolist(), strict=True))
