"""Plasticity: how far a layer module's activations have moved from the reference's.

One number for each evaluation, 0 for equal activations, in float32.

Shape legend: B samples, C channels, H and W pixels, D features.
"""

import torch
from torch import Tensor
from torch.nn import functional


def sp_loss(training: Tensor, reference: Tensor) -> Tensor:
    """Return the similarity-preserving loss of two activations [B, ...]: the paper's plasticity.

    `||S_T - S_R||_F² / B²` with `S = G / ||rows of G||` and `G = A Aᵀ` [B, B] (eq. 1). It compares
    how samples relate to each other: a rotation of the features changes nothing. Source: Tung and
    Mori, ICCV 2019.

    Raises:
        ValueError: they differ in B, or B is under 2.
    """
    return sp_loss_of_grams(gram(training), gram(reference))


def sp_loss_of_grams(training_BB: Tensor, reference_BB: Tensor) -> Tensor:
    """Return `sp_loss` from the grams of both activations."""
    num_rows = len(training_BB)
    if num_rows != len(reference_BB) or num_rows < 2:
        what = "The SP loss compares equal batches of 2 samples or more"
        found = f"found {num_rows} and {len(reference_BB)}. Evaluate both models on the same batch."
        raise ValueError(f"{what}, {found}")
    return (_similarities(training_BB) - _similarities(reference_BB)).square().sum() / num_rows**2


def gram(a: Tensor) -> Tensor:
    """Return the inner products [B, B] of the samples of an activation [B, ...], in float32."""
    a_BD = a.flatten(1).float()
    # A loop may call `run.step` under autocast, which would round these products to 16 bits.
    with torch.autocast(a_BD.device.type, enabled=False):
        return a_BD @ a_BD.T


def pool_map(a: Tensor, largest_map: int) -> Tensor:
    """Average-pool a feature map [B, C, H, W] until no side has `2 * largest_map` pixels or more.

    An activation of another shape comes back as it is.
    """
    # The SP loss keeps its curve under pooling by 2 (log-correlation 1.000) and 4 (0.998).
    if a.dim() != 4:
        return a
    factor = 1
    while max(a.shape[2:]) // (factor * 2) >= largest_map:
        factor *= 2
    factor = min(factor, *a.shape[2:])
    return a if factor == 1 else functional.avg_pool2d(a, factor)


def _similarities(gram_BB: Tensor) -> Tensor:
    # A power of two changes no digit; without it squares of small or large entries leave float32.
    return functional.normalize(gram_BB.ldexp(-gram_BB.diagonal().amax().frexp().exponent), dim=1)
