"""Tracing the parts of a model that can be traced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.undisturbed import kept_random_state, undisturbed

OUTLETS = "egeria_outlets"
"""Attribute of a traced part under which the modules lie that its taps are read at."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Tell whether a module is of these very types and nothing computes its weights on the way."""
    return type(module) in kinds and not module._forward_pre_hooks


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a copy with modules and attributes of its own that shares every tensor."""
    attributes = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)))
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *attributes)}
    with kept_random_state(model):
        return copy.deepcopy(model, memo)


class _Call(NamedTuple):
    """What a module was called with, and the tensors it returned if they are known."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule that could be traced."""

    name: str
    graph: fx.GraphModule
    taps: tuple[str, ...]
    """Taps inside; the n-th is read at the n-th outlet."""


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


def trace_parts(model: nn.Module, taps: Sequence[str], names: Sequence[str]) -> list[Part]:
    """Trace submodules that `find_parts` has found before."""
    parts = [_traced(model, name, taps, None) for name in names]
    if None in parts:
        raise ValueError(f"{names} could be traced before and cannot now")
    return [part for part in parts if part is not None]


def find_parts(model: nn.Module, taps: Sequence[str], batch: Batch, outputs: Sequence[Tensor]) -> list[Part]:
    """Return the largest submodules with convolutions that can be traced and compute the same when traced.

    Args:
        model: a copy of our own, in inference mode: outlets are added to it.
        taps: names of submodules to read.
        batch: what to compare on; a few rows do.
        outputs: the tensors that the model returns for it.
    """
    found: list[Part] = []
    if _has_convolutions(model):
        _descend(model, "", taps, _Call(batch.args, dict(batch.kwargs), outputs), found)
    return found


def _descend(model: nn.Module, name: str, taps: Sequence[str], call: _Call, found: list[Part]) -> None:
    part = _traced(model, name, taps, call)
    if part is not None:
        found.append(part)
        return
    for child, its_call in _calls_of_children(model.get_submodule(name), call).items():
        _descend(model, f"{name}.{child}" if name else child, taps, its_call, found)


def _traced(model: nn.Module, name: str, taps: Sequence[str], call: _Call | None) -> Part | None:
    module = model.get_submodule(name)
    inside = tuple(tap for tap in taps if tap != name and (not name or tap.startswith(name + ".")))
    outlets = {model.get_submodule(tap): f"{OUTLETS}.{index}" for index, tap in enumerate(inside)}
    # A layer of torch itself would be traced into functions, and functions cannot be quantised with ranges.
    root = nn.Sequential(module) if _Tracer({}).is_leaf_module(module, "") else module
    try:
        graph = _graph(root, outlets)
        if call is None or _agree(call.outputs or _run(module, call), _run(graph, call)):
            return Part(name, graph, inside)
    except Exception:  # whatever a model's own code does with a proxy: it cannot be traced
        pass
    return None


def _graph(root: nn.Module, outlets: Mapping[nn.Module, str]) -> fx.GraphModule:
    with undisturbed(root):  # a model may keep what it is given, and would keep a proxy
        graph = _Tracer(outlets).trace(root)
    # Not before tracing: a sequential container would call them.
    setattr(root, OUTLETS, nn.ModuleList(nn.Identity() for _ in outlets))
    try:
        return fx.GraphModule(root, graph)
    finally:
        delattr(root, OUTLETS)


def _run(module: nn.Module, call: _Call) -> list[Tensor]:
    args, kwargs = tree.map_tensors(torch.clone, (call.args, call.kwargs))
    with kept_random_state(module):
        return list(tree.leaves(module(*args, **kwargs)))


def _agree(expected: Sequence[Tensor], traced: Sequence[Tensor]) -> bool:
    """Compare what came of real inputs: an `if` on an optional argument is traced without an error, and wrongly."""
    pairs = list(zip(expected, traced, strict=True))
    return bool(pairs) and all(torch.equal(one, other) for one, other in pairs)


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
