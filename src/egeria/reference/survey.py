"""What one small forward pass of the snapshot tells: where the work is, and what every tap gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Autocast, Batch
from egeria.layers.undisturbed import undisturbed
from egeria.reference.machine import Workload
from egeria.reference.randomness import random_states

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
    args, kwargs = tree.map_tensors(lambda tensor: tensor.to(device), tree.detach((batch.args, dict(batch.kwargs))))
    kind = torch.device(device).type
    autocast = batch.autocast if batch.autocast.device_type == kind else in_fp32(kind)
    return replace(batch, args=args, kwargs=kwargs, autocast=autocast)


def in_fp32(device_type: str) -> Autocast:
    """Return the setting for plain float32."""
    return Autocast(device_type=device_type, enabled=False, dtype=torch.bfloat16)


def in_bf16(device_type: str) -> Autocast:
    """Return the setting for bf16."""
    return Autocast(device_type=device_type, enabled=True, dtype=torch.bfloat16)


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
            before = random_states(model)
            readings, outputs = _read(model, taps, batch, to_the_end=True)
            draws = random_states(model) != before
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
    """Ends a forward pass behind the last tap; a BaseException, so that no handler in a model swallows it."""


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

    args, kwargs = tree.map_tensors(torch.clone, (batch.args, dict(batch.kwargs)))
    hooks = [(model.get_submodule(path), keeper(tap)) for tap, path in taps.items()]
    with _hooked(hooks), batch.autocast.context(), suppress(_EnoughError):
        return readings, tuple(tree.leaves(model(*args, **kwargs)))
    return readings, ()


@contextmanager
def _hooked(hooks: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
