"""The worth of a layer module's steps: by how much they lower the loss, measured where a training begins."""

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
from egeria.session.optimizer_steps import MOST_ELEMENTS, ByParameter, by_module, some_rows, total_of

MEASURED_SHARE = 0.2
"""Share of the training, from its beginning, in which worth may be measured, while the policy needs it. In the first
twentieth all steps go one way, and the share of each layer module stands out from the noise of batches by two to
eighteen standard errors; later it does so less and less."""
MOST_MEASURED = 400
"""Steps that are measured in `MEASURED_SHARE` at most, evenly spaced: a hundred in the first twentieth. A step that is
measured takes a few milliseconds on an accelerator, as much as a part of its iteration, and more of them than that tell
little."""
LEAST_COLUMNS = 8  # of a lookup table that are looked at
PRECISION = 0.05
"""To which the optimizer's share of an iteration is rounded, so that a busy machine hardly changes a decision."""


class StepWorth(ByParameter):
    """Measures by how much the steps of each layer module lower the loss, in the first steps of a training.

    The worth of step `t` is `-<g(t + 1), w(t + 1) - w(t)>`: what the optimizer made of the weights, against the
    gradient of the next batch. That batch had no part in the step, so that to first order, at the end of the step,
    this estimates without bias what the step did to the expected loss; the gradient of the step's own batch would
    flatter every module alike. Summed over the steps it is the line integral of the gradient along the way of the
    weights, which is the fall of the loss, but for half the curvature along each step: where the worth of all modules
    together is below nothing, steps are too long for it to mean anything. Gradients are those that the optimizer gets:
    clipped where the loop clips them, by a factor that is the same for all modules where it goes by their norm.

    Of a large parameter a part is looked at: evenly spaced rows, but of a lookup table, of which a batch uses
    few rows, the first columns. Takes memory for two copies of that, for `MEASURED_SHARE` of the training at most.
    Products are added up element by element, by few calls for all parameters: on an accelerator calls are what counts.

    Source: our own.
    """

    def __init__(self, model: nn.Module, num_optimizers: int, total_steps: int | None) -> None:
        super().__init__(model)
        self._num_optimizers = num_optimizers
        self._last_step = int(MEASURED_SHARE * (total_steps or 0))
        self._stride = max(1, -(-self._last_step // MOST_MEASURED))
        self._places: dict[int, int] = {}
        """Of optimizers, in the order of their first steps."""
        self._num_steps: list[int] = []
        """Of each optimizer, by its place."""
        tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
        self._tables = {id(module.weight) for module in tables}
        self._moved: dict[str, Tensor] = {}
        """What the last step made of what is looked at of each parameter; during a step, the values before it."""
        self.backward = BackwardTimes()
        self._began = 0.0
        self._optimizer_s: list[float] = []

    def ends_before(self, step: int) -> bool:
        """Return whether a step comes after all that are measured."""
        return step > self._last_step

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Judge the last step by the gradients of this one, and hold on to what it is about to change."""
        self.backward.end_step()
        is_measured = self._count(optimizer) % self._stride == 0
        judged: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parameter, _ in self._own(optimizer):
            moved, gradient = self._moved.pop(name, None), parameter.grad
            if gradient is None or gradient.is_sparse:
                continue
            if moved is not None:
                judged[name] = self._looked_at(parameter, gradient), moved
            if is_measured:
                self._moved[name] = self._looked_at(parameter).clone()
        if judged:
            self._judge(judged, optimizer)
        self._began = time.perf_counter()

    def _count(self, optimizer: Optimizer) -> int:
        """Return how many steps an optimizer had made before this one."""
        place = self._places.setdefault(id(optimizer), len(self._places))
        self._num_steps += [0] * (place + 1 - len(self._num_steps))
        self._num_steps[place] += 1
        return self._num_steps[place] - 1

    def _judge(self, judged: Mapping[str, tuple[Tensor, Tensor]], optimizer: Optimizer) -> None:
        """Add up, by name of a parameter, gradients times what the last step made."""
        for name, (_, moved) in judged.items():
            if name not in self._found:
                self._found[name] = torch.zeros_like(moved, dtype=torch.promote_types(moved.dtype, torch.float32))
        found = [self._found[name] for name in judged]
        gradients, steps = zip(*judged.values(), strict=True)
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer under GradScaler
        if scale is None:
            _fused(
                lambda grads, sums, moved: torch._foreach_addcmul_(sums, grads, moved, value=-1),
                gradients,
                found,
                steps,
            )
            return
        is_skipped = optimizer.found_inf > 0  # type: ignore[attr-defined]
        for worth, gradient, moved in zip(found, gradients, steps, strict=True):
            worth.sub_(torch.where(is_skipped, 0.0, gradient.to(worth.dtype) * moved / scale))

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Hold on to what the step made."""
        self._optimizer_s.append(time.perf_counter() - self._began)
        held = [(name, parameter) for name, parameter, _ in self._own(optimizer) if name in self._moved]
        if held:
            before = [self._moved[name] for name, _ in held]
            steps = _fused(torch._foreach_sub, [self._looked_at(parameter) for _, parameter in held], before)
            self._moved |= zip((name for name, _ in held), steps, strict=True)

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule]) -> list[float | None]:
        """Return it for each layer module, summed over the steps, and reset it; synchronises the device.

        None for those of which no step was measured or the numbers are not finite. Of parameters in parts it is that
        of this process' part: those of all processes add up.
        """
        found, self._found = self._found, {}
        sums = {name: products.sum() * self._share_looked_at(name, products) for name, products in found.items()}
        return [total_of(part) for part in by_module(sums, modules)]

    def _share_looked_at(self, name: str, part: Tensor) -> float:
        """Return how many times as large a parameter is as what is looked at of it, for what of it is counted."""
        size = own_part(self._model.get_parameter(name)).numel()
        return self._counted[name] * size / max(1, part.numel())

    def optimizer_share(self, iteration_s: float) -> float:
        """Return which share of an iteration the optimizer's step takes: the median of those measured; 0 for none.

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
            "num_steps": list(self._num_steps),
            "moved": moved,
            "optimizer_s": list(self._optimizer_s),
            "backward": self.backward.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state.get("products", {}))
        self._num_steps = list(state.get("num_steps", ()))
        at = {name: self._model.get_parameter(name).device for name in state.get("moved", {})}
        self._moved = {name: values.to(at[name], copy=True) for name, values in state.get("moved", {}).items()}
        self._optimizer_s = list(state.get("optimizer_s", ()))
        self.backward.load_state_dict(state.get("backward", {}))

    def _looked_at(self, parameter: Tensor, values: Tensor | None = None) -> Tensor:
        """Return the part of a parameter, or of its gradient, that is looked at."""
        part = own_part((parameter if values is None else values).detach())
        if id(parameter) not in self._tables:
            return some_rows(part)
        return part[:, : max(LEAST_COLUMNS, MOST_ELEMENTS // max(1, len(part)))]


def _fused(operation: Callable[..., Any], parts: Sequence[Tensor], *others: Sequence[Tensor]) -> list[Tensor]:
    """Apply an operation of `torch._foreach`, which takes many tensors in one call only where all of them are dense."""
    found: dict[int, Tensor] = {}
    for is_dense in (True, False):
        places = [place for place, part in enumerate(parts) if part.is_contiguous() == is_dense]
        if places:
            made = operation(*([tensors[place] for place in places] for tensors in (parts, *others)))
            found |= zip(places, made or (), strict=False)
    return [found[place] for place in sorted(found)]
