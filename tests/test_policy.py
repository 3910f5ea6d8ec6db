"""What algorithm 1 promises whatever the readings are; tests/laws has a worked example."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egeria import Config
from egeria.config import PlasticityConfig
from egeria.policy import BOOTSTRAPPING, KNOWLEDGE_GUIDED, Interval, Reading, find_maker, find_rule
from egeria.policy.paper import RULES, Moment, choose_interval, rule_for_schedule


class Asked:
    """A policy of the paper, asked as a run asks it; whatever depth it returns is in force."""

    def __init__(self, num_modules=3, window=3, rule="step", total_steps=None, trainable=None, deepest=None, **groups):
        groups = {"policy": {"name": "egeria"}, "plasticity": {"window": window}, **groups}
        self.policy = find_maker(Config.from_dict(groups))(
            modules=tuple("abcdefgh"[:num_modules]),
            trainable=tuple(trainable or [True] * num_modules),
            deepest=num_modules - 1 if deepest is None else deepest,
            total_steps=total_steps,
            lr_rule=find_rule(rule),
        )
        self.frozen = self.evaluation = 0
        self.rate = 0.1
        self.decided = []

    @property
    def wanted(self):
        return self.policy.wants.plasticity_of

    @property
    def status(self):
        return self.policy.status

    def ask(self, **what):
        given = {"step": 10 * self.evaluation, "frozen": self.frozen, "learning_rate": self.rate}
        depth = self.policy.observe(Interval(**given, **what))
        if depth is not None:
            assert depth.reason and depth.frozen != self.frozen
            self.frozen = depth.frozen
            self.decided.append((self.evaluation, depth.frozen))
        return depth

    def end(self, loss=1.0, rate=None):
        """End an interval."""
        self.evaluation += 1
        self.rate = self.rate if rate is None else rate
        return self.ask(num_steps=10, loss=loss)

    def read(self, value, module=None):
        """Give a reading of the module that is wanted, or of another."""
        module = self.wanted if module is None else module
        return self.ask(readings=(Reading(evaluation=self.evaluation, module=module, value=value),))

    def past_bootstrapping(self):
        self.end()
        self.end()
        assert self.status.stage == KNOWLEDGE_GUIDED
        return self

    def settle(self):
        """Give equal readings until the wanted module freezes."""
        before = self.frozen
        for _ in range(100):
            self.end()
            self.read(1.0)
            if self.frozen > before:
                return
        raise AssertionError("nothing froze")


def test_nothing_freezes_before_the_loss_settles():
    run = Asked()
    for loss in (8.0, 4.0, 2.0, 1.0):
        assert run.end(loss) is None and run.read(1.0, module=0) is None
        assert run.status.stage == BOOTSTRAPPING and run.wanted is None and run.status.smoothed is None
    assert run.end(0.95) is None
    assert run.status.stage == KNOWLEDGE_GUIDED and "5.0%" in run.status.reason and run.wanted == 0


def test_a_tenfold_fall_thaws_and_halves_the_window_down_to_two():
    run = Asked(window=10).past_bootstrapping()
    run.settle()
    windows = []
    for rate in (0.01, 0.001, 0.0001):
        thaw = run.end(rate=rate)
        assert thaw.frozen == 0 and thaw.reason.startswith("the learning rate has fallen from")
        windows.append(run.status.window)
        run.settle()
    assert windows == [5, 2, 2]


def test_modules_without_parameters_to_train_are_passed_over():
    run = Asked(num_modules=5, trainable=[False, False, True, False, True]).past_bootstrapping()
    assert run.decided == [(2, 2)] and run.wanted == 2
    run.settle()
    assert run.frozen == 4 and run.wanted is None


def test_no_more_freeze_than_may():
    run = Asked(deepest=1).past_bootstrapping()
    run.settle()
    assert (run.frozen, run.wanted) == (1, None)
    assert Asked(deepest=0, trainable=[False] * 3).past_bootstrapping().decided == []


def test_a_refused_depth_is_not_remembered():
    run = Asked(window=2).past_bootstrapping()
    run.settle()
    run.frozen = 0  # it was refused
    assert run.read(9.0) is None and run.status.smoothed is None, "of the module behind, which it asked for before"
    assert run.end(rate=0.001) is None, "nothing to thaw"
    assert run.wanted == 0 and run.read(1.0).frozen == 1, "it may ask again"
    assert run.end(rate=0.0005) is None and run.end(rate=0.0001).frozen == 0, "the rate counts from when it was done"


@pytest.mark.parametrize(("window", "expected"), [(3, [2, 5, 8]), (2, [2, 4, 6, 8])])
def test_the_reference_is_due_when_bootstrapping_ends_and_after_so_many_evaluations(window, expected):
    run = Asked(window=window)
    due = []
    for evaluation in range(1, 10):
        run.end(loss=None if evaluation == 9 else 1.0)
        if run.policy.wants.refresh:
            due.append(evaluation)
            run.read(1.0)
            assert run.policy.wants.refresh, "until the next interval"
    assert due == expected


@st.composite
def histories(draw):
    """Losses, rates and readings of a run, whatever they may be."""
    size = draw(st.integers(5, 80))
    losses = draw(st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=size, max_size=size))
    rates = draw(st.lists(st.sampled_from([0.1, 0.05, 0.01, 0.001]), min_size=size, max_size=size))
    return list(zip(losses, rates, draw(st.lists(st.floats(0, 1), min_size=size, max_size=size)), strict=True))


@given(histories(), st.integers(2, 5), st.integers(2, 4), st.sampled_from(sorted(RULES)))
@settings(max_examples=150, deadline=None)
def test_the_frozen_prefix_only_grows_between_thaws_and_never_holds_the_last_module(history, modules, window, rule):
    run = Asked(num_modules=modules, window=window, rule=rule, total_steps=1000)
    for loss, rate, value in history:
        before, was_bootstrapping = run.frozen, run.status.stage == BOOTSTRAPPING
        run.end(loss, rate)
        assert run.frozen == before or (before and run.frozen == 0), "all or nothing thaws"
        before = run.frozen
        if run.wanted is not None:
            assert run.wanted == run.frozen
            run.read(value)
        assert before <= run.frozen <= modules - 1
        assert window >= run.status.window >= 2
        assert not (was_bootstrapping and run.frozen)


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
        ("step", moment(0.1 * 0.1), "thaw"),
        ("step", moment(0.011), "go"),
        ("exponential", moment(0.009, step=800), "thaw"),
        ("cosine", moment(0.009, step=800), "thaw"),
        ("cosine", moment(0.009, step=950), "go"),
        ("cosine", moment(0.009, step=950, total_steps=None), "thaw"),
        ("linear", moment(0.009, step=950), "go"),
        ("inverse_sqrt", moment(0.009, step=990), "thaw"),
        ("one_cycle", moment(0.2, previous=0.1, frozen=0), "hold"),
        ("one_cycle", moment(0.2, previous=0.19, before=0.1), "restart"),
        ("warm_restarts", moment(0.001), "go"),
        ("warm_restarts", moment(0.1, before=0.01, previous=0.001), "restart"),
        ("cyclic", moment(0.05, previous=0.04, before=0.04), "hold"),
        ("warmup_stable_decay", moment(0.05, step=900), "thaw"),
        ("warmup_stable_decay", moment(0.05, step=990), "go"),
        ("never", moment(1e-9), "go"),
    ]:
        assert RULES[rule].judge(situation) == action


def test_nothing_is_judged_while_the_rate_rises():
    run = Asked().past_bootstrapping()
    run.end(rate=0.11)
    assert run.wanted is None and run.read(1.0, module=0) is None and run.status.smoothed is None
    run.end()
    assert run.wanted == 0


def test_a_user_rule_is_any_object_that_judges():
    class ThawEveryHundredSteps:
        def judge(self, moment):
            return "thaw" if moment.step % 100 == 0 else "go"

    run = Asked(rule=ThawEveryHundredSteps(), window=2).past_bootstrapping()
    run.settle()
    assert run.evaluation < 10
    while run.evaluation < 9:
        run.end()
    assert run.end().frozen == 0


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


def test_interval_follows_the_papers_guideline():
    for interval_steps, total_steps, chosen in [(None, 78_000, 318), (7, 78_000, 7), (None, None, 100), (None, 10, 1)]:
        config = Config(plasticity=PlasticityConfig(interval_steps=interval_steps))
        assert choose_interval(config, total_steps=total_steps, num_modules=7) == chosen  # the paper rounds 318 to 300
    assert Asked(num_modules=7, window=10, total_steps=78_000).policy.wants.interval_steps == 318
