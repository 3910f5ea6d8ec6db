"""The learning rate to come, and the policy that goes by it."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as schedulers

import egeria
from egeria import Config
from egeria.events import IntervalMeasured, ModuleFrozen, PlasticityRead
from egeria.policy import PLASTICITY, EndBootstrapping, Freeze, Interval, Reading, Thaw, find_policy, find_rule
from egeria.policy.base import FrontPolicy
from egeria.policy.evidence import LearningRateHistory
from egeria.report.replay import replay
from egeria.session.checks import unwrap_scheduler
from egeria.session.measuring.foresight import Foresight, Foresights
from egeria.testing import ScriptedController

STEPS_PER_EPOCH, NUM_EPOCHS = 50, 20
TOTAL = STEPS_PER_EPOCH * NUM_EPOCHS


def warmup_then_cosine(optimizer):
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=100)
    return schedulers.SequentialLR(optimizer, [warm, schedulers.CosineAnnealingLR(optimizer, TOTAL - 100)], [100])


BY_EPOCH = {
    "steps": lambda optimizer: schedulers.MultiStepLR(optimizer, [10, 15]),
    "exponential": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.8),
    "one cycle of epochs": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, total_steps=NUM_EPOCHS),
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
    return [(ahead and ahead.remaining_rate_sum, sum(rates[step:])) for step, ahead in said], rates


@pytest.mark.parametrize(("make", "period"), CASES, ids=[*BY_EPOCH, *BY_STEP])
def test_the_rate_to_come_is_foreseen_to_the_end(make, period):
    pairs, rates = foreseen(make, period)
    known = [pair for pair in pairs if pair[0] is not None]
    assert len(known) >= len(pairs) - 2 * max(1, period // 20) - 1, "two calls of the scheduler are enough"
    if period == 1:
        assert all(ahead == pytest.approx(true, abs=1e-9) for ahead, true in known)
    else:  # the calls are seen at the ends of intervals, so how far apart they are becomes exact with time
        errors = [abs(ahead - true) / sum(rates) for ahead, true in known]
        assert max(errors) < 0.25 and max(errors[10:]) < 0.05 and max(errors[-12:]) < 0.03


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
    after = foresight.ahead(4, optimizer.param_groups[0]["lr"])
    assert after == pytest.approx([10 * before.remaining_rate_sum, 10 * before.last_rate])


def two_groups(front, head):
    """An optimizer whose front is scheduled by one function of the step, and its head by another."""
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [nn.Parameter(torch.zeros(2))], "lr": 1.0}]
    optimizer = SGD(groups, lr=0.1)
    return optimizer, schedulers.LambdaLR(optimizer, [front, head])


def test_groups_with_another_rate_do_not_count():
    optimizer, scheduler = two_groups(lambda step: 1.0, lambda step: 0.5**step)
    foresight = Foresight(scheduler, 100)
    for step in range(1, 11):
        optimizer.step()
        scheduler.step()
        ahead = foresight.ahead(step, 0.1)
    assert (ahead.remaining_rate_sum, ahead.last_rate) == (pytest.approx(9.0), pytest.approx(0.1))
    assert foresight.ahead(10, 0.03) is None, "no group of this scheduler trains the front"


def test_a_scheduler_that_is_begun_anew_is_watched_anew():
    optimizer = sgd()
    scheduler = schedulers.CosineAnnealingLR(optimizer, 50)
    foresight = Foresight(scheduler, 100)
    for step in range(1, 100):
        optimizer.step()
        scheduler.step()
        if step == 40:
            scheduler = foresight._scheduler = schedulers.CosineAnnealingLR(optimizer, 50)
        ahead = foresight.ahead(step, optimizer.param_groups[0]["lr"])
        assert ahead is None or ahead.remaining_rate_sum > 0


def test_the_last_rate_is_foreseen():
    optimizer = sgd()
    scheduler = schedulers.MultiStepLR(optimizer, [100, 900])
    foresight = Foresight(scheduler, TOTAL)
    for step in range(1, 51):
        optimizer.step()
        scheduler.step()
        ahead = foresight.ahead(step, 0.2)
    assert ahead.last_rate == pytest.approx(0.002)


def test_one_call_at_the_end_of_an_epoch_is_enough():
    optimizer = sgd()
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    foresight = Foresight(scheduler, 300)
    optimizer.step()
    assert foresight.ahead(50, 0.2) is None
    scheduler.step()
    ahead = foresight.ahead(100, 0.1)
    assert (ahead.remaining_rate_sum, ahead.last_rate) == (pytest.approx(10 + 5), pytest.approx(0.05))
    resumed = Foresight(scheduler, 300)
    resumed.load_state_dict(foresight.state_dict())
    assert resumed.ahead(100, 0.1) == ahead


@pytest.mark.parametrize(
    ("make", "steps", "why"),
    [
        (lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=50), 200, "forward to total_steps=200"),
        (lambda optimizer: schedulers.ConstantLR(optimizer, 1.0), 10_000_000, "too many to be played forward"),
    ],
)
def test_why_the_rate_to_come_is_unknown_is_told(make, steps, why):
    optimizer = sgd()
    scheduler = make(optimizer)
    foresight = Foresight(scheduler, steps)
    for step in range(1, 4):
        optimizer.step()
        scheduler.step()
        assert foresight.ahead(step, optimizer.param_groups[0]["lr"]) is None
        assert why in foresight.unknown


@pytest.mark.parametrize("reverse", [False, True])
def test_of_several_schedulers_that_with_the_rate_in_question_counts(reverse):
    """A head may have a larger rate than what may freeze."""
    front, head = sgd(0.001), sgd(0.02)
    both = [schedulers.LinearLR(front, 1.0, 0.1, total_iters=100), schedulers.ConstantLR(head, 1.0)]
    foresights = Foresights([Foresight(part, 100) for part in (both[::-1] if reverse else both)])
    assert unwrap_scheduler(both) == both and unwrap_scheduler([both[0], None]) is both[0]
    assert unwrap_scheduler(()) is None and foresights.refusal is None
    alone = Foresight(both[0], 100)
    for step in range(1, 11):
        for optimizer, scheduler in zip((front, head), both, strict=True):
            optimizer.step()
            scheduler.step()
        rate = front.param_groups[0]["lr"]
        assert foresights.ahead(step, rate) == alone.ahead(step, rate) and foresights.unknown is None
        if step == 5:
            state = foresights.state_dict()
            foresights = Foresights([Foresight(part, 100) for part in (both[::-1] if reverse else both)])
            foresights.load_state_dict(state)
    assert foresights.ahead(10, 0.5) is None and "pass all, in a list" in foresights.unknown


@pytest.mark.parametrize("loaded", [3, 9, 12])
def test_calls_that_are_not_those_of_the_run_say_nothing_of_how_far_apart_they_are(loaded):
    """Of a state that is loaded after `attach`: 3, 9 or 12 epochs, each of 100 steps."""
    optimizer = sgd()
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    foresight = Foresight(scheduler, 1000)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": loaded})
    optimizer.step()
    assert foresight.ahead(10 if loaded != 9 else 20, 0.2) is None
    for step in (100, 200, 300):
        scheduler.step()
        assert (foresight.ahead(step, optimizer.param_groups[0]["lr"]) is None) == (step == 100)


def test_a_call_at_the_beginning_of_the_first_epoch_says_nothing():
    optimizer = sgd()
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    foresight = Foresight(scheduler, 1000)
    optimizer.step()
    scheduler.step()
    assert foresight.ahead(10, 0.1) is None


def test_without_a_scheduler_the_worst_is_foreseen():
    ahead = Foresight(None, TOTAL).ahead(TOTAL - 10, 0.1)
    assert (ahead.remaining_rate_sum, ahead.last_rate) == (pytest.approx(1.0), 0.0)


@pytest.mark.parametrize("scheduler", [object(), schedulers.ReduceLROnPlateau(sgd())])
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


# The policy, by hand: intervals of 10 steps at a rate of 0.1, so a way of 1 each. Readings of a random walk of 3e-6 for
# each unit of the way come to 3e-6 times the way ahead: the limit of 3e-5 is reached by a way of 10.


def walk(age):
    return 3e-6 * age


def straight(age):
    return 6e-7 * age**2


def noise(_age):
    return 4e-5


def forecast(num_modules=3, trainable=None, total_steps=10_000, **settings):
    config = Config.from_dict(
        {"policy": {"name": "forecast", "limit": 3e-5, "loss_limit": 0.015, "watched_share": 1.0, **settings}}
    )
    policy = find_policy("forecast")(
        config, trainable=trainable or [True] * num_modules, rule=find_rule("step"), total_steps=total_steps
    )
    assert policy.observe_interval(interval(1, loss=2.0, step_noise=None)) == ()
    (ended, *_) = policy.observe_interval(interval(2, loss=2.0, step_noise=None))
    assert isinstance(ended, EndBootstrapping)
    return policy


def interval(evaluation, remaining=6.0, loss=1.0, rate=0.1, last_rate=0.0, step_noise=0.0149):
    return Interval(
        step=10 * evaluation,
        evaluation=evaluation,
        loss=loss,
        learning_rate=rate,
        remaining_rate_sum=remaining,
        last_rate=last_rate,
        noise=None if step_noise is None else (step_noise,) * 4,
    )


def readings(policy, count, *, plasticity=walk, first=3, oldest=10, snapshot=2, work_share=None, **interval_settings):
    """Give so many intervals with a reading each, the snapshot renewed as the policy wants; return the decisions."""
    found = []
    for evaluation in range(first, first + count):
        decisions = policy.observe_interval(interval(evaluation, **interval_settings))
        age = evaluation - snapshot
        module = policy.monitored if policy.monitored is not None else 0
        value = plasticity(age)
        judgement = policy.observe_reading(
            Reading(
                step=10 * evaluation,
                evaluation=evaluation,
                module=module,
                value=value,
                age=age,
                work_share=work_share,
            )
        )
        if age >= min(oldest, policy.window):
            snapshot = evaluation
        found.append((*decisions, *judgement.decisions))
    return found


def test_it_freezes_after_enough_readings_that_foresee_little():
    # A law takes four readings; then two in a row are under the limit.
    *before, last = readings(forecast(), 5)
    assert before == [()] * 4
    (freeze,) = last
    assert isinstance(freeze, Freeze) and freeze.module == 0 and "1.8e-05" in freeze.reason


@pytest.mark.parametrize(
    ("plasticity", "settings", "freezes"),
    [
        (walk, {"remaining": 12.0}, False),
        (straight, {"remaining": 6.5}, True),  # followed like a random walk from where it is
        (straight, {"remaining": 20.0}, False),
        (noise, {"remaining": 1e-3}, False),  # it fades with the rate, whatever the way
        (noise, {"remaining": 24.0, "last_rate": 0.1}, True),  # it stays as it is: no progress
        (noise, {"remaining": 24.0, "last_rate": 0.01}, False),
        (walk, {"remaining": None}, False),
        (walk, {"remaining": 0.0}, True),
    ],
)
def test_it_goes_by_the_kind_of_movement_and_by_what_the_rate_has_ahead(plasticity, settings, freezes):
    assert any(readings(forecast(), 20, plasticity=plasticity, **settings)) == freezes


def test_readings_from_before_a_decay_are_forgotten_and_the_snapshot_renewed():
    policy = forecast()
    assert not any(readings(policy, 12, plasticity=lambda age: 1e-3, remaining=100.0))
    policy.observe_interval(interval(15, rate=0.01))
    assert policy.window == 1, "the snapshot is from before the decay"
    policy.observe_reading(Reading(step=150, evaluation=15, module=0, value=1e-3, age=1))
    assert policy.window == 1, "the rate fell in the midst of that interval"
    found = readings(policy, 12, first=16, snapshot=15, rate=0.01, remaining=0.5)
    assert [index for index, decisions in enumerate(found) if decisions] == [6, 11], (
        "the snapshot is from when they had settled"
    )
    assert policy.window == 10


@pytest.mark.parametrize(("work_share", "remaining"), [(0.1, 9.5), (1 / 3, 9.5), (0.5, 14.5), (0.9, 19.5)])
def test_a_module_with_much_work_may_change_by_as_much_more(work_share, remaining):
    for way, freezes in ((remaining, True), (remaining + 1, False)):
        assert any(readings(forecast(), 5, remaining=way, work_share=work_share)) == freezes


def test_a_law_is_not_followed_much_farther_than_it_was_seen():
    for way, freezes in ((19.0, True), (26.0, False)):  # four and five units were seen
        assert any(readings(forecast(), 5, plasticity=lambda age: 1e-8 * age, remaining=way)) == freezes


@pytest.mark.parametrize(("ratio", "remaining", "freezes"), [(1, 19.0, True), (3, 19.0, False), (3, 5.0, True)])
def test_readings_that_scatter_tell_little_of_a_long_way(ratio, remaining, freezes):
    found = readings(
        forecast(),
        6,
        plasticity=lambda age: 1e-5 * ratio ** (0.5 if age % 2 else -0.5),
        remaining=remaining,
        last_rate=0.02,
    )
    assert any(found) == freezes


@pytest.mark.parametrize(("last_rate", "remaining"), [(0.0, 9.5), (0.025, 9.5), (0.026, 0.9), (0.1, 0.9)])
def test_a_run_that_ends_in_the_midst_of_learning_has_a_tenth_of_the_limit(last_rate, remaining):
    for way, freezes in ((remaining, True), (remaining + 1, False)):
        assert any(readings(forecast(), 5, remaining=way, last_rate=last_rate)) == freezes


@pytest.mark.parametrize(
    ("rate", "step_noise", "ease"),
    [
        (0.025, 0.03, 1),
        (0.025, 0.015, 1),
        (0.025, 0.0075, 2),
        (0.025, 0.00375, 4),
        (0.025, 0.0, 1),
        (0.025, -1.0, 1),
        (0.026, 0.00375, 1),  # at a rate still high it may not have begun to learn
    ],
)
def test_a_module_whose_steps_hardly_bear_on_the_loss_may_change_by_more(rate, step_noise, ease):
    for way, freezes in ((9.5, True), (10.5, False)):  # of a rate of 0.1
        policy = forecast()
        found = readings(
            policy,
            5,
            plasticity=lambda age: ease * walk(age),
            rate=rate,
            remaining=way * rate / 0.1,
            step_noise=step_noise,
        )
        assert any(found) == freezes


def test_what_is_frozen_counts_in_what_bears_on_the_loss():
    for remaining, frozen in ((3.7, 2), (3.8, 1)):  # with the first, the noise of the second is 1 % of the loss
        policy = forecast(num_modules=4)
        readings(policy, 17, rate=0.025, remaining=remaining, step_noise=0.005)
        assert policy.frozen == frozen


def still(_age):
    return 1e-6


@pytest.mark.parametrize(
    ("plasticity", "settings", "freezes"),
    [
        (still, {"step_noise": 0.014}, True),  # 1.4 % of a fall from 2 to 1, all of which a lower rate would take away
        (still, {"step_noise": 0.016}, False),
        (still, {"step_noise": 0.016, "loss": 0.9}, True),
        (still, {"step_noise": 0.007, "loss": 1.5}, True),  # 0.5 % of the loss, 1.4 % of what was learned
        (still, {"step_noise": 0.008, "loss": 1.5}, False),
        (still, {"step_noise": 0.0029, "loss": 1.95}, True),  # a fall of 0.05 counts for a tenth of the loss
        (still, {"step_noise": 0.0030, "loss": 1.95}, False),
        (still, {"step_noise": 0.0, "loss": 2.5}, True),
        (still, {"step_noise": 0.029, "last_rate": 0.05}, True),  # the rate falls by half only
        (still, {"step_noise": 0.031, "last_rate": 0.05}, False),
        (still, {"step_noise": 10.0, "last_rate": 0.1}, True),
        (walk, {"step_noise": 10.0}, True),  # it wanders: there is no place that it trembles around
        (still, {"step_noise": -1.0}, True),
    ],
)
def test_noise_that_a_falling_rate_would_take_from_the_loss_is_not_frozen_in(plasticity, settings, freezes):
    assert any(readings(forecast(), 8, plasticity=plasticity, **settings)) == freezes


def test_what_is_frozen_keeps_no_more_of_the_loss_than_the_limit_in_all():
    policy = forecast(num_modules=4)
    readings(policy, 20, plasticity=still, step_noise=0.006)
    assert policy.frozen == 2


@pytest.mark.parametrize(("remaining", "freezes"), [(2.4, True), (2.6, False)])
def test_where_noise_cannot_be_measured_the_limit_is_a_quarter(remaining, freezes):
    assert any(readings(forecast(), 8, remaining=remaining, step_noise=None)) == freezes


def test_readings_against_another_snapshot_are_not_mixed_in():
    policy = forecast()
    assert not any(readings(policy, 10, plasticity=lambda age: 1e-4))
    assert any(readings(policy, 5, first=13, snapshot=12))


def test_a_slow_fall_of_the_rate_forgets_nothing():
    policy = forecast()
    for evaluation in range(3, 9):
        found = readings(policy, 1, first=evaluation, rate=0.1 * 0.9**evaluation, remaining=20.0)
    assert not any(found) and len(policy.state_dict()["movement"]["samples"]) == 6


def test_a_loss_above_its_trend_thaws_and_makes_it_strict():
    policy = forecast(num_modules=4)
    readings(policy, 5)
    assert policy.frozen == 1
    found = [policy.observe_interval(interval(evaluation, loss=1.1)) for evaluation in range(8, 11)]
    (thaw,) = found[-1]
    assert found[:2] == [(), ()] and isinstance(thaw, Thaw) and "10.0%" in thaw.reason and policy.frozen == 0
    assert not any(readings(policy, 20, first=11)), "a quarter of the limit now"
    assert any(readings(policy, 20, first=31, remaining=1.5))


def test_a_loss_that_goes_on_falling_more_slowly_is_no_alarm():
    losses = [1.0 * 0.995**index for index in range(40)]
    policy = forecast()
    for evaluation, loss in enumerate(losses, start=3):
        found = readings(policy, 1, first=evaluation, loss=loss, snapshot=evaluation - 1 - evaluation % 7)
        assert not any(isinstance(decision, Thaw) for decision in found[0])
    assert policy.frozen == 2


def test_behind_a_thaw_nothing_is_read_from_when_it_was_frozen():
    policy = forecast(num_modules=4)
    readings(policy, 5)
    for evaluation in range(8, 11):
        decisions = policy.observe_interval(interval(evaluation, loss=1.1))
    assert isinstance(decisions[0], Thaw)
    # The snapshot is from when the module was frozen, so that it has not moved at all.
    found = policy.observe_reading(Reading(step=100, evaluation=10, module=0, value=0.0, age=3))
    assert found.change_ahead is None and policy.window == 1
    assert not any(readings(policy, 6, first=11, snapshot=10, remaining=1.0)), "it settles, and the guard has to learn"
    assert any(readings(policy, 8, first=17, snapshot=13, remaining=1.0))


def test_a_later_freeze_is_watched_as_long_as_the_first():
    policy = forecast(num_modules=4)
    found = readings(policy, 5)
    while policy.frozen < 2:
        found = readings(policy, 1, first=policy.state_dict()["rates"]["step"] // 10 + 1, snapshot=2, oldest=99)
    step = policy.state_dict()["rates"]["step"] // 10
    found = [policy.observe_interval(interval(evaluation, loss=1.2)) for evaluation in range(step + 1, step + 5)]
    assert any(isinstance(decision, Thaw) for decisions in found for decision in decisions)


@pytest.mark.parametrize(("level", "freezes"), [(0.2, True), (0.5, False)])
def test_readings_beyond_what_can_change_are_not_taken_for_noise_that_stays(level, freezes):
    policy = forecast(limit=0.01)
    found = readings(policy, 8, plasticity=lambda age: level, last_rate=0.1)
    assert any(found) == freezes


def test_a_run_that_was_made_longer_goes_on_with_its_new_length():
    longer = forecast(total_steps=400)
    longer.load_state_dict(forecast(total_steps=200).state_dict())
    longer.observe_interval(interval(30, remaining=5.0))
    assert longer.monitored == 0
    assert longer.observe_reading(Reading(step=300, evaluation=30, module=0, value=1e-6, age=1)).tolerance > 2e-5


@pytest.mark.parametrize(
    ("plasticity", "foreseen", "more"),
    [
        (lambda age: 2 * walk(age), 45.0, 55.0),  # ten times the limit it froze under, at a way of 50
        (lambda age: 1e-6, 95.0, 105.0),  # it only trembles, but twenty times the way that was seen is out of sight
    ],
)
def test_more_rate_than_was_foreseen_thaws(plasticity, foreseen, more):
    policy = forecast()
    readings(policy, 5, plasticity=plasticity, remaining=4.0)
    assert policy.frozen == 1
    assert policy.observe_interval(interval(8, remaining=foreseen)) == ()
    (thaw,) = policy.observe_interval(interval(9, remaining=more))
    assert isinstance(thaw, Thaw) and "foreseen" in thaw.reason


def test_what_scattered_does_not_grow_while_the_way_gets_shorter():
    policy = forecast()
    found = readings(policy, 6, plasticity=lambda age: 1e-6 * 6 ** (0.5 if age % 2 else -0.5), remaining=4.0)
    assert any(found)
    for evaluation in range(20, 60):
        assert policy.observe_interval(interval(evaluation, remaining=4.0 * 0.8 ** (evaluation - 20))) == ()


def held(optimizer):
    return None


def valley(optimizer):
    return schedulers.LambdaLR(optimizer, lambda step: 0.05 if 100 <= step < 800 else 1.0)


@pytest.mark.parametrize("until", [40, TOTAL // 2])  # in a warm-up, where there is one, and behind it
@pytest.mark.parametrize(
    ("make", "rests"),
    [
        *((make, True) for name, make in BY_STEP.items() if name != "inverse square root"),
        (BY_STEP["inverse square root"], True),  # to 0.17 of the highest rate over 1,000 steps
        (lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: min(1, 300 / (step + 1)) ** 0.5), False),
        (valley, False),
        (held, False),  # no scheduler: whoever holds the rate, or lowers it by hand, has not said that it will fall
    ],
)
def test_it_knows_whether_the_rate_ends_low(make, rests, until):
    optimizer = sgd()
    scheduler = make(optimizer)
    foresight, history = Foresight(scheduler, TOTAL), LearningRateHistory(memory=10, total_steps=TOTAL)
    for step in range(1, until + 1):
        optimizer.step()
        if scheduler:
            scheduler.step()
        rate = optimizer.param_groups[0]["lr"]
        ahead = foresight.ahead(step, rate)
        if step % 20 == 0:
            history.update(
                Interval(
                    step=step,
                    evaluation=step // 20,
                    loss=1.0,
                    learning_rate=rate,
                    remaining_rate_sum=ahead.remaining_rate_sum,
                    last_rate=ahead.last_rate,
                )
            )
    assert history.ends_low == rests
    history.update(
        Interval(step=step + 20, evaluation=99, loss=1.0, learning_rate=0.02, remaining_rate_sum=9.9, last_rate=0.0)
    )
    assert history.ends_low, "it was lowered by hand"


def test_a_reference_that_is_renewed_too_soon_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(egeria.ConfigError, match=r"refresh_evaluations must be at least 4 .* found 3"):
        egeria.attach(model, optimizer, total_steps=9, config={"reference": {"refresh_evaluations": 3}})
    assert egeria.attach(model, optimizer, total_steps=9).close() is None, "the refused call left nothing behind"


def watched(policy, evaluations, **settings):
    """Return the evaluations at which a module is wanted, and read; the snapshot is kept for ten."""
    wanted, snapshot = [], evaluations.start - 1
    for evaluation in evaluations:
        policy.observe_interval(interval(evaluation, **{"remaining": 20.0, **settings}))
        if policy.monitored is not None:
            wanted.append(evaluation)
            reading = Reading(
                step=10 * evaluation, evaluation=evaluation, module=0, value=1e-3, age=evaluation - snapshot
            )
            assert not policy.observe_reading(reading).decisions
            snapshot = evaluation if evaluation - snapshot >= policy.window else snapshot
    return wanted


def test_what_is_far_from_freezing_is_looked_at_seldom_until_the_rate_falls():
    policy = forecast()
    wanted = watched(policy, range(3, 103))
    assert 30 <= len(wanted) <= 45 and max(after - before for before, after in pairwise(wanted)) <= 11
    rests = next(before for before, after in pairwise(wanted) if after > before + 1)
    policy = forecast()
    watched(policy, range(3, rests + 2))
    assert policy.monitored is None and 40 < policy.steady_steps(10 * rests, 10) <= 140, "at rest, and not for ever"
    later = range(rests + 2, rests + 7)
    assert watched(policy, later, rate=0.01) == list(later)


def steady_run(directory, value, steps=1500):
    """Train nothing much at a steady rate, plasticity always the same; return the journal."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    run = egeria.attach(
        model,
        optimizer,
        scheduler=schedulers.CosineAnnealingLR(optimizer, 10 * steps),
        total_steps=10 * steps,
        config={
            "policy": {"watched_share": 1.0},
            "modules": {"pattern": r"\d"},
            "plasticity": {"interval_steps": 5},
            "controller": {"budget_share": 100.0},
        },
        directory=directory,
        controller=ScriptedController(lambda evaluation, module: value),
    )
    for _ in range(steps):
        run.model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(torch.ones(()))
    run.close()
    return egeria.read_journal(directory)


