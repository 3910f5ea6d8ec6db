"""Plasticity: how far a layer module's activations have moved from the reference's.

One number for each evaluation, 0 for equal activations, in float32.

Shape legend: B samples, C channels, H and W pixels, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def sp_loss(training: Tensor, reference: Tensor) -> Tensor:
    """Return the similarity-preserving loss: the paper's plasticity (eq. 1).

    `||S_T - S_R||_F² / B²` with `S = G / ||rows of G||` and `G = A Aᵀ` [B, B]. Source: Tung and
    Mori, ICCV 2019. It compares how samples relate to each other, so that a rotation of the
    features changes nothing.
    """
    a_BD, r_BD = _rows(training, reference)
    return sp_loss_of_grams(gram(a_BD), gram(r_BD))


def sp_loss_of_grams(training: Tensor, reference: Tensor) -> Tensor:
    """Return `sp_loss` from the grams [B, B] of both activations."""
    _check_rows(training, reference)
    return (_similarities(training) - _similarities(reference)).square().sum() / training.shape[
        0
    ] ** 2


def gram(a_BD: Tensor) -> Tensor:
    """Return the inner products [B, B] of the rows [B, D], in the precision of the activation."""
    # A loop may call `run.step` under autocast, which would round these products to 16 bits.
    with torch.autocast(a_BD.device.type, enabled=False):
        return a_BD @ a_BD.T


def pool_map(a: Tensor, largest_map: int) -> Tensor:
    """Average-pool a feature map until neither side exceeds `largest_map` pixels by a factor of
    two.

    Args:
        a: activation; only the shape [B, C, H, W] is pooled, any other comes back as it is.
        largest_map: side in pixels.
    """
    # The SP loss keeps its curve under pooling by 2 (log-correlation 1.000) and 4 (0.998) at a
    # fraction of the cost.
    if a.dim() != 4:
        return a
    factor = 1
    while max(a.shape[2:]) // (factor * 2) >= largest_map:
        factor *= 2
    factor = min(factor, *a.shape[2:])
    return a if factor == 1 else functional.avg_pool2d(a, factor)


def flatten_rows(a: Tensor) -> Tensor:
    """Return the activation [B, ...] as float32 rows [B, D]."""
    # The order of the features does not matter as long as both sides share it,
    # so a channels_last map is read in the order it lies in memory: a view instead of a strided
    # copy.
    if a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last):
        a = a.permute(0, 2, 3, 1)
    return a.reshape(a.shape[0], -1).float()


def _rows(training: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    _check_rows(training, reference)
    if training.stride() != reference.stride():
        reference, training = reference.contiguous(), training.contiguous()
    return flatten_rows(training), flatten_rows(reference)


def _check_rows(training: Tensor, reference: Tensor) -> None:
    if training.shape[0] != reference.shape[0] or training.shape[0] < 2:
        raise ValueError(
            f"The SP loss compares two equal batches of at least 2 samples, found "
            f"{training.shape[0]} and {reference.shape[0]}. Evaluate both models on the same batch."
        )


def _similarities(gram_BB: Tensor) -> Tensor:
    # A power of two changes no digit; without it the squares of very small or large entries leave
    # float32.
    exponent = gram_BB.diagonal().amax().frexp().exponent
    return functional.normalize(gram_BB.ldexp(-exponent), dim=1)
