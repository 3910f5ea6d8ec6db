"""How far the activations of one layer are from those of another, for the same samples.

Each distance is a callable of both activations, [B, ...] each, returns a 0-d tensor, and is 0 for equal ones; all
arithmetic is float32. `Pwcca` is none of them: it needs thousands of samples, over many batches. The library has the
paper's metric, the SP loss.

Shape legend: B samples, C channels, H and W pixels, D features, N samples of neurons, R directions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SMALLEST_VARIANCE = 1e-10
"""Share of the largest variance under which a direction is rounding, as what duplicates of a neuron differ by."""


def l2_distance(training: Tensor, reference: Tensor) -> Tensor:
    """Return the squared distance of the activations over the squared norm of the reference's."""
    a_BD, r_BD = _rows(training, reference)
    return (a_BD - r_BD).square().sum() / r_BD.square().sum().clamp_min(1e-30)


def cosine_distance(training: Tensor, reference: Tensor) -> Tensor:
    """Return one minus the cosine between the two activations of a sample, averaged over samples."""
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
    """Projection-weighted canonical correlation between a layer and the same layer of the trained network, in pieces.

    The distance is `1 - sum(alpha_i rho_i) / sum(alpha_i)`: `rho_i` are the canonical correlations, and `alpha_i` tells
    how much of the trained layer lies along its canonical variate `h_i`: `sum_j |<h_i, x_j>|` over its neurons `x_j`.
    It is 0 where one is a linear map of the other, and not symmetric. Only sums of products are kept, in float64:
    `[D, D]`, whatever the number of samples. Neurons that do not vary, or that others make up, count for nothing.

    A neuron is a channel of a feature map [B, C, H, W], and the last dimension of any other shape; everything else are
    samples. Few samples correlate by chance: with 1.2 for each neuron two independent layers come to a distance of
    0.12, with 50 to 0.88.

    Source: Morcos et al., NeurIPS 2018, section 2.2; figure 1 of the paper.

    Args:
        samples_per_neuron: fewer raise an error.
    """

    def __init__(self, samples_per_neuron: float = 50.0) -> None:
        self._samples_per_neuron = samples_per_neuron
        self._count = self._num_trained = 0
        self._shift: Tensor | None = None
        """What is subtracted from all samples, so that sums of squares lose no digits to a large mean."""
        self._sums: Tensor | None = None
        self._products: Tensor | None = None

    def add(self, training: Tensor, trained: Tensor) -> None:
        """Take in the activations of both for the same batch, [B, ...] each; their widths may differ."""
        x, y = (_neurons(activation) for activation in (trained, training))
        if len(x) != len(y):
            raise ValueError(f"both activations must have the same samples, found {len(y)} and {len(x)}")
        self._num_trained = x.shape[1]
        both = torch.cat([x, y], dim=1)
        if self._shift is None or self._sums is None or self._products is None:
            self._shift = both.mean(dim=0)
            self._sums, self._products = torch.zeros_like(self._shift), both.new_zeros(2 * both.shape[1:])
        both = both - self._shift
        self._count += len(both)
        self._sums += both.sum(dim=0)
        self._products += both.T @ both

    def distance(self) -> float:
        """Return the distance, 0 to 1.

        Raises:
            ValueError: there are too few samples, or no neuron of a layer varies.
        """
        num_neurons = 0 if self._sums is None else max(self._num_trained, len(self._sums) - self._num_trained)
        if self._sums is None or self._products is None or self._count < self._samples_per_neuron * num_neurons:
            raise ValueError(
                f"PWCCA needs {self._samples_per_neuron:g} samples for each of {num_neurons} neurons, found "
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
    """Return the standard deviations [R] along the principal directions [D, R] that vary, and these."""
    variances, directions = torch.linalg.eigh(covariance)
    varies = variances > SMALLEST_VARIANCE * variances[-1].clamp_min(torch.finfo(torch.float64).tiny)
    if not varies.any():
        raise ValueError("PWCCA needs neurons that vary, found none in a layer. Is it dead?")
    return variances[varies].sqrt(), directions[:, varies]


def gram(a_BD: Tensor) -> Tensor:
    """Return the inner products [B, B] of the rows [B, D], in the precision of the activation."""
    # A loop may call `run.step` under autocast, which would round these products to 16 bits.
    with torch.autocast(a_BD.device.type, enabled=False):
        return a_BD @ a_BD.T


def pool_map(a: Tensor, largest_map: int) -> Tensor:
    """Average-pool a feature map until neither side exceeds `largest_map` pixels by a factor of two.

    Args:
        a: activation; only the shape [B, C, H, W] is pooled, any other comes back as it is.
        largest_map: side in pixels.
    """
    # The SP loss keeps its curve under pooling by 2 (log-correlation 1.000) and 4 (0.998) at a fraction of the cost.
    if a.dim() != 4:
        return a
    factor = 1
    while max(a.shape[2:]) // (factor * 2) >= largest_map:
        factor *= 2
    factor = min(factor, *a.shape[2:])
    return a if factor == 1 else functional.avg_pool2d(a, factor)


def flatten_rows(a: Tensor) -> Tensor:
    """Return the activation [B, ...] as float32 rows [B, D]."""
    # The order of the features does not matter to any metric here as long as both sides share it, so a
    # channels_last map is read in the order it lies in memory: a view instead of a strided copy.
    if a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last):
        a = a.permute(0, 2, 3, 1)
    return a.reshape(a.shape[0], -1).float()


def _rows(training: Tensor, reference: Tensor, at_least: int = 1) -> tuple[Tensor, Tensor]:
    _check_rows(training, reference, at_least)
    if training.stride() != reference.stride():
        reference, training = reference.contiguous(), training.contiguous()
    return flatten_rows(training), flatten_rows(reference)


def _check_rows(training: Tensor, reference: Tensor, at_least: int) -> None:
    if training.shape[0] != reference.shape[0] or training.shape[0] < at_least:
        raise ValueError(
            f"A metric compares two equal batches of at least {at_least} samples, found {training.shape[0]} "
            f"and {reference.shape[0]}. Evaluate both models on the same batch."
        )


def _unit_centred_gram(a_BD: Tensor) -> Tensor:
    gram_BB = gram(a_BD - a_BD.mean(dim=0))
    return gram_BB / gram_BB.square().sum().sqrt().clamp_min(1e-30)
