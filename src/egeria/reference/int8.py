"""The two ways of computing in int8: with ranges found beforehand, and with ranges found at every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from egeria.layers.batch import Batch
from egeria.layers.undisturbed import undisturbed
from egeria.reference import quantization
from egeria.reference.formats import FormatInputs, FormatName, RunnableFormat, in_bf16, require_float32
from egeria.reference.survey import in_fp32, silence
from egeria.reference.tracing import is_plain, sharing_copy

_LEAST_SHARE = 0.4
_CALIBRATION_PRODUCTS = 1.2e10


class _Int8(RunnableFormat):
    """Runs with our engine, whatever the user has chosen, and in silence.

    torch warns at every call that joins tensors of different ranges; whether digits are lost is measured.
    """

    def readings(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the activations at all taps."""
        with quantization.engine(), silence():
            return super().readings(batch)

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        with quantization.engine(), silence():
            return super().activation(tap, batch)


class StaticInt8(_Int8):
    """Weights and activations in int8, with ranges of activations found on a batch."""

    name: FormatName = "int8-static"

    def __init__(self, inputs: FormatInputs) -> None:
        require_float32(inputs.snapshot)
        self._toolkit = quantization.load_toolkit()
        self._folded = inputs.fold()
        with quantization.engine():
            self._build(inputs)
        self.detail = self._describe(inputs.snapshot)
        super().__init__(self._folded.model, self._folded.hooks, in_fp32("cpu"))

    def _build(self, inputs: FormatInputs) -> None:
        folded, toolkit = self._folded, self._toolkit
        sources = {part.name: part.graph for part in folded.parts}
        if not sources:
            raise ValueError("no part of the model can be traced")
        prepared = {name: toolkit.prepare(graph, inputs.machine.vnni) for name, graph in sources.items()}
        folded.replace_parts(prepared)
        self._ranges = inputs.built.get("ranges") or self._observe(inputs, prepared)
        for name, part in prepared.items():
            toolkit.set_ranges(part, self._ranges[name])
        converted = {name: toolkit.convert(part) for name, part in prepared.items()}
        folded.replace_parts(converted, dequantize=True)
        self._layers = [
            (layer, sources[name].get_submodule(path))
            for name, part in converted.items()
            for path, layer in toolkit.weighted(part).items()
        ]

    def _observe(self, inputs: FormatInputs, prepared: Mapping[str, Any]) -> dict[str, Any]:
        if inputs.survey is None or inputs.batch is None:
            raise ValueError("there is no batch to find the ranges of activations on")
        # One float32 pass is most of a build: a ResNet-50 at 224 pixels gets 4 images, a CIFAR net 32.
        rows = int(_CALIBRATION_PRODUCTS / max(inputs.survey.products_per_row, 1))
        batch = inputs.batch.first_rows(min(max(rows, 4), 32))
        # Ranges need no more digits than bf16 has, and the pass takes half the time where bf16 is fast.
        autocast = in_bf16("cpu") if inputs.machine.fast_bf16 else in_fp32("cpu")
        with undisturbed(self._folded.model), autocast.context():
            self._folded.model(*batch.args, **batch.kwargs)
            return {name: self._toolkit.ranges(part) for name, part in prepared.items()}

    def _describe(self, snapshot: nn.Module) -> str:
        _require_share([source for _, source in self._layers], snapshot)
        count = f"{len(self._layers)} of {_num_weighted(snapshot)} weighted layers"
        return f"int8 static, {quantization.ENGINE} engine, {count}"

    def update(self) -> None:
        """Quantise the weights of the snapshot again; graph and ranges stay."""
        self._folded.update()
        with quantization.engine():
            for layer, source in self._layers:
                self._toolkit.take_weights(layer, source)

    def found(self) -> dict[str, Any]:
        """Return the names of the traced parts and the ranges of activations."""
        return {"parts": self._folded.part_forms, "ranges": self._ranges}


class DynamicInt8(_Int8):
    """Linear layers in int8 that find the range of their input at every call."""

    name: FormatName = "int8-dynamic"

    def __init__(self, inputs: FormatInputs) -> None:
        require_float32(inputs.snapshot)
        quantization.load_toolkit()
        model = sharing_copy(inputs.snapshot)
        with quantization.engine():
            self._layers = _replace_linear(model, inputs.machine.vnni)
        _require_share([source for _, source in self._layers], inputs.snapshot)
        count = f"{len(self._layers)} of {_num_weighted(inputs.snapshot)} weighted layers"
        self.detail = f"int8 dynamic, {quantization.ENGINE} engine, {count}"
        super().__init__(model, {tap: tap for tap in inputs.taps}, in_fp32("cpu"))

    def update(self) -> None:
        """Quantise the weights of the snapshot again."""
        with quantization.engine():
            for layer, source in self._layers:
                layer.update(source)

    def found(self) -> dict[str, Any]:
        """Return nothing: there is nothing to find out."""
        return {}


def _replace_linear(model: nn.Module, full_range: bool) -> list[tuple[quantization.DynamicLinear, nn.Linear]]:
    layers: dict[int, tuple[quantization.DynamicLinear, nn.Linear]] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and isinstance(module, nn.Linear) and is_plain(module, (nn.Linear,)):
            if id(module) not in layers:
                layers[id(module)] = (quantization.DynamicLinear(module, full_range), module)
            model.set_submodule(name, layers[id(module)][0])
    return list(layers.values())


def _require_share(quantized: list[Any], model: nn.Module) -> None:
    """Raise where too little of the model is in int8 to be worth it; vocabularies do not count."""
    vocabulary = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    total = sum(p.numel() for p in model.parameters() if id(p) not in vocabulary)
    size = sum(layer.weight.numel() for layer in quantized if id(layer.weight) not in vocabulary)
    if size < _LEAST_SHARE * total:
        raise ValueError(f"int8 has kernels for {size / max(total, 1):.0%} of the parameters only")


def _num_weighted(model: nn.Module) -> int:
    return sum(isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) for module in model.modules())
