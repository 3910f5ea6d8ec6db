"""The snapshot: a float32 copy of the training model, what one small pass shows of it, and checks
against that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.errors import ReferenceModelError
from egeria.layers.batch import Autocast, Batch
from egeria.layers.copies import copies_of_computed, remove_ours, take_off_wrappers
from egeria.layers.taps import TapReachedError, capture
from egeria.layers.undisturbed import undisturbed
from egeria.random_state import kept_random_state
from egeria.reference.machine import Workload

_MOST_ERROR = 0.5
_LEAST_SHARE = 1e-3
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_LARGE_ROW = 100_000
_CHEAP_PRODUCTS = 2e8

Readings = Mapping[str, Tensor | None]


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def refresh_snapshot(
    snapshot: nn.Module | None, model: nn.Module, device: torch.device
) -> nn.Module:
    """Return a snapshot of the model as it is now: the same object, unless shapes have changed (a
    buffer may grow).

    Parameters and buffers follow the model; numbers that a loop keeps in plain attributes (an
    annealed coefficient, a count of steps) stay as they were when the copy was made.
    """
    shapes = [tensor.shape for tensor in tensors_of(model)]
    if snapshot is not None and [tensor.shape for tensor in tensors_of(snapshot)] == shapes:
        with torch.no_grad():
            for mine, theirs in zip(tensors_of(snapshot), tensors_of(model), strict=True):
                mine.copy_(theirs)
        return snapshot
    try:
        with kept_random_state(model):  # a model's own `__deepcopy__` may rebuild itself
            copied = copy.deepcopy(model, copies_of_computed(model)).requires_grad_(False)
    except Exception as error:
        raise ReferenceModelError(
            f"The reference is a deep copy of the model, which {type(model).__name__} does not "
            f"allow: {error}. "
            f"Give it a `__deepcopy__`, or keep what cannot be copied out of its attributes."
        ) from error
    remove_ours(copied)
    take_off_wrappers(copied)
    return copied.to(device)


def run_to(model: nn.Module, tap: str, batch: Batch) -> Tensor | None:
    """Return the output of a submodule of a model of our own, running it no further; None if it
    gives no tensor.
    """
    with undisturbed(model):
        return capture(
            model, tap, batch.first_rows(None)
        )  # a copy: a model may overwrite its input


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
    """Return the setting for plain float32; enabled, it is that for bf16."""
    return Autocast(device_type=device_type, enabled=False, dtype=torch.bfloat16)


def survey_model(model: nn.Module, taps: Sequence[str], batch: Batch) -> Survey:
    """Run the model once on a few rows; on all of them where that costs little, or it cannot do
    with fewer.
    """
    batch = replace(batch, autocast=in_fp32(batch.autocast.device_type))
    # Two rows, or one where a sample is as large as an image of 224 pixels and takes as long.
    sizes = [
        tensor[0].numel() for tensor in tree.leaves(batch.arguments) if tensor.dim() and len(tensor)
    ]
    few = batch.first_rows(1 if max(sizes, default=0) > _LARGE_ROW else 2)
    try:
        survey = _survey(model, taps, few)
    except Exception:  # a graph, say, is no graph without half its nodes
        return _survey(model, taps, batch)
    num_rows = _count_rows(batch)
    is_whole = num_rows == _count_rows(few)
    return (
        survey
        if is_whole or survey.products_per_row * num_rows > _CHEAP_PRODUCTS
        else _survey(model, taps, batch)
    )


def _survey(model: nn.Module, taps: Sequence[str], batch: Batch) -> Survey:
    products = {True: 0, False: 0}

    def count(module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            weight: Any = module.weight
            products[isinstance(module, _CONVOLUTIONS)] += output.numel() * weight[0].numel()

    layers = [
        module for module in model.modules() if isinstance(module, (*_CONVOLUTIONS, nn.Linear))
    ]
    readings = read_taps(
        model, {tap: tap for tap in taps}, batch, [(layer, count) for layer in layers]
    )
    workload: Workload = "convolutions" if products[True] > products[False] else "matrix products"
    return Survey(batch, workload, sum(products.values()) / max(_count_rows(batch), 1), readings)


def _count_rows(batch: Batch) -> int:
    return next((tensor.shape[0] for tensor in tree.leaves(batch.arguments) if tensor.dim()), 1)


def read_taps(
    model: nn.Module,
    taps: Mapping[str, str],
    batch: Batch,
    hooks: Sequence[tuple[nn.Module, Any]] = (),
) -> Readings:
    """Return what every tap gives in one forward pass, which runs to the end only for other
    `hooks`.
    """
    readings: dict[str, Tensor | None] = dict.fromkeys(taps)

    def keep(tap: str, _module: nn.Module, _args: Any, output: Any) -> None:
        activation = tree.first_activation(output)
        if activation is not None and readings[tap] is None:
            readings[tap] = activation.detach().clone()
            if not hooks and all(reading is not None for reading in readings.values()):
                raise TapReachedError

    batch = batch.first_rows(None)
    with (
        undisturbed(model),
        ExitStack() as handles,
        batch.autocast.context(),
        suppress(TapReachedError),
    ):
        for module, hook in (
            *hooks,
            *((model.get_submodule(path), partial(keep, tap)) for tap, path in taps.items()),
        ):
            handles.enter_context(module.register_forward_hook(hook))
        model(*batch.args, **batch.kwargs)
    return readings


def check_readings(readings: Readings, survey: Survey, *, is_fp32: bool) -> None:
    """Raise a ValueError unless every tap gives what it gives in float32, but for rounding.

    Float32 itself may give other values: the others are measured by it, random numbers included.
    """
    sizes = {
        tap: _size(expected) for tap, expected in survey.readings.items() if expected is not None
    }
    largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    for tap, expected in survey.readings.items():
        found = readings[tap]
        if found is None or expected is None:
            if found is not expected:
                raise ValueError(
                    f"{tap} gives {'a' if expected is None else 'no'} tensor, unlike in float32"
                )
            continue
        if found.shape != expected.shape:
            raise ValueError(
                f"{tap} has the shape {list(found.shape)}, and {list(expected.shape)} in float32"
            )
        if expected.isfinite().all() and not found.isfinite().all():
            raise ValueError(f"{tap} is not finite")
        # All but zero beside the other taps, there are no digits to compare; nor are there in what
        # overflows.
        if not is_fp32 and _LEAST_SHARE * largest < sizes[tap] < math.inf:
            error = _size(found.double() - expected.double()) / sizes[tap]
            if error > _MOST_ERROR:
                raise ValueError(f"{tap} differs from float32 by {error:.0%}")


def _size(tensor: Tensor) -> float:
    """Return the root of the mean square."""
    return math.sqrt(float(tensor.double().square().mean())) if tensor.numel() else 0.0
