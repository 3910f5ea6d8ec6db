"""A copy of the snapshot whose traceable parts are graphs, with batch norm folded into
convolutions.
"""

from __future__ import annotations

import copy
import functools
import inspect
import numbers
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.undisturbed import undisturbed
from egeria.random_state import Generator, generators_of, kept_random_state, random_fingerprint

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
_NUM_RANDOM_STATES = 3
_OUTLETS = "egeria_outlets"
"""Attribute of a traced part under which the modules lie that its taps are read at."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module is of these very types and computes what they do, with the weights it
    has.
    """
    return type(module) in kinds and not is_altered(module)


def is_altered(module: nn.Module) -> bool:
    """Return whether a call does more than the class says: for a pre-hook, or a `forward` put on
    the instance.
    """
    return bool(module._forward_pre_hooks) or "forward" in vars(module)


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a copy with its own modules and attributes that shares every tensor."""
    attributes = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)))
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *attributes)}
    with kept_random_state(model):
        return copy.deepcopy(model, memo)


@dataclass(frozen=True, slots=True)
class TracedPart:
    """A submodule that could be traced, "" for the model itself."""

    name: str
    graph: fx.GraphModule
    taps: tuple[str, ...]
    """Taps inside; the n-th is read at the n-th outlet."""
    form: list[str]
    """What its arguments were when it was traced; it is wrong for any others."""


class FoldedModel:
    """A copy that shares all tensors of the snapshot but those of convolutions in its traced parts.

    The parts are found with a batch, or given by the `forms` that an earlier copy has found.
    """

    def __init__(
        self,
        snapshot: nn.Module,
        taps: Sequence[str],
        batch: Batch | None,
        forms: Mapping[str, list[str]] | None,
    ) -> None:
        self.model = sharing_copy(snapshot)
        self.hooks = {tap: tap for tap in taps}
        """For each tap, the submodule to read."""
        with undisturbed(self.model):
            if forms is not None:
                self.parts = [
                    TracedPart(name, *_trace(self.model, name, taps), form)
                    for name, form in forms.items()
                ]
            elif batch is None:
                raise ValueError("there is no batch to try it on")
            else:
                self.parts = _find_parts(self.model, "", taps, batch.arguments)
        self.folds = [fold for part in self.parts for fold in _fold_norms(part.graph)]
        self.replace_parts({part.name: part.graph for part in self.parts})

    def replace_parts(self, graphs: Mapping[str, nn.Module], dequantize: bool = False) -> None:
        """Put other modules in the place of the traced ones; their outlets may carry quantised
        tensors.
        """
        for part in self.parts:
            graph = graphs[part.name]
            check = functools.partial(_require_form, inspect.signature(graph.forward), part.form)
            graph.register_forward_pre_hook(check, with_kwargs=True)
            for index, tap in enumerate(part.taps):
                path = f"{_OUTLETS}.{index}"
                if dequantize:
                    graph.set_submodule(path, _Outlet())
                    path += ".plain"
                self.hooks[tap] = f"{part.name}.{path}" if part.name else path
            if part.name:
                self.model.set_submodule(part.name, graph)
            else:
                self.model = graph


class _Outlet(nn.Module):
    """Returns what it is given; a hook on `plain` reads it in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.plain._forward_hooks:
            self.plain(x.dequantize() if x.is_quantized else x)
        return x


class FoldedConvolution:
    """A convolution with its own tensors, channels last, that also does the work of the norm after
    it, if any.
    """

    def __init__(self, convolution: Any, norm: Any) -> None:
        self.folded: Any = copy.copy(convolution)
        self._convolution, self._norm = convolution, norm
        layout = _LAYOUTS.get(convolution.weight.dim(), torch.preserve_format)
        weight = torch.empty_like(convolution.weight, memory_format=layout)
        bias = convolution.bias if norm is None else norm.running_mean
        self.folded._parameters = {
            "weight": nn.Parameter(weight, requires_grad=False),
            "bias": None
            if bias is None
            else nn.Parameter(torch.empty_like(bias), requires_grad=False),
        }
        self.update()

    def update(self) -> None:
        """Take over the weights and statistics as they are now."""
        weight, bias, norm = self._convolution.weight, self._convolution.bias, self._norm
        if norm is not None:
            statistics = norm.running_mean, norm.running_var, norm.eps
            weight, bias = fuse_conv_bn_weights(weight, bias, *statistics, norm.weight, norm.bias)
        with torch.no_grad():
            self.folded.weight.copy_(weight)
            if bias is not None:
                self.folded.bias.copy_(bias)


