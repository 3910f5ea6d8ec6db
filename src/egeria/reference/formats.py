"""The number formats of a reference, each built from the float32 snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from egeria.layers.batch import Batch
from egeria.layers.undisturbed import undisturbed
from egeria.reference import quantization
from egeria.reference.machine import FormatName, Machine
from egeria.reference.snapshot import Readings, Survey, check_readings, in_fp32, read_taps, run_to
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
        """Return a copy with batch norm folded; raise where there is nothing to check it with."""
        batch = None if self.survey is None else self.survey.batch
        return FoldedModel(self.snapshot, self.taps, batch, self.built.get("parts"))

    def require_float32(self) -> None:
        """Raise where weights are not float32: converting them would change what is compared."""
        found = {
            parameter.dtype
            for parameter in self.snapshot.parameters()
            if parameter.is_floating_point()
        }
        if others := found - {torch.float32}:
            raise ValueError(
                f"the weights must be float32, found {', '.join(sorted(map(str, others)))}"
            )


class NumberFormat:
    """The snapshot in one number format: a model of our own, and where in it the taps are read."""

    name: FormatName
    detail: str
    """How it is made, for the journal."""
    _kernels: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, inputs: FormatInputs, folded: FoldedModel | None) -> None:
        self._inputs, self._folded = inputs, folded
        self._model, self._hooks = inputs.snapshot, {tap: tap for tap in inputs.taps}
        if folded is not None:
            self._model, self._hooks = folded.model, folded.hooks
        self._autocast = in_fp32(inputs.device_type)
        self.found: dict[str, Any] = {
            "parts": {part.name: part.form for part in folded.parts} if folded else {}
        }
        """What the build has found out, for `FormatInputs.built`."""
        self._updates: list[Callable[[], Any]] = (
            [fold.update for fold in folded.folds] if folded else []
        )
        """Each makes weights of the model anew from those of the snapshot; what it shares with that
        needs none."""

    def update(self) -> None:
        """Take over the weights of the snapshot as they are now; graphs and ranges stay."""
        with self._kernels(), torch.no_grad():
            for update in self._updates:
                update()

    def readings(self, batch: Batch) -> Readings:
        """Return the activations at all taps."""
        with self._kernels():
            return read_taps(self._model, self._hooks, replace(batch, autocast=self._autocast))

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap, running the model no further."""
        with self._kernels():
            return run_to(self._model, self._hooks[tap], replace(batch, autocast=self._autocast))


