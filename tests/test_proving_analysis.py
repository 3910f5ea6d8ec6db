"""The metrics of the bench against hand-worked numbers, and PWCCA against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.analysis.metrics import (
    Pwcca,
    cosine_distance,
    input_norm,
    l2_distance,
    linear_cka_distance,
    pwcca,
)

pytestmark = pytest.mark.bench
METRICS = {"l2": l2_distance, "cosine": cosine_distance, "input_norm": input_norm, "cka": linear_cka_distance}
each_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


def pair(*shape, distance=0.1, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    training = torch.randn(*shape, generator=generator, dtype=torch.float64)
    reference = training + distance * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return training.to(dtype), reference.to(dtype)


@each_metric
def test_metrics_are_zero_for_equal_activations_and_grow_with_the_difference(metric):
    for shape in ((4, 7), (4, 5, 7), (4, 3, 6, 6)):
        training, _ = pair(*shape)
        assert float(metric(training, training.clone())) == 0
        measured = [float(metric(*pair(*shape, distance=distance))) for distance in (1e-3, 1e-2, 1e-1)]
        assert 0 < measured[0] < measured[1] < measured[2]


def test_the_rival_metrics_are_the_hand_worked_numbers():
    training, reference = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert float(l2_distance(training, reference)) == pytest.approx((4 + 1 + 1) / 3)
    assert float(input_norm(training, reference)) == pytest.approx((2 + 0 + 1 + 1) / 4)
    # Angles of 0 and 45 degrees.
    assert float(cosine_distance(training, reference)) == pytest.approx((0 + 1 - 1 / math.sqrt(2)) / 2)
    # Centred, both hold two opposite samples: the same relation.
    assert float(linear_cka_distance(training, reference)) == pytest.approx(0, abs=1e-12)


def test_cka_distance_is_one_for_unrelated_samples():
    training = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    reference = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    assert float(linear_cka_distance(training, reference)) == pytest.approx(1)


# PWCCA


def samples_by_neurons(count, num_neurons, seed=0):
    draw = np.random.RandomState(seed)
    return draw.standard_normal((count, num_neurons)) @ draw.standard_normal((num_neurons, num_neurons)) + 3


def by_definition(training, trained):
    """Canonical variates, one by one, and how much of each neuron lies along them: Morcos et al., section 2.2."""
    trained, training = (torch.as_tensor(values, dtype=torch.float64) for values in (trained, training))
    bases = []
    for values in (trained, training):
        left, sizes, _ = torch.linalg.svd(values - values.mean(dim=0), full_matrices=False)
        bases.append(left[:, sizes > 1e-6 * sizes[0]])
    rotation, correlations, _ = torch.linalg.svd(bases[0].T @ bases[1], full_matrices=False)
    weighted = total = 0.0
    for variate, correlation in zip((bases[0] @ rotation).T, correlations, strict=True):
        weight = sum(abs(float(variate @ neuron)) for neuron in (trained - trained.mean(dim=0)).T)
        weighted, total = weighted + weight * float(correlation), total + weight
    return 1 - weighted / total


def noisy(values, num_neurons, noise, seed=1):
    draw = np.random.RandomState(seed)
    mixed = values @ draw.standard_normal((values.shape[1], num_neurons))
    return mixed + noise * draw.standard_normal(mixed.shape)


class TestPwcca:
    @pytest.mark.parametrize("num_neurons", [16, 10, 24])
    def test_it_is_the_definition_to_ten_digits(self, num_neurons):
        trained = samples_by_neurons(2000, 16)
        training = noisy(trained, num_neurons, noise=4.0)
        assert pwcca(torch.tensor(training), torch.tensor(trained)) == pytest.approx(
            by_definition(training, trained), abs=1e-10
        )

    def test_dead_neurons_and_duplicates_change_nothing(self):
        trained = torch.tensor(samples_by_neurons(3000, 12), dtype=torch.float32)
        training = torch.tensor(noisy(trained.numpy(), 12, noise=2.0), dtype=torch.float32)
        plain = pwcca(training, trained)
        dead, twice = torch.full((3000, 2), 7.0), training[:, :3] * 2
        assert pwcca(torch.cat([training, dead, twice], dim=1), trained) == pytest.approx(plain, abs=1e-6)
        assert pwcca(training, torch.cat([trained, dead], dim=1)) == pytest.approx(plain, abs=1e-6)
        assert (
            0 <= pwcca(training, torch.cat([trained, trained], dim=1)) <= 1
        )  # a neuron that is there twice counts twice

    def test_batches_add_up(self):
        trained = torch.tensor(samples_by_neurons(3000, 9)) + 1e4  # a mean that would take four digits from squares
        training = torch.tensor(noisy(trained.numpy(), 9, noise=5.0))
        pieces = Pwcca()
        for begin, end in ((0, 10), (10, 1500), (1500, 3000)):
            pieces.add(training[begin:end], trained[begin:end])
        assert pieces.distance() == pytest.approx(pwcca(training, trained), abs=1e-9)
