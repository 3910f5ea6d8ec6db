"""The number formats of a reference, each built from the float32 snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from egeria.layers.batch import Autocast, Batch
from egeria.layers.taps import capture
from egeria.layers.undisturbed import undisturbed
from egeria.reference import quantization
from egeria.reference.machine import FormatName, Machine
from egeria.reference.survey import Readings, Survey, check_readings, in_fp32, read_taps
from egeria.reference.tracing import FoldedModel, is_altered, is_plain, sharing_copy

_KEPT_IN_FLOAT32 = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_LEAST_SHARE = 0.4
_CALIBRATION_PRODUCTS = 1.2e10


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatInputs:
    """What a number format is built from."""

    snapshot: nn.Module
    taps: Sequence[str]
    machine: Machine
    device_type: str = "cpu"
    survey: Survey | None = None
    batch: Batch | None = None
    """A training batch on the CPU to find ranges on."""
    built: Mapping[str, Any] = field(default_factory=dict)
    """What an earlier build of this format has found out, to build the same again."""

    def fold(self) -> FoldedModel:
        """Return a copy with batch norm folded.

        Raises:
            ValueError: there was no batch to check it with.
        """
        forms = self.built.get("parts")
        if self.survey is None and forms is None:
            raise ValueError("there is no batch to try it on")
        return FoldedModel(self.snapshot, self.taps, None if self.survey is None else self.survey.batch, forms)

    def require_float32(self) -> None:
        """Raise where weights are not float32: converting them would change what is compared.

        Raises:
            ValueError: a parameter has another floating-point type.
        """
        found = {parameter.dtype for parameter in self.snapshot.parameters() if parameter.is_floating_point()}
        if found - {torch.float32}:
            others = ", ".join(sorted(map(str, found - {torch.float32})))
            raise ValueError(f"the weights must be float32, found {others}")


class NumberFormat:
    """The snapshot in one number format: a model of our own, and where in it the taps are read."""

    name: FormatName
    detail: str
    """How it is made, for the journal."""
    found: Mapping[str, Any]
    """What the build has found out, for `FormatInputs.built`."""
    _kernels: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, model: nn.Module, hooks: Mapping[str, str], autocast: Autocast) -> None:
        self._model, self._hooks, self._autocast = model, hooks, autocast

    def update(self) -> None:
        """Take over the weights of the snapshot as they are now."""
        raise NotImplementedError

    def readings(self, batch: Batch) -> Readings:
        """Return the activations at all taps."""
        with self._kernels():
            return read_taps(self._model, self._hooks, replace(batch, autocast=self._autocast))

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        with self._kernels():
            return _run_to(self._model, self._hooks[tap], replace(batch, autocast=self._autocast))


def _run_to(model: nn.Module, path: str, batch: Batch) -> Tensor | None:
    with undisturbed(model):
        activation = capture(model, path, batch.first_rows(None))  # a copy: a model may overwrite its input
    return None if activation is None else activation.float()


class Float32(NumberFormat):
    """Folded and channels last where the model can be traced and runs without autocast, else the plain copy.

    At the first batch that the folded copy cannot run and the plain one can, it is the plain one for good.
    """

    name: FormatName = "fp32"

    def __init__(self, inputs: FormatInputs) -> None:
        self._inputs, self._folded = inputs, _try_folding(inputs)
        if self._folded is None:
            self._unfold("fp32 copy")
        else:
            self.detail, self.found = "fp32, batch norm folded", {"parts": self._folded.forms}
            super().__init__(self._folded.model, self._folded.hooks, in_fp32(inputs.device_type))

    def _unfold(self, detail: str) -> None:
        self._folded, self.detail, self.found = None, detail, {"parts": {}}
        super().__init__(
            self._inputs.snapshot, {tap: tap for tap in self._inputs.taps}, in_fp32(self._inputs.device_type)
        )

    def update(self) -> None:
        """Fold again; all other tensors are the snapshot's."""
        if self._folded is not None:
            self._folded.update()

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        if self._folded is None or batch.autocast.enabled:
            return _run_to(self._inputs.snapshot, tap, batch)
        try:
            return super().activation(tap, batch)
        except Exception:
            activation = _run_to(self._inputs.snapshot, tap, batch)  # what fails here too is no fault of the folding
            self._unfold("fp32 copy, since a batch was too much for the folded one")
            return activation


def _try_folding(inputs: FormatInputs) -> FoldedModel | None:
    try:
        folded = inputs.fold()
        if folded.folds and (inputs.survey is None or _agrees(folded, inputs.survey)):
            return folded
    except Exception:  # folding is for speed alone
        pass
    return None


def _agrees(folded: FoldedModel, survey: Survey) -> bool:
    readings = read_taps(folded.model, folded.hooks, survey.batch)
    check_readings(readings, survey, is_fp32=True)
    pairs = ((readings[tap], expected) for tap, expected in survey.readings.items())
    return all(
        found is None or expected is None or torch.allclose(found, expected, 1e-3, 1e-3 * float(expected.abs().amax()))
        for found, expected in pairs
    )


class BFloat16(NumberFormat):
    """Weights in bf16, batch norm folded, under bf16 autocast: models that mix types keep working."""

    name: FormatName = "bf16"
    detail = "bf16"

    def __init__(self, inputs: FormatInputs) -> None:
        inputs.require_float32()
        self._folded = inputs.fold()
        self._pairs = _in_bf16(self._folded)
        self.found = {"parts": self._folded.forms}
        super().__init__(self._folded.model, self._folded.hooks, _bf16_autocast(inputs.device_type))

    def update(self) -> None:
        """Round the weights of the snapshot again."""
        self._folded.update()
        with torch.no_grad():
            for mine, theirs in self._pairs:
                mine.copy_(theirs)


