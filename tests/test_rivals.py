"""The rivals of the paper's rule, each against an example by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria import Config, ConfigError
from egeria.policy import (
    POLICIES,
    EndBootstrapping,
    Freeze,
    Interval,
    Policy,
    Thaw,
    choose_interval,
    find_policy,
    find_rule,
    with_metric_of_policy,
)
from egeria.policy.rivals import percentile
from test_policy import WORKED_READINGS

TIMED = ["static", "linear", "freezeout", "random"]


def make(name, num_modules=4, total_steps=100, trainable=None, deepest=None, groups=None, **options):
    if name == "static":
        options.setdefault("schedule", "0.5:1")
    config = Config.from_dict({**(groups or {}), "policy": {"name": name, **options}})
    return find_policy(name)(
        config,
        trainable=trainable or [True] * num_modules,
        rule=find_rule("step"),
        total_steps=total_steps,
        deepest_freeze=deepest,
    )


def interval(step, **measured):
    return Interval(step=step, evaluation=step, loss=1.0, learning_rate=0.1, **measured)


def run(policy, steps):
    """What the policy decides, by step: the modules that freeze, and 'thaw'."""
    said = {}
    for step in steps:
        decisions = policy.observe_interval(interval(step))
        if decisions:
            said[step] = [
                getattr(decision, "module", "thaw" if isinstance(decision, Thaw) else None) for decision in decisions
            ]
    return said


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_one_and_takes_its_own_state_back(name):
    policy, other = make(name), make(name)
    assert isinstance(policy, Policy)
    run(policy, range(10, 101, 10))
    other.load_state_dict(policy.state_dict())
    assert (other.frozen, other.stage, other.state_dict()) == (policy.frozen, policy.stage, policy.state_dict())


def test_none_decides_nothing():
    assert run(make("none"), range(1, 200)) == {}
    assert make("none").needs == frozenset()


def test_static_follows_its_schedule_and_thaws_at_0():
    policy = make("static", schedule="0.54:2 0.79:3 0.9:0")
    assert run(policy, range(10, 101, 10)) == {60: [0, 1], 80: [2], 90: ["thaw"]}


def test_static_thaws_down_to_fewer_modules():
    assert run(make("static", schedule="0.5:3 0.7:1"), range(10, 101, 10)) == {50: [0, 1, 2], 70: ["thaw", 0]}


def test_a_move_at_the_very_step_is_made_at_it():
    # 0.5 + 0.5 * 1 / 10 is a little more than 0.55 in floating point.
    assert run(make("linear", num_modules=11, total_steps=20), [11]) == {11: [0]}


@pytest.mark.parametrize("name", TIMED)
def test_no_more_modules_freeze_than_may(name):
    schedule = {"schedule": "0.3:9"} if name == "static" else {}
    for deepest, expected in ((None, 3), (2, 2), (0, 0)):
        policy = make(name, deepest=deepest, **schedule)
        run(policy, range(1, 101))
        assert policy.frozen == expected
    policy = make(name, groups={"freezing": {"enabled": False}}, **schedule)
    assert run(policy, range(1, 101)) == {}


@pytest.mark.parametrize("name", TIMED)
def test_the_clock_needs_the_length_of_the_run(name):
    with pytest.raises(ConfigError, match=rf"'{name}'.*found total_steps=None.*Pass total_steps="):
        make(name, total_steps=None)


# Composer, 5 modules of which 4 may freeze: floor(level * (t - 0.5) / 0.5 * 4).
#   t = 0.62: 0.96 -> 0   0.63: 1.04 -> 1   0.75: 2   0.87: 2.96 -> 2   0.88: 3.04 -> 3   1.0: 4
def test_linear_freezes_evenly_from_its_start_to_its_level():
    assert run(make("linear", 5), range(1, 101)) == {63: [0], 75: [1], 88: [2], 100: [3]}
    assert run(make("linear", 5, level=0.5), range(1, 101)) == {75: [0], 100: [1]}
    assert run(make("linear", 5, start=0.0), range(1, 101)) == {25: [0], 50: [1], 75: [2], 100: [3]}


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(1, 100), st.floats(0, 0.95), st.floats(0.05, 1))
def test_linear_is_composers_formula_at_every_step(num_modules, total_steps, start, level):
    policy = make("linear", num_modules, total_steps, start=start, level=level)
    for step in range(1, total_steps + 1):
        policy.observe_interval(interval(step))
        exact = level * max(0.0, step / total_steps - start) / (1 - start) * (num_modules - 1)
        assert math.floor(exact - 1e-6) <= policy.frozen <= math.floor(exact + 1e-6)


# FreezeOut with three modules, t_0 = 0.5, over 100 steps: r = 0.5, 0.75, 1. At step 25, cosines by hand:
#   module 0: (1 + cos(pi / 2)) / 2 = 0.5      module 1: (1 + cos(pi / 3)) / 2 = 0.75
#   module 2: (1 + cos(pi / 4)) / 2 = 0.853553 (the square root of 1/2 is 0.707107)
def test_freezeout_anneals_each_module_to_zero_at_its_own_time():
    policy = make("freezeout", 3, start=0.5, shape="linear", scaled=False)
    assert policy.rate_shares(0) == (1, 1, 1)
    assert policy.rate_shares(25) == pytest.approx((0.5, 0.75, 0.853553), abs=1e-6)
    assert policy.rate_shares(50) == pytest.approx((0, 0.25, 0.5))
    assert policy.rate_shares(75)[:2] == (0, 0)
    assert policy.rate_shares(100) == (0, 0, 0)
    assert run(policy, range(1, 101)) == {50: [0], 75: [1]}


def test_freezeout_scaled_begins_higher_by_as_much_as_it_ends_earlier():
    policy = make("freezeout", 3, start=0.5, shape="linear", scaled=True)
    assert policy.rate_shares(0) == pytest.approx((2, 4 / 3, 1))
    assert policy.rate_shares(25) == pytest.approx((1, 1, 0.853553), abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "frozen_at"), [("linear", [80, 90]), ("squared", [64, 81]), ("cubic", [52, 73])]
)  # 0.8, 0.9; 0.64, 0.81; 0.512, 0.729
def test_freezeout_spaces_by_its_shape_from_0_8_on(shape, frozen_at):
    assert list(run(make("freezeout", 3, shape=shape), range(1, 101))) == frozen_at


def test_freezeout_leaves_rates_alone_where_nothing_may_freeze():
    assert make("freezeout", groups={"freezing": {"enabled": False}}).rate_shares(10) is None


# AutoFreeze, four modules:  G(1) = 10, 10, 10, 10   G(2) = 11, 12, 15, 14   G(3) = -, -, 18, 21
#   eta at 2: 0.1, 0.2, 0.5, 0.4; their median 0.3: module 2 is the first above it, so 0 and 1 freeze.
#   eta at 3: 3/15 = 0.2, 7/14 = 0.5; their median 0.35: module 3 becomes the first in training, 2 freezes.
def test_autofreeze_keeps_the_first_module_that_changes_more_than_the_median():
    policy = make("autofreeze")
    said = [
        policy.observe_interval(interval(step, gradients=gradients))
        for step, gradients in enumerate(
            [(10.0, 10.0, 10.0, 10.0), (11.0, 12.0, 15.0, 14.0), (None, None, 18.0, 21.0), (None, None, None, 30.0)], 1
        )
    ]
    assert [[decision.module for decision in decisions] for decisions in said] == [[], [0, 1], [2], []]


def test_autofreeze_freezes_nothing_where_the_front_changes_most():
    policy = make("autofreeze")
    for step, first in enumerate((10.0, 20.0, 10.0, 40.0), start=1):
        assert policy.observe_interval(interval(step, gradients=(first, 10.0 + step / 10, 10.0, 10.0))) == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_autofreeze_judges_nothing_by_gradients_that_are_not_finite(bad):
    policy = make("autofreeze")
    calm, moved = (10.0, 10.0, 10.0, 10.0), (11.0, 12.0, 15.0, 14.0)
    for step, gradients in enumerate((calm, (10.0, bad, 10.0, 10.0), moved), start=1):
        assert policy.observe_interval(interval(step, gradients=gradients)) == ()
    # Finite again: eta = 0, 0, 0.2, 0.5.
    decisions = policy.observe_interval(interval(4, gradients=(11.0, 12.0, 18.0, 21.0)))
    assert [decision.module for decision in decisions] == [0, 1]


def test_autofreeze_passes_over_modules_without_anything_to_train():
    policy = make("autofreeze", trainable=[False, True, True, True])
    policy.observe_interval(interval(1, gradients=(0.0, 10.0, 10.0, 10.0)))
    decisions = policy.observe_interval(interval(2, gradients=(0.0, 11.0, 15.0, 14.0)))
    assert [decision.module for decision in decisions] == [0, 1]


def test_the_percentile_lies_between_its_neighbours():
    assert percentile([0.4, 0.1, 0.2, 0.5], 50) == pytest.approx(0.3)
    assert percentile([3.0, 1.0, 2.0], 50) == 2
    assert (percentile([3.0, 1.0], 0), percentile([3.0, 1.0], 100)) == (1, 3)
    assert percentile([1.0, 2.0, math.inf, math.inf], 100) == math.inf
    assert percentile([1.0, 2.0], 25) == 1.25


def test_autofreeze_is_evaluated_as_often_as_it_asks():
    for interval_steps, total_steps, chosen in ((None, 1000, 50), (7, 1000, 7), (None, 5, 1)):
        groups = {"policy": {"name": "autofreeze"}, "plasticity": {"interval_steps": interval_steps}}
        config = Config.from_dict(groups)
        assert choose_interval(config, total_steps=total_steps, num_modules=4)[0] == chosen


def test_weight_change_is_the_papers_rule_on_the_movement_of_weights():
    """The worked example of algorithm 1 freezes at its tenth reading, whatever is read."""
    policy = make("weight_change", 3, groups={"plasticity": {"window": 3}})
    assert policy.stage == "bootstrapping"
    policy.observe_interval(interval(1, weight_changes=(None, None, None)))
    (ended,) = policy.observe_interval(interval(2, weight_changes=(9.0, 9.0, 9.0)))
    assert isinstance(ended, EndBootstrapping)
    said = [
        policy.observe_interval(interval(step, weight_changes=(value, 77.0, 77.0)))
        for step, value in enumerate(WORKED_READINGS, start=3)
    ]
    assert [len(decisions) for decisions in said] == [0] * 9 + [1]
    assert isinstance(said[-1][0], Freeze) and "change of its weights" in said[-1][0].reason
    assert policy.frozen == 1 and policy.monitored is None


def test_weight_change_judges_nothing_by_the_interval_of_a_thaw():
    policy = make("weight_change", 2, groups={"plasticity": {"window": 2}})
    step = 0
    while not policy.frozen:
        step += 1
        policy.observe_interval(interval(step, weight_changes=(1.0, 1.0)))
    slow = Interval(step=step + 1, evaluation=step + 1, loss=1.0, learning_rate=0.001, weight_changes=(None, 1.0))
    (thaw,) = policy.observe_interval(slow)
    assert isinstance(thaw, Thaw)
    assert policy.observe_interval(slow) == ()  # the front module was still: there is no reading of it


def test_random_times_are_sorted_repeatable_and_after_the_start():
    first, again, other = (make("random", 9, start=0.25, seed=seed).timetable for seed in (3, 3, 4))
    assert first == again != other
    assert [front.frozen for _, front in first] == list(range(1, 9))
    shares = [share for share, _ in first]
    assert shares == sorted(shares) and min(shares) >= 0.25 and max(shares) <= 1


def test_skipconv_is_the_papers_rule_on_its_own_metric():
    config = with_metric_of_policy(Config.from_dict({"policy": {"name": "skipconv"}}))
    assert config.plasticity.metric == "input_norm"
    assert type(make("skipconv")) is type(make("egeria"))


@pytest.mark.parametrize(
    ("policy", "metric", "taken"),
    [
        ("egeria", None, "sp"),
        ("forecast", None, "relative_sp"),
        ("forecast", "cka", "cka"),
        ("skipconv", "cka", "input_norm"),
    ],
)
def test_a_policy_has_its_metric_unless_the_user_names_one(policy, metric, taken):
    config = Config.from_dict({"policy": {"name": policy}, "plasticity": {"metric": metric}})
    assert with_metric_of_policy(config).plasticity.metric == taken
    assert with_metric_of_policy(with_metric_of_policy(config)) == with_metric_of_policy(config)


def test_the_boundary_stays_until_the_next_move():
    policy = make("static", schedule="0.5:1 0.9:2")
    assert [policy.steady_steps(step, 10) for step in (0, 50, 89, 90)] == [50, 40, 1, None]


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'autofreeze'.*found 'autofreze'"):
        find_policy("autofreze")
