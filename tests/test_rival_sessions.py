"""The rivals under a session: the laws hold for each, and only what they need is measured."""

from __future__ import annotations

import multiprocessing
import warnings

import pytest
import torch
from torch import nn

import egeria
from egeria import Config, ConfigError, EgeriaWarning, StateError, read_journal
from egeria.events import (
    ControllerChosen,
    Declined,
    FaultCaught,
    IntervalMeasured,
    ModuleFrozen,
    PlasticityRead,
    Thawed,
)
from egeria.policy import POLICIES, RULES, EgeriaPolicy, find_policy
from egeria.policy.base import FrontPolicy
from egeria.report.replay import replay
from egeria.testing import ScriptedController
from loops import FAST, Loop, differences, outside
from menagerie import SPECIMENS

STEPS = 60
# Settings under which each policy freezes within 60 steps and, where it can, thaws.
POLICY = {
    "static": {"schedule": "0.3:1 0.5:2 0.7:1"},
    "linear": {"start": 0.2},
    "freezeout": {"start": 0.6, "scaled": False},  # scaled, the rate is too high for some of the models
    "autofreeze": {},
    "skipconv": {},
    "weight_change": {},
    "random": {"start": 0.3, "seed": 1},
    "forecast": {"limit": 1e6, "loss_limit": 1e6, "patience": 1},
    "worth": {"limit": 1e6, "loss_limit": 1e6, "patience": 1},  # of models that begin untrained
    "smartfrz": {"freeze_score": 1e-9},
}
GROUPS = {"smartfrz": {"plasticity": {"interval_steps": 30}}}  # for as many snapshots
TIMED = ("static", "linear", "freezeout", "random")
MODELS = ("residual", "with_dropout", "Tied")
each_rival = pytest.mark.parametrize("policy", POLICY)
each_model = pytest.mark.parametrize("name", MODELS)


def attaching(policy, directory, **groups):
    """The arguments of `attach` for a policy."""
    config = {
        **FAST,
        "freezing": {"tolerance_share": 3.0},
        "policy": {"name": policy, **POLICY.get(policy, {})},
        **GROUPS.get(policy, {}),
        **groups,
    }
    return {"config": config, "policy": policy, "total_steps": STEPS, "directory": directory}


def rival_loop(policy, directory, name="residual", seed=0, **groups):
    return Loop(SPECIMENS[name], attaching(policy, directory, **groups), seed=seed)


def num_hooks(optimizer):
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def frozen_at(directory):
    journal = read_journal(directory)
    return [(event.kind, event.step) for event in journal if isinstance(event, (ModuleFrozen, Thawed))]


# --- the laws ------------------------------------------------------------------------------------


@each_model
def test_law_1_none_is_the_plain_loop_and_reads_nothing(name, tmp_path):
    plain, watched = Loop(SPECIMENS[name]), rival_loop("none", tmp_path, name)
    for loop in (plain, watched):
        loop.step(24)
    assert differences(plain.everything(), watched.everything()) == []
    assert num_hooks(watched.optimizer) == 1, "only that which counts steps"
    journal = read_journal(tmp_path)
    assert {event.kind for event in journal} <= {"run_started", "controller", "interval", "modules_ordered"}
    intervals = journal.of(IntervalMeasured)
    assert len(intervals) == 12
    assert all(event.gradients is None and event.weight_changes is None for event in intervals)
    watched.run.close()
    assert outside(plain.model) == outside(watched.model)


@each_rival
def test_law_1_measuring_without_freezing_is_the_plain_loop(policy, tmp_path):
    plain, watched = Loop(SPECIMENS["residual"]), rival_loop(policy, tmp_path, freezing={"enabled": False})
    for loop in (plain, watched):
        loop.step(40)
    assert differences(plain.everything(), watched.everything()) == []
    assert frozen_at(tmp_path) == []