def test_after_a_rest_a_module_is_judged_against_a_new_snapshot(tmp_path):
    journal = steady_run(tmp_path, 3.0)
    read = [event for event in journal if isinstance(event, PlasticityRead)]
    num_intervals = len([event for event in journal if isinstance(event, IntervalMeasured)])
    assert 0.3 * num_intervals < len(read) < 0.5 * num_intervals
    assert max(event.age for event in read) <= 10
    rested = [after for before, after in pairwise(read) if after.evaluation > before.evaluation + 1]
    assert len(rested) > 5 and all(event.age == 1 for event in rested)
    assert replay(tmp_path).agrees and replay(tmp_path).waiting_since is None
    watchful = Config.from_dict({"policy": {"patience": 7, "watched_share": 1.0}, "modules": {"pattern": r"\d"}})
    assert replay(tmp_path, watchful).waiting_since is not None, "it would have looked in the rests"


def test_a_run_of_few_evaluations_is_not_at_rest_for_much_of_it():
    wanted = watched(forecast(total_steps=500), range(3, 45))
    assert max(after - before for before, after in pairwise(wanted)) <= 4


@pytest.mark.parametrize(("share", "begins"), [(0.15, 1 - math.sqrt(0.15)), (0.5, 1 - math.sqrt(0.5)), (1.0, 0.0)])
def test_while_the_rate_has_more_ahead_than_a_share_and_will_fall_nothing_is_watched(share, begins):
    def first_watched(rate_at, ahead_at):
        policy = forecast(total_steps=1000, watched_share=share)
        for evaluation in range(3, 95):
            done = evaluation / 100
            policy.observe_interval(
                interval(evaluation, rate=rate_at(done), remaining=ahead_at(done), last_rate=rate_at(1.0))
            )
            if policy.monitored is not None:
                return done
        return None

    assert first_watched(lambda done: 1 - done, lambda done: 500 * (1 - done) ** 2) == pytest.approx(begins, abs=0.03)
    # A rate that stays, with a scheduler and without one, is watched from the critical period on.
    assert first_watched(lambda done: 1.0, lambda done: 1000 * (1 - done)) == 0.03
    assert first_watched(lambda done: min(1.0, 1e9 * (1 - done)), lambda done: 1000 * (1 - done)) == 0.03


