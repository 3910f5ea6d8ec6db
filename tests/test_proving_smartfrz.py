"""The rival 'smartfrz': snapshots of weights, the predictor that looks at them, and what is decided by it."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.rivals.smartfrz import find_depth
from benchmarks.rivals.smartfrz.history import WeightHistory
from benchmarks.rivals.smartfrz.predictor import (
    NUM_SNAPSHOTS,
    NUM_WEIGHTS,
    OWN_WEIGHTS,
    FreezePredictor,
    load_predictor,
    save_predictor,
)
from torch import nn

from egeria.model.cut import make_modules

pytestmark = pytest.mark.bench


def network(width=40):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)), nn.Linear(width, 2))


def count_up(model, history, steps):
    """Let all weights be the number of the step."""
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.full_like(parameter, count_up.step + 1))
        count_up.step += 1
        history.end_step()


# Snapshots


@pytest.mark.parametrize("length", [30, 31, 59, 60, 61, 100, 119, 1000])
def test_snapshots_are_evenly_spaced_over_an_interval_of_any_length(length):
    model, count_up.step = network(), 0
    history, modules = WeightHistory(model), make_modules(model, pattern=r"\d")
    for began in (0, length):  # the second interval knows how far apart they were
        count_up(model, history, length)
        windows = history.windows(modules)
        assert [window.shape for window in windows] == [(NUM_SNAPSHOTS, NUM_WEIGHTS)] * len(modules)
        steps = windows[0][:, 0] - began
        gaps = steps.diff()
        assert steps[0] >= 1 and length - gaps.max() < steps[-1] <= length
        assert gaps.min() >= 1 and gaps.max() <= 2 * max(1, gaps.min())


def test_an_interval_with_fewer_steps_than_snapshots_shows_nothing():
    model, count_up.step = network(), 0
    history, modules = WeightHistory(model), make_modules(model, pattern=r"\d")
    count_up(model, history, NUM_SNAPSHOTS - 1)
    assert history.windows(modules) == [None] * len(modules)
    count_up(model, history, NUM_SNAPSHOTS)
    assert history.windows(modules)[0][0, 0] == NUM_SNAPSHOTS, "the next begins anew"


def test_each_snapshot_shows_the_same_weights_of_matrices_that_train():
    model = network()
    model[1].requires_grad_(False)
    model[2][0].weight.requires_grad_(False)
    history, modules = WeightHistory(model), make_modules(model, pattern=r"\d")
    for _ in range(NUM_SNAPSHOTS):
        history.end_step()
    first, fixed, biases, head = history.windows(modules)
    assert fixed is None, "nothing in it trains"
    assert set(biases[0].tolist()) == set(model[2][0].bias.tolist()), "where no matrix trains, what does"
    assert (first == first[0]).all() and first[0].unique().numel() > 500
    assert set(first[0].tolist()) <= set(model[0][0].weight.flatten().tolist())
    assert set(head[0].tolist()) == set(model[3].weight.flatten().tolist()), "80 weights, again and again"


def test_a_module_of_several_matrices_shows_each_by_its_size():
    model = nn.Sequential(nn.Sequential(nn.Linear(300, 30), nn.Linear(30, 100)), nn.Linear(100, 2))
    with torch.no_grad():
        model[0][0].weight.fill_(1.0)
        model[0][1].weight.fill_(2.0)
    history, modules = WeightHistory(model), make_modules(model, pattern=r"\d")
    for _ in range(NUM_SNAPSHOTS):
        history.end_step()
    window = history.windows(modules)[0]
    assert (window[0] == 1.0).sum() == pytest.approx(NUM_WEIGHTS * 9000 / 12000, abs=2)


def test_an_interval_goes_on_where_its_state_was_saved():
    model, count_up.step = network(), 0
    history, modules = WeightHistory(model), make_modules(model, pattern=r"\d")
    count_up(model, history, 45)
    other = WeightHistory(model)
    other.load_state_dict(history.state_dict())
    found = []
    for entry in (history, other):
        count_up.step = 45
        count_up(model, entry, 45)
        found.append(entry.windows(modules)[0])
    assert torch.equal(*found)


# The predictor


def windows(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, NUM_SNAPSHOTS, NUM_WEIGHTS, generator=draw)


def test_what_it_says_of_a_module_does_not_depend_on_the_others():
    predictor, asked = load_predictor(), windows(4)
    together = predictor.score(asked)
    assert all(0 <= score <= 1 for score in together)
    assert [predictor.score(asked[place : place + 1])[0] for place in range(4)] == pytest.approx(together, abs=1e-5)


def test_what_comes_with_egeria_was_trained_and_has_its_card():
    draw = torch.Generator().manual_seed(0)
    base, way = (0.05 * torch.randn(16, 1, NUM_WEIGHTS, generator=draw) for _ in range(2))
    steps = torch.linspace(0, 1, NUM_SNAPSHOTS)[None, :, None]
    still, moving = (load_predictor().score(base + share * way * steps) for share in (0.001, 0.5))
    assert min(still) > 0.9 and max(moving) < 0.5
    card = OWN_WEIGHTS.with_name("CARD.md").read_text(encoding="utf-8")
    assert "Trained on" in card and "trained without it" in card


def test_layers_of_all_scales_look_alike_to_it():
    predictor, asked = load_predictor(), windows(2)
    assert predictor.score(1e-3 * asked) == pytest.approx(predictor.score(asked), abs=1e-4)


def test_weights_that_are_not_finite_or_all_alike_do_not_break_it():
    asked = windows(2)
    asked[0, 3, 5] = math.inf
    asked[1] = 0.25
    infinite, alike = load_predictor().score(asked)
    assert math.isnan(infinite) and 0 <= alike <= 1


def test_reading_it_draws_no_random_numbers_and_gives_what_was_saved(tmp_path):
    torch.manual_seed(3)
    own, before = FreezePredictor().eval(), torch.get_rng_state()
    save_predictor(own, tmp_path / "it.safetensors")
    read = load_predictor(tmp_path / "it.safetensors")
    assert torch.equal(torch.get_rng_state(), before)
    assert read.score(windows(3)) == pytest.approx(own.score(windows(3)), abs=1e-2), "kept in half precision"
    assert not any(parameter.requires_grad for parameter in read.parameters())
    assert sum(parameter.numel() for parameter in read.parameters()) == pytest.approx(1.04e6, rel=0.01)


def test_a_state_of_other_weights_begins_the_interval_anew():
    model, count_up.step = network(), 0
    history, modules = WeightHistory(model), make_modules(model, pattern=r"\d")
    count_up(model, history, 45)
    model[0].requires_grad_(False)
    other = WeightHistory(model)
    other.load_state_dict(history.state_dict())
    assert other.num_steps == 0 and other.windows(modules) == [None] * len(modules)


# What is decided


def depth(scores, frozen=0, limit=0.5, trainable=None):
    return find_depth(list(scores), trainable or [True] * len(scores), frozen, limit)[0]


def test_it_freezes_the_front_as_far_as_the_predictor_says_so_without_a_gap():
    assert depth((None,) * 5) == 0, "too few snapshots"
    assert depth((0.4, 0.9, 0.9, 0.9, 0.9)) == 0
    assert depth((0.8, 0.6, 0.5, 0.9, 0.9)) == 2
    assert find_depth([0.8, 0.6, 0.5], [True] * 3, 0, 0.5)[1] == "the predictor gives 60% for a freeze"
    assert depth((None, None, 0.1, 0.9, 0.9), frozen=2) == 2, "nothing thaws"
    assert depth((None, None, 0.51, 0.9, 0.99), frozen=2) == 4, "the last one never freezes"
    assert depth((math.nan, 0.9, 0.9)) == 0


def test_it_passes_over_what_does_not_train_and_stops_at_what_is_not_known():
    assert depth((0.9, None, 0.9, None, 0.9), trainable=[True, False, True, True, True]) == 3
    assert depth((None, 0.1, 0.9), trainable=[False, True, True]) == 0


def test_the_limit_is_a_setting():
    assert depth((0.9,) * 4, limit=0.9) == 0
    assert depth((0.91, 0.91, 0.5, 0.91), limit=0.9) == 2
