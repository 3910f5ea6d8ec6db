"""A learning rate for each layer module, without a change to the optimizer: its step is scaled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egeria.journal.recorder import Recorder
from egeria.layers.modules import LayerModule
from egeria.session.following import Training
from egeria.session.measures.hooks import OptimizerHooks

Wanted = tuple[Sequence[LayerModule], Sequence[float]]


class LayerRates:
    """Scales what each optimizer step does to the parameters of a layer module.

    The steps of SGD, Adam and AdamW, weight decay included, are linear in the learning rate, so that
    `before + share * (after - before)` is the step with that share of the rate. Parameters whose share is 1, and
    those that are frozen, are left alone; the others are copied before the step.

    Args:
        training: what the user trains.
        wanted: returns the layer modules and, for the step to come, the rate of each as a share of the initial
            rate; None to scale nothing.
        recorder: records faults.
        spend: counts seconds in the midst of the user's iteration.
    """

    def __init__(
        self,
        training: Training,
        wanted: Callable[[], Wanted | None],
        recorder: Recorder,
        spend: Callable[[float, float], None],
    ) -> None:
        self._names = {id(parameter): name for name, parameter in training.model.named_parameters()}
        self._optimizers = list(training.optimizers)
        self._wanted = wanted
        # A tied weight that an active module uses too trains on through that; it takes the rate of the last.
        self._keeps_tied = training.config.freezing.tied == "keep"
        self._initial = [[_initial_rate(group) for group in entry.param_groups] for entry in self._optimizers]
        self._before: list[tuple[Tensor, Tensor, float]] = []
        self._hooks = OptimizerHooks(
            self._optimizers,
            recorder,
            spend,
            what="setting learning rates by layer module",
            before=self._note,
            after=self._scale,
        )

    def close(self) -> None:
        """Leave the optimizers as they were found."""
        self._hooks.close()
        self._before = []

    def state_dict(self) -> dict[str, Any]:
        """Return the initial rates: a scheduler, or the user, may have changed those of the groups since."""
        return {"initial": [list(rates) for rates in self._initial]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._initial = [list(rates) for rates in state.get("initial", self._initial)]

    @torch.no_grad()
    def _note(self, optimizer: Optimizer) -> None:
        """Keep the parameters whose step is scaled."""
        self._before = []
        wanted = self._wanted()
        if wanted is None:
            return
        shares = self._shares_by_name(*wanted)
        initial = self._initial[self._optimizers.index(optimizer)]
        for index, group in enumerate(optimizer.param_groups):
            rate = float(group["lr"])
            if rate == 0:
                continue  # nothing moves at this step, whatever it is scaled by
            base = initial[index] if index < len(initial) else _initial_rate(group)  # a group that was added later
            for parameter in group["params"]:
                share = shares.get(self._names.get(id(parameter), ""))
                if share is None or not parameter.requires_grad or share * base == rate:
                    continue
                self._before.append((parameter, parameter.detach().clone(), share * base / rate))

    @torch.no_grad()
    def _scale(self, optimizer: Optimizer) -> None:
        """Make of the step what it would have been with the wanted rate."""
        noted, self._before = self._before, []
        for parameter, before, factor in noted:
            if factor == 0:
                parameter.copy_(before)
            else:
                parameter.sub_(before).mul_(factor).add_(before)

    def _shares_by_name(self, modules: Collection[LayerModule], shares: Sequence[float]) -> dict[str, float]:
        found = {name: share for module, share in zip(modules, shares, strict=True) for name in module.parameters}
        if self._keeps_tied:
            found |= {name: shares[-1] for module in modules for name in module.shared_parameters}
        return found


def _initial_rate(group: Mapping[str, Any]) -> float:
    """Return the rate that a group began with: a scheduler notes it."""
    return float(group.get("initial_lr", group["lr"]))
