"""The policy 'smartfrz': snapshots of weights, the predictor that looks at them, and what is decided by it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import egeria
from egeria import events
from egeria.journal import read_journal
from egeria.layers.modules import parse_modules
from egeria.policy import Freeze
from egeria.report.replay import replay
from egeria.smartfrz import NUM_SNAPSHOTS, NUM_WEIGHTS, FreezePredictor, WeightHistory, load_predictor, save_predictor
from egeria.smartfrz.predictor import OWN_WEIGHTS
from test_rivals import interval, make

STEPS = 120


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
    history, modules = WeightHistory(model), parse_modules(model, pattern=r"\d")
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
    history, modules = WeightHistory(model), parse_modules(model, pattern=r"\d")
    count_up(model, history, NUM_SNAPSHOTS - 1)
    assert history.windows(modules) == [None] * len(modules)
    count_up(model, history, NUM_SNAPSHOTS)
    assert history.windows(modules)[0][0, 0] == NUM_SNAPSHOTS, "the next begins anew"


def test_each_snapshot_shows_the_same_weights_of_matrices_that_train():
    model = network()
    model[1].requires_grad_(False)
    model[2][0].weight.requires_grad_(False)
    history, modules = WeightHistory(model), parse_modules(model, pattern=r"\d")
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
    history, modules = WeightHistory(model), parse_modules(model, pattern=r"\d")
    for _ in range(NUM_SNAPSHOTS):
        history.end_step()
    window = history.windows(modules)[0]
    assert (window[0] == 1.0).sum() == pytest.approx(NUM_WEIGHTS * 9000 / 12000, abs=2)


def test_an_interval_goes_on_where_its_state_was_saved():
    model, count_up.step = network(), 0
    history, modules = WeightHistory(model), parse_modules(model, pattern=r"\d")
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


# What is decided


def test_it_freezes_the_front_as_far_as_the_predictor_says_so_without_a_gap():
    policy = make("smartfrz", num_modules=5)
    assert policy.observe_interval(interval(30)) == (), "nothing was predicted"
    assert policy.observe_interval(interval(30, freeze_scores=(None,) * 5)) == (), "too few snapshots"
    assert policy.observe_interval(interval(60, freeze_scores=(0.4, 0.9, 0.9, 0.9, 0.9))) == ()
    freezes = policy.observe_interval(interval(90, freeze_scores=(0.8, 0.6, 0.5, 0.9, 0.9)))
    assert [freeze.module for freeze in freezes] == [0, 1] and all(isinstance(freeze, Freeze) for freeze in freezes)
    assert freezes[0].reason == "the predictor gives 60% for a freeze"
    assert policy.observe_interval(interval(120, freeze_scores=(None, None, 0.1, 0.9, 0.9))) == (), "nothing thaws"
    freezes = policy.observe_interval(interval(150, freeze_scores=(None, None, 0.51, 0.9, 0.99)))
    assert [freeze.module for freeze in freezes] == [2, 3], "the last one never freezes"


def test_it_passes_over_what_does_not_train_and_stops_at_what_is_not_known():
    policy = make("smartfrz", num_modules=5, trainable=[True, False, True, True, True])
    freezes = policy.observe_interval(interval(30, freeze_scores=(0.9, None, 0.9, None, 0.9)))
    assert [freeze.module for freeze in freezes] == [0, 1, 2]


def test_the_limit_is_a_setting():
    policy = make("smartfrz", freeze_score=0.9)
    assert policy.observe_interval(interval(30, freeze_scores=(0.9,) * 4)) == ()
    assert len(policy.observe_interval(interval(60, freeze_scores=(0.91, 0.91, 0.5, 0.91)))) == 2


# In a run


def train(directory, steps=STEPS, plasticity=None, meanwhile=lambda model, step: None, **policy):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings = {"policy": {"name": "smartfrz", "evaluations": 4, **policy}, "modules": {"pattern": r"\d"}}
    settings |= {"plasticity": plasticity or {}}
    arguments = {"total_steps": steps, "controller": "inline", "directory": directory, "config": settings}
    with egeria.attach(model, optimizer, **arguments) as run:
        draw = torch.Generator().manual_seed(1)
        for step in range(steps):
            meanwhile(model, step)
            x = torch.randn(16, 40, generator=draw)
            loss = nn.functional.cross_entropy(run.model(x), (x[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
    return read_journal(directory)


def test_a_run_asks_the_predictor_at_the_end_of_each_interval_and_can_be_replayed(tmp_path):
    journal = train(tmp_path, freeze_score=1e-9)
    first, second, *_ = intervals = journal.of(events.IntervalMeasured)
    assert [entry.step for entry in intervals] == [30, 60, 90, 120]
    assert len(first.freeze_scores) == 4 and all(0 <= score <= 1 for score in first.freeze_scores)
    assert second.freeze_scores[:3] == [None] * 3, "what is frozen is not asked about"
    assert [(event.step, event.module) for event in journal.of(events.ModuleFrozen)] == [(30, 0), (30, 1), (30, 2)]
    assert not journal.of(events.PlasticityRead) and not journal.of(events.FaultCaught)
    assert replay(tmp_path).agrees
    stricter = replay(tmp_path, egeria.Config.from_dict({"policy": {"name": "smartfrz", "freeze_score": 1.0}}))
    assert not stricter.replayed


def test_intervals_that_are_too_short_for_the_predictor_are_told(tmp_path):
    journal = train(tmp_path, plasticity={"interval_steps": 20})
    assert not journal.of(events.ModuleFrozen) and not journal.of(events.FaultCaught)
    (declined,) = [event for event in journal.of(events.Declined) if "smartfrz" in event.what]
    assert "20 steps" in declined.reason and "at least 30" in declined.reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_user_does_not_matter(dtype, tmp_path):
    load_predictor.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        journal = train(tmp_path, freeze_score=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)
        load_predictor.cache_clear()
    assert len(journal.of(events.ModuleFrozen)) == 3 and not journal.of(events.FaultCaught)


def test_weights_that_leave_the_model_end_it_and_the_training_goes_on(tmp_path):
    def shrink(model, step):
        if step == 40:
            prune.l1_unstructured(model[1][0], "weight", 0.5)

    journal = train(tmp_path, meanwhile=shrink, freeze_score=1.0)
    assert journal.of(events.FaultCaught)[0].where == "looking at weights"
    assert journal.of(events.RunClosed)[0].step == STEPS
    assert not journal.of(events.ModuleFrozen)


def test_a_state_of_other_weights_begins_the_interval_anew():
    model, count_up.step = network(), 0
    history, modules = WeightHistory(model), parse_modules(model, pattern=r"\d")
    count_up(model, history, 45)
    model[0].requires_grad_(False)
    other = WeightHistory(model)
    other.load_state_dict(history.state_dict())
    assert other.num_steps == 0 and other.windows(modules) == [None] * len(modules)


def test_a_predictor_that_fails_leaves_the_training_alone(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken weights")

    monkeypatch.setattr("egeria.session.measuring.measures.load_predictor", fail)
    journal = train(tmp_path, freeze_score=1e-9)
    assert journal.of(events.FaultCaught)[0].error.endswith("broken weights")
    assert not journal.of(events.ModuleFrozen)
    assert journal.of(events.RunClosed)[0].step == STEPS