class Float32(NumberFormat):
    """Folded and channels last where the model can be traced and runs without autocast, else the
    plain copy.

    At the first batch that the folded copy cannot run and the plain one can, it is the plain one
    for good.
    """

    name: FormatName = "fp32"

    def __init__(self, inputs: FormatInputs) -> None:
        super().__init__(inputs, _try_folding(inputs))
        self.detail = "fp32, batch norm folded" if self._folded else "fp32 copy"

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap, running the model no further."""
        if self._folded is None or batch.autocast.enabled:
            return run_to(self._inputs.snapshot, tap, batch)
        try:
            return super().activation(tap, batch)
        except Exception:
            activation = run_to(
                self._inputs.snapshot, tap, batch
            )  # what fails here too is no fault of the folding
            super().__init__(self._inputs, None)
            self.detail = "fp32 copy, since a batch was too much for the folded one"
            return activation


def _try_folding(inputs: FormatInputs) -> FoldedModel | None:
    with suppress(Exception):  # folding is for speed alone
        folded = inputs.fold()
        if folded.folds and (inputs.survey is None or _agrees(folded, inputs.survey)):
            return folded
    return None


def _agrees(folded: FoldedModel, survey: Survey) -> bool:
    readings = read_taps(folded.model, folded.hooks, survey.batch)
    check_readings(readings, survey, is_fp32=True)
    pairs = ((readings[tap], expected) for tap, expected in survey.readings.items())
    return all(
        found is None
        or expected is None
        or torch.allclose(found, expected, 1e-3, 1e-3 * float(expected.abs().amax()))
        for found, expected in pairs
    )


class BFloat16(NumberFormat):
    """Weights in bf16, batch norm folded, under bf16 autocast: models that mix
    types keep working.
    """

    name: FormatName = "bf16"
    detail = "bf16"

    def __init__(self, inputs: FormatInputs) -> None:
        inputs.require_float32()
        folded = inputs.fold()
        rounding = _in_bf16(folded)
        super().__init__(inputs, folded)
        self._updates += rounding
        self._autocast = replace(self._autocast, enabled=True)


def _in_bf16(folded: FoldedModel) -> list[Callable[[], Any]]:
    """Replace parameters by copies in bf16; return what rounds those again that the snapshot has as
    they are.

    Norms keep float32, since a residual stream may be either. So do weights that are computed from
    others, or used by a `forward` of the instance: such arithmetic may know nothing of autocast.
    """
    owned = {id(fold.folded) for fold in folded.folds}
    copies: dict[int, nn.Parameter] = {}
    rounding: list[Callable[[], Any]] = []
    for module in folded.model.modules():
        if isinstance(module, _KEPT_IN_FLOAT32) or not _is_ordinary(module):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype != torch.float32:
                continue
            if id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(
                    parameter.detach().bfloat16(), requires_grad=False
                )
                if id(module) not in owned:
                    rounding.append(partial(copies[id(parameter)].detach().copy_, parameter))
            module._parameters[name] = copies[id(parameter)]
    return rounding


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
        quantization.load_toolkit()
        folded = inputs.fold()
        if not folded.parts:
            raise ValueError("no part of the model can be traced")
        with quantization.kernels():
            parts = {
                part.name: quantization.StaticPart(part.graph, inputs.machine.vnni)
                for part in folded.parts
            }
            folded.replace_parts({name: part.module for name, part in parts.items()})
            ranges = inputs.built.get("ranges") or _observe(inputs, folded.model, parts)
            for name, part in parts.items():
                part.convert(ranges[name])
            folded.replace_parts(
                {name: part.module for name, part in parts.items()}, dequantize=True
            )
        sources = [source for part in parts.values() for _, source in part.layers]
        self.detail = _describe("static", sources, inputs.snapshot)
        super().__init__(inputs, folded)
        self.found["ranges"] = ranges
        self._updates += [part.update for part in parts.values()]


def _observe(
    inputs: FormatInputs, model: nn.Module, parts: Mapping[str, quantization.StaticPart]
) -> dict[str, Any]:
    """Return the ranges of activations, by part, on a batch."""
    if inputs.survey is None or inputs.batch is None:
        raise ValueError("there is no batch to find the ranges of activations on")
    # One float32 pass is most of a build: a ResNet-50 at 224 pixels gets 4 images, a CIFAR net 32.
    rows = int(_CALIBRATION_PRODUCTS / max(inputs.survey.products_per_row, 1))
    batch = inputs.batch.first_rows(min(max(rows, 4), 32))
    # Ranges need no more digits than bf16 has, and the pass takes half the time where bf16 is fast.
    autocast = replace(in_fp32("cpu"), enabled=inputs.machine.fast_bf16)
    with undisturbed(model), autocast.context():
        model(*batch.args, **batch.kwargs)
        return {
            name: part.ranges() for name, part in parts.items()
        }  # here: observers keep them in buffers


class DynamicInt8(NumberFormat):
    """Linear layers in int8 that find the range of their input at every call."""

    name: FormatName = "int8-dynamic"
    _kernels = staticmethod(quantization.kernels)

    def __init__(self, inputs: FormatInputs) -> None:
        inputs.require_float32()
        quantization.load_toolkit()
        super().__init__(inputs, None)
        self._model, self.found = sharing_copy(inputs.snapshot), {}
        layers: dict[nn.Linear, quantization.DynamicLinear] = {}
        with quantization.kernels():
            for name, module in list(self._model.named_modules(remove_duplicate=False)):
                if name and isinstance(module, nn.Linear) and is_plain(module, (nn.Linear,)):
                    if module not in layers:
                        layers[module] = quantization.DynamicLinear(module, inputs.machine.vnni)
                    self._model.set_submodule(name, layers[module])
        self.detail = _describe("dynamic", list(layers), inputs.snapshot)
        self._updates = [partial(layer.update, source) for source, layer in layers.items()]


def _describe(kind: str, quantized: list[Any], model: nn.Module) -> str:
    """Return a line for the journal; raise where too little is in int8 to be worth it, vocabularies
    left out.
    """
    vocabulary = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    total = sum(
        parameter.numel() for parameter in model.parameters() if id(parameter) not in vocabulary
    )
    size = sum(layer.weight.numel() for layer in quantized if id(layer.weight) not in vocabulary)
    if size < _LEAST_SHARE * total:
        raise ValueError(f"int8 has kernels for {size / max(total, 1):.0%} of the parameters only")
    weighted = (nn.Linear, nn.modules.conv._ConvNd)
    num_weighted = sum(isinstance(module, weighted) for module in model.modules())
    return (
        f"int8 {kind}, {quantization.ENGINE} engine, {len(quantized)} of {num_weighted} "
        "weighted layers"
    )


FORMATS: dict[str, Callable[[FormatInputs], NumberFormat]] = {
    kind.name: kind for kind in (StaticInt8, DynamicInt8, BFloat16, Float32)
}
