"""The snapshot in a number format: float32, bfloat16 or int8, the last by `torch.ao.quantization`.

Of convolutional models the largest submodules that can be traced and have no tap inside are
quantised statically, with ranges of activations found on a batch; the model around them runs its
own code. In other models each linear layer finds the range of its input at every call.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from egeria.model.passes import Batch, captures, undisturbed
from egeria.random_state import kept_random_state

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ENGINE = "x86"
# By submodule, the state of the observers in it: the smallest and largest value at each place.
Ranges = Mapping[str, Mapping[str, Tensor]]


def with_autocast(batch: Batch, enabled: bool) -> Batch:
    """Return the batch with autocast to bfloat16, or with none."""
    return replace(batch, autocast=replace(batch.autocast, enabled=enabled, dtype=torch.bfloat16))


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A snapshot in one number format.

    Attributes:
        name: 'int8', 'bf16' or 'fp32'.
        builder: how it was made, for the journal.
        model: the snapshot.
        ranges: what it takes to make the same again without a batch.
    """

    name: str
    builder: str
    model: nn.Module
    ranges: Ranges = field(default_factory=dict)

    def read(self, taps: Sequence[str], batch: Batch) -> dict[str, Tensor]:
        """Return the activations [B, ...] of submodules in float32; see `captures`."""
        # The float32 snapshot runs under the autocast of the batch, as the model in training did.
        if self.name != "fp32":
            batch = with_autocast(batch, self.name == "bf16")
        own = batch.first_rows(None)  # a copy: a model may overwrite its input
        with kernels() if self.name == "int8" else nullcontext(), undisturbed(self.model):
            found = captures(self.model, taps, own)
        return {tap: activation.float() for tap, activation in found.items()}


def build(
    name: str, snapshot: nn.Module, taps: Sequence[str], batch: Batch | None, ranges: Ranges
) -> Format:
    """Return the snapshot in a number format.

    Args:
        name: of the format.
        snapshot: in float32; left as it is.
        taps: where activations will be read.
        batch: to find ranges of activations on; None to take `ranges`.
        ranges: those of an earlier build.

    Raises:
        Exception: of any type: it cannot be had in this format.
    """
    if name != "int8":
        return Format(name=name, builder=name, model=snapshot)
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in snapshot.parameters()):
        raise ValueError("not all weights are float32")
    with kept_random_state(snapshot), torch.no_grad():
        model = deepcopy(snapshot)
        with kernels():
            if len(_layers(model, _CONVOLUTIONS)) < len(_layers(model, (nn.Linear,))):
                return _dynamic(model)
            return _static(model, taps, batch, ranges)


def _layers(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """Return the submodules of these very types that compute what their class says."""
    found = ((name, module) for name, module in model.named_modules() if type(module) in kinds)
    return {name: module for name, module in found if not _is_altered(module)}


def _is_altered(module: nn.Module) -> bool:
    """Return whether weights are computed ahead of a call, or another `forward` is called."""
    return "forward" in vars(module) or bool(module._forward_pre_hooks) or is_parametrized(module)


def _dynamic(model: nn.Module) -> Format:
    toolkit = _toolkit()
    layers = dict.fromkeys(_layers(model, (nn.Linear,)), toolkit.per_channel_dynamic_qconfig)
    if not layers:
        raise ValueError("no layer has an int8 form")
    toolkit.quantize_dynamic(model, layers, inplace=True)
    return Format(name="int8", builder=f"int8, {len(layers)} linear layers, dynamic", model=model)


def _static(model: nn.Module, taps: Sequence[str], batch: Batch | None, ranges: Ranges) -> Format:
    parts = dict[str, nn.Module]()
    for name, module in model.named_modules():
        has_tap = not name or any(tap.startswith(f"{name}.") for tap in taps)
        is_inside = any(name.startswith(f"{part}.") for part in parts)
        is_altered = any(map(_is_altered, module.modules()))
        if has_tap or is_inside or is_altered or not _layers(module, _CONVOLUTIONS):
            continue
        with suppress(Exception):  # what cannot be traced gives way to the parts of it
            parts[name] = _prepare(module)
    if not parts:
        raise ValueError("no part of the model with a convolution can be traced")
    for name, part in parts.items():
        model.set_submodule(name, part)
    if batch is not None:
        own = with_autocast(batch.first_rows(None), False)
        with undisturbed(model), own.autocast.context():
            model(*own.args, **own.kwargs)
            # Here: observers are buffers, which get back what they had.
            ranges = {name: _ranges_of(part) for name, part in parts.items()}
    for name, part in parts.items():
        part.load_state_dict(ranges[name], strict=False)
        model.set_submodule(name, _toolkit().quantize_fx.convert_fx(part))
    builder = f"int8, {len(parts)} parts, static"
    return Format(name="int8", builder=builder, model=model, ranges=ranges)


def _ranges_of(part: nn.Module) -> dict[str, Tensor]:
    state = part.state_dict()
    return {key: state[key].clone() for key in state if key.endswith(("min_val", "max_val"))}


def _prepare(module: nn.Module) -> nn.Module:
    """Return the graph of a module with observers in it.

    Raises:
        Exception: of any type: it cannot be traced.
    """
    toolkit = _toolkit()
    # Sums of products with 8 bits on both sides would overflow 16 bits without VNNI.
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", bool)()
    activation = toolkit.MinMaxObserver.with_args(quant_min=0, quant_max=255 if has_vnni else 127)
    qconfig = toolkit.QConfig(activation, toolkit.default_per_channel_weight_observer)
    mapping = toolkit.get_default_qconfig_mapping(_ENGINE).set_global(qconfig)
    # A layer of torch itself would be traced into a function.
    root = nn.Sequential(module) if isinstance(module, _CONVOLUTIONS) else module
    graph: nn.Module = toolkit.quantize_fx.prepare_fx(root, mapping, ())
    return graph


def _toolkit() -> Any:
    """Import what torch deprecates: it takes a second, and a later torch may not have it."""
    importlib.import_module("torch.ao.quantization.quantize_fx")
    return importlib.import_module("torch.ao.quantization")


@contextmanager
def kernels() -> Iterator[None]:
    """Use our int8 kernels for the block, whatever engine the user chose, and in silence."""
    backend, graphs = cast(Any, (torch.backends.quantized, fx.config))
    before = backend.engine, graphs.do_not_emit_stack_traces
    # Where each node of a graph comes from is not looked up: that imports the compiler.
    backend.engine, graphs.do_not_emit_stack_traces = _ENGINE, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that they are deprecated
            yield
    finally:
        backend.engine, graphs.do_not_emit_stack_traces = before
