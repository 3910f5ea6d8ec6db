"""The worth of a layer module's steps: by how much they lower the loss, measured where a training begins."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
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
    few rows, the first columns. Takes memory for one copy of that, for `MEASURED_SHARE` of the training at most.

    Source: our own.
    """

    def __init__(self, model: nn.Module, num_optimizers: int, total_steps: int | None) -> None:
        super().__init__(model)
        self._num_optimizers = num_optimizers
        self._last_step = int(MEASURED_SHARE * (total_steps or 0))
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
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer under GradScaler
        for name, parameter, _ in self._own(optimizer):
            moved, part = self._moved.pop(name, None), self._looked_at(parameter)
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                continue
            if moved is not None:
                worth = -torch.sum(self._looked_at(parameter, gradient).float() * moved.float())
                worth = worth * (self._counted[name] * own_part(parameter).numel() / max(1, part.numel()))
                if scale is not None:
                    worth = torch.where(optimizer.found_inf > 0, 0.0, worth / scale)  # type: ignore[attr-defined]
                self._found[name] = self._found[name] + worth if name in self._found else worth
            self._moved[name] = part.clone()
        self._began = time.perf_counter()

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Hold on to what the step made."""
        self._optimizer_s.append(time.perf_counter() - self._began)
        for name, parameter, _ in self._own(optimizer):
            if name in self._moved:
                self._moved[name] = self._looked_at(parameter) - self._moved[name]

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule]) -> list[float | None]:
        """Return it for each layer module, summed over the steps, and reset it; synchronises the device.

        None for those of which no step was measured or the numbers are not finite. Of parameters in parts it is that
        of this process' part: those of all processes add up.
        """
        found, self._found = self._found, {}
        return [total_of(part) for part in by_module(found, modules)]

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
            "found": super().state_dict(),
            "moved": moved,
            "optimizer_s": list(self._optimizer_s),
            "backward": self.backward.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state.get("found", {}))
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
