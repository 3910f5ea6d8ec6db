"""Detect pretrained weights from normalisation layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria.tree import own_part

COARSE_SHARE, FINE_SHARE = 0.2, 0.1
"""For a `modules.target_share` of None: plasticity judges layer modules one by one, so that few are
better; a plan for a pretrained model freezes many, each at its own time."""


def find_trained_norms(model: nn.Module) -> dict[str, bool]:
    """Return for each normalisation layer, by its dotted name, whether it was ever trained.

    They begin with all weights equal, 1 or 0, and with the statistics of no data. Parameters in
    parts are judged by the part of this process.
    """
    found = {name: list(_numbers(part)) for name, part in model.named_modules()}
    return {name: not all(map(_is_constant, own)) for name, own in found.items() if own}


def is_mostly_trained(norms: Mapping[str, bool]) -> bool:
    """Return whether most normalisation layers were trained before, so that this is fine-tuning."""
    return 2 * sum(norms.values()) > len(norms)


def settings_of_cut(settings: Mapping[str, Any], *, is_pretrained: bool) -> dict[str, Any]:
    """Return what `parse_modules` is given for settings of `[modules]`."""
    share = settings["target_share"]
    is_fine = share is None and is_pretrained
    share = share or (FINE_SHARE if is_fine else COARSE_SHARE)
    return {**settings, "target_share": share, "tables_apart": is_fine}


def _numbers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the weights and the statistics of what has `norm` in the name of its class."""
    if "norm" not in type(module).__name__.lower():
        return
    named = (getattr(module, name, None) for name in ("weight", "running_mean"))
    tensors = (values for values in named if isinstance(values, Tensor) and not values.is_meta)
    yield from (values for values in tensors if values.dim() == 1 and values.is_floating_point())


@torch.no_grad()
def _is_constant(values: Tensor) -> bool:
    part = own_part(values)
    return part.numel() == 0 or bool((part == part[0]).all())
