"""Everything that torch deprecates: graph-mode static quantisation, quantised tensors and their
kernels.

`load_toolkit` is the only way in: it imports `torch.ao.quantization`, and raises where a torch has
it no more.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from egeria.errors import ReferenceModelError
from egeria.reference.tracing import CONVOLUTIONS, is_altered, is_plain

ENGINE = "x86"
_FRONTEND = "torch.ao.quantization"
_WEIGHTED = (*CONVOLUTIONS, nn.Linear)
# What stays in float32: all that has weights, but for the layers above, since only they are
# quantised again when weights change; and `mean`, whose int8 kernel refuses maps of one pixel.
_IN_FLOAT32 = re.compile(
    r"(Batch|Layer|Instance|Group)Norm.*|(batch|layer|instance|group)_norm|.*(LSTM|GRU|RNN).*|Embedding.*|embedding.*"
    r"|PReLU|Conv.*d.*BatchNorm.*|ConvTranspose.*|conv.*d|linear|BN.*|.*Bn.*|mean"
)


@contextmanager
def _changed(settings: Any, name: str, value: Any) -> Iterator[None]:
    """Change a setting of torch for the block; a release that does not know it does not mind."""
    before = getattr(settings, name, None)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


@contextmanager
def silence() -> Iterator[None]:
    """Suppress all warnings in the block.

    After `warnings.catch_warnings` Python forgets what it has shown, and a user's code would warn
    again.
    """
    filters: Any = warnings.filters
    # Like no filter of anyone else, so that the right one is removed.
    ignore = ("ignore", None, Warning, re.compile("(?#egeria)"), 0)
    filters.insert(0, ignore)
    try:
        yield
    finally:
        with suppress(ValueError):  # the block itself may have reset all filters
            filters.remove(ignore)


@contextmanager
def kernels() -> Iterator[None]:
    """Use our kernels for the block, whatever engine the user has chosen, and in silence.

    torch warns of kernels on their way out, and of joins of tensors with different ranges; what
    that costs is measured.
    """
    with _changed(torch.backends.quantized, "engine", ENGINE), silence():
        yield


def quantize_weight(weight: Tensor) -> Tensor:
    """Return a weight [out, ...] in 8 bits with a symmetric scale for each output channel.

    To the bit as torch's per-channel min-max observer does it, whether taken over in place or built
    anew.
    """
    weight = weight.detach()
    # In the order they lie in memory, the values of a channels_last weight need no copy.
    rows = weight.permute(0, 2, 3, 1) if weight.dim() == 4 else weight
    low, high = torch.aminmax(rows.flatten(1), dim=1)
    largest = torch.maximum(-low.clamp(max=0), high.clamp(min=0))
    scale = (largest / 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return torch.quantize_per_channel(
        weight, scale.double(), torch.zeros_like(scale).long(), 0, torch.qint8
    )


class DynamicLinear(nn.Module):
    """A linear layer in int8 that finds the range of its input [..., in] at every call.

    Without `full_range` inputs use 7 bits, because sums of products would overflow 16.
    """

    def __init__(self, source: nn.Linear, full_range: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        # Models that look at the weight (T5 compares its type) find that there is none.
        self.weight = self.bias = None
        self._full_range = full_range
        self.update(source)

    def update(self, source: nn.Linear) -> None:
        """Take over the weights of the layer as they are now."""
        bias = None if source.bias is None else source.bias.detach()
        self._packed = torch.ops.quantized.linear_prepack(quantize_weight(source.weight), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out] in float32."""
        product: Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, not self._full_range)
        return product


