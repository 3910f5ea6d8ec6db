"""How far the weights of each layer module have moved in an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from egeria.layers.modules import LayerModule


class WeightChanges:
    """Compares the weights with those at the end of the interval before: `||w_now - w_then|| / ||w_then||`.

    Takes memory for one more copy of the parameters that were in training when it was made.

    Args:
        model: the model in training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._then: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule], num_frozen: int) -> list[float | None]:
        """Return the change of each layer module and start anew; synchronises the device.

        None for the frozen ones, and for all at the first call.
        """
        squares = [self._squares(name) for name in self._then]
        table = torch.stack([entry.to(squares[0].device) for entry in squares]).tolist() if squares else []
        numbers = dict(zip(self._then, table, strict=True))
        self._then = {name: self._model.get_parameter(name).detach().clone() for name in self._names}
        if not numbers:
            return [None for _ in modules]
        pairs = [[numbers[name] for name in module.parameters if name in numbers] for module in modules]
        return [None if index < num_frozen else _change(entry) for index, entry in enumerate(pairs)]

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that the next change is against."""
        return {name: weight.clone() for name, weight in self._then.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved weights."""
        self._then = {name: old.to(self._model.get_parameter(name).device, copy=True) for name, old in state.items()}

    def _squares(self, name: str) -> Tensor:
        """Return the squared norms of the difference and of the weight before [2]."""
        now, then = self._model.get_parameter(name), self._then[name]
        wide = torch.promote_types(now.dtype, torch.float32)
        difference = now.detach().to(wide) - then.to(wide)
        return torch.stack([_square(difference), _square(then.to(wide))])


def _square(values: Tensor) -> Tensor:
    return values.abs().square().sum()


def _change(squares: Sequence[Sequence[float]]) -> float:
    moved, size = (math.sqrt(sum(pair[index] for pair in squares)) for index in (0, 1))
    if moved == 0:
        return 0.0
    return moved / size if size else math.inf
