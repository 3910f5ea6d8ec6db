"""Trial runs of a model, called as in training: what frozen submodules do, what a pass gives and
changes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.errors import without_frames
from egeria.model.batch import Batch
from egeria.model.undisturbed import TapReachedError, undisturbed
from egeria.random_state import random_fingerprint, seed_random_state
from egeria.skipping.replay import Place, Template, Values, stubbed

TOLERANCE = 1e-4
"""Largest relative difference between two ways to compute the same, at float32 and above (issue
4)."""
RANDOM_STATE = "the random state"


def tolerance(batch: Batch, device: torch.device) -> float:
    """Return the relative difference that the precision of a forward pass allows."""
    if batch.autocast.enabled:
        return max(TOLERANCE, 8 * torch.finfo(batch.autocast.dtype).eps)
    uses_tf32 = device.type == "cuda" and (
        torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    )
    return 8 * 2.0**-10 if uses_tf32 else TOLERANCE


def difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value of the second; 0
    for equal ones.

    Infinite where shapes differ, or one is not finite and the other is something else.
    """
    if first.shape != second.shape:
        return math.inf
    if torch.equal(first, second):
        return 0.0
    if not second.is_floating_point() and not second.is_complex():
        return math.inf
    wide = (
        torch.complex128
        if second.is_complex()
        else torch.promote_types(second.dtype, torch.float32)
    )
    a, b = first.to(wide), second.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool((~same & ~(a.isfinite() & b.isfinite())).any()):
        return math.inf
    gap = torch.where(same, 0.0, (a - b).abs()).max().item()
    size = torch.where(b.isfinite(), b.abs(), 0.0).max().item()
    return float(gap / size) if size else math.inf


def is_close(first: Tensor, second: Tensor, limit: float) -> bool:
    """Return whether two tensors are the same up to rounding, also that of their own dtype."""
    if second.is_floating_point():
        limit = max(limit, 8 * torch.finfo(second.dtype).eps)
    return first.dtype == second.dtype and difference(first, second) <= limit


def gradients_agree(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None], limit: float
) -> bool:
    """Return whether gradients are the same up to rounding, relative to the largest of them all.

    Some are zero but for rounding, such as that of a bias in front of a normalisation.
    """
    if [gradient is None for gradient in first] != [gradient is None for gradient in second]:
        return False
    pairs = [
        (a, b)
        for a, b in zip(first, second, strict=True)
        if a is not None and b is not None and b.numel()
    ]
    size = max((float(b.abs().max()) for _, b in pairs), default=0.0)
    gap = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return all(bool(a.isfinite().all()) for a, _ in pairs) and gap <= limit * size


def has_nan(output: Any) -> bool:
    """Return whether a tensor that a pass gave, also one inside an object, has a NaN in it; waits
    once for a device.
    """
    tensors = [
        value.detach()
        for _, value in tree.contents(output)
        if isinstance(value, Tensor) and value.numel()
    ]
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in dense]
    largest = [
        tensor.max() for tensor in real if tensor.is_floating_point()
    ]  # NaN if any is, without a copy
    return bool(largest) and bool(
        torch.stack([t.to(largest[0].device, torch.float32) for t in largest]).isnan().any()
    )


def first_difference(first: Mapping[str, Any], second: Mapping[str, Any], limit: float) -> str:
    """Return the name of the first thing that differs by more than rounding between two outcomes,
    or ''.
    """
    names = sorted(
        {**first, **second}, key=RANDOM_STATE.__eq__
    )  # last: it goes with what differs before it
    differing = (
        n
        for n in names
        if n not in first or n not in second or not _agree(first[n], second[n], limit)
    )
    return next(differing, "")


def _agree(first: Any, second: Any, limit: float) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return is_close(first, second, limit)
    if isinstance(first, float) and isinstance(second, float):
        both_nan = math.isnan(first) and math.isnan(second)
        return first == second or math.isclose(first, second, rel_tol=limit) or both_nan
    return type(first) is type(second) and bool(first == second)


