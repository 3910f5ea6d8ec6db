"""How far a layer module's activations have moved from the reference's: one number per evaluation.

A metric is a callable of the training and the reference activation, [B, ...] each, to one scalar.
Every metric is 0 for equal activations and grows with the difference; all arithmetic is float32.
One that compares samples with each other raises ValueError for fewer than two, and each does for
batches that differ in size. `Pwcca`, for analysis afterwards, is none of them: it needs thousands
of samples, over many batches.

Shape legend: B samples, C channels, H and W pixels, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from egeria.config.checks import require

SMALLEST_VARIANCE = 1e-10
"""Share of the largest variance under which a direction is rounding, as what duplicates of a neuron
differ by."""
Metric = Callable[[Tensor, Tensor], Tensor]
"""`metric(training, reference)`: activations of one module for the same batch; returns a 0-d
tensor."""


def sp_loss(training: Tensor, reference: Tensor) -> Tensor:
    """Return the similarity-preserving loss: the paper's plasticity (eq. 1).

    `||S_T - S_R||_F² / B²` with `S = G / ||rows of G||` and `G = A Aᵀ` [B, B]. Source: Tung and
    Mori, ICCV 2019. It compares how samples relate to each other, so that a rotation of the
    features changes nothing.
    """
    a_BD, r_BD = _rows(training, reference, at_least=2)
    return sp_loss_of_grams(gram(a_BD), gram(r_BD))


def sp_loss_of_grams(training: Tensor, reference: Tensor) -> Tensor:
    """Return `sp_loss` from the grams [B, B] of both activations."""
    _check_rows(training, reference, at_least=2)
    return (_similarities(training) - _similarities(reference)).square().sum() / training.shape[
        0
    ] ** 2


def relative_sp_loss(training: Tensor, reference: Tensor) -> Tensor:
    """Return the share of the similarities that changed: `||S_T - S_R||_F² / ||S_R -
    mean(S_R)||_F²`.

    `S` [B, B] as in `sp_loss`; `mean` is that of its rows. What is common to all samples is in
    every row of `S` and does not distinguish them, and how much it makes up differs a hundredfold
    between networks; divided by how much the rows vary, values of different networks and depths
    compare. Source: our own.
    """
    a_BD, r_BD = _rows(training, reference, at_least=2)
    return relative_sp_loss_of_grams(gram(a_BD), gram(r_BD))


def relative_sp_loss_of_grams(training: Tensor, reference: Tensor) -> Tensor:
    """Return `relative_sp_loss` from the grams [B, B] of both activations."""
    _check_rows(training, reference, at_least=2)
    a_BB, r_BB = _similarities(training), _similarities(reference)
    varied = (r_BB - r_BB.mean(dim=0)).square().sum()
    return (a_BB - r_BB).square().sum() / varied.clamp_min(1e-30)


def l2_distance(training: Tensor, reference: Tensor) -> Tensor:
    """Return the squared distance of the activations over the squared norm of the reference's."""
    a_BD, r_BD = _rows(training, reference)
    return (a_BD - r_BD).square().sum() / r_BD.square().sum().clamp_min(1e-30)


def cosine_distance(training: Tensor, reference: Tensor) -> Tensor:
    """Return one minus the cosine between the two activations of a sample,
    averaged over samples.
    """
    a_BD, r_BD = _rows(training, reference)
    # Half the squared distance of unit vectors: 1 - cos without its cancellation near 0.
    difference_BD = functional.normalize(a_BD, dim=1) - functional.normalize(r_BD, dim=1)
    return difference_BD.square().sum(dim=1).mean() / 2


def input_norm(training: Tensor, reference: Tensor) -> Tensor:
    """Return the mean absolute difference: Skip-Conv's input-norm gate, taken on activations.

    Source: Habibian et al., CVPR 2021; the rival metric in the paper's §6.1.
    """
    a_BD, r_BD = _rows(training, reference)
    return (a_BD - r_BD).abs().mean()


def linear_cka_distance(training: Tensor, reference: Tensor) -> Tensor:
    """Return one minus linear centred kernel alignment (Kornblith et al., ICML 2019)."""
    a_BD, r_BD = _rows(training, reference, at_least=2)
    # Half the squared distance of unit Gram matrices: 1 - alignment without its cancellation.
    return (_unit_centred_gram(a_BD) - _unit_centred_gram(r_BD)).square().sum() / 2


