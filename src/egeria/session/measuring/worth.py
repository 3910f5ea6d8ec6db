"""The worth of a layer module's steps: by how much they lower the loss, measured where a training
begins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.layers.backward_times import BackwardTimes
from egeria.layers.modules import LayerModule
from egeria.layers.shards import own_part
from egeria.session.measuring.optimizer_steps import (
    MOST_ELEMENTS,
    ByParameter,
    by_module,
    some_rows,
    total_of,
)

MEASURED_SHARE = 0.2
"""Share of the training, from its beginning, in which worth may be measured, while the policy needs
it. In the first twentieth all steps go one way, and the share of each layer module stands out from
the noise of batches by two to eighteen standard errors; later it does so less and less."""
LEAST_COLUMNS = 8  # of a lookup table that are looked at
PRECISION = 0.05
"""To which the optimizer's share of an iteration is rounded, so that a busy machine hardly changes
a decision."""


class StepWorth(ByParameter):
    """Measures by how much the steps of each layer module lower the loss, in the first steps of a
    training.

    The worth of step `t` is `-<g(t + 1), w(t + 1) - w(t)>`: what the optimizer made of the weights,
    against the gradient of the next batch. That batch had no part in the step, so that to first
    order, at the end of the step, this estimates without bias what the step did to the expected
    loss; the gradient of the step's own batch would flatter every module alike. Summed over the
    steps it is the line integral of the gradient along the way of the weights, which is the fall of
    the loss, but for half the curvature along each step: where the worth of all modules together is
    below nothing, steps are too long for it to mean anything. Gradients are those that the
    optimizer gets: clipped where the loop clips them, by a factor that is the same for all modules
    where it goes by their norm.

    Of a large parameter a part is looked at: evenly spaced rows, but of a lookup table, of which a
    batch uses few rows, the first columns. Takes memory for two copies of that, one of them in
    float32, for `MEASURED_SHARE` of the training at most. Products are added up element by element,
    where it can be in one call for many parameters: on an accelerator calls are what counts.

    Source: our own.
    """

    def __init__(self, model: nn.Module, num_optimizers: int, total_steps: int | None) -> None:
        super().__init__(model)
        self._num_optimizers = num_optimizers
        self._last_step = int(MEASURED_SHARE * (total_steps or 0))
        tables = (
            module
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        )
        self._tables = {id(module.weight) for module in tables}
        self._moved: dict[str, Tensor] = {}
        """What the last step made of what is looked at of each parameter."""
        self._before: dict[str, Tensor] = {}
        """During a step, the values before it; left over from one that failed."""
        self._factors: dict[str, float] = {}
        """By how much more of each parameter counts than is looked at."""
        self._rates: dict[str, float] = {}
        """Of the last step, by parameter."""
        self.backward = BackwardTimes()
        self._began = 0.0
        self._optimizer_s: list[float] = []

    def ends_before(self, step: int) -> bool:
        """Return whether a step comes after all that are measured."""
        return step > self._last_step

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Judge the last step by the gradients of this one, and hold on to what it is about to
        change.
        """
        self._before = {}
        self.backward.end_step()
        own = [
            (name, parameter, parameter.grad)
            for name, parameter, _ in self._own(optimizer)
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]
        moved = {
            name: self._moved.pop(name) for name, *_ in self._own(optimizer) if name in self._moved
        }
        judged = [
            (name, self._looked_at(parameter, grad), moved[name])
            for name, parameter, grad in own
            if name in moved
        ]
        if judged:
            self._judge(judged, optimizer)
        del moved, judged  # before as much is held again
        moving = self._moving(optimizer)
        for name, parameter, _ in own:
            if name not in moving:
                continue
            part = self._before[name] = self._looked_at(parameter).clone()
            size = own_part(parameter).numel() * (2 if parameter.is_complex() else 1)
            self._factors[name] = self._counted[name] * size / max(1, part.numel())
        self._began = time.perf_counter()

    def _moving(self, optimizer: Optimizer) -> set[str]:
        """Return the parameters whose steps tell what later ones will be worth.

        Steps at a rate of 0 are no steps: what rests for now, as under a schedule of its own, is
        not worth nothing. Nor do those of a rate that still rises, while the largest of the
        optimizer does not, tell what it will bring.
        """
        rates = {name: group.get("lr") for name, _, group in self._own(optimizer)}
        before = {name: self._rates[name] for name in rates if name in self._rates}
        # One on a device is not asked for, but taken for one that moves.
        now = {
            name: float(rate)
            for name, rate in rates.items()
            if rate is not None and not isinstance(rate, Tensor)
        }
        self._rates.update(now)
        has_risen = max(now.values(), default=0.0) > max(before.values(), default=0.0)
        rising = (
            set()
            if has_risen
            else {name for name, rate in now.items() if rate > before.get(name, rate)}
        )
        return {name for name, rate in rates.items() if now.get(name) != 0.0} - rising

    def _judge(self, judged: Sequence[tuple[str, Tensor, Tensor]], optimizer: Optimizer) -> None:
        """Add up gradients times what the last step made, each with the name of its parameter."""
        names, gradients, steps = zip(*judged, strict=True)
        for name, moved in zip(names, steps, strict=True):
            if name not in self._found:
                self._found[name] = torch.zeros_like(
                    moved, dtype=torch.promote_types(moved.dtype, torch.float32)
                )
        sums = [self._found[name] for name in names]
        # Of a fused optimizer under GradScaler; there is no scale where the loop has taken it out
        # already.
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if scale is None and found_inf is None:
            _fused(
                lambda grads, sums, moved: torch._foreach_addcmul_(sums, grads, moved, value=-1),
                gradients,
                sums,
                steps,
            )
            return
        for worth, gradient, moved in zip(sums, gradients, steps, strict=True):
            products = gradient.to(worth.dtype) * moved
            if scale is not None:
                products = products / scale
            if found_inf is not None:
                products = torch.where(found_inf > 0, 0.0, products)
            worth.sub_(products)

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Hold on to what the step made."""
        self._optimizer_s.append(time.perf_counter() - self._began)
        before, self._before = self._before, {}
        held = {name: parameter for name, parameter, _ in self._own(optimizer) if name in before}
        moved = {name: before[name] for name in held}
        _fused(
            _subtract_from,
            [self._looked_at(parameter) for parameter in held.values()],
            list(moved.values()),
        )
        self._moved.update(moved)

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule]) -> list[float | None]:
        """Return it for each layer module, summed over the steps, and reset it; synchronises the
        device.

        None for those of which no step was measured, as at a rate of 0, or the numbers are not
        finite. Of parameters in parts it is that of this process' part: those of all processes add
        up.
        """
        found, self._found = self._found, {}
        sums = {name: products.sum() * self._factors[name] for name, products in found.items()}
        return [total_of(part) for part in by_module(sums, modules)]

    def optimizer_share(self, iteration_s: float) -> float:
        """Return which share of an iteration the optimizer's step takes: the median of those
        measured; 0 for none.

        On an accelerator it is what putting the step into its queue takes.
        """
        if not self._optimizer_s or iteration_s <= 0:
            return 0.0
        share = statistics.median(self._optimizer_s) * self._num_optimizers / iteration_s
        return PRECISION * round(min(1.0, share) / PRECISION)

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered so far, and what the last step made."""
        moved = {name: values.clone() for name, values in self._moved.items()}
        return {
            "products": super().state_dict(),
            "factors": dict(self._factors),
            "rates": dict(self._rates),
            "moved": moved,
            "optimizer_s": list(self._optimizer_s),
            "backward": self.backward.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state.get("products", {}))
        self._factors, self._rates = dict(state.get("factors", {})), dict(state.get("rates", {}))
        at = {name: self._model.get_parameter(name).device for name in state.get("moved", {})}
        self._moved = {
            name: values.to(at[name], copy=True) for name, values in state.get("moved", {}).items()
        }
        self._optimizer_s = list(state.get("optimizer_s", ()))
        self.backward.load_state_dict(state.get("backward", {}))

    def _looked_at(self, parameter: Tensor, values: Tensor | None = None) -> Tensor:
        """Return the part of a parameter, or of its gradient, that is looked at,
        in real numbers.
        """
        part = own_part((parameter if values is None else values).detach())
        if part.is_complex():
            part = torch.view_as_real(part)
        if id(parameter) not in self._tables:
            return some_rows(part)
        return part[:, : max(LEAST_COLUMNS, MOST_ELEMENTS // max(1, len(part)))]


def _subtract_from(parts: list[Tensor], before: list[Tensor]) -> None:
    """Put `part - before` in the place of each tensor before."""
    torch._foreach_neg_(before)
    torch._foreach_add_(before, parts)


def _fused(
    operation: Callable[..., None], parts: Sequence[Tensor], *others: Sequence[Tensor]
) -> None:
    """Apply an operation of `torch._foreach`, which takes many tensors in one call only where all
    of them are dense.
    """
    for is_dense in (True, False):
        places = [place for place, part in enumerate(parts) if part.is_contiguous() == is_dense]
        if places:
            operation(*([tensors[place] for place in places] for tensors in (parts, *others)))