@each_rival
@each_model
def test_law_4_a_rivals_freeze_then_thaw_leaves_all_as_before(policy, name, tmp_path):
    loop = rival_loop(policy, tmp_path, name)
    before = outside(SPECIMENS[name].build().train())
    while not loop.run.frozen:
        loop.step()
        assert len(loop.losses) < STEPS
    module = loop.run.modules[0]
    frozen = [entry for entry in module.parameters if entry not in module.shared_parameters]
    assert not any(loop.model.get_parameter(entry).requires_grad for entry in frozen)
    at_freeze = loop.everything()
    loop.step(2)
    assert not set(differences(at_freeze, loop.everything())) & {f"model.{entry}" for entry in frozen}
    loop.model.train()
    loop.run.close()
    assert num_hooks(loop.optimizer) == 0
    assert {**outside(loop.model), "attributes": None} == {**before, "attributes": None}
    loop.run = None
    thawed = loop.everything()
    loop.step(2)
    assert {f"model.{entry}" for entry in frozen} <= set(differences(thawed, loop.everything()))


@each_rival
@pytest.mark.parametrize(("name", "stop"), [("residual", 7), ("residual", 33), ("with_dropout", 24), ("Backwards", 41)])
def test_law_5_a_resumed_run_decides_like_one_that_never_stopped(policy, name, stop, tmp_path):
    whole = rival_loop(policy, tmp_path / "whole", name)
    first = rival_loop(policy, tmp_path / "parts", name)
    whole.step(STEPS)
    first.step(stop)
    checkpoint = first.save()
    first.step(5)  # lost: the job died after its last checkpoint
    del first
    second = rival_loop(policy, tmp_path / "parts", name, seed=9)
    second.load(checkpoint)
    second.step(STEPS - stop)
    assert differences(whole.everything(), second.everything()) == []
    assert whole.run.frozen == second.run.frozen and frozen_at(tmp_path / "whole")
    late = [entry for entry in frozen_at(tmp_path / "whole") if entry[1] > stop]
    resumed = read_journal(tmp_path / "parts")
    start = max(index for index, event in enumerate(resumed) if event.kind == "resumed")
    again = [(e.kind, e.step) for e in list(resumed)[start:] if isinstance(e, (ModuleFrozen, Thawed))]
    assert again == late