@dataclass(slots=True)
class Trial:
    """One forward pass on trial, and what hooks saw of the frozen submodules (roots) in it."""

    keeps: Collection[Place] = ()
    stops: bool = False
    """Whether the pass ends when all roots of these have run."""
    values: dict[Place, Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    template: Template = field(default_factory=Template)
    outcome: dict[str, Any] | None = None
    """What the pass gave and changed, by name; None where it failed, or was ended behind the
    prefix."""
    error: Exception | None = None
    needs_grad: str = ""
    """A root whose output needs a gradient."""
    opaque: str = ""
    """A root whose output holds tensors that cannot be stored."""
    unsettled: str = ""
    """A normalisation or dropout in training mode inside a root, in words."""
    changed: Sequence[str] = ()
    """Attributes of the frozen part that it set, and buffers of it that it changed."""
    gradients: Sequence[Tensor | None] = ()
    again: str = ""
    """A root that the backward pass ran again."""
    drew: bool = False
    """Whether random numbers were drawn as far as it went."""

    @property
    def is_finite(self) -> bool:
        """Whether no output is NaN: beside NaN no poison shows."""
        return not has_nan(
            [value for name, value in (self.outcome or {}).items() if name.startswith("output")]
        )

    def value(self, place: Place) -> Tensor | None:
        """Return one of the tensors kept; None where the pass did not run so far, or its root not
        once.
        """
        return (
            self.values.get(place) if self.error is None and self.calls.get(place[0]) == 1 else None
        )

    def called(self, root: str) -> str:
        """Return how often a root was called, as words for a reason."""
        number = self.calls.get(root, 0)
        return (
            f"{root} is called {number} times in a forward pass"
            if number
            else f"{root} is not called"
        )

    def watch(
        self, modules: Mapping[str, nn.Module], *, guarded: bool = False
    ) -> list[RemovableHandle]:
        """Put a hook on each module; one that is `guarded` raises nothing, and leaves `error`."""
        note = _note_guarded if guarded else _note
        return [
            module.register_forward_hook(partial(note, self, name))
            for name, module in modules.items()
        ]


class Probe:
    """Makes trial runs of a model with frozen submodules (roots); each leaves everything as it was.

    Modes stay as they are, so that frozen layers are in inference mode and all others in training,
    and random numbers begin with a seed, so that passes can be compared.
    """

    def __init__(self, model: nn.Module, roots: Mapping[str, nn.Module]) -> None:
        self.model = model
        self.roots = roots
        inside = {module for root in roots.values() for module in root.modules()}
        self._frozen = {name: module for name, module in model.named_modules() if module in inside}
        self._rest = {
            name: module for name, module in model.named_modules() if module not in inside
        }

    @contextmanager
    def session(self) -> Iterator[None]:
        """Passes within the block see what earlier ones of the block left in the model.

        With gradients on, as in training: some layers (LSTM) run another way without.
        """
        with undisturbed(self.model, gradients=True, keeps_modes=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # poison makes some operations complain
            yield

    def run(
        self,
        batch: Batch,
        *,
        keeps: Collection[Place] = (),
        template: Template | None = None,
        values: Values | None = None,
        gradients: bool = False,
    ) -> Trial:
        """Run the whole model once on copies of the arguments, and with `gradients` its backward
        pass too.

        With a template stubs answer for its roots: with `values` in their places, and poison
        elsewhere.
        """
        trial = Trial(keeps)
        with self.session():
            trial.watch(self.roots)  # the end of the session takes the hooks off
            try:
                stubs: AbstractContextManager[object] = nullcontext()
                if template is not None:
                    stubs = stubbed(self.model, template, _copies(template, values or {}))
                with stubs, batch.autocast.context():
                    self._run(trial, batch, gradients)
            except Exception as error:  # whatever a model raises, poisoned or not
                trial.outcome, trial.error = None, without_frames(error)
        return trial

    def outputs(self, batch: Batch, places: Collection[Place], *, seed: int | None = None) -> Trial:
        """Run the model, within a session, as far as it takes to have the tensors at `places`; to
        its end for none.
        """
        trial = Trial(places, stops=True)
        if seed is not None:
            seed_random_state(self.model, seed)
        before = None if seed is None else random_fingerprint(self.model)
        handles = trial.watch({root: self.roots[root] for root, _ in places})
        arguments = batch.first_rows(None)
        try:
            with batch.autocast.context():
                self.model(*arguments.args, **arguments.kwargs)
        except TapReachedError:
            pass
        except Exception as failure:  # whatever a model raises on some of the rows
            trial.error = without_frames(failure)
        finally:
            for handle in handles:
                handle.remove()
        trial.drew = seed is not None and random_fingerprint(self.model) != before
        return trial

    def active_in_front(self, batch: Batch, places: Collection[Place]) -> list[str]:
        """Return the names of dropout and batch normalisation in training mode that run in front of
        `places`.
        """
        trial = Trial()
        with self.session():
            trial.watch(
                {name: module for name, module in self._rest.items() if is_unsettled(module)}
            )
            self.outputs(batch, places, seed=0)
        return list(trial.calls)

    def _run(self, trial: Trial, batch: Batch, gradients: bool) -> None:
        frozen, rest, buffers = (
            attributes_of(self._frozen),
            attributes_of(self._rest),
            self._buffers(),
        )
        seed_random_state(self.model, 0)
        arguments = batch.first_rows(None)
        trained = {
            id(p): p.detach().requires_grad_() for p in self.model.parameters() if p.requires_grad
        }
        # Through stand-ins, since a user's hooks on parameters must not fire.
        with _standing_in(self.model, trained) if gradients else nullcontext():
            given = self.model(*arguments.args, **arguments.kwargs)
        parts = {
            "output": given,
            "argument": (arguments.args, arguments.kwargs),  # it may have written there
            "buffer": dict(self.model.named_buffers()),
            "attribute": set_since(rest, self._rest),
        }
        trial.outcome = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for part, content in parts.items()
            for name, value in tree.contents(content, part)
        }
        trial.outcome[RANDOM_STATE] = random_fingerprint(self.model)
        moved = [name for name, version in self._buffers().items() if buffers.get(name) != version]
        trial.changed = (*moved, *set_since(frozen, self._frozen))
        if gradients:
            calls = dict(trial.calls)
            trial.gradients = _backward(given, list(trained.values()))
            trial.again = next(
                (name for name, number in trial.calls.items() if number != calls.get(name)), ""
            )

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Return what changes with each buffer of the frozen part."""
        return {
            f"{name}.{key}": (id(buffer), buffer._version)
            for name, module in self._frozen.items()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }


@contextmanager
def _standing_in(model: nn.Module, stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
    """Put other tensors in the places of parameters, by their `id`.

    `torch.func.functional_call` goes by names: of a module that has two it puts a stand-in back for
    the parameter.
    """
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in stand_ins
    ]
    try:
        for module, name, parameter in places:
            module._parameters[name] = stand_ins[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _copies(template: Template, values: Values) -> dict[Place, Tensor]:
    """Copy values into tensors of the form that they had: the pass may overwrite them."""
    return {place: template.forms[place].empty().copy_(value) for place, value in values.items()}


def _backward(given: Any, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of what a pass gave, also of tensors inside objects, each element
    weighted another way.
    """
    tensors = [value for _, value in tree.contents(given) if isinstance(value, Tensor)]
    outputs = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()]
    if not outputs or not inputs:
        return ()
    weights = [
        torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=o.device).view(o.shape)
        for o in outputs
    ]
    return torch.autograd.grad(outputs, inputs, weights, allow_unused=True)


