"""Everything that torch deprecates: graph-mode static quantisation, quantised tensors and their kernels.

`load_toolkit` is the only way in: it imports `torch.ao.quantization`, and raises where a torch has it no more.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from egeria.errors import ReferenceModelError
from egeria.reference.tracing import CONVOLUTIONS, is_altered, is_plain

ENGINE = "x86"
_WEIGHTED = (*CONVOLUTIONS, nn.Linear)
# What stays in float32: all that has weights, but for the layers above, since only they are quantised
# again when weights change; and `mean`, whose int8 kernel refuses maps of one pixel.
_IN_FLOAT32 = re.compile(
    r"(Batch|Layer|Instance|Group)Norm.*|(batch|layer|instance|group)_norm|.*(LSTM|GRU|RNN).*|Embedding.*|embedding.*"
    r"|PReLU|Conv.*d.*BatchNorm.*|ConvTranspose.*|conv.*d|linear|BN.*|.*Bn.*|mean"
)


@contextmanager
def _changed(settings: Any, name: str, value: Any) -> Iterator[None]:
    """Change a setting of torch for the block, where this release has it."""
    before = getattr(settings, name, None)
    if before is None:
        yield
        return
    try:
        setattr(settings, name, value)
        yield
    finally:
        setattr(settings, name, before)


@contextmanager
def silence() -> Iterator[None]:
    """Suppress all warnings in the block, and leave no trace.

    `warnings.catch_warnings` would: entering and leaving it makes Python forget what it has shown, and
    whatever a user's code is to say once would be said again.
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

    torch warns at every call that joins tensors of different ranges; whether digits are lost is measured.
    """
    with _changed(torch.backends.quantized, "engine", ENGINE), silence():
        yield


def quantize_weight(weight: Tensor) -> Tensor:
    """Return a weight [out, ...] in 8 bits with a symmetric scale for each output channel.

    The arithmetic is that of torch's per-channel min-max observer, so that weights taken over in
    place equal those of a new build to the bit.
    """
    weight = weight.detach()
    # In the order they lie in memory, the values of a channels_last weight need no copy.
    rows = weight.permute(0, 2, 3, 1) if weight.dim() == 4 else weight
    low, high = torch.aminmax(rows.flatten(1), dim=1)
    largest = torch.maximum(-low.clamp(max=0), high.clamp(min=0))
    scale = (largest / 127.5).clamp(min=torch.finfo(torch.float32).eps)
    return torch.quantize_per_channel(weight, scale.double(), torch.zeros_like(scale).long(), 0, torch.qint8)


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


class Toolkit:
    """Static quantisation of traced modules."""

    def __init__(self) -> None:
        # Importing takes more than a second.
        import torch.ao.quantization as frontend  # noqa: PLC0415
        from torch.ao.nn import quantized  # noqa: PLC0415
        from torch.ao.quantization import quantize_fx  # noqa: PLC0415

        self._frontend, self._quantize_fx = frontend, quantize_fx
        self._make_config: Any = frontend.QConfig
        self._backend = _backend_config()
        weights = frontend.default_per_channel_weight_observer.p
        self._weights = _quickly_made(weights.func, **weights.keywords).with_args()
        self._observers = {
            full: _quickly_made(
                frontend.MinMaxObserver, dtype=torch.quint8, quant_min=0, quant_max=255 if full else 127
            ).with_args()
            for full in (False, True)
        }
        self._quantized = (quantized.Conv1d, quantized.Conv2d, quantized.Conv3d, quantized.Linear)

    def prepare(self, graph: fx.GraphModule, full_range: bool) -> fx.GraphModule:
        """Return the traced module with observers of the ranges of its activations."""
        mapping = self._frontend.get_default_qconfig_mapping(ENGINE)
        mapping.set_global(self._make_config(activation=self._observers[full_range], weight=self._weights))
        for name in _hide_weights(graph):
            mapping.set_module_name(name, None)
        # To look up where each node of a trace comes from would import the whole compiler.
        with _changed(fx.config, "do_not_emit_stack_traces", True):
            prepared: fx.GraphModule = self._quantize_fx.prepare_fx(graph, mapping, (), backend_config=self._backend)
        return prepared

    def ranges(self, prepared: fx.GraphModule) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the smallest and largest value that each observer has seen."""
        return {name: (o.min_val.clone(), o.max_val.clone()) for name, o in self._observers_of(prepared)}

    def convert(self, prepared: fx.GraphModule, ranges: Mapping[str, tuple[Tensor, Tensor]]) -> fx.GraphModule:
        """Return the module in int8, as if every observer had seen these values."""
        for name, observer in self._observers_of(prepared):
            observer.min_val, observer.max_val = (value.clone() for value in ranges[name])
        converted: fx.GraphModule = self._quantize_fx.convert_fx(prepared, backend_config=self._backend)
        _move_in_int8(converted)
        return converted

    def weighted(self, converted: fx.GraphModule) -> dict[str, nn.Module]:
        """Return the quantised layers with weights, by the name of the layer they stand for."""
        return {name: module for name, module in converted.named_modules() if isinstance(module, self._quantized)}

    @staticmethod
    def take_weights(quantized: nn.Module, source: nn.Module) -> None:
        """Quantise the weights of a layer as they are now into its counterpart."""
        weight, bias = source.weight, source.bias
        quantized.set_weight_bias(quantize_weight(weight), bias)  # type: ignore[operator, arg-type]

    def _observers_of(self, prepared: fx.GraphModule) -> Iterator[tuple[str, Any]]:
        for name, module in prepared.named_modules():
            if isinstance(module, self._frontend.MinMaxObserver):
                yield name, module