def test_what_is_to_come_is_not_known_yet_before_a_scheduler_was_called_twice():
    policy = forecast(total_steps=1000, watched_share=0.15)
    policy.observe_interval(interval(3, remaining=None, last_rate=None))
    assert policy.monitored is None
    policy = forecast(total_steps=None, watched_share=0.15)  # it never will be
    policy.observe_interval(interval(3, remaining=None, last_rate=None))
    assert policy.monitored == 0


def test_before_watching_no_noise_is_measured_and_where_it_begins_the_snapshot_is_renewed():
    policy = forecast(total_steps=1000, watched_share=0.5)
    policy.observe_interval(interval(3, remaining=60.0))
    assert "noise" not in policy.needs and policy.steady_steps(30, 10) == 1 + 4 * 10
    policy.observe_interval(interval(4, rate=0.1, remaining=1e-3))
    assert policy.monitored == 0 and "noise" in policy.needs and policy.window == 1
    policy.observe_interval(interval(5, rate=0.1, remaining=1e-3))
    assert policy.window > 1


def test_a_run_that_is_nearly_over_is_not_looked_at():
    policy = forecast(total_steps=100)
    policy.observe_interval(interval(9))
    assert policy.monitored == 0
    policy.observe_interval(interval(10))
    assert policy.monitored is None