def _bf16_autocast(device_type: str) -> Autocast:
    return Autocast(device_type=device_type, enabled=True, dtype=torch.bfloat16)


def _in_bf16(folded: FoldedModel) -> list[tuple[Tensor, Tensor]]:
    """Replace parameters by copies in bf16; return those that are rounded from the snapshot as they are.

    Norms keep float32, since a residual stream may be either. So do weights that are computed from
    others, or used by a `forward` of the instance: such arithmetic may know nothing of autocast.
    """
    owned = {id(fold.folded) for fold in folded.folds}
    copies: dict[int, nn.Parameter] = {}
    pairs: list[tuple[Tensor, Tensor]] = []
    for module in folded.model.modules():
        if isinstance(module, _KEPT_IN_FLOAT32) or not _is_ordinary(module):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype != torch.float32:
                continue
            if id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(parameter.detach().bfloat16(), requires_grad=False)
                if id(module) not in owned:
                    pairs.append((copies[id(parameter)].detach(), parameter))
            module._parameters[name] = copies[id(parameter)]
    return pairs


def _is_ordinary(module: nn.Module) -> bool:
    computed = nn.utils.parametrize.is_parametrized(module) or isinstance(
        module, nn.utils.parametrize.ParametrizationList
    )
    return isinstance(module, fx.GraphModule) or not (computed or is_altered(module))


class StaticInt8(NumberFormat):
    """Weights and activations in int8, with ranges of activations found on a batch."""

    name: FormatName = "int8-static"
    _kernels = staticmethod(quantization.kernels)

    def __init__(self, inputs: FormatInputs) -> None:
        inputs.require_float32()
        self._toolkit, self._folded = quantization.load_toolkit(), inputs.fold()
        with quantization.kernels():
            self._build(inputs)
        self.detail = _describe("static", [source for _, source in self._layers], inputs.snapshot)
        super().__init__(self._folded.model, self._folded.hooks, in_fp32("cpu"))

    def _build(self, inputs: FormatInputs) -> None:
        folded, toolkit = self._folded, self._toolkit
        sources = {part.name: part.graph for part in folded.parts}
        if not sources:
            raise ValueError("no part of the model can be traced")
        prepared = {name: toolkit.prepare(graph, inputs.machine.vnni) for name, graph in sources.items()}
        folded.replace_parts(prepared)
        ranges = inputs.built.get("ranges") or self._observe(inputs, prepared)
        self.found = {"parts": folded.forms, "ranges": ranges}
        converted = {name: toolkit.convert(part, ranges[name]) for name, part in prepared.items()}
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
        autocast = _bf16_autocast("cpu") if inputs.machine.fast_bf16 else in_fp32("cpu")
        with undisturbed(self._folded.model), autocast.context():
            self._folded.model(*batch.args, **batch.kwargs)
            return {name: self._toolkit.ranges(part) for name, part in prepared.items()}

    def update(self) -> None:
        """Quantise the weights of the snapshot again; graph and ranges stay."""
        self._folded.update()
        with quantization.kernels():
            for layer, source in self._layers:
                self._toolkit.take_weights(layer, source)


class DynamicInt8(NumberFormat):
    """Linear layers in int8 that find the range of their input at every call."""

    name: FormatName = "int8-dynamic"
    _kernels = staticmethod(quantization.kernels)

    def __init__(self, inputs: FormatInputs) -> None:
        inputs.require_float32()
        quantization.load_toolkit()
        model = sharing_copy(inputs.snapshot)
        with quantization.kernels():
            self._layers = _replace_linear(model, inputs.machine.vnni)
        self.detail, self.found = _describe("dynamic", list(self._layers), inputs.snapshot), {}
        super().__init__(model, {tap: tap for tap in inputs.taps}, in_fp32("cpu"))

    def update(self) -> None:
        """Quantise the weights of the snapshot again."""
        with quantization.kernels():
            for source, layer in self._layers.items():
                layer.update(source)


def _replace_linear(model: nn.Module, full_range: bool) -> dict[nn.Linear, quantization.DynamicLinear]:
    layers: dict[nn.Linear, quantization.DynamicLinear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and isinstance(module, nn.Linear) and is_plain(module, (nn.Linear,)):
            if module not in layers:
                layers[module] = quantization.DynamicLinear(module, full_range)
            model.set_submodule(name, layers[module])
    return layers


def _describe(kind: str, quantized: list[Any], model: nn.Module) -> str:
    """Return a line for the journal; raise where too little is in int8 to be worth it, vocabularies left out."""
    vocabulary = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    total = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in vocabulary)
    size = sum(layer.weight.numel() for layer in quantized if id(layer.weight) not in vocabulary)
    if size < _LEAST_SHARE * total:
        raise ValueError(f"int8 has kernels for {size / max(total, 1):.0%} of the parameters only")
    weighted = (nn.Linear, nn.modules.conv._ConvNd)
    num_weighted = sum(isinstance(module, weighted) for module in model.modules())
    return f"int8 {kind}, {quantization.ENGINE} engine, {len(quantized)} of {num_weighted} weighted layers"


FORMATS: dict[str, Callable[[FormatInputs], NumberFormat]] = {
    kind.name: kind for kind in (StaticInt8, DynamicInt8, BFloat16, Float32)
}
