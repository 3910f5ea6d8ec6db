"""Tracing the parts of a model that can be traced, and checking that they compute the same."""

from __future__ import annotations

import copy
import inspect
import numbers
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from egeria import tree
from egeria.layers.undisturbed import kept_random_state, random_fingerprint, undisturbed
from egeria.reference.survey import Survey

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
OUTLETS = "egeria_outlets"
"""Attribute of a traced part under which the modules lie that its taps are read at."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NUM_RANDOM_STATES = 3


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module is of these very types and computes what they do, with the weights it has."""
    return type(module) in kinds and not is_altered(module)


def is_altered(module: nn.Module) -> bool:
    """Return whether a call does more than the class says: for a pre-hook, or a `forward` put on the instance."""
    return bool(module._forward_pre_hooks) or "forward" in vars(module)


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a copy with its own modules and attributes that shares every tensor."""
    attributes = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)))
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *attributes)}
    with kept_random_state(model):
        return copy.deepcopy(model, memo)


class _Call(NamedTuple):
    """What a module was called with, and the tensors it returned if they are known and no random numbers were drawn."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[Tensor] = ()


class _CallResult(NamedTuple):
    """The tensors that a module returned, and the random states that it left."""

    outputs: Sequence[Tensor]
    states: tuple[Any, ...]

    def equals(self, other: _CallResult) -> bool:
        """Compare to the bit."""
        pairs = list(zip(self.outputs, other.outputs, strict=True))
        return bool(pairs) and self.states == other.states and all(torch.equal(one, two) for one, two in pairs)


@dataclass(frozen=True, slots=True)
class TracedPart:
    """A submodule that could be traced."""

    name: str
    graph: fx.GraphModule
    taps: tuple[str, ...]
    """Taps inside; the n-th is read at the n-th outlet."""
    form: list[str]
    """What its arguments were when it was traced; it is wrong for any others."""


