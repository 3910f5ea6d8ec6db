"""Tracing the parts of a model that can be traced."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from egeria import tree
from egeria.layers.undisturbed import kept_random_state, undisturbed
from egeria.reference.forms import form_of
from egeria.reference.randomness import draw_once, has_own_generator, random_states
from egeria.reference.survey import Survey

OUTLETS = "egeria_outlets"
"""Attribute of a traced part under which the modules lie that its taps are read at."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NUM_RANDOM_STATES = 3


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Tell whether a module is of these very types and computes what they do, with the weights it has."""
    return type(module) in kinds and not is_altered(module)


def is_altered(module: nn.Module) -> bool:
    """Tell whether a call does more than the class says: for a pre-hook, or a `forward` put on the instance."""
    return bool(module._forward_pre_hooks) or "forward" in vars(module)


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a copy with modules and attributes of its own that shares every tensor."""
    attributes = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)))
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *attributes)}
    with kept_random_state(model):
        return copy.deepcopy(model, memo)


class _Call(NamedTuple):
    """What a module was called with, and the tensors it returned if they are known and no dice were thrown."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[Tensor] = ()


class _Outcome(NamedTuple):
    """The tensors that a module returned, and the random states that it left."""

    outputs: Sequence[Tensor]
    states: tuple[Any, ...]

    def equals(self, other: _Outcome) -> bool:
        """Compare to the bit."""
        pairs = list(zip(self.outputs, other.outputs, strict=True))
        return bool(pairs) and self.states == other.states and all(torch.equal(one, two) for one, two in pairs)


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule that could be traced."""

    name: str
    graph: fx.GraphModule
    taps: tuple[str, ...]
    """Taps inside; the n-th is read at the n-th outlet."""
    form: list[str]
    """What its arguments were when it was traced; it is wrong for any others."""


class _Tracer(fx.Tracer):
    """Puts an outlet behind every tap, so that the tap survives when its module is fused away."""

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


def trace_parts(model: nn.Module, taps: Sequence[str], forms: Mapping[str, list[str]]) -> list[Part]:
    """Trace submodules that `find_parts` has found before, named with the form of their calls."""
    return [Part(name, *_trace(model, name, taps), form) for name, form in forms.items()]


def find_parts(model: nn.Module, taps: Sequence[str], survey: Survey) -> list[Part]:
    """Return the largest submodules with convolutions that can be traced and compute the same when traced.

    Args:
        model: a copy of our own, in inference mode: outlets are added to it.
        taps: names of submodules to read.
        survey: what to compare with.
    """
    found: list[Part] = []
    if _has_convolutions(model):
        batch, outputs = survey.batch, () if survey.draws_random_numbers else survey.outputs
        _descend(model, "", taps, _Call(batch.args, dict(batch.kwargs), outputs), found)
    return found


def _descend(model: nn.Module, name: str, taps: Sequence[str], call: _Call, found: list[Part]) -> None:
    part = _try_part(model, name, taps, call)
    if part is not None:
        found.append(part)
        return
    for child, its_call in _calls_of_children(model.get_submodule(name), call).items():
        _descend(model, f"{name}.{child}" if name else child, taps, its_call, found)


def _try_part(model: nn.Module, name: str, taps: Sequence[str], call: _Call) -> Part | None:
    module = model.get_submodule(name)
    # Tracing starts behind what has been put on the module from outside, and throws its dice once and for all.
    if is_altered(module) or has_own_generator(module):
        return None
    try:
        graph, inside = _trace(model, name, taps)
        if _computes_the_same(graph, module, call):
            return Part(name, graph, inside, form_of(inspect.signature(graph.forward), call.args, call.kwargs))
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

    An `if` on an optional argument, or on a die of Python's, is traced without an error, and wrongly.
    A die of torch's becomes a part of the graph, where its argument is a tensor, or a constant. The
    random states left behind tell which.
    """
    before = random_states(module)
    expected = _Outcome(call.outputs, before) if call.outputs else _run(module, call)
    if not expected.equals(_run(graph, call)):
        return False
    num_more = 0 if expected.states == before else _NUM_RANDOM_STATES - 1
    with kept_random_state(module):
        for _ in range(num_more):
            draw_once(module)
            if not _run(module, call).equals(_run(graph, call)):
                return False
    return True


def _run(module: nn.Module, call: _Call) -> _Outcome:
    args, kwargs = tree.map_tensors(torch.clone, (call.args, call.kwargs))
    # A graph that is called and fails prints where; one whose `forward` is called does not.
    function = module.forward if isinstance(module, fx.GraphModule) else module
    with undisturbed(module):
        return _Outcome(list(tree.leaves(function(*args, **kwargs))), random_states(module))


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
