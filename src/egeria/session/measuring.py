"""What a policy may need beside plasticity, the loss and the rate; only what it needs is measured."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.layers.modules import LayerModule
from egeria.layers.shards import own_part
from egeria.policy import FORESIGHT, GRADIENTS, NOISE, WEIGHTS
from egeria.session.following import Training
from egeria.session.optimizer_steps import ByParameter, OptimizerHooks, StepNoise, by_module

MOST_CALLS = 1_000_000
"""A longer schedule is not played forward; at 3 to 10 µs a call this one takes seconds."""
SAME = 1e-6
"""Relative difference under which the rate found is the one foreseen."""


@dataclass(eq=False)
class Measures:
    """Gradients, weights, noise and the remaining learning rate, interval by interval."""

    training: Training
    needs: Collection[str]
    """What the policy needs; nothing else costs anything."""
    scheduler: Any
    """Of the user; read for the learning rates to come."""
    spend: Callable[[float, float], None]
    """Counts seconds in the midst of the user's iteration."""

    def __post_init__(self) -> None:
        model, needs = self.training.model, self.needs
        self._parts: dict[str, Any] = {}
        self._hooks: dict[str, OptimizerHooks] = {}
        hook = partial(OptimizerHooks, self.training.optimizers, self.training.recorder, self.spend)
        if GRADIENTS in needs:
            gradients = self._parts[GRADIENTS] = GradientSums(model)
            self._hooks[GRADIENTS] = hook(what="adding up gradients", before=gradients.take_in)
        if WEIGHTS in needs:
            self._parts[WEIGHTS] = WeightChanges(model, self.training.ranks.sums if self.training.is_sharded else list)
        if NOISE in needs:
            noise = self._parts[NOISE] = StepNoise(model)
            self._hooks[NOISE] = hook(
                what="measuring noise", before=noise.before, after=noise.after, takes_closures=False
            )
        if FORESIGHT in needs:
            self._parts[FORESIGHT] = Foresight(self.scheduler, self.training.total_steps)

    def take(self, step: int, rate: float, modules: Sequence[LayerModule], num_frozen: int) -> dict[str, Any]:
        """Return the measures of an interval that has ended, by the names of their journal fields."""
        for hooks in self._hooks.values():
            if hooks.is_closed:
                hooks.close()
        found: dict[str, Any] = {"gradients": None, "weight_changes": None, "noise": None}
        for name, field_name in zip((GRADIENTS, WEIGHTS, NOISE), found, strict=True):
            if name in self._parts and not (name in self._hooks and self._hooks[name].is_closed):
                values = self._parts[name].take(modules)
                found[field_name] = [None if index < num_frozen else value for index, value in enumerate(values)]
        ahead = self._parts[FORESIGHT].ahead(step, rate) if FORESIGHT in self._parts else None
        way, last_rate = (None, None) if ahead is None else ahead
        return {**found, "way_ahead": way, "last_rate": last_rate}

    def close(self) -> None:
        """Leave the optimizers as they were found, and release all tensors."""
        for hooks in self._hooks.values():
            hooks.close()
        self._hooks.clear()
        self._parts = {name: part for name, part in self._parts.items() if name == FORESIGHT}

    def state_dict(self) -> dict[str, Any]:
        """Return what an interval under way has gathered; nothing of parameters in parts, which would be one's own."""
        return {name: part.state_dict() for name, part in self._parts.items() if self._is_whole(name)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; measures that it lacks restart."""
        for name, part in self._parts.items():
            part.load_state_dict(state.get(name, {}) if self._is_whole(name) else {})

    def _is_whole(self, name: str) -> bool:
        """Return whether a measure is the same in all processes."""
        return not self.training.is_sharded or name == FORESIGHT


class GradientSums(ByParameter):
    """Adds up the gradient of each parameter, one for each optimizer step, on its own device.

    Gradients are taken just before the step, because a loop may clear them before it calls `run.step`. They are what
    the optimizer is given: clipped, and summed over accumulated batches, where the loop does that. `GradScaler` has
    unscaled them by then and skips steps that overflow, but for optimizers that unscale within their own step
    (`fused=True`): there the sums carry the scale, and its changes too. Takes memory for one more copy of the
    parameters in training.
    """

    @torch.no_grad()
    def take_in(self, optimizer: Optimizer) -> None:
        """Add the gradients that an optimizer is about to use."""
        for name, parameter, _ in self._own(optimizer):
            if parameter.grad is None:
                continue
            if name not in self._found:
                is_half = parameter.dtype in (torch.float16, torch.bfloat16)
                wide = torch.float32 if is_half else parameter.dtype
                self._found[name] = torch.zeros_like(own_part(parameter), dtype=wide)
            self._found[name].add_(own_part(parameter.grad))

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule]) -> list[float]:
        """Return the L1 norm of each layer module, and reset it; synchronises the device.

        A module whose parameters had no gradient has 0. Of parameters in parts it is that of this process' part.
        """
        found, self._found = self._found, {}
        norms = {name: total.abs().sum() * self._counted[name] for name, total in found.items()}
        return [sum(values, 0.0) for values in by_module(norms, modules)]


class WeightChanges(ByParameter):
    """Compares the weights with those at the end of the interval before: `||w_now - w_then|| / ||w_then||`.

    Takes memory for one more copy of the parameters that were in training when it was made. Where each process has a
    part of the parameters, `add_up` returns the sums over all processes.
    """

    def __init__(self, model: nn.Module, add_up: Callable[[Sequence[float]], Sequence[float]] = list) -> None:
        super().__init__(model)
        self._add_up = add_up
        self._trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule]) -> list[float | None]:
        """Return the change of each layer module, None at the first call, and reset it; synchronises the device."""
        then, self._found = self._found, {name: self._now(name).clone() for name in self._trained}
        if not then:
            return [None for _ in modules]
        pairs = by_module({name: self._squares(name, weights) for name, weights in then.items()}, modules)
        totals = self._add_up([sum(pair[side] for pair in entry) for entry in pairs for side in (0, 1)])
        return [_change(*totals[2 * index : 2 * index + 2]) for index in range(len(modules))]

    def _now(self, name: str) -> Tensor:
        return own_part(self._model.get_parameter(name).detach())

    def _squares(self, name: str, then: Tensor) -> Tensor:
        """Return the squared norms of the difference and of the weight before [2]."""
        now = self._now(name)
        wide = torch.promote_types(now.dtype, torch.float32)
        difference = now.to(wide) - then.to(wide)
        squares = [values.abs().square().sum() for values in (difference, then.to(wide))]
        return torch.stack(squares) * self._counted[name]


def _change(moved: float, size: float) -> float:
    """Return the change from the squared norms of the difference and of the weights before."""
    if moved == 0:
        return 0.0
    return math.sqrt(moved) / math.sqrt(size) if size else math.inf


class Ahead(NamedTuple):
    """The learning rate still to come."""

    way: float
    """Its sum over the steps to the end of the run."""
    last_rate: float
    """That of the last step."""


class Foresight:
    """Returns how much learning rate is still to come: the user's scheduler, played forward on a copy.

    The scheduler is only read. How many optimizer steps lie between two of its calls is seen from the loop, so
    that schedules by epoch and by step are both understood.

    Args:
        scheduler: of `torch.optim.lr_scheduler` or made like those. Without one the rate may stay or be lowered by
            hand, so the worst of both is foreseen: it stays as it is to the end, where it is zero.
        total_steps: optimizer steps of the run; None where unknown.
    """

    def __init__(self, scheduler: Any, total_steps: int | None) -> None:
        self._scheduler, self._total_steps = scheduler, total_steps
        self._calls: int | None = None
        """Calls of the scheduler, as it counts them, when it was last looked at."""
        self._changes: list[tuple[int, int]] = []
        """Step and calls at the first and the newest change of that number."""
        self._played: list[float] = []
        """Rates after `_played_from` calls, and after each further one: played once, as long as they come true."""
        self._played_from = 0
        self._played_groups: list[int] = []

    def ahead(self, step: int, rate: float) -> Ahead | None:
        """Return the learning rate still to come.

        Args:
            step: optimizer steps done.
            rate: the learning rate now.

        Returns:
            None where it is unknown: no `total_steps`, a schedule that depends on the training (plateaus), one
            that has come to zero, or not enough calls seen yet.
        """
        self._observe(step)
        if self._total_steps is None:
            return None
        if self._scheduler is None:
            return Ahead(rate * max(0, self._total_steps - step), 0.0)
        if len(self._changes) < 2 or rate <= 0:
            return None
        (first_step, first_calls), (last_step, last_calls) = self._changes
        period = (last_step - first_step) / (last_calls - first_calls)
        left = max(0, self._total_steps - step)
        until_next = min(left, max(0.0, last_step + period - step))
        num_calls = math.ceil((left - until_next) / period)
        shares = self._shares(num_calls, rate)
        if shares is None:
            return None
        way = rate * (until_next + sum(shares) * (left - until_next) / max(1, num_calls))
        return Ahead(way, rate * shares[-1] if shares else rate)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen of the scheduler."""
        return {"calls": self._calls, "changes": [list(change) for change in self._changes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._calls = state.get("calls")
        self._changes = [(step, calls) for step, calls in state.get("changes", [])]

    def _observe(self, step: int) -> None:
        calls = getattr(self._scheduler, "last_epoch", None)
        if not isinstance(calls, int) or calls == self._calls:
            return
        if self._calls is not None and calls < self._calls:  # it was restarted
            self._changes, self._played, self._calls = [], [], None
        if self._calls is not None:
            self._changes = [*self._changes[:1], (step, calls)]
        self._calls = calls

    def _shares(self, num_calls: int, rate: float) -> list[float] | None:
        """Return the rate after each of the next calls, as a share of the rate now; None where it is unknown.

        Groups of parameters may have schedules of their own: those count that have this rate now.
        """
        assert self._calls is not None
        if num_calls > MOST_CALLS:
            return None
        try:
            groups = self._scheduler.optimizer.param_groups
            fitting = [index for index, group in enumerate(groups) if abs(float(group["lr"]) - rate) <= SAME * rate]
            if not fitting:
                return None
            known = self._played[self._calls - self._played_from :] if self._calls >= self._played_from else []
            is_true = fitting == self._played_groups and len(known) > num_calls and abs(known[0] - rate) <= SAME * rate
            if not is_true:
                self._played = known = [rate, *play(self._scheduler, num_calls, fitting)]
                self._played_from, self._played_groups = self._calls, fitting
        except Exception:  # whatever a scheduler of the user's own makes of being copied: it cannot be foreseen then
            return None
        return [later / rate for later in known[1 : num_calls + 1]]


def play(scheduler: Any, num_calls: int, fitting: Sequence[int]) -> list[float]:
    """Return the largest rate of some groups after each of the next calls; the scheduler itself stays as it is."""
    optimizer = scheduler.optimizer
    groups = [
        {"params": [], **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"}}
        for group in optimizer.param_groups
    ]
    # Some schedulers look for the method.
    stand_in = SimpleNamespace(param_groups=groups, defaults=dict(optimizer.defaults), step=lambda: None)
    twin = copy.deepcopy(scheduler, {id(optimizer): stand_in})
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of calls without a step of the optimizer: there is none to make
        for _ in range(num_calls):
            twin.step()
            rates.append(max(float(groups[index]["lr"]) for index in fitting))
    return rates