def _quickly_made(observer: type[Any], **settings: Any) -> Any:
    """Return the class of observer with these settings, whose instances are copies of one.

    Preparing a ResNet-56 makes two thousand, most of them only to look at their type.
    """
    template = observer(**settings)

    def copy_template(self: Any) -> None:
        vars(self).update({name: dict(v) if type(v) is dict else copy.copy(v) for name, v in vars(template).items()})
        vars(self)["_buffers"] = {name: buffer.clone() for name, buffer in template._buffers.items()}

    return type(observer.__name__, (observer,), {"__init__": copy_template})


def _hide_weights(graph: fx.GraphModule) -> list[str]:
    """Name the modules that stay in float32, and give them types that torch has no int8 form for.

    They are those with weights that only float32 can use, and those that do more than their class says.
    The configuration alone does not do: a norm between two quantised layers would still be replaced.
    """
    names = []
    for name, module in list(graph.named_modules()):
        has_weights = any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
        if name and (is_altered(module) or (has_weights and not is_plain(module, _WEIGHTED))):
            # The module name makes the tracer take it for a layer of torch, and not look inside. It is
            # the module itself and no copy, since a `forward` of the instance is bound to it.
            module.__class__ = type(type(module).__name__, (type(module),), {"__module__": "torch.nn.float32"})
            names.append(name)
    return names


def _move_in_int8(converted: fx.GraphModule) -> None:
    """Let what only picks values, or puts zeros beside them, do so in int8, with the range its input has.

    torch leaves slices and padding in float32, between two changes of format.
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
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    return all(isinstance(index, slice) for index in node.args[1])


def _is_zero_padding(node: fx.Node) -> bool:
    is_padding = node.target is functional.pad and len(node.args) == 2
    return is_padding and node.kwargs.get("mode", "constant") == "constant" and not node.kwargs.get("value")


def _backend_config() -> Any:
    """Return which operations have an int8 form."""
    from torch.ao.quantization import backend_config  # noqa: PLC0415

    kept = backend_config.BackendConfig("egeria")
    configs = backend_config.get_native_backend_config().configs
    for config in configs:
        if not any(_IN_FLOAT32.fullmatch(name) for name in _names(config.pattern)):
            kept.set_backend_pattern_config(config)
    pooling = next(config for config in configs if config.pattern is nn.MaxPool2d)
    padding = backend_config.BackendPatternConfig(functional.pad)
    padding.set_observation_type(pooling.observation_type).set_dtype_configs(pooling.dtype_configs)
    return kept.set_backend_pattern_config(padding)


def _names(pattern: Any) -> list[str]:
    if isinstance(pattern, (tuple, list)):
        return [name for part in pattern for name in _names(part)]
    return [pattern if isinstance(pattern, str) else getattr(pattern, "__name__", "")]


@functools.cache
def load_toolkit() -> Toolkit:
    """Return what quantises; the first call imports it.

    torch warns once of kernels on their way out, and of joins of unlike ranges: in the first call, unheard.

    Raises:
        ReferenceModelError: this torch, or the CPU, has no quantisation.
    """
    with kernels():
        try:
            toolkit = Toolkit()
            for dtype in (torch.quint8, torch.qint8):  # each kind of tensor warns when it is first made
                torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, dtype)
            quantize_weight(torch.zeros(1, 1))
            unlike = [torch.quantize_per_tensor(torch.ones(1, 1, 1, 1), scale, 0, torch.quint8) for scale in (1.0, 2.0)]
            torch.cat(unlike, dim=1)
        except (ImportError, AttributeError, RuntimeError) as error:
            raise ReferenceModelError(
                f"int8 needs torch.ao.quantization with the {ENGINE} engine, found torch {torch.__version__} "
                f"without ({error}). Choose reference.precision 'bf16' or 'fp32', or leave it at 'auto'."
            ) from error
    return toolkit
