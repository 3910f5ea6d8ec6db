"""Detect pretrained weights from normalisation layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria.tree import own_part

COARSE_SHARE, FINE_SHARE = 0.2, 0.1
"""What `modules.target_share` stands for where it is None: plasticity judges one layer module after
the other, so that few are better; a plan for a pretrained model freezes many at their own times."""


def find_trained_norms(model: nn.Module) -> dict[str, bool]:
    """Return for each normalisation layer, by its dotted name, whether it was ever trained.

    They begin with all weights equal, 1 or 0, and with the statistics of no data; training moves
    each number by itself. What is of torch or has `norm` in the name of its class counts.
    Parameters in parts are judged by the part of this process.
    """
    found = {
        name: [not _is_constant(values) for values in _numbers(part)]
        for name, part in model.named_modules()
    }
    return {name: any(signs) for name, signs in found.items() if signs}


def is_mostly_trained(norms: Mapping[str, bool]) -> bool:
    """Return whether most normalisation layers came trained, so that training on
    is a fine-tuning.
    """
    return 2 * sum(norms.values()) > len(norms)


def settings_of_cut(settings: Mapping[str, Any], *, is_pretrained: bool) -> dict[str, Any]:
    """Return what `parse_modules` is given for settings of `[modules]`."""
    share = settings["target_share"]
    is_fine = share is None and is_pretrained
    share = share or (FINE_SHARE if is_fine else COARSE_SHARE)
    return {**settings, "target_share": share, "tables_apart": is_fine}


def _numbers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the weights and the statistics of a normalisation layer."""
    if "norm" not in type(module).__name__.lower():
        return
    for values in (getattr(module, "weight", None), getattr(module, "running_mean", None)):
        if (
            isinstance(values, Tensor)
            and values.dim() == 1
            and values.is_floating_point()
            and not values.is_meta
        ):
            yield values


@torch.no_grad()
def _is_constant(values: Tensor) -> bool:
    part = own_part(values)
    return part.numel() == 0 or bool((part == part[0]).all())