class _Tracer(fx.Tracer):
    """Puts an outlet after every tap, so that the tap survives when its module is fused away."""

    def __init__(self, outlets: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self._outlets = outlets

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        output = super().call_module(m, forward, args, kwargs)
        outlet = self._outlets.get(m)
        if outlet is None:
            return output
        if not isinstance(output, fx.Proxy):
            raise TypeError(f"a tap must return one tensor, found {type(output).__name__}")
        return self.create_proxy("call_module", outlet, (output,), {})


def trace_parts(model: nn.Module, taps: Sequence[str], forms: Mapping[str, list[str]]) -> list[TracedPart]:
    """Trace submodules that `find_parts` has found before, named with the form of their calls."""
    return [TracedPart(name, *_trace(model, name, taps), form) for name, form in forms.items()]


def find_parts(model: nn.Module, taps: Sequence[str], survey: Survey) -> list[TracedPart]:
    """Return the largest submodules with convolutions that can be traced and compute the same when traced.

    Args:
        model: a copy of our own, in inference mode: outlets are added to it.
        taps: names of submodules to read.
        survey: what to compare with.
    """
    found: list[TracedPart] = []
    if _has_convolutions(model):
        batch, outputs = survey.batch, () if survey.draws_random_numbers else survey.outputs
        _descend(model, "", taps, _Call(batch.args, dict(batch.kwargs), outputs), found)
    return found


def _descend(model: nn.Module, name: str, taps: Sequence[str], call: _Call, found: list[TracedPart]) -> None:
    part = _try_part(model, name, taps, call)
    if part is not None:
        found.append(part)
        return
    for child, its_call in _calls_of_children(model.get_submodule(name), call).items():
        _descend(model, f"{name}.{child}" if name else child, taps, its_call, found)


def _try_part(model: nn.Module, name: str, taps: Sequence[str], call: _Call) -> TracedPart | None:
    module = model.get_submodule(name)
    # Tracing starts after what has been put on the module from outside, and draws its random numbers once and for all.
    if is_altered(module) or _has_own_generator(module):
        return None
    try:
        graph, inside = _trace(model, name, taps)
        if _computes_the_same(graph, module, call):
            return TracedPart(name, graph, inside, _form_of(inspect.signature(graph.forward), call.args, call.kwargs))
    except Exception:  # whatever a model's own code does with a proxy: it cannot be traced
        pass
    return None


def _trace(model: nn.Module, name: str, taps: Sequence[str]) -> tuple[fx.GraphModule, tuple[str, ...]]:
    module = model.get_submodule(name)
    inside = tuple(tap for tap in taps if tap != name and (not name or tap.startswith(name + ".")))
    outlets = {model.get_submodule(tap): f"{OUTLETS}.{index}" for index, tap in enumerate(inside)}
    # A layer of torch itself would be traced into functions, and functions cannot be quantised with ranges.
    root = nn.Sequential(module) if _Tracer({}).is_leaf_module(module, "") else module
    return _graph(root, outlets), inside


def _graph(root: nn.Module, outlets: Mapping[nn.Module, str]) -> fx.GraphModule:
    with undisturbed(root):  # a model may keep what it is given, and would keep a proxy
        graph = _Tracer(outlets).trace(root)
    # Not before tracing: a sequential container would call them.
    setattr(root, OUTLETS, nn.ModuleList(nn.Identity() for _ in outlets))
    try:
        return fx.GraphModule(root, graph)
    finally:
        delattr(root, OUTLETS)


def _computes_the_same(graph: nn.Module, module: nn.Module, call: _Call) -> bool:
    """Compare what comes of real inputs.

    An `if` on an optional argument, or on a number of Python's random generator, is traced without an error, and
    wrongly. A random tensor of torch becomes a part of the graph, where its argument is a tensor, or a constant. The
    random states left behind show which.
    """
    before = random_fingerprint(module)
    expected = _CallResult(call.outputs, before) if call.outputs else _run(module, call)
    if not expected.equals(_run(graph, call)):
        return False
    num_more = 0 if expected.states == before else _NUM_RANDOM_STATES - 1
    with kept_random_state(module):
        for _ in range(num_more):
            _draw_once(module)
            if not _run(module, call).equals(_run(graph, call)):
                return False
    return True


def _run(module: nn.Module, call: _Call) -> _CallResult:
    args, kwargs = tree.map_tensors(torch.clone, (call.args, call.kwargs))
    # A graph that is called and fails prints where; one whose `forward` is called does not.
    function = module.forward if isinstance(module, fx.GraphModule) else module
    with undisturbed(module):
        return _CallResult(list(tree.leaves(function(*args, **kwargs))), random_fingerprint(module))


def _calls_of_children(module: nn.Module, call: _Call) -> dict[str, _Call]:
    """Return what the first call of each child with convolutions inside was given."""
    calls: dict[str, _Call] = {}
    handles = []
    for name, child in _callable_children(module):

        def keep(_module: nn.Module, its_args: Any, its_kwargs: Any, name: str = name) -> None:
            if name not in calls:
                calls[name] = _Call(*tree.map_tensors(torch.clone, (its_args, its_kwargs)))

        handles.append(child.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        if handles:
            _run(module, call)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(inner, CONVOLUTIONS) for inner in module.modules())


def _callable_children(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    children = []
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            children += _callable_children(child, f"{prefix}{name}.")
        elif _has_convolutions(child):
            children.append((f"{prefix}{name}", child))
    return children


def _draw_once(model: nn.Module) -> None:
    """Advance every random state, so that a model that draws may find other numbers."""
    random.random()
    np.random.random()
    tensors = tree.leaves([*model.parameters(), *model.buffers()])
    for device in {torch.device("cpu"), *(tensor.device for tensor in tensors if tensor.is_cuda)}:
        torch.rand(1, device=device)


def _has_own_generator(model: nn.Module) -> bool:
    """Return whether a submodule keeps its own random generator."""
    return any(isinstance(value, _GENERATORS) for module in model.modules() for value in vars(module).values())


def _form_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return a word for each argument, defaults included: its type, not its value.

    An `if` on an optional argument leaves nothing behind in a traced module, which would go on computing
    what it computed when traced. So it refuses calls of any other form.

    Raises:
        TypeError: the call does not fit the signature.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return [_describe(value) for value in bound.arguments.values()]


def accept_only(module: nn.Module, form: list[str]) -> None:
    """Make calls of another form raise a ValueError."""
    module.register_forward_pre_hook(_Guard(inspect.signature(module.forward), form), with_kwargs=True)


class _Guard:
    """A pre-hook; a class, so that a copy of the module can be made."""

    def __init__(self, signature: inspect.Signature, form: list[str]) -> None:
        self._signature, self._form = signature, form

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        form = _form_of(self._signature, args, kwargs)
        if form != self._form:
            raise ValueError(f"traced with the arguments {self._form}, called with {form}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return "Tensor"
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, numbers.Number):  # a 1 may be a 1.0 the next time
        return "number"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_describe, value)) + "]"
    return type(value).__name__