def _fold_norms(graph: fx.GraphModule) -> list[FoldedConvolution]:
    """Fold, in place, each batch norm that alone reads a convolution; return every convolution,
    folded or not.
    """
    folds = []
    modules = dict(graph.named_modules())
    targets = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    for node in list(graph.graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if module is None or not is_plain(module, CONVOLUTIONS) or targets.count(node.target) > 1:
            continue
        norm_node = _norm_behind(node, modules, targets)
        folds.append(
            FoldedConvolution(module, None if norm_node is None else modules[str(norm_node.target)])
        )
        graph.set_submodule(str(node.target), folds[-1].folded)
        if norm_node is not None:
            norm_node.replace_all_uses_with(node)
            graph.graph.erase_node(norm_node)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return folds


def _norm_behind(
    node: fx.Node, modules: Mapping[str, nn.Module], targets: Sequence[Any]
) -> fx.Node | None:
    users = list(node.users)
    if len(users) != 1 or users[0].op != "call_module" or targets.count(users[0].target) > 1:
        return None
    norm = modules[str(users[0].target)]
    return users[0] if is_plain(norm, _NORMS) and isinstance(norm.running_mean, Tensor) else None


class _Tracer(fx.Tracer):
    """Puts an outlet after every tap, so that the tap survives when its module is fused away."""

    def __init__(self, outlets: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self._outlets = outlets

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        output = super().call_module(m, forward, args, kwargs)
        outlet = self._outlets.get(m)
        if outlet is None:
            return output
        if not isinstance(output, fx.Proxy):
            raise TypeError(f"a tap must return one tensor, found {type(output).__name__}")
        return self.create_proxy("call_module", outlet, (output,), {})


def _trace(
    model: nn.Module, name: str, taps: Sequence[str]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return the graph of a submodule, and the taps inside."""
    module = model.get_submodule(name)
    inside = tuple(tap for tap in taps if tap != name and (not name or tap.startswith(name + ".")))
    outlets = {model.get_submodule(tap): f"{_OUTLETS}.{index}" for index, tap in enumerate(inside)}
    tracer = _Tracer(outlets)
    # A layer of torch itself would be traced into functions, and functions cannot be quantised with
    # ranges.
    root = nn.Sequential(module) if tracer.is_leaf_module(module, "") else module
    with undisturbed(root):  # a model may keep what it is given, and would keep a proxy
        graph = tracer.trace(root)
    # Not before tracing: a sequential container would call them.
    setattr(root, _OUTLETS, nn.ModuleList(nn.Identity() for _ in outlets))
    try:
        return fx.GraphModule(root, graph), inside
    finally:
        delattr(root, _OUTLETS)


def _find_parts(model: nn.Module, name: str, taps: Sequence[str], call: _Call) -> list[TracedPart]:
    """Return the largest submodules with convolutions that can be traced and compute the same when
    traced.
    """
    module = model.get_submodule(name)
    if not _has_convolutions(module):
        return []
    # Tracing starts after what has been put on the module from outside, and draws its random
    # numbers once and for all.
    draws = any(
        isinstance(value, Generator) for inner in module.modules() for value in vars(inner).values()
    )
    if not draws and not is_altered(module):
        with suppress(
            Exception
        ):  # whatever a model's own code does with a proxy: it cannot be traced
            graph, inside = _trace(model, name, taps)
            if _computes_the_same(graph, module, call):
                return [
                    TracedPart(
                        name, graph, inside, _form_of(inspect.signature(graph.forward), *call)
                    )
                ]
    calls, prefix = _calls_of_children(module, call), f"{name}." if name else ""
    return [
        part for child in calls for part in _find_parts(model, prefix + child, taps, calls[child])
    ]


def _computes_the_same(graph: nn.Module, module: nn.Module, call: _Call) -> bool:
    """Compare what comes of real inputs, to the bit, and the random states left behind.

    An `if` on an optional argument, or on a number of Python's random generator, is traced without
    an error, and wrongly; a random tensor of torch becomes a part of the graph, or a constant.
    """
    with kept_random_state(module):
        for _ in range(_NUM_RANDOM_STATES):
            before = random_fingerprint(module)
            (expected, state), (found, other_state) = _run(module, call), _run(graph, call)
            is_equal = len(expected) == len(found) > 0 and all(map(torch.equal, expected, found))
            if not is_equal or state != other_state:
                return False
            if state == before:
                break
            _draw_once(module)
    return True


def _run(module: nn.Module, call: _Call) -> tuple[list[Tensor], tuple[object, ...]]:
    """Return the tensors that a module returns, and the random states that it leaves."""
    args, kwargs = tree.map_tensors(torch.clone, call)
    # A graph that is called and fails prints where; one whose `forward` is called does not.
    function = module.forward if isinstance(module, fx.GraphModule) else module
    with undisturbed(module):
        return list(tree.leaves(function(*args, **kwargs))), random_fingerprint(module)


def _calls_of_children(module: nn.Module, call: _Call) -> dict[str, _Call]:
    """Return what the first call of each child with convolutions inside was given."""
    calls: dict[str, _Call] = {}

    def keep(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, tree.map_tensors(torch.clone, (args, kwargs)))

    with ExitStack() as handles:
        for name, child in _callable_children(module):
            handles.enter_context(
                child.register_forward_pre_hook(functools.partial(keep, name), with_kwargs=True)
            )
        _run(module, call)
    return calls


def _callable_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child, f"{prefix}{name}.")
        elif _has_convolutions(child):
            yield f"{prefix}{name}", child


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(inner, CONVOLUTIONS) for inner in module.modules())


def _draw_once(model: nn.Module) -> None:
    """Advance every random state, so that a model that draws may find other numbers."""
    random.random()
    np.random.random()
    for generator in generators_of(model):
        torch.rand(1, device=generator.device, generator=generator)


def _form_of(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return a word for each argument, defaults included: its type, not its value."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return [_describe(value) for value in bound.arguments.values()]


def _require_form(
    signature: inspect.Signature,
    form: list[str],
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse a call of another form: an `if` on an optional argument leaves nothing behind in a
    traced module.
    """
    found = _form_of(signature, args, kwargs)
    if found != form:
        raise ValueError(f"traced with the arguments {form}, called with {found}")


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