@each_rival
@each_model
def test_law_7_replaying_a_journal_gives_its_decisions(policy, name, tmp_path):
    loop = rival_loop(policy, tmp_path, name)
    loop.step(STEPS // 2)
    for group in loop.optimizer.param_groups:
        group["lr"] /= 20
    loop.step(STEPS // 2)
    loop.run.close()
    result = replay(tmp_path)
    assert result.agrees and result.waiting_since is None
    kinds = {entry.kind for entry in result.recorded}
    assert "freeze" in kinds and ("thaw" in kinds) == (policy in ("static", "skipconv", "weight_change"))


# --- attaching -----------------------------------------------------------------------------------


def model_and_optimizer():
    torch.manual_seed(0)
    model = SPECIMENS["residual"].build()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("policy", TIMED)
def test_a_policy_of_the_clock_without_the_length_of_the_run_is_refused(policy, tmp_path):
    model, optimizer = model_and_optimizer()
    config = {"policy": {"name": policy, **POLICY[policy]}}
    with pytest.raises(ConfigError, match=f"'{policy}'.*found total_steps=None"):
        egeria.attach(model, optimizer, config=config, directory=tmp_path / "run")
    assert num_hooks(optimizer) == 0 and not (tmp_path / "run").exists()


def test_an_unknown_policy_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'freezeout'.*found 'freezout'"):
        egeria.attach(*model_and_optimizer(), policy="freezout", directory=tmp_path)


def test_attach_has_the_last_word_on_the_policy_and_the_journal_keeps_it(tmp_path):
    config = Config.from_dict({"policy": {"name": "none"}})
    egeria.attach(
        *model_and_optimizer(), config=config, policy="autofreeze", total_steps=200, directory=tmp_path
    ).close()
    (started,) = [event for event in read_journal(tmp_path) if event.kind == "run_started"]
    assert started.config["policy"]["name"] == "autofreeze"
    assert started.interval_steps == 10 and "20 evaluations" in started.interval_reason


def test_skipconv_brings_its_metric(tmp_path):
    loop = rival_loop("skipconv", tmp_path)
    loop.step(10)
    journal = read_journal(tmp_path)
    assert (
        next(event for event in journal if event.kind == "run_started").config["plasticity"]["metric"] == "input_norm"
    )
    assert journal.of(PlasticityRead)


@pytest.mark.parametrize("policy", ["none", "static", "autofreeze", "weight_change"])
def test_no_controller_is_started_for_who_reads_no_plasticity(policy, tmp_path):
    before = multiprocessing.active_children()
    loop = Loop(SPECIMENS["residual"], {**attaching(policy, tmp_path / "process"), "controller": "process"})
    loop.step(20)
    assert multiprocessing.active_children() == before
    (chosen,) = read_journal(tmp_path / "process").of(ControllerChosen)
    assert chosen.controller == "none" and policy in chosen.reason
    given = ScriptedController()
    loop = Loop(SPECIMENS["residual"], {**attaching(policy, tmp_path / "given"), "controller": given})
    loop.step(40)
    assert given.requests == [] and not read_journal(tmp_path / "given").of(PlasticityRead)


# --- a policy of the user's own ------------------------------------------------------------------


class FreezeOnceCalm(FrontPolicy):
    """Freezes one module as soon as gradients and weights were seen twice."""

    needs = frozenset({"gradients", "weights"})
    seen = 0

    def observe_interval(self, interval):
        self.seen += interval.gradients is not None and None not in interval.weight_changes
        return self._move_to(1, "calm") if self.seen == 2 else ()


def test_a_policy_of_the_users_own_is_asked_and_obeyed(tmp_path):
    loop = Loop(SPECIMENS["residual"], {**attaching("none", tmp_path), "policy": FreezeOnceCalm})
    loop.step(20)
    assert frozen_at(tmp_path) == [("frozen", 6)]  # no change of weights is known at the first interval's end
    interval = read_journal(tmp_path).of(IntervalMeasured)[-1]
    for measured in (interval.gradients, interval.weight_changes):
        assert len(measured) == len(loop.run.modules)
        assert measured[0] is None and all(value > 0 for value in measured[1:])
    with pytest.raises(ConfigError, match="FreezeOnceCalm"):  # what a journal cannot hold
        replay(tmp_path)


def test_what_makes_no_policy_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"makes an egeria\.policy\.Policy, found one that makes dict"):
        egeria.attach(*model_and_optimizer(), policy=lambda config, **facts: facts, directory=tmp_path)


def test_a_policy_that_fails_never_reaches_the_loop(tmp_path):
    class Failing(FreezeOnceCalm):
        def observe_interval(self, interval):
            raise RuntimeError("injected")

    plain = Loop(SPECIMENS["residual"])
    loop = Loop(SPECIMENS["residual"], {**attaching("none", tmp_path), "policy": Failing})
    for entry in (plain, loop):
        entry.step(20)
    assert differences(plain.everything(), loop.everything()) == []
    assert [fault.count for fault in read_journal(tmp_path).of(FaultCaught)] == [1, 2, 3]
    assert num_hooks(loop.optimizer) == 1, "only that which counts steps"


def test_a_state_of_another_policy_is_refused(tmp_path):
    first, second = rival_loop("linear", tmp_path / "first"), rival_loop("random", tmp_path / "second")
    first.step(10)
    with pytest.raises(StateError, match=r"'linear'.*'random'"):
        second.run.load_state_dict(first.run.state_dict())


# --- what is measured ----------------------------------------------------------------------------


class Two(nn.Module):
    """Two layers with weights of which the test knows the gradients: out = b * a * x, summed."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.a.weight.data.fill_(2.0)
        self.b.weight.data.fill_(3.0)

    def forward(self, x):
        return self.b(self.a(x))


def train_two(policy, directory, xs, scaler=None, lr=0.0):
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = {**FAST, "modules": {"pattern": "[ab]"}}
    with egeria.attach(model, optimizer, config=config, policy=policy, directory=directory, total_steps=100) as run:
        for x in xs:
            loss = run.model(torch.tensor([[x]])).sum()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            run.step(loss)
    return read_journal(directory).of(IntervalMeasured)


def test_gradients_are_summed_before_their_norm_is_taken(tmp_path):
    # The gradient of a is b * x = 3x, that of b is a * x = 2x; steps go in pairs.
    intervals = train_two("autofreeze", tmp_path, [1.0, 2.0, 1.0, -2.0])
    assert [event.gradients for event in intervals] == [[9.0, 6.0], [3.0, 2.0]]


@pytest.mark.parametrize("scale", [8.0, 1024.0])
def test_gradients_are_taken_as_grad_scaler_has_unscaled_them(scale, tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    intervals = train_two("autofreeze", tmp_path, [1.0, 2.0, float("inf"), -2.0], scaler)
    # The third step overflows: the scaler skips it, and so do the sums.
    assert [event.gradients for event in intervals] == [[9.0, 6.0], [6.0, 4.0]]


def test_weights_are_compared_with_those_of_the_evaluation_before(tmp_path):
    # The rate 0.1 and x = 1: a, b go 2, 3 -> 1.7, 2.8 -> 1.42, 2.63 -> 1.157, 2.488 -> 0.9082, 2.3723.
    intervals = train_two("weight_change", tmp_path, [1.0] * 4, lr=0.1)
    assert intervals[0].weight_changes == [None, None]
    moved = [(1.42 - 0.9082) / 1.42, (2.63 - 2.3723) / 2.63]
    assert intervals[1].weight_changes == pytest.approx(moved, rel=1e-5)


def test_an_optimizer_without_hooks_is_told_of_and_trains_on(tmp_path):
    class Wrapper:
        """What some libraries put around an optimizer."""

        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

        def step(self):
            self.optimizer.step()

    model, optimizer = model_and_optimizer()
    with pytest.warns(EgeriaWarning, match="takes no hooks"):
        run = egeria.attach(
            model, Wrapper(optimizer), policy="autofreeze", config=FAST, total_steps=60, directory=tmp_path
        )
    for _ in range(20):
        loss = run.model(torch.randn(6, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    assert run.frozen == 0
    run.close()


# --- rates by layer module -----------------------------------------------------------------------

PARTS = SPECIMENS["PartsByName"]  # without a batch norm, before which Adam makes steps of mere rounding
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.005, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=1e-1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_freezeout_trains_like_parameter_groups_with_rates_of_their_own(kind, scheduled, tmp_path):
    """The user's optimizer has one group, and may have a schedule; the twin has a group for each layer module."""
    config = {
        **FAST,
        "policy": {"name": "freezeout", "start": 0.6, "shape": "squared"},
        "plasticity": {"interval_steps": 1},
    }
    loop = Loop(
        PARTS,
        {"config": config, "policy": "freezeout", "total_steps": STEPS, "directory": tmp_path},
        make_optimizer=OPTIMIZERS[kind],
    )
    twin = Loop(PARTS, make_optimizer=OPTIMIZERS[kind])
    modules = loop.run.modules
    policy = find_policy("freezeout")(
        Config.from_dict(config), trainable=[True] * len(modules), rule=RULES["step"], total_steps=STEPS
    )
    base = twin.optimizer.param_groups[0]["lr"]
    parameters = [[twin.model.get_parameter(name) for name in module.parameters] for module in modules]
    twin.optimizer = OPTIMIZERS[kind]([{"params": group} for group in parameters])
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 15) if scheduled else None
    for step in range(30):  # up to r_0 = 0.36, where the first module freezes, and on to behind it
        shares = policy.rate_shares(step)
        for group, share in zip(twin.optimizer.param_groups, shares, strict=True):
            group["lr"] = share * base
        for entry in (loop, twin):
            entry.step()
        if scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                scheduler.step()
        if step == 20:
            assert loop.run.frozen == 0
            states = zip(loop.model.state_dict().items(), twin.model.state_dict().values(), strict=True)
            for (name, mine), theirs in states:
                assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5), name
    assert loop.run.frozen >= 1 and shares[0] == 0
    loop.run.close()
    assert num_hooks(loop.optimizer) == 0


