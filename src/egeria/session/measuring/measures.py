"""What a policy may need beside plasticity, the loss and the rate; only what it
needs is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.journal import Recorder
from egeria.layers.modules import LayerModule, count_trainable, parameters_of
from egeria.layers.shards import own_part
from egeria.policy import FORESIGHT, GRADIENTS, NOISE, PREDICTION, WEIGHTS, WORTH
from egeria.report.freezing import backward_shares
from egeria.session.following import Training
from egeria.session.measuring.foresight import Foresight, Foresights
from egeria.session.measuring.optimizer_steps import (
    ByParameter,
    OptimizerHooks,
    StepNoise,
    by_module,
)
from egeria.session.measuring.worth import StepWorth
from egeria.smartfrz import NUM_SNAPSHOTS, WeightHistory, load_predictor


@dataclass(eq=False)
class Measures:
    """Gradients, weights, noise, worth and the remaining learning rate, interval by interval."""

    training: Training
    needs: Collection[str]
    """What the policy needs at its beginning; nothing else costs anything."""
    scheduler: Any
    """Of the user; read for the learning rates to come."""
    spend: Callable[[float, float], None]
    """Counts seconds in the midst of the user's iteration."""

    def __post_init__(self) -> None:
        model, needs = self.training.model, self.needs
        self._parts: dict[str, Any] = {}
        self._hooks: dict[str, OptimizerHooks] = {}
        hook = self._hook = partial(
            OptimizerHooks, self.training.optimizers, self.training.recorder, self.spend
        )
        if GRADIENTS in needs:
            gradients = self._parts[GRADIENTS] = GradientSums(model)
            self._hooks[GRADIENTS] = hook(
                what="adding up gradients", before=gradients.take_in, reads_gradients=True
            )
        if WEIGHTS in needs:
            self._parts[WEIGHTS] = WeightChanges(
                model, self.training.ranks.sums if self.training.is_sharded else list
            )
        if NOISE in needs:
            noise = self._parts[NOISE] = StepNoise(model)
            self._hooks[NOISE] = hook(
                what="measuring noise", before=noise.before, after=noise.after, reads_gradients=True
            )
        if self._measures_worth:
            self._open_worth()
        if PREDICTION in needs:
            self._parts[PREDICTION] = FreezeScores(model, self.training.recorder)
        if FORESIGHT in needs:
            self._parts[FORESIGHT] = self._foresee()

    def take(
        self, step: int, rate: float, modules: Sequence[LayerModule], num_frozen: int
    ) -> dict[str, Any]:
        """Return the measures of an interval that has ended, by the names of
        their journal fields.
        """
        for hooks in self._hooks.values():
            if hooks.is_closed:
                hooks.close()
        found: dict[str, Any] = dict.fromkeys(
            ("gradients", "weight_changes", "noise", "worth", "freeze_scores")
        )
        for name, field_name in zip(
            (GRADIENTS, WEIGHTS, NOISE, WORTH, PREDICTION), found, strict=True
        ):
            if name in self._parts and not (name in self._hooks and self._hooks[name].is_closed):
                own = _as_frozen(self.training, modules) if name in (NOISE, WORTH) else modules
                values = self._parts[name].take(own)
                found[field_name] = [
                    None if index < num_frozen else value for index, value in enumerate(values)
                ]
        foresight = self._parts.get(FORESIGHT)
        ahead = None if foresight is None else foresight.ahead(step, rate)
        if foresight is not None and foresight.unknown is not None:
            self.training.recorder.decline("looking ahead", foresight.unknown)
        rate_sum, last_rate = (None, None) if ahead is None else ahead
        return {**found, "way_ahead": rate_sum, "last_rate": last_rate}

    def begin(self, step: int, needs: Collection[str], modules: Sequence[LayerModule]) -> None:
        """Measure again after a step, from the first of an interval on, or in the midst of it after
        a resume.

        Args:
            step: the last one.
            needs: what the policy needs now.
            modules: the layer modules, front to back.
        """
        hooks = self._hooks.get(NOISE)
        if hooks is not None and NOISE in needs:
            hooks.wake()
        elif hooks is not None:  # they are open in a new process
            hooks.rest()
        worth = self._parts.get(WORTH)
        if worth is not None and (WORTH not in needs or worth.ends_before(step + 1)):
            self._close_worth()
        elif worth is not None and not self.training.hooks.is_compiled:
            worth.backward.arm(self.training.model, modules)

    def time_shares(
        self, iteration_s: float, modules: Sequence[LayerModule], shares: Sequence[float]
    ) -> list[float]:
        """Return which share of an iteration a freeze of each layer module saves, where all in
        front are frozen.

        Its backward pass as it was timed, and its part of what follows, such as clipping and
        reducing, and the optimizer's step: by its elements; where one process trains on an
        accelerator by its tensors, since putting that into the queue is what is timed. Tied weights
        that train on save nothing of that part. Backward passes that could not be timed, as in
        compiled models, are counted: for weights that are trained two multiplications for each of
        the forward pass, for others one.

        Args:
            iteration_s: seconds of an iteration.
            modules: front to back.
            shares: of the operations of a forward pass that each makes.
        """
        model, worth = self.training.model, self._parts.get(WORTH)
        step = 0.0 if worth is None else worth.optimizer_share(iteration_s)
        found = None if worth is None else worth.backward.shares(len(modules), iteration_s)
        parameters = parameters_of(model, modules)
        trained = [count_trainable(own) for own in parameters]
        sizes = [sum(parameter.numel() for parameter in own) for own in parameters]
        trains = [count / max(1, size) for count, size in zip(trained, sizes, strict=True)]
        timed, loop = found or (backward_shares(shares, trains), 0.0)
        # What was timed of a step that was held up leaves no room for the optimizer's.
        whole = 1.0 if found is None else max(1 - step, sum(timed) + loop)
        factor = (1 - step) / whole if whole else 0.0
        is_queued = all(parameter.device.type != "cpu" for own in parameters for parameter in own)
        count = _count_tensors if is_queued and self.training.ranks.is_alone else count_trainable
        counts = trained if count is count_trainable else list(map(count, parameters))
        each = (factor * loop + step) / max(1, sum(counts))
        kept = [
            () if _freezes_tied(self.training) else module.shared_parameters for module in modules
        ]
        freed = [
            all_own - count(map(model.get_parameter, names))
            for all_own, names in zip(counts, kept, strict=True)
        ]
        return [factor * part + each * number for part, number in zip(timed, freed, strict=True)]

    def end_step(self) -> None:
        """Take note of a step, and leave the optimizers alone for the rest of an interval that is
        measured.
        """
        if PREDICTION in self._parts:
            try:
                self._parts[PREDICTION].end_step()
            except Exception as error:  # such as weights that were taken out of the model
                del self._parts[PREDICTION]
                self.training.recorder.fault("looking at weights", error)
        hooks = self._hooks.get(NOISE)
        if (
            hooks is not None
            and not hooks.is_resting
            and self._parts[NOISE].is_done(self.training.optimizers)
        ):
            hooks.rest()

    @property
    def _measures_worth(self) -> bool:
        return (
            WORTH in self.needs and self.training.is_pretrained and bool(self.training.total_steps)
        )

    def _open_worth(self) -> None:
        optimizers = self.training.optimizers
        worth = self._parts[WORTH] = StepWorth(
            self.training.model, len(optimizers), self.training.total_steps
        )
        what = "measuring the worth of steps"
        self._hooks[WORTH] = self._hook(
            what=what, before=worth.before, after=worth.after, reads_gradients=True
        )

    def _close_worth(self) -> None:
        self._hooks.pop(WORTH).close()
        self._parts.pop(WORTH).backward.disarm()

    def close(self) -> None:
        """Leave the optimizers as they were found, and release all tensors."""
        for hooks in self._hooks.values():
            hooks.close()
        self._hooks.clear()
        if WORTH in self._parts:
            self._parts[WORTH].backward.disarm()
        self._parts = {name: part for name, part in self._parts.items() if name == FORESIGHT}

    def state_dict(self) -> dict[str, Any]:
        """Return what an interval under way has gathered; nothing of parameters in parts, which
        would be one's own.
        """
        return {
            name: part.state_dict() for name, part in self._parts.items() if self._is_whole(name)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; measures that it lacks restart.

        The worth of steps is measured where the run that was saved did so: what looks trained now
        may have begun at random there.
        """
        if WORTH in self._parts and not self._measures_worth:
            self._close_worth()
        elif WORTH in state and WORTH not in self._parts and self._measures_worth:
            self._open_worth()
        for name, part in self._parts.items():
            part.load_state_dict(state.get(name, {}) if self._is_whole(name) else {})

    def _foresee(self) -> Foresight | Foresights:
        """Return the foresight, and say what follows where there is none."""
        training, recorder = self.training, self.training.recorder
        make = partial(Foresight, total_steps=training.total_steps, warn=recorder.warn)
        schedulers = self.scheduler if isinstance(self.scheduler, list) else [self.scheduler]
        foresight = (
            Foresights(list(map(make, schedulers))) if len(schedulers) > 1 else make(schedulers[0])
        )
        if foresight.refusal and training.total_steps is not None:
            recorder.decline(
                "freezing",
                f"the learning rates of {type(schedulers[0]).__name__} cannot be foreseen "
                f"({foresight.refusal}), and "
                f"{training.policy_name!r} freezes nothing while the rate to come is unknown. Use "
                "a scheduler that "
                "goes by the number of calls alone, or policy='egeria', which does not look "
                "ahead; in a loop of "
                f"your own, attach without a scheduler also counts the rate as if it stayed",
            )
        return foresight

    def _is_whole(self, name: str) -> bool:
        """Return whether a measure is the same in all processes."""
        return not self.training.is_sharded or name == FORESIGHT


def _count_tensors(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.requires_grad for parameter in parameters)


def _freezes_tied(training: Training) -> bool:
    return training.config.freezing.tied == "freeze"


def _as_frozen(training: Training, modules: Sequence[LayerModule]) -> Sequence[LayerModule]:
    """Return layer modules with those of their parameters alone that a freeze
    takes from training.
    """
    if _freezes_tied(training) or not any(module.shared_parameters for module in modules):
        return modules
    named = [
        [name for name in module.parameters if name not in module.shared_parameters]
        for module in modules
    ]
    return [
        replace(module, parameters=tuple(names))
        for module, names in zip(modules, named, strict=True)
    ]


class FreezeScores(WeightHistory):
    """What the predictor of SmartFRZ says of each layer module."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        super().__init__(model)
        self._recorder = recorder

    def take(self, modules: Sequence[LayerModule]) -> list[float | None]:
        """Return the probability that each may freeze; None where it cannot be asked, or its
        weights are not finite.
        """
        num_steps, windows = self.num_steps, self.windows(modules)
        if num_steps < NUM_SNAPSHOTS:
            self._recorder.decline(
                "freezing by 'smartfrz'",
                f"an interval had {num_steps} steps, and the predictor looks at {NUM_SNAPSHOTS} "
                "snapshots of it; set "
                f"plasticity.interval_steps to at least {NUM_SNAPSHOTS}, or leave it out",
            )
        known = [window for window in windows if window is not None]
        scores = iter(load_predictor().score(torch.stack(known)) if known else ())
        found = [None if window is None else next(scores) for window in windows]
        return [None if score is None or math.isnan(score) else score for score in found]


class GradientSums(ByParameter):
    """Adds up the gradient of each parameter, one for each optimizer step, on its own device.

    Gradients are taken just before the step, because a loop may clear them before it calls
    `run.step`. They are what the optimizer is given: clipped, and summed over accumulated batches,
    where the loop does that. `GradScaler` has unscaled them by then and skips steps that overflow,
    but for optimizers that unscale within their own step (`fused=True`): there the sums carry the
    scale, and its changes too. Takes memory for one more copy of the parameters in training.
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

        A module whose parameters had no gradient has 0. Of parameters in parts it is that of this
        process' part.
        """
        found, self._found = self._found, {}
        norms = {name: total.abs().sum() * self._counted[name] for name, total in found.items()}
        return [sum(values, 0.0) for values in by_module(norms, modules)]


class WeightChanges(ByParameter):
    """Compares the weights with those at the end of the interval before: `||w_now - w_then|| /
    ||w_then||`.

    Takes memory for one more copy of the parameters that were in training when it was made. Where
    each process has a part of the parameters, `add_up` returns the sums over all processes.
    """

    def __init__(
        self, model: nn.Module, add_up: Callable[[Sequence[float]], Sequence[float]] = list
    ) -> None:
        super().__init__(model)
        self._add_up = add_up
        self._trained = [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ]

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule]) -> list[float | None]:
        """Return the change of each layer module, None at the first call, and reset it;
        synchronises the device.
        """
        then, self._found = self._found, {name: self._now(name).clone() for name in self._trained}
        if not then:
            return [None for _ in modules]
        pairs = by_module(
            {name: self._squares(name, weights) for name, weights in then.items()}, modules
        )
        totals = self._add_up(
            [sum(pair[side] for pair in entry) for entry in pairs for side in (0, 1)]
        )
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
