"""Algorithm 1 against a worked example, and what it promises whatever the readings are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria import Config, ConfigError
from egeria.config import FreezingConfig, PlasticityConfig
from egeria.policy import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    RULES,
    EgeriaPolicy,
    EndBootstrapping,
    Freeze,
    Interval,
    Moment,
    Reading,
    Thaw,
    UnfreezeAction,
    choose_interval,
    find_rule,
    rule_for_schedule,
)
from egeria.policy.paper import ModuleHistory, least_squares_slope

# The worked example, by hand. W = 3, T = 20 % of the largest of the first three slopes.
#
#  i  reading  smoothed (mean of the last 3)   slope of the last 3 smoothed     stationary
#  1    9      9                               -                                0
#  2    7      (9+7)/2 = 8                     -                                0
#  3    5      (9+7+5)/3 = 7                   (7-9)/2 = -1        1st slope    0
#  4    3      (7+5+3)/3 = 5                   (5-8)/2 = -1.5      2nd slope    0
#  5    1      (5+3+1)/3 = 3                   (3-7)/2 = -2        3rd: T = 0.4 0   (2 is not < 0.4)
#  6    2      (3+1+2)/3 = 2                   (2-5)/2 = -1.5                   0
#  7    1.8    (1+2+1.8)/3 = 1.6               (1.6-3)/2 = -0.7                 0
#  8    2.2    (2+1.8+2.2)/3 = 2               (2-2)/2 = 0                      1
#  9    2      (1.8+2.2+2)/3 = 2               (2-1.6)/2 = 0.2                  2
# 10    2.1    (2.2+2+2.1)/3 = 2.1             (2.1-2)/2 = 0.05                 3 -> frozen
#
# (The least-squares slope through three equally spaced values is (third - first) / 2.)
WORKED_READINGS = [9, 7, 5, 3, 1, 2, 1.8, 2.2, 2, 2.1]
WORKED_SLOPES = [None, None, -1, -1.5, -2, -1.5, -0.7, 0, 0.2, 0.05]
WORKED_STATIONARY = [0, 0, 0, 0, 0, 0, 0, 1, 2, 3]


def make_policy(num_modules=3, window=3, rule="step", total_steps=None, trainable=None, **freezing):
    config = Config(plasticity=PlasticityConfig(window=window), freezing=FreezingConfig(**freezing))
    trainable = trainable or [True] * num_modules
    return EgeriaPolicy(config, trainable=trainable, rule=find_rule(rule), total_steps=total_steps)


def interval(evaluation, loss=1.0, rate=0.1):
    return Interval(step=10 * evaluation, evaluation=evaluation, loss=loss, learning_rate=rate)


def reading(evaluation, module, value):
    return Reading(step=10 * evaluation, evaluation=evaluation, module=module, value=value)


def past_bootstrapping(policy, rate=0.1):
    policy.observe_interval(interval(1, rate=rate))
    decisions = policy.observe_interval(interval(2, rate=rate))
    assert isinstance(decisions[0], EndBootstrapping)
    return policy


def settle(policy, rate=0.1, start=3):
    """Feed constant readings until the monitored module freezes; return the evaluation after that."""
    evaluation = start
    target = policy.frozen + 1
    while policy.frozen < target:
        policy.observe_interval(interval(evaluation, rate=rate))
        policy.observe_reading(reading(evaluation, policy.monitored, 1.0))
        evaluation += 1
        assert evaluation < start + 100
    return evaluation


def test_the_worked_example_freezes_at_its_tenth_evaluation():
    policy = past_bootstrapping(make_policy())
    for index, value in enumerate(WORKED_READINGS):
        judgement = policy.observe_reading(reading(3 + index, 0, value))
        assert judgement.slope == pytest.approx(WORKED_SLOPES[index], abs=1e-12)
        assert judgement.stationary == WORKED_STATIONARY[index]
        expected = [Freeze] if index == 9 else []
        assert [type(decision) for decision in judgement.decisions] == expected
    assert policy.frozen == 1
    assert policy.monitored == 1


def test_tolerance_is_a_fifth_of_the_largest_early_slope_and_stays():
    history = ModuleHistory(tolerance_share=0.2, tolerance_readings=3)
    tolerances = []
    for value in WORKED_READINGS:
        history = history.observe(value, window=3)
        tolerances.append(history.tolerance)
    assert tolerances[:4] == [None] * 4
    assert tolerances[4:] == [pytest.approx(0.4)] * 6


def test_a_new_module_starts_with_a_fresh_history():
    policy = past_bootstrapping(make_policy())
    after = settle(policy)
    judgement = policy.observe_reading(reading(after, 1, 5.0))
    assert (judgement.smoothed, judgement.slope, judgement.stationary) == (5.0, None, 0)


def test_slope_of_a_line_is_its_gradient():
    assert least_squares_slope([3 + 0.25 * index for index in range(10)]) == pytest.approx(0.25)


def test_nothing_freezes_before_the_loss_settles():
    policy = make_policy()
    for evaluation, loss in enumerate([8.0, 4.0, 2.0, 1.0], start=1):
        assert policy.observe_interval(interval(evaluation, loss=loss)) == ()
        assert policy.observe_reading(reading(evaluation, 0, 1.0)).decisions == ()
        assert policy.stage == BOOTSTRAPPING and policy.monitored is None
    (ended,) = policy.observe_interval(interval(5, loss=0.95))
    assert isinstance(ended, EndBootstrapping) and "5.0%" in ended.reason
    assert policy.stage == KNOWLEDGE_GUIDED and policy.monitored == 0


def test_an_interval_without_a_finite_loss_says_nothing():
    policy = make_policy()
    for evaluation, loss in enumerate([1.0, None, None], start=1):
        assert policy.observe_interval(interval(evaluation, loss=loss)) == ()
    assert policy.observe_interval(interval(4, loss=1.0))


def test_a_tenfold_fall_thaws_and_halves_the_window_down_to_two():
    policy = past_bootstrapping(make_policy(window=10))
    evaluation = settle(policy)
    windows = []
    for rate in (0.01, 0.001, 0.0001):
        (thaw,) = policy.observe_interval(interval(evaluation, rate=rate))
        assert isinstance(thaw, Thaw)
        windows.append(thaw.window)
        assert policy.frozen == 0
        evaluation = settle(policy, rate=rate, start=evaluation + 1)
    assert windows == [5, 2, 2]


def test_refreezing_measures_against_the_early_slopes():
    policy = past_bootstrapping(make_policy(window=2))
    values = [100, 80, 60, 40, 20, 10, 10, 10, 10, 10]
    for index, value in enumerate(values):
        policy.observe_reading(reading(3 + index, 0, value))
    assert policy.frozen == 1
    policy.observe_interval(interval(20, rate=0.001))
    assert policy.frozen == 0
    # Slopes of 0.5 are small against the early 20; judged by their own first three they would not be.
    judged = [policy.observe_reading(reading(21 + index, 0, 5 - index)) for index in range(3)]
    assert [judgement.stationary for judgement in judged] == [0, 1, 2]
    assert policy.frozen == 1


def test_modules_without_parameters_to_train_are_passed_over():
    policy = make_policy(trainable=[False, False, True, True])
    policy.observe_interval(interval(1))
    decisions = policy.observe_interval(interval(2))
    assert [getattr(decision, "module", None) for decision in decisions] == [None, 0, 1]
    assert policy.monitored == 2


def test_a_disabled_policy_watches_and_never_freezes():
    policy = past_bootstrapping(make_policy(enabled=False))
    for evaluation in range(3, 60):
        judgement = policy.observe_reading(reading(evaluation, 0, 1.0))
    assert judgement.stationary > 10 and judgement.decisions == () and policy.frozen == 0


def test_equal_readings_are_stationary_although_their_tolerance_is_zero():
    policy = past_bootstrapping(make_policy(window=2))
    assert settle(policy) < 12


@st.composite
def histories(draw):
    """Losses, rates and readings of a run, whatever they may be."""
    size = draw(st.integers(5, 80))
    losses = draw(st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=size, max_size=size))
    rates = draw(st.lists(st.sampled_from([0.1, 0.05, 0.01, 0.001]), min_size=size, max_size=size))
    values = draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))
    return list(zip(losses, rates, values, strict=True))


@given(histories(), st.integers(2, 5), st.integers(2, 4), st.sampled_from(sorted(RULES)))
@settings(max_examples=150, deadline=None)
def test_the_frozen_prefix_only_grows_between_thaws_and_never_holds_the_last_module(history, modules, window, rule):
    policy = make_policy(num_modules=modules, window=window, rule=rule, total_steps=1000)
    for evaluation, (loss, rate, value) in enumerate(history, start=1):
        before = policy.frozen
        was_bootstrapping = policy.stage == BOOTSTRAPPING
        decisions = policy.observe_interval(interval(evaluation, loss=loss, rate=rate))
        if policy.monitored is not None:
            decisions += policy.observe_reading(reading(evaluation, policy.monitored, value)).decisions
        frozen = before
        for decision in decisions:
            if isinstance(decision, Thaw):
                assert frozen > 0
                frozen = 0
            elif isinstance(decision, Freeze):
                assert decision.module == frozen
                frozen += 1
        assert policy.frozen == frozen <= modules - 1
        assert window >= policy.window >= 2
        if was_bootstrapping:
            assert frozen == 0


@given(histories(), st.integers(1, 79))
@settings(max_examples=50, deadline=None)
def test_a_restored_policy_decides_like_one_that_never_stopped(history, cut):
    whole, first = make_policy(window=2), make_policy(window=2)
    decided = {id(whole): [], id(first): []}

    def feed(policy, evaluation, entry, log):
        loss, rate, value = entry
        log.append(policy.observe_interval(interval(evaluation, loss=loss, rate=rate)))
        if policy.monitored is not None:
            log.append(policy.observe_reading(reading(evaluation, policy.monitored, value)))

    resumed = first
    log_whole, log_parts = decided.values()
    for evaluation, entry in enumerate(history, start=1):
        if evaluation == cut:
            state = first.state_dict()
            resumed = make_policy(window=2)
            resumed.load_state_dict(state)
        feed(whole, evaluation, entry, log_whole)
        feed(resumed, evaluation, entry, log_parts)
    assert log_whole == log_parts
    assert whole.state_dict() == resumed.state_dict()


def moment(rate, before=0.1, previous=None, frozen=1, step=500, total_steps=1000):
    return Moment(
        step=step,
        total_steps=total_steps,
        frozen=frozen,
        learning_rate=rate,
        previous_learning_rate=previous,
        freeze_learning_rate=before if frozen else None,
    )


def test_unfreeze_rules():
    for rule, situation, action in [
        ("step", moment(0.1 * 0.1), UnfreezeAction.THAW),
        ("step", moment(0.011), UnfreezeAction.GO),
        ("exponential", moment(0.009, step=800), UnfreezeAction.THAW),
        ("cosine", moment(0.009, step=800), UnfreezeAction.THAW),
        ("cosine", moment(0.009, step=950), UnfreezeAction.GO),
        ("cosine", moment(0.009, step=950, total_steps=None), UnfreezeAction.THAW),
        ("linear", moment(0.009, step=950), UnfreezeAction.GO),
        ("inverse_sqrt", moment(0.009, step=990), UnfreezeAction.THAW),
        ("one_cycle", moment(0.2, previous=0.1, frozen=0), UnfreezeAction.HOLD),
        ("one_cycle", moment(0.2, previous=0.19, before=0.1), UnfreezeAction.RESTART),
        ("warm_restarts", moment(0.001), UnfreezeAction.GO),
        ("warm_restarts", moment(0.1, before=0.01, previous=0.001), UnfreezeAction.RESTART),
        ("cyclic", moment(0.05, previous=0.04, before=0.04), UnfreezeAction.HOLD),
        ("warmup_stable_decay", moment(0.05, step=900), UnfreezeAction.THAW),
        ("warmup_stable_decay", moment(0.05, step=990), UnfreezeAction.GO),
        ("never", moment(1e-9), UnfreezeAction.GO),
    ]:
        assert RULES[rule].judge(situation) is action


def test_a_rate_that_stays_at_zero_thaws_nothing():
    for rule in RULES:
        assert RULES[rule].judge(moment(0.0, before=0.0, previous=0.0)) is UnfreezeAction.GO
        risen = UnfreezeAction.HOLD if rule == "never" else UnfreezeAction.RESTART
        assert RULES[rule].judge(moment(1e-3, before=0.0, previous=0.0)) is risen, "from nothing"


def test_nothing_is_monitored_while_the_rate_rises():
    policy = past_bootstrapping(make_policy())
    policy.observe_interval(interval(3, rate=0.11))
    assert policy.monitored is None
    policy.observe_interval(interval(4, rate=0.11))
    assert policy.monitored == 0


def test_a_user_rule_is_any_object_that_judges():
    class ThawEveryHundredSteps:
        def judge(self, moment):
            return UnfreezeAction.THAW if moment.step % 100 == 0 else UnfreezeAction.GO

    policy = past_bootstrapping(make_policy(rule=ThawEveryHundredSteps(), window=2))
    assert settle(policy) <= 10
    (thaw,) = policy.observe_interval(interval(10))
    assert isinstance(thaw, Thaw)


def test_a_user_rule_may_thaw_where_only_modules_without_anything_to_train_are_frozen():
    class ThawAlways:
        def judge(self, moment):
            return UnfreezeAction.THAW if moment.frozen else UnfreezeAction.GO

    policy = past_bootstrapping(make_policy(rule=ThawAlways(), trainable=[False, True, True]))
    assert policy.frozen == 1
    (thaw, *_) = policy.observe_interval(interval(3))
    assert isinstance(thaw, Thaw) and thaw.reason == "the learning rate has fallen since the first freeze"


def test_the_scheduler_picks_the_rule():
    for names, rule in [
        ([], "step"),
        (["MultiStepLR"], "step"),
        (["ReduceLROnPlateau"], "step"),
        (["ExponentialLR"], "exponential"),
        (["CosineAnnealingLR"], "cosine"),
        (["CosineAnnealingWarmRestarts"], "warm_restarts"),
        (["CyclicLR"], "cyclic"),
        (["OneCycleLR"], "one_cycle"),
        (["PolynomialLR"], "linear"),
        (["SequentialLR", "LinearLR", "CosineAnnealingLR"], "cosine"),
        (["SequentialLR", "LinearLR", "MultiStepLR"], "step"),
        (["LambdaLR", "_get_linear_schedule_with_warmup_lr_lambda"], "linear"),
        (["LambdaLR", "_get_cosine_with_hard_restarts_schedule_with_warmup_lr_lambda"], "warm_restarts"),
        (["LambdaLR", "_get_inverse_sqrt_schedule_lr_lambda"], "inverse_sqrt"),
        (["LambdaLR", "_get_wsd_scheduler_lambda"], "warmup_stable_decay"),
    ]:
        assert rule_for_schedule(names) == rule


def test_an_unknown_rule_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'cosine'.*found 'cosin'"):
        find_rule("cosin")


def test_interval_follows_the_papers_guideline():
    for interval_steps, total_steps, chosen in [(None, 78_000, 318), (7, 78_000, 7), (None, None, 100), (None, 10, 1)]:
        config = Config(plasticity=PlasticityConfig(interval_steps=interval_steps))
        steps, reason = choose_interval(config, total_steps=total_steps, num_modules=7)
        assert steps == chosen  # the paper rounds 318 to 300
        assert chosen != 318 or "78000" in reason
