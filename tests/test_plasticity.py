"""The metrics against hand-worked numbers and against the same formula in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria import ConfigError
from egeria.plasticity import (
    METRICS,
    Pwcca,
    find_metric,
    flatten_rows,
    input_norm,
    l2_distance,
    pool_map,
    pwcca,
    sp_loss,
)

each_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


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
@pytest.mark.parametrize(
    ("training", "reference", "by_hand"),
    [
        ([[1, 0], [0, 1]], [[1, 0], [1, 0]], 1 - 1 / math.sqrt(2)),
        ([[1, 0], [0, 1], [1, 1]], [[1, 0], [0, 1], [0, 0]], (5 - 2 * math.sqrt(2)) / 9),
        ([[1, 0], [0, 1]], [[3, 0], [0, -0.5]], 0),
        ([[1, 0], [1, 0]], [[1, 0], [-1, 0]], 1),
    ],
)
def test_sp_loss_is_the_hand_worked_number(training, reference, by_hand):
    training, reference = torch.tensor(training).float(), torch.tensor(reference).float()
    assert float(sp_loss(training, reference)) == pytest.approx(by_hand, rel=1e-6, abs=1e-12)
    assert float(sp_loss(reference, training)) == pytest.approx(by_hand, rel=1e-6, abs=1e-12)


@given(st.integers(2, 33), st.integers(1, 200), st.floats(-3, 1), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_sp_loss_is_the_formula_in_double_precision(samples, features, decade, seed):
    training, reference = pair(samples, features, distance=10**decade, seed=seed)
    assert float(sp_loss(training, reference)) == pytest.approx(sp_in_double(training, reference), rel=1e-3, abs=1e-11)


@pytest.mark.parametrize("distance", [1e-2, 1e-3, 3e-4])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_sp_loss_keeps_two_digits_far_below_a_billionth(distance, offset):
    training, reference = (side.relu() + offset for side in pair(32, 4096, distance=distance))
    truth = sp_in_double(training, reference)
    assert 1e-13 < truth < 2e-8
    assert float(sp_loss(training, reference)) == pytest.approx(truth, rel=2e-2, abs=0)


@given(st.integers(-15, 15))
@settings(deadline=None)
def test_sp_loss_does_not_care_how_large_the_activations_are(decade):
    training, reference = pair(8, 50)
    scaled = sp_loss(training * 10.0**decade, reference * 10.0**decade)
    assert float(scaled) == pytest.approx(float(sp_loss(training, reference)), rel=1e-3)


def test_relative_sp_loss_is_the_sp_loss_over_what_varies_between_samples():
    training, reference = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    # Similarities of the reference: rows (1, 1)/sqrt(2) and (1, 2)/sqrt(5); of the training: (1, 0) and (0, 1).
    apart = (1 - 0.5**0.5) ** 2 + 0.5 + 0.2 + (1 - 2 / 5**0.5) ** 2
    varied = ((0.5**0.5 - 0.2**0.5) ** 2 + (0.5**0.5 - 2 * 0.2**0.5) ** 2) / 2
    assert float(METRICS["relative_sp"](training, reference)) == pytest.approx(apart / varied, rel=1e-5)


def test_relative_sp_loss_does_not_shrink_where_samples_have_much_in_common():
    torch.manual_seed(0)
    reference = torch.randn(16, 64)
    moved = reference + 0.1 * torch.randn(16, 64)
    common = torch.full((64,), 5.0)
    plain, shared = (
        (float(sp_loss(moved + part, reference + part)), float(METRICS["relative_sp"](moved + part, reference + part)))
        for part in (torch.zeros(64), common)
    )
    assert shared[0] / plain[0] < 0.05 * shared[1] / plain[1]


def test_sp_loss_sees_samples_and_not_features():
    training, reference = pair(8, 20)
    turned = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(1))).Q
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    measured = float(sp_loss(training, reference))
    assert float(sp_loss(training, training @ turned)) == pytest.approx(0, abs=1e-11)
    assert float(sp_loss(training @ turned, reference[:, shuffled])) == pytest.approx(measured, rel=1e-3)
    assert float(sp_loss(training, training.flip(0))) > 0.01, "other samples are another activation"
    assert float(sp_loss(training.flip(0), reference.flip(0))) == pytest.approx(measured, rel=1e-3)


def test_samples_without_any_activation_count_as_unlike_all_others():
    training, reference = pair(4, 6)
    training[1] = 0
    reference[1] = 0
    assert float(sp_loss(training, reference)) == pytest.approx(sp_in_double(training, reference), rel=1e-4)
    assert float(sp_loss(torch.zeros(4, 6), torch.zeros(4, 6))) == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_an_activation_that_is_not_finite_gives_no_finite_reading(broken):
    training, reference = pair(4, 6)
    training[2, 3] = broken
    assert not math.isfinite(sp_loss(training, reference))


@each_metric
@pytest.mark.parametrize("shape", [(4, 7), (4, 5, 7), (4, 3, 6, 6)])
def test_metrics_are_zero_for_equal_activations_and_grow_with_the_difference(metric, shape):
    training, _ = pair(*shape)
    assert float(metric(training, training.clone())) == 0
    measured = [float(metric(*pair(*shape, distance=distance))) for distance in (1e-3, 1e-2, 1e-1)]
    assert 0 < measured[0] < measured[1] < measured[2]


@each_metric
def test_metrics_return_a_single_number_in_float32(metric):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        value = metric(*pair(4, 7, dtype=dtype))
        assert value.shape == () and value.dtype == torch.float32


@each_metric
def test_sixteen_bit_activations_are_compared_in_full_precision(metric):
    training, reference = pair(16, 300, dtype=torch.bfloat16)
    exact = float(metric(training.double(), reference.double()))
    assert float(metric(training, reference)) == pytest.approx(exact, rel=1e-3)


@each_metric
def test_autocast_around_the_call_costs_no_precision(metric):
    training, reference = pair(16, 300, distance=1e-2)
    expected = float(metric(training, reference))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(metric(training, reference)) == expected


@each_metric
@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)])
def test_the_memory_format_of_a_map_does_not_matter(metric, sides):
    contiguous = pair(4, 3, 5, 6)
    formatted = [
        side.to(memory_format=torch.channels_last) if last else side
        for side, last in zip(contiguous, sides, strict=True)
    ]
    assert float(metric(*formatted)) == pytest.approx(float(metric(*contiguous)), rel=1e-4)


@each_metric
@pytest.mark.parametrize("shape", [(4, 3, 1, 1), (4, 1, 5, 6), (4, 1, 1, 1), (4, 3, 1, 6)])
def test_maps_that_are_contiguous_in_both_formats_pair_the_same_features(metric, shape):
    training, _ = pair(*shape)
    last = training.to(memory_format=torch.channels_last)
    assert float(metric(training, last)) == 0
    assert float(metric(last, training)) == 0


@each_metric
def test_sequence_first_views_are_compared_by_sample(metric):
    training, reference = pair(4, 5, 7)
    views = [side.transpose(0, 1).contiguous().transpose(0, 1) for side in (training, reference)]
    assert views[0].stride() != training.stride()
    expected = float(metric(training, reference))
    assert float(metric(*views)) == pytest.approx(expected, rel=1e-4)
    assert float(metric(views[0], reference)) == pytest.approx(expected, rel=1e-4)


@each_metric
def test_unequal_batches_are_refused(metric):
    training, reference = pair(4, 7)
    with pytest.raises(ValueError, match=r"equal batches .*found 4 and 3\. Evaluate both models on the same batch"):
        metric(training, reference[:3])
    with pytest.raises(ValueError, match="found 0 and 0"):
        metric(training[:0], reference[:0])


@pytest.mark.parametrize("name", ["sp", "relative_sp", "cka"])
def test_metrics_of_relations_need_two_samples(name):
    training, reference = pair(1, 7)
    with pytest.raises(ValueError, match="at least 2 samples, found 1 and 1"):
        METRICS[name](training, reference)


def test_the_rival_metrics_are_the_hand_worked_numbers():
    training, reference = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert float(l2_distance(training, reference)) == pytest.approx((4 + 1 + 1) / 3)
    assert float(input_norm(training, reference)) == pytest.approx((2 + 0 + 1 + 1) / 4)
    # Angles of 0 and 45 degrees.
    assert float(METRICS["cosine"](training, reference)) == pytest.approx((0 + 1 - 1 / math.sqrt(2)) / 2)
    # Centred, both hold two opposite samples: the same relation.
    assert float(METRICS["cka"](training, reference)) == pytest.approx(0, abs=1e-12)


def test_cka_distance_is_one_for_unrelated_samples():
    training = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    reference = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    assert float(METRICS["cka"](training, reference)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("size", "largest", "pooled"),
    [
        ((8, 8), 16, (8, 8)),
        ((16, 16), 16, (16, 16)),
        ((31, 31), 16, (31, 31)),
        ((32, 32), 16, (16, 16)),
        ((33, 33), 16, (16, 16)),
        ((56, 56), 16, (28, 28)),
        ((64, 64), 16, (16, 16)),
        ((224, 224), 16, (28, 28)),
        ((64, 32), 16, (16, 8)),
        ((64, 2), 16, (32, 1)),
        ((64, 1), 16, (64, 1)),
        ((32, 32), 1, (1, 1)),
    ],
)
def test_maps_are_pooled_by_powers_of_two(size, largest, pooled):
    assert pool_map(torch.zeros(2, 3, *size), largest).shape == (2, 3, *pooled)


def test_pooling_averages():
    a = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert pool_map(a, 2).tolist() == [[[[2.5, 4.5], [10.5, 12.5]]]]


@pytest.mark.parametrize("shape", [(2, 64), (2, 64, 64), (2, 3, 64, 64, 64)])
def test_what_is_no_map_is_not_pooled(shape):
    a = torch.zeros(shape)
    assert pool_map(a, 16) is a


def test_pooling_keeps_the_memory_format_and_sixteen_bits():
    a = torch.randn(2, 3, 64, 64).to(torch.bfloat16, memory_format=torch.channels_last)
    pooled = pool_map(a, 16)
    assert pooled.dtype == torch.bfloat16
    assert pooled.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_flattening_float32_copies_nothing(layout):
    a = torch.randn(4, 3, 5, 6).to(memory_format=layout)
    rows = flatten_rows(a)
    assert rows.shape == (4, 90)
    assert rows.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
    assert rows.sum(dim=1).tolist() == pytest.approx(a.sum(dim=(1, 2, 3)).tolist(), rel=1e-4)


def test_flattening_keeps_samples_apart():
    a = torch.arange(24.0).reshape(2, 3, 4)
    assert flatten_rows(a).tolist() == [list(range(12)), list(range(12, 24))]
    assert flatten_rows(a.to(torch.bfloat16)).dtype == torch.float32


def test_a_metric_is_found_by_its_name():
    assert find_metric("sp") is sp_loss
    assert {name: find_metric(name) for name in METRICS} == METRICS


def test_an_unknown_metric_is_refused_beside_the_known_ones():
    with pytest.raises(ConfigError, match=r"plasticity\.metric must be 'sp', 'relative_sp', .*found 'SP'\. Correct it"):
        find_metric("SP")


def test_a_users_own_metric_is_taken_as_it_is():
    def largest_difference(training, reference):
        return (training - reference).abs().max()

    assert find_metric(largest_difference) is largest_difference


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


@pytest.fixture(scope="module")
def activations():
    """Of two layers of a network for the digits, trained for 5 and for 60 epochs, as [B, C, H, W]."""
    digits = pytest.importorskip("sklearn.datasets", reason="the digits ship with scikit-learn").load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    front = torch.nn.Sequential(torch.nn.Conv2d(1, 12, 3), torch.nn.BatchNorm2d(12), torch.nn.ReLU())
    network = torch.nn.Sequential(
        front, torch.nn.Conv2d(12, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10)
    )
    optimizer, found = torch.optim.SGD((network(images[:2]), network.parameters())[1], lr=0.3), []
    for epoch in range(60):
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch in (4, 59):
            with torch.no_grad():
                found.append((front(images), network[:3](images)))
    return found


class TestPwcca:
    @pytest.mark.parametrize("num_neurons", [16, 10, 24])
    def test_it_is_the_definition_to_ten_digits(self, num_neurons):
        trained = samples_by_neurons(2000, 16)
        training = noisy(trained, num_neurons, noise=4.0)
        assert pwcca(torch.tensor(training), torch.tensor(trained)) == pytest.approx(
            by_definition(training, trained), abs=1e-10
        )

    def test_of_real_feature_maps_too(self, activations):
        for training, trained in zip(*activations, strict=True):
            rows = [maps.movedim(1, -1).flatten(0, 2) for maps in (training, trained)]
            assert pwcca(training, trained) == pytest.approx(by_definition(*rows), abs=1e-10)
            assert 0.0 < pwcca(training, trained) < 0.5

    def test_both_ways_it_is_what_another_library_finds(self, activations):
        draw = np.random.RandomState(0)
        trained = draw.standard_normal((2000, 16)) @ draw.standard_normal((16, 16))
        training = np.tanh(trained @ draw.standard_normal((16, 10))) + draw.standard_normal((2000, 10))

        def both_ways(first, second):
            first, second = torch.as_tensor(first), torch.as_tensor(second)
            return 1 - (pwcca(first, second) + pwcca(second, first)) / 2

        assert both_ways(training, trained) == pytest.approx(0.5189967528152412, abs=1e-6)  # of repsim 0.1.5
        repsim = pytest.importorskip("repsim", reason="pip install repsim, which needs a compiler")
        pairs = [
            (maps.movedim(1, -1).flatten(0, 2).double().numpy() for maps in pair)
            for pair in zip(*activations, strict=True)
        ]
        for first, second in [(training, trained), *pairs]:
            assert both_ways(first, second) == pytest.approx(float(repsim.pwcca([first, second])[0, 1]), abs=1e-6)

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

    def test_a_linear_map_is_no_distance_and_what_has_nothing_in_common_is_nearly_one(self):
        trained = samples_by_neurons(4000, 8)
        assert pwcca(torch.tensor(noisy(trained, 8, noise=0.0)), torch.tensor(trained)) == pytest.approx(0, abs=1e-9)
        assert pwcca(torch.tensor(samples_by_neurons(4000, 8, seed=5)), torch.tensor(trained)) > 0.9

    def test_batches_add_up(self):
        trained = torch.tensor(samples_by_neurons(3000, 9)) + 1e4  # a mean that would take four digits from squares
        training = torch.tensor(noisy(trained.numpy(), 9, noise=5.0))
        pieces = Pwcca()
        for begin, end in ((0, 10), (10, 1500), (1500, 3000)):
            pieces.add(training[begin:end], trained[begin:end])
        assert pieces.distance() == pytest.approx(pwcca(training, trained), abs=1e-9)

    def test_tokens_are_samples(self):
        trained = torch.tensor(samples_by_neurons(1200, 6))
        training = torch.tensor(noisy(trained.numpy(), 6, noise=1.0))
        by_token = pwcca(training.reshape(100, 12, 6), trained.reshape(100, 12, 6))
        assert by_token == pytest.approx(pwcca(training, trained))

    def test_too_few_samples_are_refused(self):
        few = torch.randn(490, 10)
        with pytest.raises(ValueError, match=r"50 samples for each of 10 neurons, found 490"):
            pwcca(few, torch.randn(490, 8))
        assert 0 < pwcca(few, torch.randn(490, 8), samples_per_neuron=40) < 1

    def test_a_layer_that_is_dead_is_refused(self):
        with pytest.raises(ValueError, match="none in a layer"):
            pwcca(torch.randn(500, 4), torch.ones(500, 4))
        with pytest.raises(ValueError, match="found 3 and 4"):
            pwcca(torch.randn(3, 4), torch.randn(4, 4))
        with pytest.raises(ValueError, match="found 0"):
            Pwcca().distance()