class StaticPart:
    """A traced module in int8, with ranges of activations found beforehand: until `convert`,
    `module` observes them.
    """

    def __init__(self, graph: fx.GraphModule, full_range: bool) -> None:
        self._source, self._tools = graph, load_toolkit()
        frontend = self._tools.frontend
        activation = frontend.MinMaxObserver.with_args(
            dtype=torch.quint8, quant_min=0, quant_max=127 + 128 * full_range
        )
        weight = frontend.default_per_channel_weight_observer
        mapping = frontend.get_default_qconfig_mapping(ENGINE)
        mapping.set_global(frontend.QConfig(activation=activation, weight=weight))
        for name in _hide_weights(graph):
            mapping.set_module_name(name, None)
        # To look up where each node of a trace comes from would import the whole compiler.
        with _changed(fx.config, "do_not_emit_stack_traces", True):
            prepared = self._tools.quantize_fx.prepare_fx(
                graph, mapping, (), backend_config=self._tools.backend
            )
        self.module: fx.GraphModule = prepared
        self.layers: list[tuple[Any, Any]] = []
        """The quantised layers, each with the layer it stands for."""
        modules = prepared.named_modules()
        self._observers = {
            name: each for name, each in modules if isinstance(each, frontend.MinMaxObserver)
        }

    def ranges(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the smallest and largest value that each observer has seen."""
        return {
            name: (found.min_val.clone(), found.max_val.clone())
            for name, found in self._observers.items()
        }

    def convert(self, ranges: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Change to int8, as if every observer had seen these values."""
        for name, observer in self._observers.items():
            observer.min_val, observer.max_val = (value.clone() for value in ranges[name])
        self.module = self._tools.quantize_fx.convert_fx(
            self.module, backend_config=self._tools.backend
        )
        _move_in_int8(self.module)
        quantized = [
            (name, layer)
            for name, layer in self.module.named_modules()
            if isinstance(layer, self._tools.kinds)
        ]
        self.layers = [(layer, self._source.get_submodule(name)) for name, layer in quantized]

    def update(self) -> None:
        """Quantise the weights of the source as they are now."""
        for layer, source in self.layers:
            layer.set_weight_bias(quantize_weight(source.weight), source.bias)


def _hide_weights(graph: fx.GraphModule) -> list[str]:
    """Name the modules that stay in float32, and give them types that torch has no int8 form for.

    To configure them is not enough: a norm between two quantised layers would still be replaced.
    """
    names = []
    for name, module in list(graph.named_modules()):
        has_weights = any(
            tensor is not None
            for tensor in (*module._parameters.values(), *module._buffers.values())
        )
        if name and (is_altered(module) or (has_weights and not is_plain(module, _WEIGHTED))):
            # The module name makes the tracer take it for a layer of torch, and not look inside. It
            # is the module itself and no copy, since a `forward` of the instance is bound to it.
            module.__class__ = type(
                type(module).__name__, (type(module),), {"__module__": "torch.nn.float32"}
            )
            names.append(name)
    return names


def _move_in_int8(converted: fx.GraphModule) -> None:
    """Let slices and padding with zeros work in int8, with the range of their input; torch leaves
    them in float32.
    """
    for node in converted.graph.nodes:
        moving = node.args[0] if node.target is torch.quantize_per_tensor else None
        if not isinstance(moving, fx.Node) or not (_is_slice(moving) or _is_zero_padding(moving)):
            continue
        floating: Any = moving.args[0]
        if floating.op == "call_method" and floating.target == "dequantize":
            with converted.graph.inserting_before(node):
                arguments = (floating.args[0], *moving.args[1:])
                moved = converted.graph.call_function(moving.target, arguments, moving.kwargs)  # type: ignore[arg-type]
            node.replace_all_uses_with(moved)
    converted.graph.eliminate_dead_code()
    converted.recompile()


def _is_slice(node: fx.Node) -> bool:
    indices = node.args[1] if node.target is operator.getitem else None
    return isinstance(indices, tuple) and all(isinstance(index, slice) for index in indices)


def _is_zero_padding(node: fx.Node) -> bool:
    is_padding = node.target is functional.pad and len(node.args) == 2
    return (
        is_padding
        and node.kwargs.get("mode", "constant") == "constant"
        and not node.kwargs.get("value")
    )


def _names(pattern: Any) -> list[str]:
    if isinstance(pattern, (tuple, list)):
        return [name for part in pattern for name in _names(part)]
    return [pattern if isinstance(pattern, str) else getattr(pattern, "__name__", "")]


def _backend_config(backend_config: Any) -> Any:
    """Return which operations have an int8 form."""
    kept = backend_config.BackendConfig("egeria")
    configs = backend_config.get_native_backend_config().configs
    for config in configs:
        if not any(_IN_FLOAT32.fullmatch(name) for name in _names(config.pattern)):
            kept.set_backend_pattern_config(config)
    pooling = next(config for config in configs if config.pattern is nn.MaxPool2d)
    padding = backend_config.BackendPatternConfig(functional.pad)
    padding.set_observation_type(pooling.observation_type).set_dtype_configs(pooling.dtype_configs)
    return kept.set_backend_pattern_config(padding)


@functools.cache
def load_toolkit() -> Any:
    """Return what torch has for static quantisation; the first call takes more than a second.

    Raises:
        ReferenceModelError: this torch, or the CPU, has no quantisation.
    """
    try:
        with kernels():
            frontend, modules = (
                importlib.import_module(_FRONTEND),
                importlib.import_module("torch.ao.nn.quantized"),
            )
            return SimpleNamespace(
                frontend=frontend,
                quantize_fx=importlib.import_module(f"{_FRONTEND}.quantize_fx"),
                backend=_backend_config(importlib.import_module(f"{_FRONTEND}.backend_config")),
                kinds=(modules.Conv1d, modules.Conv2d, modules.Conv3d, modules.Linear),
            )
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ReferenceModelError(
            f"int8 needs torch.ao.quantization with the {ENGINE} engine, found torch "
            f"{torch.__version__} "
            f"without ({error}). Choose reference.precision 'bf16' or 'fp32', or leave it at "
            "'auto'."
        ) from error
