"""How much of the training loss is the noise of the optimizer's steps, module by module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.layers.modules import LayerModule
from egeria.layers.shards import element_shares, own_part

MOST_ELEMENTS = 1 << 16
"""Elements of a parameter that are looked at; of a larger one, evenly spaced rows."""


class StepNoise:
    """Measures, at the first step of each interval, by how much the noise of steps holds the loss up.

    Where SGD trembles around its place, the loss lies above its floor by `-<g, dw> / (4 (1 - b))`: `g` is the
    gradient of a step, `dw` what the step made of it, `b` the momentum. For plain SGD `-<g, dw>` is the rate times
    the squared gradient; taken from the step itself it holds for every optimizer, its own scaling included, but
    for steps with a closure or with sparse gradients, of which there is no measure. A rate
    that falls to nothing takes that part of the loss away, but not from a module that is frozen.

    Takes memory for what it looks at, twice, during one step of each interval.

    Source: the stationary covariance of SGD in a quadratic bowl, `E[loss] = rate tr(C) / (4 (1 - b))` with `C` that
    of the gradients (Mandt, Hoffman and Blei, JMLR 2017, section 3).

    Args:
        model: the model in training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counted = element_shares(model)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._held: dict[str, tuple[Tensor, Tensor]] = {}
        """Rows of the parameters before the step under way, and of their gradients."""
        self._found: dict[str, Tensor] = {}
        self._done: set[int] = set()
        """Optimizers whose step was measured in this interval."""
        self._is_complete = False
        """Whether the interval was measured before the run was resumed."""

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Hold on to what an optimizer is about to change, unless this interval has its measure of that."""
        if self._is_complete or id(optimizer) in self._done:
            return
        # A fused optimizer under GradScaler gets scaled gradients, and this beside them.
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            scale = scale * (1 - optimizer.found_inf)  # type: ignore[attr-defined]  # 0 where it takes no step: NaN below
        self._held = {
            name: (_rows(parameter).clone(), _rows(parameter.grad).float() / (1.0 if scale is None else scale))
            for name, parameter, _ in self._own(optimizer)
            if parameter.grad is not None and not parameter.grad.is_sparse
        }

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Measure what the step did."""
        held, self._held = self._held, {}
        if not held:
            return
        self._done.add(id(optimizer))
        for name, parameter, momentum in self._own(optimizer):
            if name in held:
                then, gradient = held[name]
                rows = _rows(parameter)
                moved = torch.sum(gradient * (rows.float() - then.float()))
                scale = self._counted[name] * own_part(parameter).numel() / max(1, rows.numel())
                self._found[name] = -moved * scale / (4 * (1 - momentum))

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule], num_frozen: int) -> list[float | None]:
        """Return it for each layer module and reset it; synchronises the device.

        None for the frozen ones, and for those of which no step was measured or the numbers are not finite.
        It is below 0 where a step went up its own gradient, as momentum may. Of parameters in parts it is that of
        this process' part: those of all processes add up.
        """
        found, self._found = self._found, {}
        self._done, self._is_complete = set(), False
        values = list(found.values())
        table = torch.stack([entry.to(values[0].device) for entry in values]).tolist() if values else []
        numbers = dict(zip(found, table, strict=True))
        parts = [[numbers[name] for name in module.parameters if name in numbers] for module in modules]
        return [None if index < num_frozen else _total(part) for index, part in enumerate(parts)]

    def state_dict(self) -> dict[str, Any]:
        """Return what this interval has shown so far."""
        return dict(self._found)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._found, self._is_complete = dict(state), bool(state)

    def _own(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter, float]]:
        """Return the parameters of the model that an optimizer has, with their names and momentum."""
        return [
            (self._names[id(parameter)], parameter, _momentum(group))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._names
        ]


def _total(numbers: Sequence[float]) -> float | None:
    total = math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return total if numbers and math.isfinite(total) else None


def _momentum(group: Mapping[str, Any]) -> float:
    """Return the share of the last step that goes into the next."""
    betas = group.get("betas")
    momentum = betas[0] if isinstance(betas, (tuple, list)) and betas else group.get("momentum", 0.0)
    return min(0.999, max(0.0, float(momentum or 0.0)))


def _rows(values: Tensor) -> Tensor:
    """Return a tensor, or evenly spaced rows of a large one."""
    values = own_part(values.detach())
    step = -(-values.numel() // MOST_ELEMENTS)
    return values[::step] if step > 1 and values.dim() else values
