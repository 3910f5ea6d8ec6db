"""The SP loss against hand-worked numbers and against the same formula in double precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria.plasticity import pool_map, sp_loss


def sp_in_double(training, reference):
    """Equation 1, word by word, in float64."""
    grams = []
    for activation in (training, reference):
        rows = activation.double().flatten(1)
        gram = rows @ rows.T
        grams.append(gram / gram.norm(dim=1, keepdim=True).clamp_min(1e-300))
    return float((grams[0] - grams[1]).norm() ** 2 / len(training) ** 2)


def pair(*shape, distance=0.1, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    training = torch.randn(*shape, generator=generator, dtype=torch.float64)
    reference = training + distance * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return training.to(dtype), reference.to(dtype)


# By hand. G = A A^T; the rows of G divided by their length; the sum of squared differences over B².
#
#   A = (1 0)   G = (1 0)   R = (1 0)   G = (1 1) -> (1 1)/√2     differences squared, both rows:
#       (0 1)       (0 1)       (1 0)       (1 1)    (1 1)/√2     (1 - 1/√2)² + 1/2 = 2 - √2
#
#   so P = 2 (2 - √2) / 4 = 1 - 1/√2.
#
#   A = (1 0)   G = (1 0 1) /√2   R = (1 0)   G = (1 0 0)   rows 1 and 2: (1 - 1/√2)² + 1/2 = 2 - √2
#       (0 1)       (0 1 1) /√2       (0 1)       (0 1 0)   row 3:        (1 + 1 + 4) / 6 = 1
#       (1 1)       (1 1 2) /√6       (0 0)       (0 0 0)   P = (2 (2 - √2) + 1) / 9
def test_sp_loss_is_the_hand_worked_number():
    for rows, others, by_hand in [
        ([[1, 0], [0, 1]], [[1, 0], [1, 0]], 1 - 1 / math.sqrt(2)),
        ([[1, 0], [0, 1], [1, 1]], [[1, 0], [0, 1], [0, 0]], (5 - 2 * math.sqrt(2)) / 9),
        ([[1, 0], [0, 1]], [[3, 0], [0, -0.5]], 0),
        ([[1, 0], [1, 0]], [[1, 0], [-1, 0]], 1),
    ]:
        training, reference = torch.tensor(rows).float(), torch.tensor(others).float()
        assert float(sp_loss(training, reference)) == pytest.approx(by_hand, rel=1e-6, abs=1e-12)
        assert float(sp_loss(reference, training)) == pytest.approx(by_hand, rel=1e-6, abs=1e-12)


@given(st.integers(2, 33), st.integers(1, 200), st.floats(-3, 1), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_sp_loss_is_the_formula_in_double_precision(samples, features, decade, seed):
    training, reference = pair(samples, features, distance=10**decade, seed=seed)
    assert float(sp_loss(training, reference)) == pytest.approx(sp_in_double(training, reference), rel=1e-3, abs=1e-11)


def test_sp_loss_keeps_two_digits_far_below_a_billionth():
    for distance in [1e-2, 1e-3, 3e-4]:
        for offset in [0.0, 1.0]:
            training, reference = (side.relu() + offset for side in pair(32, 4096, distance=distance))
            truth = sp_in_double(training, reference)
            assert 1e-13 < truth < 2e-8
            assert float(sp_loss(training, reference)) == pytest.approx(truth, rel=2e-2, abs=0)


def test_an_activation_that_is_not_finite_gives_no_finite_reading():
    for broken in [math.nan, math.inf]:
        training, reference = pair(4, 6)
        training[2, 3] = broken
        assert not math.isfinite(sp_loss(training, reference))


def test_sixteen_bit_activations_are_compared_in_full_precision():
    training, reference = pair(16, 300, dtype=torch.bfloat16)
    exact = float(sp_loss(training.double(), reference.double()))
    assert float(sp_loss(training, reference)) == pytest.approx(exact, rel=1e-3)


def test_the_memory_format_of_a_map_does_not_matter():
    for sides in [(True, True), (True, False), (False, True)]:
        contiguous = pair(4, 3, 5, 6)
        formatted = [
            side.to(memory_format=torch.channels_last) if last else side
            for side, last in zip(contiguous, sides, strict=True)
        ]
        assert float(sp_loss(*formatted)) == pytest.approx(float(sp_loss(*contiguous)), rel=1e-4)


def test_maps_are_averaged_by_powers_of_two():
    for size, largest, pooled in [
        ((31, 31), 16, (31, 31)),
        ((32, 32), 16, (16, 16)),
        ((56, 56), 16, (28, 28)),
        ((224, 224), 16, (28, 28)),
        ((64, 2), 16, (32, 1)),
        ((64, 1), 16, (64, 1)),
        ((32, 32), 1, (1, 1)),
    ]:
        assert pool_map(torch.zeros(2, 3, *size), largest).shape == (2, 3, *pooled)
    assert pool_map(torch.arange(16.0).reshape(1, 1, 4, 4), 2).tolist() == [[[[2.5, 4.5], [10.5, 12.5]]]]
    sequence = torch.zeros(2, 64, 64)
    assert pool_map(sequence, 16) is sequence, "what is no map is not pooled"