def test_what_has_nothing_to_train_is_passed_over_and_the_last_never_freezes():
    policy = forecast(trainable=[False, True, False, True])
    assert policy.frozen == 1
    assert [decision.module for decision in readings(policy, 5)[-1]] == [1, 2]
    assert policy.monitored is None and policy.frozen == 3


@pytest.mark.parametrize("stop", [1, 5, 8, 12])
def test_it_goes_on_from_its_state_as_if_it_had_never_stopped(stop):
    def observe(policy, evaluations):
        for evaluation in evaluations:
            loss = 1.2 if evaluation in (12, 13, 14, 15) else 1.0
            yield readings(policy, 1, first=evaluation, loss=loss, snapshot=evaluation - 1 - evaluation % 7)

    whole, stopped, other = forecast(), forecast(), forecast()
    expected = list(observe(whole, range(3, 30)))
    list(observe(stopped, range(3, 3 + stop)))
    other.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert list(observe(other, range(3 + stop, 30))) == expected[stop:]
    assert whole.state_dict() == other.state_dict()
    assert any(isinstance(decision, Thaw) for found in expected for decisions in found for decision in decisions)


@pytest.mark.parametrize("refresh_evaluations", [None, 4])
def test_a_run_freezes_behind_the_decay_and_its_journal_replays(refresh_evaluations, tmp_path):
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
        config={
            "modules": {"pattern": r"\d"},
            "plasticity": {"interval_steps": 5},
            "controller": {"budget_share": 100.0},
            "reference": {"refresh_evaluations": refresh_evaluations},
        },
        directory=tmp_path,
        controller=ScriptedController(lambda evaluation, module: 0.1 if evaluation <= 40 else 1e-4),
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


