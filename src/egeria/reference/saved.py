"""Batches as plain values and tensors, for a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from egeria import tree
from egeria.layers.batch import Autocast, Batch
from egeria.reference.survey import on_device


def copied(batch: Batch, autocast: Autocast) -> Batch:
    """Return a copy that a model may overwrite, to be run under another setting."""
    args, kwargs = tree.map_tensors(torch.clone, (batch.args, dict(batch.kwargs)))
    return replace(batch, args=args, kwargs=kwargs, autocast=autocast)


def pack(batch: Batch | None) -> dict[str, Any] | None:
    """Return the batch as a dictionary."""
    if batch is None:
        return None
    autocast = batch.autocast
    return {
        "args": batch.args,
        "kwargs": dict(batch.kwargs),
        "device_type": autocast.device_type,
        "enabled": autocast.enabled,
        "dtype": str(autocast.dtype).removeprefix("torch."),
    }


def unpack(entry: dict[str, Any] | None, device: str) -> Batch | None:
    """Return the batch that `pack` was given, on a device."""
    if entry is None:
        return None
    dtype = getattr(torch, entry["dtype"])
    autocast = Autocast(device_type=entry["device_type"], enabled=entry["enabled"], dtype=dtype)
    return on_device(Batch(args=entry["args"], kwargs=entry["kwargs"], autocast=autocast), device)
