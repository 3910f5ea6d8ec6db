"""The rivals, each against an example by hand, and what they do to a model."""

import dataclasses

import pytest
import torch
from benchmarks.proving.comparing.results import read_outcome
from benchmarks.proving.journal import JournalWriter, read_journal
from benchmarks.proving.policies import parse_policy
from benchmarks.proving.running.recipe import describe
from benchmarks.proving.running.training import train
from benchmarks.rivals import make_rival
from benchmarks.rivals.base import relative_change
from benchmarks.rivals.freezeout import find_ends, rate_share
from benchmarks.rivals.gradients import first_that_changes
from tests.pieces import CPU, new_training, wanted_run

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]
NUM_STEPS = 5 * 32
TEXTS = {"head-only": "head-only", "freezeout": "freezeout", "autofreeze": "autofreeze:plasticity.interval_steps=12"}


@pytest.fixture
def make(tmp_path):
    """Makes a rival of a training."""
    writer = JournalWriter(tmp_path)

    def make_one(training, text):
        policy = parse_policy(text)
        return make_rival(training, policy.name, policy.settings, writer)

    yield make_one
    writer.close()


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_frozen_does_not_move_and_all_is_given_back(name, tmp_path):
    training = new_training()
    weights = [[entry.detach().clone() for entry in layer.parameters()] for layer in training.model]
    moved = {}

    def look(epoch, frozen, values):
        now = [[entry.detach().clone() for entry in layer.parameters()] for layer in training.model]
        for place, (own, before) in enumerate(zip(now, weights, strict=True)):
            moved[epoch, place] = not all(map(torch.equal, own, before))
        weights[:] = now

    train(training, parse_policy(TEXTS[name]), tmp_path, CPU, look)
    journal = read_journal(tmp_path)
    frozen = {event["module"]: event["step"] for event in journal.of("frozen")}
    if not journal.of("thawed"):
        assert frozen.keys() == {0, 1, 2}
        assert moved == {(epoch, place): frozen.get(place, 999) > (epoch - 1) * 32 for epoch, place in moved}
    assert all(parameter.requires_grad for parameter in training.model.parameters())
    assert training.model.training or not any(module._forward_pre_hooks for module in training.model.modules())
    assert len(training.optimizer.param_groups) == 1 and not training.optimizer._optimizer_step_pre_hooks
    found = read_outcome(tmp_path, wanted_run(TEXTS[name], recipe=describe(new_training())))
    assert found.num_modules == 4 and 0 < found.skipped.total < 2 / 3 and found.quality > 10


# FreezeOut with three modules, t_0 = 0.5: r = 0.5, 0.75, 1. At a quarter of the training, cosines by hand:
#   module 0: (1 + cos(pi / 2)) / 2 = 0.5      module 1: (1 + cos(pi / 3)) / 2 = 0.75
#   module 2: (1 + cos(pi / 4)) / 2 = 0.853553 (the square root of 1/2 is 0.707107)
def test_freezeout_anneals_each_module_to_zero_at_its_own_time():
    ends = find_ends(3, 0.5, "linear")
    assert ends == [0.5, 0.75, 1.0]
    found = [[rate_share(done, end, scaled=False) for end in ends] for done in (0, 0.25, 0.5, 0.75, 1)]
    assert found[0] == [1, 1, 1] and found[4] == [0, 0, 0] and found[3][:2] == [0, 0]
    assert found[1] == pytest.approx([0.5, 0.75, 0.853553], abs=1e-6)
    assert found[2] == pytest.approx([0, 0.25, 0.5])
    assert rate_share(0, 0.5, scaled=True) == 2 and rate_share(0.25, 0.75, scaled=True) == pytest.approx(1)


def test_freezeout_steps_each_layer_module_at_its_own_rate(make):
    """Of SGD the step is the rate times the gradient: of the initial rate, whatever the scheduler has made of it."""
    training = new_training()
    training = dataclasses.replace(training, optimizer=torch.optim.SGD(training.model.parameters(), lr=0.1))
    training.optimizer.param_groups[0].update(initial_lr=0.1, lr=0.025)
    rival = make(training, "freezeout:start=0.5,shape=linear,scaled=false")
    rival.step = NUM_STEPS // 4
    before = [block[0].weight.clone() for block in training.model[:3]]
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()
    moved = [
        float((own - block[0].weight).detach().mean()) for own, block in zip(before, training.model[:3], strict=True)
    ]
    expected = [0.1 * rate_share(0.25, end, scaled=False) for end in find_ends(4, 0.5, "linear")[:3]]
    assert moved == pytest.approx(expected, rel=1e-4) and moved[0] < moved[1] < moved[2]
    assert training.optimizer.param_groups[0]["lr"] == 0.025, "that of the user's own group"


# AutoFreeze, four modules:  G(1) = 10, 10, 10, 10   G(2) = 11, 12, 15, 14   G(3) = -, -, 18, 21
#   eta at 2: 0.1, 0.2, 0.5, 0.4; their median 0.3: module 2 is the first above it, so 0 and 1 freeze.
#   eta at 3: 3/15 = 0.2, 7/14 = 0.5; their median 0.35: module 3 becomes the first in training, 2 freezes.
def test_autofreeze_keeps_the_first_module_that_changes_more_than_the_median():
    first = [relative_change(10.0, now) for now in (11.0, 12.0, 15.0, 14.0)]
    second = [relative_change(before, now) for before, now in ((15.0, 18.0), (14.0, 21.0))]
    assert first_that_changes([0, 1, 2, 3], first, 50) == 2
    assert first_that_changes([2, 3], second, 50) == 3
    assert first_that_changes([0, 1, 2], [0.5, 0.1, 0.2], 50) == 0, "nothing may freeze"


def test_autofreeze_adds_up_the_gradients_that_the_optimizer_is_given(make):
    training = new_training()
    rival = make(training, "autofreeze:plasticity.interval_steps=2")
    for sign in (1.0, -0.25):
        for parameter in training.model.parameters():
            parameter.grad = torch.full_like(parameter, sign)
        training.optimizer.step()
        rival.end_step(torch.tensor(1.0), None)
    assert rival._before == [0.75 * sum(entry.numel() for entry in layer.parameters()) for layer in training.model]
