"""How far the weights of each layer module have moved in an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from egeria.layers.modules import LayerModule
from egeria.layers.shards import element_shares, own_part


class WeightChanges:
    """Compares the weights with those at the end of the interval before: `||w_now - w_then|| / ||w_then||`.

    Takes memory for one more copy of the parameters that were in training when it was made.

    Args:
        model: the model in training.
        add_up: returns the sums over all processes, where each has a part of the parameters.
    """

    def __init__(self, model: nn.Module, add_up: Callable[[Sequence[float]], Sequence[float]] = list) -> None:
        self._model = model
        self._add_up = add_up
        self._counted = element_shares(model)
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._then: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule], num_frozen: int) -> list[float | None]:
        """Return the change of each layer module and reset it; synchronises the device.

        None for the frozen ones, and for all at the first call.
        """
        squares = [self._squares(name) for name in self._then]
        table = torch.stack([entry.to(squares[0].device) for entry in squares]).tolist() if squares else []
        numbers = dict(zip(self._then, table, strict=True))
        self._then = {name: self._now(name).clone() for name in self._names}
        if not numbers:
            return [None for _ in modules]
        pairs = [[numbers[name] for name in module.parameters if name in numbers] for module in modules]
        totals = self._add_up([sum(pair[side] for pair in entry) for entry in pairs for side in (0, 1)])
        changes = [_change(*totals[2 * index : 2 * index + 2]) for index in range(len(modules))]
        return [None if index < num_frozen else change for index, change in enumerate(changes)]

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that the next change is against."""
        return {name: weight.clone() for name, weight in self._then.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved weights."""
        self._then = {name: old.to(self._now(name).device, copy=True) for name, old in state.items()}

    def _now(self, name: str) -> Tensor:
        return own_part(self._model.get_parameter(name).detach())

    def _squares(self, name: str) -> Tensor:
        """Return the squared norms of the difference and of the weight before [2]."""
        now, then = self._now(name), self._then[name]
        wide = torch.promote_types(now.dtype, torch.float32)
        difference = now.to(wide) - then.to(wide)
        return torch.stack([_square(difference), _square(then.to(wide))]) * self._counted[name]


def _square(values: Tensor) -> Tensor:
    return values.abs().square().sum()


def _change(moved: float, size: float) -> float:
    """Return the change from the squared norms of the difference and of the weights before."""
    if moved == 0:
        return 0.0
    return math.sqrt(moved) / math.sqrt(size) if size else math.inf