def test_a_module_at_the_end_of_its_time_stands_still_before_it_is_frozen(tmp_path):
    config = {
        **FAST,
        "policy": {"name": "freezeout", "start": 0.1, "shape": "linear"},
        "plasticity": {"interval_steps": 20},
    }
    loop = Loop(
        SPECIMENS["residual"], {"config": config, "policy": "freezeout", "total_steps": 50, "directory": tmp_path}
    )
    loop.step(5)
    names = {f"model.{name}" for name in loop.run.modules[0].parameters}
    at_end = loop.everything()
    loop.step(10)
    assert loop.run.frozen == 0
    moved = set(differences(at_end, loop.everything()))
    assert not moved & names and moved & {f"model.{name}" for name in loop.run.modules[-1].parameters}


def test_a_fault_in_the_rates_leaves_them_to_the_optimizer(tmp_path):
    class Failing(EgeriaPolicy):
        needs = frozenset()
        monitored = None

        def rate_shares(self, step):
            raise RuntimeError("injected")

    plain = Loop(SPECIMENS["residual"])
    loop = Loop(SPECIMENS["residual"], {**attaching("none", tmp_path), "policy": Failing})
    for entry in (plain, loop):
        entry.step(10)
    assert differences(plain.everything(), loop.everything()) == []
    loop.run.close()
    assert num_hooks(loop.optimizer) == 0
    (declined,) = read_journal(tmp_path).of(Declined)
    assert declined.what == "setting learning rates by layer module" and "3 times in a row" in declined.reason


