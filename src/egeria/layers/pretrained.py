"""Telling what came trained from what begins at random, by what training never leaves as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from egeria.layers.atoms import is_under
from egeria.layers.modules import LayerModule
from egeria.layers.shards import own_part

COARSE_SHARE, FINE_SHARE = 0.2, 0.1
"""What `modules.target_share` stands for where it is None: plasticity judges one layer module after
the other, so that few are better; the worth of many is measured at once, so that more can freeze at
their own time."""


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


def count_pretrained(norms: Mapping[str, bool], modules: Sequence[LayerModule]) -> int:
    """Return how many front layer modules came trained.

    Args:
        norms: of `find_trained_norms`, before the training.
        modules: front to back. One without normalisation is like the next behind it that has some;
            where none has, nothing is known to be trained.
    """
    found = [
        [
            is_trained
            for name, is_trained in norms.items()
            if any(name == at or is_under(name, at) for at in m.submodules)
        ]
        for m in modules
    ]
    count = 0
    while count < len(found) and any(next((signs for signs in found[count:] if signs), ())):
        count += 1
    return count


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
