"""Callbacks on the optimizer's steps, and what needs them: the noise of steps, and a rate for each
layer module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.journal import Recorder
from egeria.layers.modules import LayerModule
from egeria.layers.shards import element_shares, own_part
from egeria.session.following import Training
from egeria.session.measuring.timing import Stopwatch

FAULTS_BEFORE_GIVING_UP = 3
MOST_ELEMENTS = 1 << 16
"""Elements of a parameter that are looked at; of a larger one, evenly spaced rows."""
Wanted = tuple[Sequence[LayerModule], Sequence[float]]


@dataclass(eq=False)
class OptimizerHooks:
    """Calls back before and after each optimizer step, until it is closed or has failed too often
    in a row.

    What the callbacks take is counted as overhead, and what they raise is a fault of ours.
    """

    optimizers: Sequence[Optimizer]
    recorder: Recorder
    spend: Callable[[float, float], None]
    """Counts seconds in the midst of the user's iteration."""
    _: KW_ONLY
    what: str
    """Is not done where it fails, in the words of a warning."""
    before: Callable[[Optimizer], None]
    after: Callable[[Optimizer], None] | None = None
    reads_gradients: bool = False
    """Whether `before` needs the gradients of the step. A closure computes them within the step:
    `before` is then called behind it. An optimizer that calls its closure several times, or moves
    the weights before, steps by other gradients than those at the weights it began with, so that
    callbacks end there."""

    def __post_init__(self) -> None:
        self._handles: list[Any] = []
        self._has_given_up = False
        self._call_before = self._guarded(self.before)
        self._call_after = None if self.after is None else self._guarded(self.after)
        self.is_resting = False
        """Whether no callback is made for now; `wake` puts the hooks back."""
        self.has_failed = False
        """Whether a callback has ever raised."""
        self._open()

    @property
    def is_closed(self) -> bool:
        """Return whether no callback is made any more."""
        return self._has_given_up or not (self._handles or self.is_resting)

    def rest(self) -> None:
        """Take the hooks off the optimizers until `wake`; not in the midst of a step."""
        if not self.is_closed:
            self.close()
            self.is_resting = True

    def wake(self) -> None:
        """Put the hooks back after `rest`."""
        if self.is_resting:
            self.is_resting = False
            self._open()

    def close(self) -> None:
        """Leave the optimizers as they were found."""
        self.is_resting = False
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _open(self) -> None:
        try:
            for optimizer in self.optimizers:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
                if self._call_after is not None:
                    self._handles.append(optimizer.register_step_post_hook(self._call_after))
        except AttributeError as error:  # what wraps an optimizer need not have hooks
            self.close()
            self.recorder.decline(self.what, f"an optimizer takes no hooks on its steps ({error})")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Call `before`, or have the closure call it, and then return the arguments that the step
        is to have.
        """
        closure = kwargs.get("closure") or next(
            (entry for entry in args[1:] if callable(entry)), None
        )
        if closure is None or not self.reads_gradients or self._has_given_up:
            self._call_before(optimizer)
            return None
        behind = self._behind(closure, optimizer)
        return tuple(behind if entry is closure else entry for entry in args), {
            name: behind if entry is closure else entry for name, entry in kwargs.items()
        }

    def _behind(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        """Return the closure with `before` called behind its first call."""
        num_calls, began_at = 0, _weight_versions(optimizer)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            is_at_start = _weight_versions(optimizer) == began_at
            result = closure(*args, **kwargs)
            num_calls += 1
            if num_calls == 1 and is_at_start:
                self._call_before(optimizer)
            elif not self._has_given_up:
                self._give_up(
                    "the optimizer calls its closure several times in a step, or from other weights"
                )
            return result

        return call

    def _give_up(self, reason: str) -> None:
        """End all callbacks; hooks must not be removed in the midst of a step, which goes through
        them.
        """
        self._has_given_up = True
        self.recorder.decline(self.what, reason)

    def _guarded(self, action: Callable[[Optimizer], None]) -> Callable[..., None]:
        faults_in_a_row = 0

        def call(optimizer: Optimizer, *_: Any) -> None:
            nonlocal faults_in_a_row
            if self._has_given_up:
                return
            watch = Stopwatch()
            try:
                action(optimizer)
                faults_in_a_row = 0
            except Exception as error:
                faults_in_a_row, self.has_failed = faults_in_a_row + 1, True
                self.recorder.fault(self.what, error)
                if faults_in_a_row >= FAULTS_BEFORE_GIVING_UP:
                    self._give_up(f"it failed {faults_in_a_row} times in a row, last with: {error}")
            self.spend(*watch.read())

        return call


def _weight_versions(optimizer: Optimizer) -> int:
    """Return a number that grows whenever weights of an optimizer are changed in place."""
    return sum(
        parameter._version for group in optimizer.param_groups for parameter in group["params"]
    )


class ByParameter:
    """Tensors for the parameters of a model, gathered over an interval and told by layer module."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counted = element_shares(model)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._found: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered so far."""
        return {name: values.clone() for name, values in self._found.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._found = {
            name: values.to(self._model.get_parameter(name).device, copy=True)
            for name, values in state.items()
        }

    def _own(self, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter, Mapping[str, Any]]]:
        """Yield the parameters of the model that an optimizer has: name, parameter and group."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    yield self._names[id(parameter)], parameter, group


def by_module(found: Mapping[str, Tensor], modules: Sequence[LayerModule]) -> list[list[Any]]:
    """Return the numbers of each layer module, of those parameters that have any; synchronises the
    device.
    """
    numbers = dict(zip(found, to_numbers(list(found.values())), strict=True))
    return [[numbers[name] for name in module.parameters if name in numbers] for module in modules]


def to_numbers(tensors: Sequence[Tensor]) -> list[Any]:
    """Return tensors of one shape as numbers, asking the device once."""
    return (
        torch.stack([entry.to(tensors[0].device) for entry in tensors]).tolist() if tensors else []
    )


class StepNoise(ByParameter):
    """Measures, at the first step of each interval, by how much the noise of steps raises the loss.

    Where SGD trembles around its place, the loss lies above its floor by `-<g, dw> / (4 (1 - b))`:
    `g` is the gradient of a step, `dw` what the step made of it, `b` the momentum. For plain SGD
    `-<g, dw>` is the rate times the squared gradient; taken from the step itself it holds for every
    optimizer, its own scaling included, but for steps with sparse gradients or with several calls
    of a closure, of which there is no measure. A rate that falls to nothing takes that part of the
    loss away, but not from a module that is frozen.

    Takes memory for what it looks at, twice, during one step of each interval.

    Source: the stationary covariance of SGD in a quadratic bowl, `E[loss] = rate tr(C) / (4 (1 -
    b))` with `C` that of the gradients (Mandt, Hoffman and Blei, JMLR 2017, section 3).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._held: dict[str, tuple[Tensor, Tensor]] = {}
        """Rows of the parameters before the step under way, and of their gradients."""
        self._done: set[int] = set()
        """Optimizers whose step was measured in this interval."""
        self._is_complete = False
        """Whether the interval was measured before the run was resumed."""

    def is_done(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether this interval has its measure of the steps of all these optimizers."""
        return self._is_complete or len(self._done) == len(optimizers)

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Hold on to what an optimizer is about to change, unless this interval has its measure of
        that.
        """
        if self._is_complete or id(optimizer) in self._done:
            return
        # A fused optimizer under GradScaler gets scaled gradients, and this beside them.
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            scale = scale * (1 - optimizer.found_inf)  # type: ignore[attr-defined]  # 0 where it takes no step: NaN below
        self._held = {
            name: (
                some_rows(parameter).clone(),
                some_rows(parameter.grad).float() / (1.0 if scale is None else scale),
            )
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
        for name, parameter, group in self._own(optimizer):
            if name in held:
                then, gradient = held[name]
                rows = some_rows(parameter)
                moved = torch.sum(gradient * (rows.float() - then.float()))
                scale = self._counted[name] * own_part(parameter).numel() / max(1, rows.numel())
                self._found[name] = -moved * scale / (4 * (1 - _momentum(group)))

    @torch.no_grad()
    def take(self, modules: Sequence[LayerModule]) -> list[float | None]:
        """Return it for each layer module and reset it; synchronises the device.

        None for those of which no step was measured or the numbers are not finite.
        It is below 0 where a step went up its own gradient, as momentum may. Of parameters in parts
        it is that of this process' part: those of all processes add up.
        """
        found, self._found = self._found, {}
        self._done, self._is_complete = set(), False
        return [total_of(part) for part in by_module(found, modules)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        super().load_state_dict(state)
        self._done, self._is_complete = set(), bool(state)


def total_of(numbers: Sequence[float]) -> float | None:
    """Return the sum of the numbers of a layer module; None where there are none, or not all are
    finite.
    """
    total = math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return total if numbers and math.isfinite(total) else None


def _momentum(group: Mapping[str, Any]) -> float:
    """Return the share of the last step that goes into the next."""
    betas = group.get("betas")
    momentum = (
        betas[0] if isinstance(betas, (tuple, list)) and betas else group.get("momentum", 0.0)
    )
    return min(0.999, max(0.0, float(momentum or 0.0)))


def some_rows(values: Tensor) -> Tensor:
    """Return a tensor, or evenly spaced rows of a large one."""
    values = own_part(values.detach())
    step = -(-values.numel() // MOST_ELEMENTS)
    return values[::step] if step > 1 and values.dim() else values


@dataclass(eq=False)
class ScaledSteps:
    """Scales what each optimizer step does to some parameters: a rate of their own, with the
    optimizer unchanged.

    The steps of SGD, Adam and AdamW, weight decay included, are linear in the learning rate, so
    that `before + factor * (after - before)` is the step with that multiple of the rate. These
    parameters are copied before the step; others, and those without a gradient, are left alone.
    """

    training: Training
    factors: Callable[[Optimizer], Iterable[tuple[nn.Parameter, float]]]
    """Returns the parameters whose coming step is scaled, each with its factor."""
    spend: Callable[[float, float], None]
    what: str
    """Is not done where it fails, in the words of a warning."""

    def __post_init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor, float]] = []
        self.hooks = OptimizerHooks(
            self.training.optimizers,
            self.training.recorder,
            self.spend,
            what=self.what,
            before=self._note,
            after=self._scale,
        )

    def close(self) -> None:
        """Leave the optimizers as they were found."""
        self.hooks.close()
        self._before = []

    @torch.no_grad()
    def _note(self, optimizer: Optimizer) -> None:
        """Keep the parameters whose step is scaled."""
        self._before = []
        for parameter, factor in self.factors(optimizer):
            if parameter.requires_grad:
                self._before.append((parameter, parameter.detach().clone(), factor))

    @torch.no_grad()
    def _scale(self, optimizer: Optimizer) -> None:
        """Make of the step what it would have been with the wanted rate."""
        noted, self._before = self._before, []
        for parameter, before, factor in noted:
            if factor == 0:
                parameter.copy_(before)
            else:
                parameter.sub_(before).mul_(factor).add_(before)


@dataclass(eq=False)
class LayerRates:
    """Gives each layer module the learning rate that a policy wants, as a share
    of the initial one.
    """

    training: Training
    wanted: Callable[[], Wanted | None]
    """Returns the layer modules and the rate of each in the coming step, as a share of the initial
    rate; or None."""
    spend: Callable[[float, float], None]

    def __post_init__(self) -> None:
        self._names = {
            id(parameter): name for name, parameter in self.training.model.named_parameters()
        }
        self._optimizers = list(self.training.optimizers)
        self._initial = [
            [_initial_rate(group) for group in entry.param_groups] for entry in self._optimizers
        ]
        what = "setting learning rates by layer module"
        self._steps = ScaledSteps(self.training, self._factors, self.spend, what)

    def close(self) -> None:
        """Leave the optimizers as they were found."""
        self._steps.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the initial rates: a scheduler, or the user, may have changed those of the groups
        since.
        """
        return {"initial": [list(rates) for rates in self._initial]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._initial = [list(rates) for rates in state.get("initial", self._initial)]

    def _factors(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, float]]:
        wanted = self.wanted()
        if wanted is None:
            return
        shares = self._shares_by_name(*wanted)
        initial = self._initial[self._optimizers.index(optimizer)]
        for index, group in enumerate(optimizer.param_groups):
            rate = float(group["lr"])
            if rate == 0:
                continue  # nothing moves at this step, whatever it is scaled by
            base = (
                initial[index] if index < len(initial) else _initial_rate(group)
            )  # a group that was added later
            for parameter in group["params"]:
                share = shares.get(self._names.get(id(parameter), ""))
                if share is not None and share * base != rate:
                    yield parameter, share * base / rate

    def _shares_by_name(
        self, modules: Collection[LayerModule], shares: Sequence[float]
    ) -> dict[str, float]:
        found = {
            name: share
            for module, share in zip(modules, shares, strict=True)
            for name in module.parameters
        }
        # A tied weight that an active module uses too trains on through that; it takes the rate of
        # the last.
        if self.training.config.freezing.tied == "keep":
            found |= {name: shares[-1] for module in modules for name in module.shared_parameters}
        return found


def _initial_rate(group: Mapping[str, Any]) -> float:
    """Return the rate that a group began with, which schedulers note."""
    return float(group.get("initial_lr", group["lr"]))