# --- decisions that would do harm, replays, reports ----------------------------------------------


def test_a_rival_freezes_no_head_of_its_own(tmp_path):
    from test_session import TwoPlayers  # noqa: PLC0415

    torch.manual_seed(0)
    model = TwoPlayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {**FAST, "policy": {"schedule": "0.2:9"}}
    run = egeria.attach(model, optimizer, config=config, policy="static", total_steps=40, directory=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EgeriaWarning)
        for step in range(40):
            loss = run.model(torch.randn(6, 8))[step % 2].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
    (declined,) = read_journal(tmp_path).of(Declined)
    assert "a branch of its own" in declined.reason
    assert all(parameter.requires_grad for parameter in model.parameters())
    run.close()
    found = replay(tmp_path)
    assert found.agrees
    assert [entry.kind for entry in found.replayed] == [*["freeze"] * 3, "the end of freezing"], "a fourth was refused"


def test_a_journal_is_replayed_under_another_policy_as_far_as_it_can_tell(tmp_path):
    loop = rival_loop("skipconv", tmp_path)
    loop.step(STEPS)
    loop.run.close()
    static = replay(tmp_path, Config.from_dict({"policy": {"name": "static", "schedule": "0.5:1"}}))
    assert [(entry.step, entry.kind) for entry in static.replayed] == [(30, "freeze")]
    assert static.waiting_since is None
    for lacking in ("autofreeze", "forecast"):
        assert replay(tmp_path, Config.from_dict({"policy": {"name": lacking}})).waiting_since == 2
    clock = rival_loop("static", tmp_path / "clock")
    clock.step(STEPS)
    clock.run.close()
    paper = replay(tmp_path / "clock", Config.from_dict({**FAST, "policy": {}}))
    assert [entry.kind for entry in paper.replayed] == ["knowledge-guided"] and paper.waiting_since is not None


@pytest.mark.parametrize(
    ("policy", "said"),
    [("none", "the policy 'none' freezes nothing"), ("linear", "the policy 'linear' had no module to freeze")],
)
def test_the_report_knows_why_a_rival_froze_nothing(policy, said, tmp_path):
    loop = rival_loop(policy, tmp_path)
    loop.step(10)
    loop.run.close()
    found = egeria.report(tmp_path).summary.why_nothing_froze
    assert said in found


def test_every_rival_is_tested_here():
    assert set(POLICIES) == {*POLICY, "egeria", "none"}
