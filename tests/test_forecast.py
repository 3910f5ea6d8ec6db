"""The learning rate to come, and the policy that goes by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as schedulers

import egeria
from egeria import Config
from egeria.events import IntervalMeasured, ModuleFrozen, PlasticityRead
from egeria.policy import EndBootstrapping, Freeze, Interval, Reading, find_policy, find_rule
from egeria.report.replay import replay
from egeria.session.measures import Foresight
from egeria.testing import ScriptedController

STEPS_PER_EPOCH, NUM_EPOCHS = 50, 20
TOTAL = STEPS_PER_EPOCH * NUM_EPOCHS


def warmup_then_cosine(optimizer):
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=100)
    return schedulers.SequentialLR(optimizer, [warm, schedulers.CosineAnnealingLR(optimizer, TOTAL - 100)], [100])


BY_EPOCH = {
    "steps": lambda optimizer: schedulers.MultiStepLR(optimizer, [10, 15]),
    "exponential": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.8),
    "warm restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 7),
}
BY_STEP = {
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, TOTAL),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=TOTAL + 1),
    "inverse square root": lambda optimizer: schedulers.LambdaLR(
        optimizer, lambda step: min(1, 30 / (step + 1)) ** 0.5
    ),
    "warmup, then cosine": warmup_then_cosine,
}
CASES = [(make, STEPS_PER_EPOCH) for make in BY_EPOCH.values()] + [(make, 1) for make in BY_STEP.values()]


def sgd(rate=0.2):
    return SGD([nn.Parameter(torch.zeros(2))], lr=rate, momentum=0.9)


def foreseen(make, period, every=20):
    """Train nothing for a run; return (foreseen, true) for each interval, and the rates of all steps."""
    optimizer = sgd()
    scheduler = make(optimizer)
    foresight, rates, said = Foresight(scheduler, TOTAL), [], []
    for step in range(1, TOTAL + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step % period == 0:
            scheduler.step()
        if step % every == 0:
            said.append((step, foresight.ahead(step, optimizer.param_groups[0]["lr"])))
    return [(ahead, sum(rates[step:])) for step, ahead in said], rates


@pytest.mark.parametrize(("make", "period"), CASES, ids=[*BY_EPOCH, *BY_STEP])
def test_the_rate_to_come_is_foreseen_to_the_end(make, period):
    pairs, rates = foreseen(make, period)
    known = [pair for pair in pairs if pair[0] is not None]
    assert len(known) >= len(pairs) - 2 * max(1, period // 20) - 1, "two calls of the scheduler are enough"
    if period == 1:
        assert all(ahead == pytest.approx(true, abs=1e-9) for ahead, true in known)
    else:  # the calls are seen at the ends of intervals, so how far apart they are becomes exact with time
        errors = [abs(ahead - true) / sum(rates) for ahead, true in known]
        assert max(errors) < 0.2 and max(errors[10:]) < 0.05 and max(errors[-12:]) < 0.03


def test_foreseeing_leaves_the_run_as_it_is():
    _, rates = foreseen(BY_STEP["warmup, then cosine"], 1)
    optimizer = sgd()
    scheduler = warmup_then_cosine(optimizer)
    for rate in rates:
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.step()
        scheduler.step()


def test_a_rate_that_somebody_sets_by_hand_is_gone_on_from():
    optimizer = sgd()
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    foresight = Foresight(scheduler, 10)
    for step in range(1, 5):
        optimizer.step()
        scheduler.step()
        before = foresight.ahead(step, optimizer.param_groups[0]["lr"])
    optimizer.param_groups[0]["lr"] *= 10
    assert foresight.ahead(4, optimizer.param_groups[0]["lr"]) == pytest.approx(10 * before)


@pytest.mark.parametrize("scheduler", [None, object(), schedulers.ReduceLROnPlateau(sgd())])
def test_what_cannot_be_foreseen_is_unknown(scheduler):
    foresight = Foresight(scheduler, TOTAL)
    for step in range(1, 100):
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(1.0)
        assert foresight.ahead(step, 0.1) is None


def test_a_run_of_unknown_length_has_no_end_to_see():
    optimizer = sgd()
    scheduler = BY_STEP["cosine"](optimizer)
    foresight = Foresight(scheduler, None)
    for step in range(1, 10):
        optimizer.step()
        scheduler.step()
        assert foresight.ahead(step, 0.1) is None


# The policy, by hand: intervals of 10 steps at a rate of 0.1, so a way of 1 each. A reading of 4e-6 at the second
# evaluation since the snapshot is a drift of 2e-3 / 2 = 1e-3. With a way of 5 ahead it comes to (5e-3)^2 = 2.5e-5,
# with one of 10 to 1e-4: the limit of 5e-5 lies between.


def forecast(num_modules=3, trainable=None, **settings):
    config = Config.from_dict({"policy": {"name": "forecast", **settings}})
    policy = find_policy("forecast")(
        config, trainable=trainable or [True] * num_modules, rule=find_rule("step"), total_steps=1000
    )
    assert policy.observe_interval(interval(1, loss=1.0)) == ()
    (ended, *_) = policy.observe_interval(interval(2, loss=1.01))
    assert isinstance(ended, EndBootstrapping)
    return policy


def interval(evaluation, way_ahead=5.0, loss=1.0):
    return Interval(step=10 * evaluation, evaluation=evaluation, loss=loss, learning_rate=0.1, way_ahead=way_ahead)


def readings(policy, count, *, way_ahead=5.0, value=4e-6, age=2, first=3):
    """Give so many intervals with a reading each; return the decisions of each."""
    found = []
    for evaluation in range(first, first + count):
        policy.observe_interval(interval(evaluation, way_ahead))
        reading = Reading(step=10 * evaluation, evaluation=evaluation, module=policy.frozen, value=value, age=age)
        found.append(policy.observe_reading(reading).decisions)
    return found


def test_it_freezes_after_enough_readings_that_foresee_little():
    # The first two drifts are too few to foresee anything by; then three readings in a row are under the limit.
    *before, last = readings(forecast(), 5)
    assert before == [()] * 4
    (freeze,) = last
    assert isinstance(freeze, Freeze) and freeze.module == 0 and "2.5e-05" in freeze.reason


def test_a_long_way_ahead_freezes_nothing_however_stationary():
    assert not any(readings(forecast(), 30, way_ahead=10.0))


def test_an_older_snapshot_is_not_taken_for_a_faster_drift():
    assert not any(readings(forecast(), 8, value=16e-6, age=2))
    assert any(readings(forecast(), 8, value=16e-6, age=4, first=6))


def test_one_reading_out_of_line_does_not_freeze_and_does_not_hinder():
    policy = forecast()
    readings(policy, 4)
    policy.observe_interval(interval(7))
    policy.observe_reading(Reading(step=70, evaluation=7, module=0, value=1.0, age=2))
    assert policy.frozen == 1, "the median of the drifts is what counts"


def test_nothing_freezes_while_the_way_ahead_is_unknown():
    assert not any(readings(forecast(), 20, way_ahead=None))


def test_what_has_nothing_to_train_is_passed_over_and_the_last_never_freezes():
    policy = forecast(trainable=[False, True, False, True])
    assert policy.frozen == 1
    assert [decision.module for decision in readings(policy, 5)[-1]] == [1, 2]
    assert policy.monitored is None and policy.frozen == 3


def test_it_goes_on_from_its_state_as_if_it_had_never_stopped():
    whole, stopped = forecast(), forecast()
    readings(stopped, 3)
    other = forecast()
    other.load_state_dict(stopped.state_dict())
    assert readings(whole, 5)[3:] == readings(other, 2, first=6)
    assert whole.state_dict() == other.state_dict()


def test_a_run_freezes_behind_the_decay_and_its_journal_replays(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = schedulers.MultiStepLR(optimizer, [10])
    run = egeria.attach(
        model,
        optimizer,
        scheduler=scheduler,
        total_steps=400,
        policy="forecast",
        config={"modules": {"pattern": r"\d"}, "plasticity": {"interval_steps": 5}, "policy": {"limit": 1e-4}},
        directory=tmp_path,
        controller=ScriptedController(lambda evaluation, module: 1e-6),
    )
    inputs = torch.randn(16, 4)
    for step in range(1, 401):
        loss = run.model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
        if step % 20 == 0:
            scheduler.step()
    run.close()
    journal = egeria.read_journal(tmp_path)
    frozen = [event.step for event in journal if isinstance(event, ModuleFrozen)]
    assert frozen and min(frozen) > 200, "at the high rate there is too much to come"
    assert all(event.age is not None for event in journal if isinstance(event, PlasticityRead))
    assert any(event.way_ahead for event in journal if isinstance(event, IntervalMeasured))
    assert replay(tmp_path).agrees
