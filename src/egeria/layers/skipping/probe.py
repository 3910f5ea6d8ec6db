"""Running the model on trial, called as in training, with an eye on what its frozen submodules do."""

from __future__ import annotations

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
from egeria.layers.skipping.outcome import Attributes, Outcome, float_tensors
from egeria.layers.skipping.replay import Place, Template, stubbed
from egeria.layers.skipping.signature import copied
from egeria.layers.undisturbed import random_fingerprint, seed_random_state, undisturbed


class _ReachedError(BaseException):
    """Ends a forward pass behind the prefix; a BaseException, so that no handler in a model swallows it."""


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
    outcome: Outcome | None
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
        arguments = copied(batch)
        error = None
        try:
            with batch.autocast.context():
                self.model(*arguments.args, **arguments.kwargs)
        except _ReachedError:
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
        arguments = copied(batch)
        stack.enter_context(batch.autocast.context())
        trained = {n: p.detach().requires_grad_() for n, p in self.model.named_parameters() if p.requires_grad}
        if gradients:  # through stand-ins, since a user's hooks on parameters must not fire
            given = functional_call(self.model, trained, arguments.args, dict(arguments.kwargs))
        else:
            given = self.model(*arguments.args, **arguments.kwargs)
        outcome = Outcome.of(self.model, given, (arguments.args, arguments.kwargs), rest.changed())
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
        raise _ReachedError


def find_roots(model: nn.Module, modules: Sequence[LayerModule]) -> dict[str, nn.Module]:
    """Return the submodules of layer modules by name, each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name in (name for module in modules for name in module.submodules):
        root = model.get_submodule(name)
        found.setdefault(id(root), (name, root))
    return dict(found.values())


def is_opaque(output: Any) -> bool:
    """Tell whether an output holds tensors in objects, or tensors that are not plain memory."""
    plain = list(tree.leaves(output))
    is_odd = any(type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_nested for t in plain)
    return is_odd or sum(isinstance(value, Tensor) for _, value in tree.contents(output)) != len(plain)


def is_unsettled(module: nn.Module) -> bool:
    """Tell whether a module is a dropout or a normalisation over the batch, and in training mode."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_batch_norm or (isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats)
