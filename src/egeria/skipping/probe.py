"""Trial runs of a model, called as in training: what frozen submodules do, what a pass gives and changes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.taps import TapReachedError
from egeria.layers.undisturbed import random_fingerprint, seed_random_state, undisturbed
from egeria.skipping.replay import Place, Template, stubbed

TOLERANCE = 1e-4
"""Largest relative difference between two ways to compute the same, at float32 and above (issue 4)."""

_OWN = frozenset({"training", "forward", "_parameters", "_buffers", "_modules"})
"""Tables of `nn.Module` that are looked at elsewhere, and what freezing and skipping themselves set."""


def tolerance(batch: Batch, device: torch.device) -> float:
    """Return the relative difference that the precision of a forward pass allows."""
    if batch.autocast.enabled:
        return max(TOLERANCE, 8 * torch.finfo(batch.autocast.dtype).eps)
    uses_tf32 = device.type == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    return 8 * 2.0**-10 if uses_tf32 else TOLERANCE


def difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors of one shape, relative to the largest value of the second.

    Infinite where one of them is not finite and the other is something else; 0 for equal tensors.
    """
    if first.shape != second.shape:
        return math.inf
    if torch.equal(first, second):
        return 0.0
    if not second.is_floating_point() and not second.is_complex():
        return math.inf
    wide = (
        torch.complex128 if second.is_complex() else torch.float64 if second.dtype == torch.float64 else torch.float32
    )
    a, b = first.to(wide), second.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool((~same & ~(a.isfinite() & b.isfinite())).any()):
        return math.inf
    gap = torch.where(same, torch.zeros_like(a.abs()), (a - b).abs()).max().item()
    size = torch.where(b.isfinite(), b.abs(), torch.zeros_like(b.abs())).max().item()
    return float(gap / size) if size else math.inf


def is_close(first: Tensor, second: Tensor, limit: float) -> bool:
    """Return whether two tensors are the same up to rounding, also that of their own dtype."""
    if second.is_floating_point():
        limit = max(limit, 8 * torch.finfo(second.dtype).eps)
    return first.dtype == second.dtype and difference(first, second) <= limit


class Attributes:
    """The attributes that modules have besides their tables, as they are now."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._before = {name: dict(_own(module)) for name, module in modules.items()}
        self._sizes = {name: {key: _size(value) for key, value in own.items()} for name, own in self._before.items()}

    def changed(self) -> dict[str, Any]:
        """Return those set anew or resized since, by name; what was set to an equal plain value is not among them."""
        found: dict[str, Any] = {}
        for name, module in self._modules.items():
            before, sizes = self._before[name], self._sizes[name]
            for key, value in _own(module).items():
                same = key in before and (before[key] is value or _is_equal(before[key], value))
                if not same or _size(value) != sizes[key]:
                    found[f"{name}.{key}".strip(".")] = value
        return found


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What one forward pass gave and changed, by name; plain values and tensors, which are copies."""

    values: Mapping[str, Any]
    random: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module, given: Any, arguments: Any, attributes: Mapping[str, Any]) -> PassOutcome:
        """Collect it right after the pass.

        Args:
            model: the model that ran.
            given: what it returned.
            arguments: what it was called with; it may have written there.
            attributes: those of its modules that changed, by name.
        """
        parts = {
            "output": given,
            "argument": arguments,
            "buffer": dict(model.named_buffers()),
            "attribute": dict(attributes),
        }
        values = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for part, content in parts.items()
            for name, value in tree.contents(content, part)
        }
        return cls(values, random_fingerprint(model))

    def first_difference(self, other: PassOutcome, limit: float) -> str:
        """Return the name of the first thing that differs by more than rounding; empty if nothing does."""
        for name in [*self.values, *(name for name in other.values if name not in self.values)]:
            if name not in self.values or name not in other.values:
                return name
            if not _agree(self.values[name], other.values[name], limit):
                return name
        return "" if self.random == other.random else "the random state"

    @property
    def is_finite(self) -> bool:
        """Whether no output is NaN: beside NaN no poison shows."""
        outputs = [value for name, value in self.values.items() if name.startswith("output")]
        return not any(isinstance(value, Tensor) and bool(value.isnan().any()) for value in outputs)