class Pwcca:
    """Projection-weighted canonical correlation between a layer and the same layer of the trained
    network, in pieces.

    The distance is `1 - sum(alpha_i rho_i) / sum(alpha_i)`: `rho_i` are the canonical correlations,
    and `alpha_i` tells how much of the trained layer lies along its canonical variate `h_i`: `sum_j
    |<h_i, x_j>|` over its neurons `x_j`. It is 0 where one is a linear map of the other, and not
    symmetric. Only sums of products are kept, in float64: `[D, D]`, whatever the number of samples.
    Neurons that do not vary, or that others make up, count for nothing.

    A neuron is a channel of a feature map [B, C, H, W], and the last dimension of any other shape;
    everything else are samples. Few samples correlate by chance: with 1.2 for each neuron two
    independent layers come to a distance of 0.12, with 50 to 0.88.

    Source: Morcos et al., NeurIPS 2018, section 2.2; figure 1 of the paper.

    Args:
        samples_per_neuron: fewer raise an error.
    """

    def __init__(self, samples_per_neuron: float = 50.0) -> None:
        self._samples_per_neuron = samples_per_neuron
        self._count = self._num_trained = 0
        self._shift: Tensor | None = None
        """What is subtracted from all samples, so that sums of squares lose no digits to a large
        mean."""
        self._sums: Tensor | None = None
        self._products: Tensor | None = None

    def add(self, training: Tensor, trained: Tensor) -> None:
        """Take in the activations of both for the same batch, [B, ...] each; their widths may
        differ.
        """
        x, y = (_neurons(activation) for activation in (trained, training))
        if len(x) != len(y):
            raise ValueError(
                f"both activations must have the same samples, found {len(y)} and {len(x)}"
            )
        self._num_trained = x.shape[1]
        both = torch.cat([x, y], dim=1)
        if self._shift is None or self._sums is None or self._products is None:
            self._shift = both.mean(dim=0)
            self._sums, self._products = (
                torch.zeros_like(self._shift),
                both.new_zeros(2 * both.shape[1:]),
            )
        both = both - self._shift
        self._count += len(both)
        self._sums += both.sum(dim=0)
        self._products += both.T @ both

    def distance(self) -> float:
        """Return the distance, 0 to 1.

        Raises:
            ValueError: there are too few samples, or no neuron of a layer varies.
        """
        num_neurons = (
            0 if self._sums is None else max(self._num_trained, len(self._sums) - self._num_trained)
        )
        if (
            self._sums is None
            or self._products is None
            or self._count < self._samples_per_neuron * num_neurons
        ):
            raise ValueError(
                f"PWCCA needs {self._samples_per_neuron:g} samples for each of {num_neurons} "
                "neurons, found "
                f"{self._count}. Give it more batches, or pool the neurons."
            )
        mean, cut = self._sums / self._count, self._num_trained
        covariance = self._products / self._count - torch.outer(mean, mean)
        roots, directions = _principal(covariance[:cut, :cut])
        other_roots, others = _principal(covariance[cut:, cut:])
        whitened = (directions / roots).T @ covariance[:cut, cut:] @ (others / other_roots)
        variates, correlations, _ = torch.linalg.svd(whitened, full_matrices=False)
        weights = (variates.T @ (directions * roots).T).abs().sum(dim=1)
        return float(1 - (weights * correlations.clamp(max=1)).sum() / weights.sum())


def pwcca(training: Tensor, trained: Tensor, samples_per_neuron: float = 50.0) -> float:
    """Return the distance of `Pwcca` for activations [B, ...] of one batch."""
    found = Pwcca(samples_per_neuron)
    found.add(training, trained)
    return found.distance()


def _neurons(activation: Tensor) -> Tensor:
    """Return samples by neurons [N, D], in float64."""
    if activation.dim() == 4:
        activation = activation.movedim(1, -1)
    return activation.detach().reshape(-1, activation.shape[-1]).double()


def _principal(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard deviations [R] along the principal directions [D, R] that vary, and
    these.
    """
    variances, directions = torch.linalg.eigh(covariance)
    varies = variances > SMALLEST_VARIANCE * variances[-1].clamp_min(
        torch.finfo(torch.float64).tiny
    )
    if not varies.any():
        raise ValueError("PWCCA needs neurons that vary, found none in a layer. Is it dead?")
    return variances[varies].sqrt(), directions[:, varies]


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
    # The order of the features does not matter to any metric here as long as both sides share it,
    # so a channels_last map is read in the order it lies in memory: a view instead of a strided
    # copy.
    if a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last):
        a = a.permute(0, 2, 3, 1)
    return a.reshape(a.shape[0], -1).float()


METRICS: dict[str, Metric] = {
    "sp": sp_loss,
    "relative_sp": relative_sp_loss,
    "l2": l2_distance,
    "cosine": cosine_distance,
    "input_norm": input_norm,
    "cka": linear_cka_distance,
}

GRAM_FORMS: dict[Metric, Metric] = {
    sp_loss: sp_loss_of_grams,
    relative_sp_loss: relative_sp_loss_of_grams,
}
"""The metrics that need no more than the grams of the two activations, and their form that takes
these."""


def find_metric(metric: Any) -> Metric:
    """Return the metric a setting means: a name, or a callable as it is."""
    if not isinstance(metric, str):
        return metric  # type: ignore[no-any-return]
    require(
        metric in METRICS,
        "plasticity.metric",
        f"{', '.join(map(repr, METRICS))} or a callable",
        metric,
    )
    return METRICS[metric]


def _rows(training: Tensor, reference: Tensor, at_least: int = 1) -> tuple[Tensor, Tensor]:
    _check_rows(training, reference, at_least)
    if training.stride() != reference.stride():
        reference, training = reference.contiguous(), training.contiguous()
    return flatten_rows(training), flatten_rows(reference)


def _check_rows(training: Tensor, reference: Tensor, at_least: int) -> None:
    if training.shape[0] != reference.shape[0] or training.shape[0] < at_least:
        raise ValueError(
            f"A metric compares two equal batches of at least {at_least} samples, found "
            f"{training.shape[0]} "
            f"and {reference.shape[0]}. Evaluate both models on the same batch."
        )


def _similarities(gram_BB: Tensor) -> Tensor:
    # A power of two changes no digit; without it the squares of very small or large entries leave
    # float32.
    exponent = gram_BB.diagonal().amax().frexp().exponent
    return functional.normalize(gram_BB.ldexp(-exponent), dim=1)


def _unit_centred_gram(a_BD: Tensor) -> Tensor:
    gram_BB = gram(a_BD - a_BD.mean(dim=0))
    return gram_BB / gram_BB.square().sum().sqrt().clamp_min(1e-30)