def test_the_age_of_a_reading_counts_intervals_without_a_loss_too(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = SGD(model.parameters(), lr=0.01)
    config = {"modules": {"pattern": r"\d"}, "plasticity": {"interval_steps": 1}, "controller": {"budget_share": 100.0}}
    with egeria.attach(
        model, optimizer, total_steps=60, config=config, directory=tmp_path, controller=ScriptedController()
    ) as run:
        for step in range(1, 31):
            loss = run.model(torch.randn(16, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(math.nan if 12 <= step < 20 else 1.0)
    snapshot, ages = 0, []
    for event in egeria.read_journal(tmp_path):
        if isinstance(event, PlasticityRead):
            ages.append(event.age)
            assert event.age == event.evaluation - snapshot
        elif event.kind == "reference":
            snapshot = event.evaluation
    assert max(ages) > 10


class Late(FrontPolicy):
    """Looks away right behind the first reference, and then wants a new one for each reading."""

    needs = frozenset({PLASTICITY})
    window = 1

    def _prepare(self):
        self.evaluation = 0

    @property
    def _candidate(self):
        return None if 3 <= self.evaluation < 7 else 0

    def observe_interval(self, interval):
        self.evaluation = interval.evaluation
        return (EndBootstrapping(reason="at once"),) if interval.evaluation == 2 else ()


@pytest.mark.parametrize("refresh_evaluations", [None, 4])
def test_a_reference_that_is_too_old_is_renewed_whatever_was_read_since(refresh_evaluations, tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = SGD(model.parameters(), lr=0.01)
    config = {
        "modules": {"pattern": r"\d"},
        "plasticity": {"interval_steps": 1},
        "controller": {"budget_share": 100.0},
        "reference": {"refresh_evaluations": refresh_evaluations},
        "policy": {"name": Late},
    }
    run = egeria.attach(
        model, optimizer, total_steps=60, config=config, directory=tmp_path, controller=ScriptedController()
    )
    for _ in range(20):
        run.model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(torch.ones(()))
    run.close()
    read = egeria.read_journal(tmp_path).of(PlasticityRead)
    assert len(read) >= 6 and read[0].evaluation == 8 and {event.age for event in read} == {1}