# A function of this file, not a closure: some models copy themselves in their forward pass.


def _note(trial: Trial, name: str, module: nn.Module, _args: Any, output: Any) -> None:
    trial.calls[name] = trial.calls.get(name, 0) + 1
    unsettled = next((child for child in module.modules() if is_unsettled(child)), None)
    if unsettled is not None:
        trial.unsettled = trial.unsettled or f"{type(unsettled).__name__} in {name}"
    if tree.requires_grad(output):
        trial.needs_grad = trial.needs_grad or name
    if _is_opaque(output):
        trial.opaque = trial.opaque or name
    else:
        trial.template.add(name, tree.detach(output))
        tensors = enumerate(
            tree.leaves(output)
        )  # copies, since an in-place operation behind may overwrite them
        trial.values |= {
            (name, index): t.detach().clone()
            for index, t in tensors
            if (name, index) in trial.keeps
        }
    if trial.stops and trial.keeps and all(root in trial.calls for root, _ in trial.keeps):
        raise TapReachedError


def _note_guarded(trial: Trial, name: str, module: nn.Module, args: Any, output: Any) -> None:
    try:
        _note(trial, name, module, args, output)
    except Exception as error:  # such as no memory for a copy, in a pass that is the user's
        trial.error = trial.error or without_frames(error)


