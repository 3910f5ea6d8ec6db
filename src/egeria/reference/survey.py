"""What one small forward pass of the snapshot shows: where the work is, what every tap gives; checks against that."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Autocast, Batch
from egeria.layers.undisturbed import random_fingerprint, undisturbed

Workload = Literal["convolutions", "matrix products"]

_MOST_ERROR = 0.5
_LEAST_SHARE = 1e-3
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_LARGE_ROW = 100_000
_CHEAP_PRODUCTS = 2e8


@dataclass(frozen=True, slots=True)
class Survey:
    """A small batch that the snapshot can run, and what came of it."""

    batch: Batch
    workload: Workload
    products_per_row: float
    """Multiplications of convolutions and linear layers for one sample."""
    readings: Mapping[str, Tensor | None]
    """What the snapshot gives at every tap for the batch."""
    outputs: tuple[Tensor, ...]
    """The tensors of what it returns."""
    draws_random_numbers: bool
    """Whether they may be others the next time."""


def on_device(batch: Batch, device: str) -> Batch:
    """Return the batch on a device; the mixed precision of another type of device means nothing there."""
    args, kwargs = tree.map_tensors(lambda tensor: tensor.detach().to(device), (batch.args, dict(batch.kwargs)))
    kind = torch.device(device).type
    autocast = batch.autocast if batch.autocast.device_type == kind else in_fp32(kind)
    return replace(batch, args=args, kwargs=kwargs, autocast=autocast)


def in_fp32(device_type: str) -> Autocast:
    """Return the setting for plain float32."""
    return Autocast(device_type=device_type, enabled=False, dtype=torch.bfloat16)


def survey_model(model: nn.Module, taps: Mapping[str, str], batch: Batch) -> Survey:
    """Run the model once on a few rows; on all of them where that costs little, or it cannot do with fewer.

    Args:
        model: the snapshot.
        taps: for each tap, the submodule to read.
        batch: a training batch.
    """
    batch = replace(batch, autocast=in_fp32(batch.autocast.device_type))
    few = batch.first_rows(_num_rows(batch))
    try:
        survey = _survey(model, taps, few)
    except Exception:  # a graph, say, is no graph without half its nodes
        return _survey(model, taps, batch)
    num_rows = _count_rows(batch)
    is_whole = num_rows == _count_rows(few)
    return survey if is_whole or survey.products_per_row * num_rows > _CHEAP_PRODUCTS else _survey(model, taps, batch)


def _num_rows(batch: Batch) -> int:
    """Return two, or one where a sample is as large as an image of 224 pixels and takes as long."""
    sizes = [
        tensor[0].numel() for tensor in tree.leaves((batch.args, dict(batch.kwargs))) if tensor.dim() and len(tensor)
    ]
    return 1 if max(sizes, default=0) > _LARGE_ROW else 2


def _survey(model: nn.Module, taps: Mapping[str, str], batch: Batch) -> Survey:
    products = {True: 0, False: 0}

    def count(module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            weight: Any = module.weight
            products[isinstance(module, _CONVOLUTIONS)] += output.numel() * weight[0].numel()

    with undisturbed(model):
        layers = [module for module in model.modules() if isinstance(module, (*_CONVOLUTIONS, nn.Linear))]
        with _hooked([(layer, count) for layer in layers]):
            before = random_fingerprint(model)
            readings, outputs = _read(model, taps, batch, to_the_end=True)
            draws = random_fingerprint(model) != before
    workload: Workload = "convolutions" if products[True] > products[False] else "matrix products"
    return Survey(batch, workload, sum(products.values()) / max(_count_rows(batch), 1), readings, outputs, draws)


def _count_rows(batch: Batch) -> int:
    return next((tensor.shape[0] for tensor in tree.leaves((batch.args, dict(batch.kwargs))) if tensor.dim()), 1)


def read_taps(model: nn.Module, taps: Mapping[str, str], batch: Batch) -> dict[str, Tensor | None]:
    """Return what every tap gives in one forward pass, None for those that give no tensor.

    Args:
        model: a model of our own.
        taps: for each tap, the submodule to read.
        batch: the batch, with the autocast to run under.
    """
    with undisturbed(model):
        return _read(model, taps, batch)[0]


class _EnoughError(BaseException):
    """Ends a forward pass after the last tap; a BaseException, so that no handler in a model swallows it."""


def _read(
    model: nn.Module, taps: Mapping[str, str], batch: Batch, *, to_the_end: bool = False
) -> tuple[dict[str, Tensor | None], tuple[Tensor, ...]]:
    readings: dict[str, Tensor | None] = dict.fromkeys(taps)

    def keeper(tap: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            activation = tree.first_activation(output)
            if activation is not None and readings[tap] is None:
                readings[tap] = activation.detach().clone()
                if not to_the_end and all(reading is not None for reading in readings.values()):
                    raise _EnoughError

        return keep

    batch = batch.first_rows(None)  # a copy: a model may overwrite its input
    hooks = [(model.get_submodule(path), keeper(tap)) for tap, path in taps.items()]
    with _hooked(hooks), batch.autocast.context(), suppress(_EnoughError):
        return readings, tuple(tree.leaves(model(*batch.args, **batch.kwargs)))
    return readings, ()


@contextmanager
def _hooked(hooks: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_readings(readings: Mapping[str, Tensor | None], survey: Survey, *, is_fp32: bool) -> None:
    """Raise unless every tap gives what it gives in float32, but for rounding.

    Args:
        readings: activations [B, ...] of a number format at all taps, for the survey's batch.
        survey: of the snapshot.
        is_fp32: whether the format is float32, by which the others are measured, random numbers included.

    Raises:
        ValueError: a tensor is missing, has another shape, is not finite or is another one altogether.
    """
    largest = _largest_size(survey)
    for tap, expected in survey.readings.items():
        found = readings[tap]
        _require_same_shape(tap, found, expected)
        if found is not None and expected is not None and not is_fp32:
            _require_close(tap, found, expected, _LEAST_SHARE * largest)


def _require_same_shape(tap: str, found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        if found is not expected:
            raise ValueError(f"{tap} gives {'a' if expected is None else 'no'} tensor, unlike in float32")
    elif found.shape != expected.shape:
        raise ValueError(f"{tap} has the shape {list(found.shape)}, and {list(expected.shape)} in float32")
    elif expected.isfinite().all() and not found.isfinite().all():
        raise ValueError(f"{tap} is not finite")


def _require_close(tap: str, found: Tensor, expected: Tensor, least_size: float) -> None:
    size = _size(expected)
    # All but zero beside the other taps, there are no digits to compare; nor are there in what overflows.
    if size <= least_size or not math.isfinite(size):
        return
    error = _size(found.double() - expected.double()) / size
    if error > _MOST_ERROR:
        raise ValueError(f"{tap} differs from float32 by {error:.0%}")


def _largest_size(survey: Survey) -> float:
    sizes = (_size(tensor) for tensor in survey.readings.values() if tensor is not None)
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _size(tensor: Tensor) -> float:
    """Return the root of the mean square."""
    return math.sqrt(float(tensor.double().square().mean())) if tensor.numel() else 0.0


def brief(error: Exception) -> str:
    """Return the error in one line."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line[:200]}"


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