def float_tensors(given: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output that need a gradient, also those inside objects."""
    tensors = [value for _, value in tree.contents(given) if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()]


def gradients_agree(first: Sequence[Tensor | None], second: Sequence[Tensor | None], limit: float) -> bool:
    """Return whether gradients are the same up to rounding, relative to the largest of them all.

    Some are zero but for rounding, such as that of a bias in front of a normalisation.
    """
    if [gradient is None for gradient in first] != [gradient is None for gradient in second]:
        return False
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None and b.numel()]
    size = max((float(b.abs().max()) for _, b in pairs), default=0.0)
    gap = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return all(bool(a.isfinite().all()) for a, _ in pairs) and gap <= limit * size


def _agree(first: Any, second: Any, limit: float) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return is_close(first, second, limit)
    if isinstance(first, float) and isinstance(second, float):
        return (
            first == second or math.isclose(first, second, rel_tol=limit) or (math.isnan(first) and math.isnan(second))
        )
    return type(first) is type(second) and bool(first == second)


def _own(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OWN and "_hooks" not in key}


def _is_equal(before: Any, after: Any) -> bool:
    """Return whether a value was set to what it was; a tensor made anew counts as another one."""
    first, second = dict(tree.contents(before)), dict(tree.contents(after))
    if type(before) is not type(after) or first.keys() != second.keys() or not first:
        return False
    return all(
        value is second[name] or (tree.is_plain(value) and value == second[name]) for name, value in first.items()
    )


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, Collection) and not isinstance(value, (str, bytes, Tensor)) else None


@dataclass(slots=True)
class Seen:
    """What hooks saw of the roots in one forward pass."""

    keeps: Collection[str] | None = None
    """Whose outputs are copied; None copies all."""
    stops_behind: Collection[str] = ()
    """The pass ends when all of these have run."""
    calls: dict[str, int] = field(default_factory=dict)
    """How often each root ran, in the order of first calls."""
    template: Template = field(default_factory=Template)
    """The outputs of all roots without their values."""
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """The tensors that each root to be kept gave last, as detached copies."""
    again: dict[str, int] = field(default_factory=dict)
    """Which roots the backward pass ran again."""
    needs_grad: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    unsettled: dict[str, str] = field(default_factory=dict)
    """Roots with a normalisation or dropout in training mode, and its name."""

    def watch(self, roots: Mapping[str, nn.Module]) -> list[RemovableHandle]:
        """Put a hook on each root."""
        return [module.register_forward_hook(partial(_note, self, name)) for name, module in roots.items()]

    def value(self, place: Place) -> Tensor:
        """Return one of the tensors kept."""
        root, index = place
        return self.outputs[root][index]


@dataclass(frozen=True, slots=True)
class Trial:
    """One forward pass on trial."""

    seen: Seen
    outcome: PassOutcome | None
    """None for a pass that failed, or was ended behind the prefix."""
    error: Exception | None = None
    changed: tuple[str, ...] = ()
    """Attributes of the frozen part that it set, and buffers of it that it changed."""
    gradients: tuple[Tensor | None, ...] = ()
    drew: bool = False
    """Whether random numbers were drawn as far as it went."""


class Probe:
    """Makes trial runs of one model; each leaves everything as it was.

    Modes stay as they are, so that frozen layers are in inference mode and all others in training, and
    random numbers begin with a seed, so that passes can be compared.
    """

    def __init__(self, model: nn.Module, roots: Mapping[str, nn.Module]) -> None:
        self.model = model
        self.roots = roots
        inside = {id(module) for root in roots.values() for module in root.modules()}
        named = dict(model.named_modules())
        self._frozen = {name: module for name, module in named.items() if id(module) in inside}
        self._rest = {name: module for name, module in named.items() if id(module) not in inside}

    @contextmanager
    def session(self, *, gradients: bool = True) -> Iterator[None]:
        """Passes within the block see what earlier ones of the block left in the model."""
        with undisturbed(self.model, gradients=gradients, keeps_modes=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # poison makes some operations complain
            yield

    def run(
        self,
        batch: Batch,
        *,
        seed: int = 0,
        keeps: Collection[str] | None = (),
        template: Template | None = None,
        values: Mapping[Place, Tensor] | None = None,
        gradients: bool = False,
    ) -> Trial:
        """Run the whole model once.

        Args:
            batch: the arguments; the model gets copies.
            seed: where random numbers begin.
            keeps: names of the roots whose outputs are kept; None for all.
            template: lets stubs answer for its roots.
            values: what they give where it is not poison.
            gradients: whether to run the backward pass too.
        """
        seen = Seen(keeps=keeps)
        with ExitStack() as stack:
            stack.enter_context(self.session())
            if template is not None:
                stack.enter_context(stubbed(self.model, template, _copies(template, values or {})))
            try:
                return self._run(stack, seen, batch, seed, gradients)
            except Exception as error:  # whatever a model raises, poisoned or not
                return Trial(seen, None, error)

    def outputs(self, batch: Batch, places: Sequence[Place], *, seed: int | None = None) -> Trial:
        """Run the model, within a session, as far as it takes to have the tensors at `places`; to its end for none."""
        roots = {root: self.roots[root] for root, _ in places}
        seen = Seen(keeps=roots, stops_behind=roots)
        if seed is not None:
            seed_random_state(self.model, seed)
        before = None if seed is None else random_fingerprint(self.model)
        handles = seen.watch(roots)
        arguments = batch.first_rows(None)
        error = None
        try:
            with batch.autocast.context():
                self.model(*arguments.args, **arguments.kwargs)
        except TapReachedError:
            pass
        except Exception as failure:  # whatever a model raises on some of the rows
            error = failure
        finally:
            for handle in handles:
                handle.remove()
        return Trial(seen, None, error, drew=seed is not None and random_fingerprint(self.model) != before)

    def active_in_front(self, batch: Batch, places: Sequence[Place]) -> list[str]:
        """Return the names of dropout and batch normalisation in training mode that run in front of `places`."""
        seen = Seen()
        watched = {name: module for name, module in self._rest.items() if is_unsettled(module)}
        handles = seen.watch(watched)
        self.outputs(batch, places, seed=0)
        for handle in handles:
            handle.remove()
        return list(seen.calls)

    def _run(self, stack: ExitStack, seen: Seen, batch: Batch, seed: int, gradients: bool) -> Trial:
        for handle in seen.watch(self.roots):
            stack.callback(handle.remove)
        frozen, rest = Attributes(self._frozen), Attributes(self._rest)
        buffers = {name: (id(buffer), buffer._version) for name, buffer in self._buffers()}
        seed_random_state(self.model, seed)
        arguments = batch.first_rows(None)
        stack.enter_context(batch.autocast.context())
        trained = {n: p.detach().requires_grad_() for n, p in self.model.named_parameters() if p.requires_grad}
        if gradients:  # through stand-ins, since a user's hooks on parameters must not fire
            given = functional_call(self.model, trained, arguments.args, dict(arguments.kwargs))
        else:
            given = self.model(*arguments.args, **arguments.kwargs)
        outcome = PassOutcome.of(self.model, given, (arguments.args, arguments.kwargs), rest.changed())
        moved = [n for n, b in self._buffers() if buffers.get(n) != (id(b), b._version)]
        changed = (*moved, *frozen.changed())
        calls = dict(seen.calls)
        found = _backward(given, list(trained.values())) if gradients else ()
        seen.again = {name: number for name, number in seen.calls.items() if number != calls.get(name)}
        return Trial(seen, outcome, None, changed, found)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self._frozen.items():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{name}.{key}", buffer


def _copies(template: Template, values: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    """Copy values into tensors of the form that they had: the pass may overwrite them."""
    return {place: template.forms[place].empty().copy_(value) for place, value in values.items()}


def _backward(given: Any, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    outputs = float_tensors(given)
    if not outputs or not inputs:
        return ()
    weights = [
        torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape) for out in outputs
    ]
    return torch.autograd.grad(outputs, inputs, weights, allow_unused=True)


# A function of this file, not a closure: some models copy themselves in their forward pass.


def _note(seen: Seen, name: str, module: nn.Module, _args: Any, output: Any) -> None:
    seen.calls[name] = seen.calls.get(name, 0) + 1
    if tree.requires_grad(output):
        seen.needs_grad.append(name)
    if is_opaque(output):
        seen.opaque.append(name)
    unsettled = next((child for child in module.modules() if is_unsettled(child)), None)
    if unsettled is not None:
        seen.unsettled[name] = type(unsettled).__name__
    seen.template.add(name, tree.detach(output))
    if seen.keeps is None or name in seen.keeps:
        seen.outputs[name] = [tensor.detach().clone() for tensor in tree.leaves(output)]
    if seen.stops_behind and all(root in seen.calls for root in seen.stops_behind):
        raise TapReachedError


def find_roots(model: nn.Module, modules: Sequence[LayerModule]) -> dict[str, nn.Module]:
    """Return the submodules of layer modules by name, each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name in (name for module in modules for name in module.submodules):
        root = model.get_submodule(name)
        found.setdefault(id(root), (name, root))
    return dict(found.values())


def is_opaque(output: Any) -> bool:
    """Return whether an output holds tensors in objects, or tensors that are not plain memory."""
    plain = list(tree.leaves(output))
    is_odd = any(type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_nested for t in plain)
    return is_odd or sum(isinstance(value, Tensor) for _, value in tree.contents(output)) != len(plain)


def is_unsettled(module: nn.Module) -> bool:
    """Return whether a module is a dropout or a normalisation over the batch, and in training mode."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_batch_norm or (isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats)