def _is_opaque(output: Any) -> bool:
    """Return whether an output holds tensors in objects, or tensors that are not plain memory."""
    plain = list(tree.leaves(output))
    is_odd = any(
        type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_nested
        for t in plain
    )
    return is_odd or sum(isinstance(value, Tensor) for _, value in tree.contents(output)) != len(
        plain
    )


def is_unsettled(module: nn.Module) -> bool:
    """Return whether a module is a dropout or a normalisation over the batch, and
    in training mode.
    """
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_batch_norm or (
        isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    )


_OWN = frozenset({"training", "forward", "_parameters", "_buffers", "_modules"})
"""Tables of `nn.Module` that are looked at elsewhere, and what freezing and skipping themselves
set."""
MOST_ENTRIES = 1000
"""Of a dictionary or list that are compared: a larger one, such as a vocabulary, is taken not to
change."""


def attributes_of(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Any, int | None]]:
    """Return the attributes that modules have besides their tables, by name, each
    with its length.
    """
    return {
        f"{name}.{key}".strip("."): (value, _size(value))
        for name, module in modules.items()
        for key, value in _own(module)
    }


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        (key, value)
        for key, value in vars(module).items()
        if key not in _OWN and "_hook" not in key
    ]


def set_since(
    before: Mapping[str, tuple[Any, int | None]], modules: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Return the attributes set anew or resized, by name; those set to an equal plain value are not
    among them.
    """

    def is_same(name: str, value: Any, size: int | None) -> bool:
        own, own_size = before[name]
        return (own is value or _is_equal(own, value)) and size == own_size

    after = attributes_of(modules)
    return {
        name: value
        for name, (value, size) in after.items()
        if name not in before or not is_same(name, value, size)
    }


def _is_equal(before: Any, after: Any) -> bool:
    """Return whether a value was set to what it was; a tensor made anew counts as another one."""
    first, second = dict(tree.contents(before)), dict(tree.contents(after))
    if type(before) is not type(after) or first.keys() != second.keys() or not first:
        return False
    return all(
        value is second[name] or (tree.is_plain(value) and value == second[name])
        for name, value in first.items()
    )


def _size(value: Any) -> int | None:
    return (
        len(value)
        if isinstance(value, Collection) and not isinstance(value, (str, bytes, Tensor))
        else None
    )


class PlainAttributes:
    """The plain values that modules hold in attributes, and in dictionaries and lists that are
    attributes.

    Such as a scale, or the switch of an adapter. Those of a module are compared as one tuple, which
    looks at identity first: a few hundred take some ten microseconds.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._values: list[tuple[Any, Callable[[Any], Any], Any]] = []
        self._inside: list[tuple[Any, str, int, Callable[[Any], Any], Any]] = []
        for module in modules:
            attributes = _own(module)
            pick = _picker([key for key, value in attributes if _is_constant(value)])
            self._values.append((vars(module), pick, pick(vars(module))))
            for name, value in attributes:
                if isinstance(value, (dict, list)) and len(value) <= MOST_ENTRIES:
                    entries = value.items() if isinstance(value, dict) else enumerate(value)
                    pick = _picker([key for key, entry in entries if _is_constant(entry)])
                    self._inside.append((vars(module), name, len(value), pick, pick(value)))

    @property
    def have_changed(self) -> bool:
        """Whether one was set to another value, or is gone, or is new in a dictionary or list."""
        try:
            return any(pick(table) != values for table, pick, values in self._values) or any(
                len(table[name]) != size or pick(table[name]) != values
                for table, name, size, pick, values in self._inside
            )
        except (LookupError, TypeError):
            return True


def _is_constant(value: Any) -> bool:
    return tree.is_plain(value) or (isinstance(value, tuple) and all(map(_is_constant, value)))


def _picker(keys: Sequence[Any]) -> Callable[[Any], Any]:
    """Return what takes the values at some keys out of a table, as a tuple."""
    return itemgetter(keys[0], *keys) if keys else lambda _: ()
