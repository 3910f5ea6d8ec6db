"""What one small forward pass of the snapshot shows: where the work is, what every tap gives; checks against that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Autocast, Batch
from egeria.layers.taps import TapReachedError
from egeria.layers.undisturbed import undisturbed
from egeria.reference.machine import Workload

_MOST_ERROR = 0.5
_LEAST_SHARE = 1e-3
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_LARGE_ROW = 100_000
_CHEAP_PRODUCTS = 2e8

Readings = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Survey:
    """A small batch that the snapshot can run, and what came of it."""

    batch: Batch
    workload: Workload
    products_per_row: float
    """Multiplications of convolutions and linear layers for one sample."""
    readings: Readings
    """What the snapshot gives at every tap for the batch."""


def in_fp32(device_type: str) -> Autocast:
    """Return the setting for plain float32."""
    return Autocast(device_type=device_type, enabled=False, dtype=torch.bfloat16)


def on_device(batch: Batch, device: str) -> Batch:
    """Return the batch on a device; the mixed precision of another type of device means nothing there."""
    kind = torch.device(device).type
    autocast = batch.autocast if batch.autocast.device_type == kind else in_fp32(kind)
    return replace(batch.on(device), autocast=autocast)


def survey_model(model: nn.Module, taps: Sequence[str], batch: Batch) -> Survey:
    """Run the model once on a few rows; on all of them where that costs little, or it cannot do with fewer."""
    batch = replace(batch, autocast=in_fp32(batch.autocast.device_type))
    # Two rows, or one where a sample is as large as an image of 224 pixels and takes as long.
    sizes = [tensor[0].numel() for tensor in _inputs(batch) if tensor.dim() and len(tensor)]
    few = batch.first_rows(1 if max(sizes, default=0) > _LARGE_ROW else 2)
    try:
        survey = _survey(model, taps, few)
    except Exception:  # a graph, say, is no graph without half its nodes
        return _survey(model, taps, batch)
    num_rows = _count_rows(batch)
    is_whole = num_rows == _count_rows(few)
    return survey if is_whole or survey.products_per_row * num_rows > _CHEAP_PRODUCTS else _survey(model, taps, batch)


def _survey(model: nn.Module, taps: Sequence[str], batch: Batch) -> Survey:
    products = {True: 0, False: 0}

    def count(module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            weight: Any = module.weight
            products[isinstance(module, _CONVOLUTIONS)] += output.numel() * weight[0].numel()

    with undisturbed(model), ExitStack() as handles:
        for module in model.modules():
            if isinstance(module, (*_CONVOLUTIONS, nn.Linear)):
                handles.enter_context(module.register_forward_hook(count))
        readings = _read(model, {tap: tap for tap in taps}, batch, to_the_end=True)
    workload: Workload = "convolutions" if products[True] > products[False] else "matrix products"
    return Survey(batch, workload, sum(products.values()) / max(_count_rows(batch), 1), readings)


def _inputs(batch: Batch) -> list[Tensor]:
    return list(tree.leaves((batch.args, dict(batch.kwargs))))


def _count_rows(batch: Batch) -> int:
    return next((tensor.shape[0] for tensor in _inputs(batch) if tensor.dim()), 1)


def read_taps(model: nn.Module, taps: Mapping[str, str], batch: Batch) -> Readings:
    """Return what every tap gives in one forward pass, None for those that give no tensor.

    Args:
        model: a model of our own.
        taps: for each tap, the submodule to read.
        batch: the batch, with the autocast to run under.
    """
    with undisturbed(model):
        return _read(model, taps, batch)


def _read(model: nn.Module, taps: Mapping[str, str], batch: Batch, *, to_the_end: bool = False) -> Readings:
    readings: dict[str, Tensor | None] = dict.fromkeys(taps)

    def keeper(tap: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            activation = tree.first_activation(output)
            if activation is not None and readings[tap] is None:
                readings[tap] = activation.detach().clone()
                if not to_the_end and all(reading is not None for reading in readings.values()):
                    raise TapReachedError

        return keep

    batch = batch.first_rows(None)  # a copy: a model may overwrite its input
    with ExitStack() as handles, batch.autocast.context(), suppress(TapReachedError):
        for tap, path in taps.items():
            handles.enter_context(model.get_submodule(path).register_forward_hook(keeper(tap)))
        model(*batch.args, **batch.kwargs)
    return readings


def check_readings(readings: Readings, survey: Survey, *, is_fp32: bool) -> None:
    """Raise unless every tap gives what it gives in float32, but for rounding.

    Args:
        readings: activations [B, ...] of a number format at all taps, for the survey's batch.
        survey: of the snapshot.
        is_fp32: whether the format is float32, by which the others are measured, random numbers included.

    Raises:
        ValueError: a tensor is missing, has another shape, is not finite or is another one altogether.
    """
    sizes = {tap: _size(expected) for tap, expected in survey.readings.items() if expected is not None}
    largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    for tap, expected in survey.readings.items():
        found = readings[tap]
        if found is None or expected is None:
            if found is not expected:
                raise ValueError(f"{tap} gives {'a' if expected is None else 'no'} tensor, unlike in float32")
            continue
        if found.shape != expected.shape:
            raise ValueError(f"{tap} has the shape {list(found.shape)}, and {list(expected.shape)} in float32")
        if expected.isfinite().all() and not found.isfinite().all():
            raise ValueError(f"{tap} is not finite")
        # All but zero beside the other taps, there are no digits to compare; nor are there in what overflows.
        if not is_fp32 and _LEAST_SHARE * largest < sizes[tap] < math.inf:
            error = _size(found.double() - expected.double()) / sizes[tap]
            if error > _MOST_ERROR:
                raise ValueError(f"{tap} differs from float32 by {error:.0%}")


def _size(tensor: Tensor) -> float:
    """Return the root of the mean square."""
    return math.sqrt(float(tensor.double().square().mean())) if tensor.numel() else 0.0
