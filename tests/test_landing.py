"""Landing: what happens to the weights of layer modules between the decision to freeze them and the freeze."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from egeria import attach, read_journal
from egeria.events import (
    CacheDecided,
    CacheUsed,
    Declined,
    FaultCaught,
    FreezeWaits,
    LandingBegan,
    LandingEnded,
    ModuleFrozen,
    Thawed,
)
from egeria.layers.landing import AveragedWeights, compare
from egeria.report import report
from egeria.report.replay import replay
from egeria.session.measuring.optimizer_steps import ScaledSteps
from loops import Loop, differences, outside
from menagerie import SPECIMENS, each_stateless, each_supported
from test_cache_memory import Loop as CachedLoop

MODES = ["average", "anneal", "both"]
AVERAGING = ["average", "both"]
TOTAL, STEPS, PAIRS = 200, 12, 3
BEGINS, LANDS = 20, 20 + STEPS + 2 * PAIRS
"""A decision at 10 % of 200 steps; landing takes 6 % of them, then three pairs of steps are compared."""


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(kw_only=True)
class Training:
    """An MLP in float64, whose first two blocks are a group of the optimizer; `mode` None trains it plainly."""

    mode: str | None = "average"
    schedule: str = "0.1:2"
    directory: Any = None
    total: int | None = TOTAL
    optimizer: str = "sgd"
    micro: int = 1
    log_to: Any = None

    def __post_init__(self):
        torch.manual_seed(0)
        self.model = MLP().double().train()
        front = list(self.model.blocks[:2].parameters())
        rest = [*self.model.blocks[2:].parameters(), *self.model.head.parameters()]
        groups = [{"params": front}, {"params": rest}]
        self.optim = {
            "sgd": lambda: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3),
            "adamw": lambda: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1),
        }[self.optimizer]()
        self.run = None
        self.done = 0
        self.inputs = torch.Generator().manual_seed(1)
        if self.mode is not None:
            config = {
                "policy": {"name": "static", "schedule": self.schedule},
                "plasticity": {"interval_steps": 2},
                "freezing": {"landing": self.mode},
            }
            given = {"total_steps": self.total, "directory": self.directory, "log_to": self.log_to}
            self.run = attach(self.model, self.optim, config=config, **given)

    def go(self, to):
        while self.done < to:
            self.step()
        return self

    def step(self):
        for micro in range(self.micro):
            inputs = torch.randn(16, 8, generator=self.inputs, dtype=torch.float64)
            loss = nn.functional.cross_entropy(self.model(inputs), (inputs.sum(1) > 0).long()) / self.micro
            loss.backward()
            if self.run and micro + 1 < self.micro:
                self.run.step(loss)
        self.optim.step()
        self.optim.zero_grad()
        self.done += 1
        if self.run:
            self.run.step(loss)

    @property
    def front(self):
        return self.model.blocks[:2]

    def weights(self):
        return {name: entry.detach().clone() for name, entry in self.front.named_parameters()}

    def everything(self):
        found = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        for index, entry in self.optim.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{name}": value.clone() for name, value in entry.items()}
        return found

    def set_weights(self, weights):
        with torch.no_grad():
            for name, entry in self.front.named_parameters():
                entry.copy_(weights[name])


def by_hand(mode, **options):
    """Train plainly, and land the front by hand; return the training as it is at the freeze."""
    hand = Training(mode=None, **options).go(BEGINS)
    rate, averages = hand.optim.param_groups[0]["lr"], None
    for k in range(STEPS):
        hand.optim.param_groups[0]["lr"] = rate if mode == "average" else rate * (1 - k / STEPS)
        hand.step()
        now = hand.weights()
        averages = now if averages is None else {n: (k * averages[n] + now[n]) / (k + 1) for n in now}
    if mode == "anneal":
        return hand
    seen: list[list[torch.Tensor]] = []
    """Of each step with the average, what went into each norm."""
    raw = hand.weights()
    hand.optim.param_groups[0]["lr"] = 0.0  # held
    norms = [module for module in hand.front.modules() if isinstance(module, nn.BatchNorm1d)]
    for turn in (False, True, True, False, False, True):
        before = copy.deepcopy(hand.front.state_dict())
        hooks = []
        if turn:
            hand.set_weights(averages)
            seen.append([])
            hooks = [
                norm.register_forward_pre_hook(lambda _, args: seen[-1].append(args[0].detach())) for norm in norms
            ]
        hand.step()
        if turn:
            hand.front.load_state_dict(before)
            for hook in hooks:
                hook.remove()
    assert all(torch.equal(raw[name], now) for name, now in hand.weights().items())
    hand.set_weights(averages)
    for norm, *batches in zip(norms, *seen, strict=True):
        norm.running_mean.copy_(torch.stack([x.mean(0) for x in batches]).mean(0))
        norm.running_var.copy_(torch.stack([x.var(0) for x in batches]).mean(0))
    return hand


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_and_statistics_at_the_freeze_are_those_of_a_landing_by_hand(mode, optimizer, tmp_path):
    ends = BEGINS + STEPS if mode == "anneal" else LANDS
    ours = Training(mode=mode, optimizer=optimizer, directory=tmp_path).go(ends - 1)
    assert ours.run.frozen == 0 and ours.run.summary().landing == 2
    ours.go(ends)
    assert ours.run.frozen == 2 and ours.run.summary().landing == 0
    hand = by_hand(mode, optimizer=optimizer)
    theirs = hand.everything()
    for name, value in ours.everything().items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-11, msg=name)
    plain = Training(mode=None, optimizer=optimizer).go(ends)
    assert not torch.allclose(plain.model.blocks[0][0].weight, ours.model.blocks[0][0].weight, rtol=1e-5)
    journal = read_journal(tmp_path)
    assert [(event.step, event.module, event.mode, event.num_steps) for event in journal.of(LandingBegan)] == [
        (BEGINS, 0, mode, STEPS),
        (BEGINS, 1, mode, STEPS),
    ]
    [ended] = journal.of(LandingEnded)
    assert (ended.step, ended.outcome, ended.num_pairs) == (ends, "landed", 0 if mode == "anneal" else PAIRS)
    assert [(event.step, event.frozen, event.decided_at) for event in journal.of(ModuleFrozen)] == [
        (ends, 1, BEGINS),
        (ends, 2, BEGINS),
    ]
    assert not journal.of(FaultCaught) and not journal.of(Declined)
    frozen = ours.weights()
    ours.go(ends + 10)
    assert differences(frozen, ours.weights()) == []
    ours.run.close()
    assert outside(ours.model) == outside(plain.model)


def test_by_default_nothing_lands(tmp_path):
    ours = Training(mode="none", directory=tmp_path).go(BEGINS)
    assert ours.run.frozen == 2 and not read_journal(tmp_path).of(LandingBegan)
    assert ours.run.summary().landing is None


# --- the check ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AVERAGING)
def test_an_average_that_is_worse_is_undone(mode, tmp_path):
    steps, pairs = 48, 12
    ours = Training(mode=mode, total=800, schedule="0.025:2", directory=tmp_path).go(BEGINS + steps)
    average = ours.run._session.parts.applier.landing._average
    for values in average._average.values():
        values.zero_()
    raw = ours.weights()
    ours.go(BEGINS + steps + 2 * pairs)
    assert ours.run.frozen == 2
    assert differences(raw, ours.weights()) == []
    [ended] = read_journal(tmp_path).of(LandingEnded)
    assert ended.outcome == "undone" and ended.landed_loss - ended.raw_loss > 2 * ended.error > 0
    # Its statistics are those of the steps as trained, in which nothing of the average was left.
    hand = Training(mode=None).go(BEGINS)
    rate = hand.optim.param_groups[0]["lr"]
    for k in range(steps):
        hand.optim.param_groups[0]["lr"] = rate if mode == "average" else rate * (1 - k / steps)
        hand.step()
    hand.optim.param_groups[0]["lr"] = 0.0
    for turn in (False, True, True, False) * (pairs // 2):
        before = copy.deepcopy(hand.front.state_dict())
        hand.step()
        if turn:
            hand.front.load_state_dict(before)
    norm = ours.model.blocks[0][1]
    torch.testing.assert_close(norm.running_mean, hand.model.blocks[0][1].running_mean)
    torch.testing.assert_close(norm.running_var, hand.model.blocks[0][1].running_var)
    assert norm.num_batches_tracked == hand.model.blocks[0][1].num_batches_tracked


@pytest.mark.parametrize(
    ("raw", "landed", "is_worse"),
    [
        ([1.0, 1.2, 0.8], [1.01, 1.19, 0.82], False),
        ([1.0, 1.2, 0.8], [1.5, 1.7, 1.4], True),
        ([1.0, 1.2, 0.8], [1.0, 1.2, 0.8], False),
        ([1.0, 1.2, 0.8], [0.5, 0.7, 0.4], False),
        ([1.0, 1.2, 0.8], [math.nan, 1.2, 0.8], True),
        ([1.0, 1.2, 0.8, math.inf], [0.9, 1.1, 0.7, math.inf], False),
        ([1.0, 1.2], [0.5, 0.7], True),
        ([], [], True),
    ],
)
def test_the_average_is_taken_unless_its_loss_is_above_by_more_than_noise(raw, landed, is_worse):
    pairs = list(zip(raw, landed, strict=True))
    assert bool(compare([pairs]).reason) == is_worse
    assert bool(compare([pairs, pairs]).reason) == is_worse


def test_a_roll_back_in_a_step_made_with_the_average_keeps_the_weights_that_were_loaded():
    training = Training(mode="average").go(BEGINS)
    saved = copy.deepcopy((training.model.state_dict(), training.optim.state_dict(), training.run.state_dict()))
    training.go(BEGINS + STEPS)
    average = training.run._session.parts.applier.landing._average
    while not average.is_in_place:
        training.step()
        training.model(torch.ones(16, 8, dtype=torch.float64))
    for own, state in zip((training.model, training.optim, training.run), saved, strict=True):
        own.load_state_dict(state)
    assert [name for name, entry in training.model.state_dict().items() if not torch.equal(entry, saved[0][name])] == []


def test_what_others_read_between_steps_has_the_weights_as_trained():
    ours = Training().go(BEGINS + STEPS)
    raw = ours.weights()
    probe = torch.randn(4, 8, dtype=torch.float64)
    expected = ours.model.eval()(probe)[0, 0]
    ours.model.train()
    outputs = []
    for _ in range(2 * PAIRS - 1):
        ours.step()
        assert differences(raw, ours.weights()) == []
        held = copy.deepcopy(ours.model).blocks[:2].eval()
        outputs.append(held[0][0](probe))
    assert all(torch.equal(outputs[0], output) for output in outputs) and expected.isfinite()


@pytest.mark.parametrize("mode", AVERAGING)
def test_micro_batches_are_counted_as_ever(mode, tmp_path):
    ours = Training(mode=mode, micro=3, directory=tmp_path).go(LANDS + 4)
    assert ours.run.frozen == 2
    journal = read_journal(tmp_path)
    assert journal.of(LandingEnded)[0].outcome == "landed" and not journal.of(FaultCaught)
    assert abs(ours.run.summary().step - (LANDS + 4)) <= 2  # of the first steps, before micro-batches were recognised


# --- what else the policy decides meanwhile -----------------------------------------------------


def test_a_thaw_in_mid_landing_cancels_it_and_training_goes_on_as_plain(tmp_path):
    ours = Training(schedule="0.1:2 0.14:0", directory=tmp_path).go(60)
    assert differences(ours.everything(), Training(mode=None).go(60).everything()) == []
    journal = read_journal(tmp_path)
    assert [(event.step, event.outcome) for event in journal.of(LandingEnded)] == [(28, "cancelled")]
    assert journal.of(Thawed) and not journal.of(ModuleFrozen)
    assert replay(tmp_path).agrees


@pytest.mark.parametrize("at", [28, 34])
def test_a_thaw_gives_rates_back_and_leaves_the_weights_as_trained(at):
    ours = Training(mode="both", schedule=f"0.1:2 {at / TOTAL}:0").go(at)
    theirs = Training(mode=None).go(at)
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.optim.load_state_dict(copy.deepcopy(ours.optim.state_dict()))
    assert differences(ours.go(60).everything(), theirs.go(60).everything()) == []


def test_a_thaw_after_landing_goes_on_from_the_landed_weights():
    ours = Training(schedule="0.1:2 0.3:0").go(60)
    landed = by_hand("average").weights()
    for name, value in ours.weights().items():
        torch.testing.assert_close(value, landed[name], rtol=1e-9, atol=1e-11)
    assert ours.run.frozen == 0
    theirs = Training(mode=None).go(60)
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.optim.load_state_dict(copy.deepcopy(ours.optim.state_dict()))
    assert differences(ours.go(70).everything(), theirs.go(70).everything()) == []


def test_what_is_decided_in_mid_landing_lands_after_that(tmp_path):
    ours = Training(schedule="0.1:1 0.13:2 0.16:3", directory=tmp_path).go(LANDS)
    assert (ours.run.frozen, ours.run.summary().landing) == (1, 2)
    ours.go(LANDS + STEPS + 2 * PAIRS)
    assert ours.run.frozen == 3
    journal = read_journal(tmp_path)
    assert [(event.step, event.module) for event in journal.of(FreezeWaits)] == [(26, 1), (32, 2)]
    assert [(event.step, event.module, event.decided_at) for event in journal.of(LandingBegan)] == [
        (20, 0, None),
        (38, 1, 26),
        (38, 2, 32),
    ]
    found = replay(tmp_path)
    assert found.agrees and [entry.module for entry in found.recorded if entry.kind == "freeze"] == [0, 1, 2]


def test_what_stays_frozen_at_a_partial_thaw_does_not_land_again(tmp_path):
    ours = Training(schedule="0.1:2 0.3:1", directory=tmp_path).go(60)
    assert ours.run.frozen == 1
    journal = read_journal(tmp_path)
    assert len(journal.of(LandingBegan)) == 2 and journal.of(ModuleFrozen)[-1].decided_at is None
    assert replay(tmp_path).agrees


def test_what_is_decided_where_a_landing_ends_is_recorded_once(tmp_path):
    ours = Training(schedule=f"0.1:1 {LANDS / TOTAL}:2", directory=tmp_path).go(LANDS)
    assert (ours.run.frozen, ours.run.summary().landing) == (1, 1)
    assert replay(tmp_path).agrees
    assert [event.decided_at for event in read_journal(tmp_path).of(LandingBegan)] == [None, LANDS]


@pytest.mark.parametrize("mode", MODES)
def test_modules_that_are_updated_at_some_steps_only_land_too(mode, tmp_path):
    ours = Training(mode=mode, schedule="0.05:2/4,3/2 0.1:2,3/2", directory=tmp_path).go(BEGINS + STEPS)
    raw = ours.weights()
    ours.go(LANDS + 6)
    assert ours.run.frozen == 2 and ours.run.periods[2] == 2
    journal = read_journal(tmp_path)
    assert [event.outcome for event in journal.of(LandingEnded)] == ["landed"]
    assert not journal.of(FaultCaught) and replay(tmp_path).agrees
    assert (differences(raw, ours.weights()) == []) == (mode == "anneal")


def test_without_a_known_length_it_takes_ten_intervals(tmp_path):
    specimen = SPECIMENS["residual"]
    config = {
        "policy": {"name": "egeria"},
        "plasticity": {"interval_steps": 3, "window": 2},
        "bootstrapping": {"change_threshold": 1.0},
        "controller": {"budget_share": 1000.0},
        "freezing": {"tolerance_share": 100.0, "landing": "anneal"},
    }
    loop = Loop(specimen, {"config": config, "controller": "inline", "directory": tmp_path})
    loop.step(90)
    journal = read_journal(tmp_path)
    assert {event.num_steps for event in journal.of(LandingBegan)} == {30}
    began, frozen = journal.of(LandingBegan)[0], journal.of(ModuleFrozen)[0]
    assert frozen.step - began.step == 30 and replay(tmp_path).agrees


@pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")
def test_where_too_few_steps_are_left_it_freezes_at_once(tmp_path):
    ours = Training(schedule="0.94:2", directory=tmp_path).go(190)
    assert ours.run.frozen == 2
    [declined] = read_journal(tmp_path).of(Declined)
    assert declined.what == "landing" and "it takes 18 steps, and 12 are left" in declined.reason


# --- the laws, over the menagerie ---------------------------------------------------------------

LANDING = {"landing_share": 0.04, "tied": "freeze"}
"""4 of 100 steps, and 6 to compare; the decision is made at step 2."""


def attached(mode, directory=None, schedule="0.02:1 0.04:9", **groups):
    freezing = {"landing": mode, **LANDING}
    policy = {"name": "static", "schedule": schedule}
    config = {"policy": policy, "plasticity": {"interval_steps": 2}, "freezing": freezing, **groups}
    return {"config": config, "total_steps": 100, "directory": directory}


@each_supported
def test_law_7_replaying_a_journal_gives_its_decisions(specimen, tmp_path):
    loop = Loop(specimen, attached("both", tmp_path))
    loop.step(26)
    loop.run.close()
    journal = read_journal(tmp_path)
    assert replay(tmp_path).agrees and not journal.of(FaultCaught)
    assert journal.of(ModuleFrozen) or journal.of(Declined)
    plain = Loop(specimen)
    plain.step(1)
    assert {**outside(loop.model), "gradients": None} == {**outside(plain.model), "gradients": None}


@pytest.mark.parametrize("stop", [4, 9, 15])
@each_stateless
def test_law_5_stop_in_mid_landing_and_resume(specimen, stop, tmp_path):
    whole = Loop(specimen, attached("both", tmp_path / "whole"))
    whole.step(26)
    first = Loop(specimen, attached("both", tmp_path / "parts"))
    first.step(stop)
    resumed = Loop(specimen, attached("both", tmp_path / "parts"))
    resumed.model.train()
    resumed.load(first.save())
    assert resumed.run.summary().landing == first.run.summary().landing
    resumed.step(26 - stop)
    assert differences(whole.everything(), resumed.everything()) == []
    for name in ("whole", "parts"):
        journal = read_journal(tmp_path / name)
        assert not journal.of(FaultCaught)
    ends = [
        [(e.step, e.outcome, e.raw_loss) for e in read_journal(tmp_path / n).of(LandingEnded)]
        for n in ("whole", "parts")
    ]
    assert ends[0] == ends[1]
    assert replay(tmp_path / "parts").agrees
    for loop in (resumed, whole):
        loop.run.close()
    assert outside(resumed.model) == outside(whole.model)


@each_stateless
def test_law_4_thawing_returns_to_plain_training(specimen):
    loop = Loop(specimen, attached("both", schedule="0.02:9 0.08:0"))
    loop.step(9)  # it is compared
    assert loop.run.frozen == 0
    plain = Loop(specimen)
    plain.step()  # makes what models keep beside their state, and optimizers theirs
    plain.model.load_state_dict(loop.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    plain.data.set_state(loop.data.get_state())
    plain.random, plain.losses = loop.random, list(loop.losses)
    for each in (loop, plain):
        each.step(4)
    assert differences(loop.everything(), plain.everything()) == []
    loop.run.close()
    assert outside(loop.model) == outside(plain.model)


def test_law_3_the_cache_begins_at_the_freeze_and_changes_nothing(tmp_path):
    loops = {}
    for name, settings in (("plain", {"enabled": False}), ("cached", {})):
        freezing = {"landing": "both", "landing_share": 0.05}
        loops[name] = CachedLoop(tmp_path / name, settings=settings, freezing=freezing).finish()
    assert differences(loops["plain"].everything(), loops["cached"].everything()) == []
    journal = read_journal(tmp_path / "cached")
    assert journal.of(LandingEnded)[0].outcome == "landed" and journal.of(CacheUsed)[-1].hits > 100
    frozen = journal.of(ModuleFrozen)[0]
    assert frozen.step - frozen.decided_at >= 4 + 6
    stored = [event.step for event in journal.of(CacheDecided) if event.mode == "stored"]
    assert min(stored) == frozen.step


# --- faults of ours -----------------------------------------------------------------------------


def failing(*_args, **_options):
    raise RuntimeError("injected")


@pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")
@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (AveragedWeights, "__post_init__", BEGINS),
        (AveragedWeights, "take_in", BEGINS + 2),
        (AveragedWeights, "put_in", BEGINS + STEPS + 2),
        (AveragedWeights, "_record", BEGINS + STEPS + 2),
        (AveragedWeights, "use_statistics", LANDS),
        (ScaledSteps, "_scale", BEGINS + 2),
    ],
)
def test_a_fault_ends_the_landing_and_the_front_freezes_as_trained(owner, name, at, tmp_path, monkeypatch):
    ours = Training(mode="both", directory=tmp_path)
    monkeypatch.setattr(owner, name, failing)
    ours.go(at)
    assert ours.run.frozen == 2
    journal = read_journal(tmp_path)
    assert "injected" in journal.of(FaultCaught)[0].error
    assert [event.outcome for event in journal.of(LandingEnded)] == ["failed"]
    frozen = ours.weights()
    ours.go(LANDS + 4)
    assert differences(frozen, ours.weights()) == []
    assert replay(tmp_path).agrees
    ours.run.close()
    assert outside(ours.model) == outside(Training(mode=None).model)


@pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")
def test_where_an_optimizer_takes_no_hooks_the_front_freezes_as_trained(tmp_path, monkeypatch):
    def has_none(*_):
        raise AttributeError("no hooks")

    ours = Training(mode="both", directory=tmp_path)
    monkeypatch.setattr(torch.optim.Optimizer, "register_step_pre_hook", has_none)
    ours.go(BEGINS + 4)
    assert ours.run.frozen == 2
    journal = read_journal(tmp_path)
    assert [event.what for event in journal.of(Declined)] == ["landing"] and replay(tmp_path).agrees
    assert [(event.step, event.outcome) for event in journal.of(LandingEnded)] == [(BEGINS, "failed")]


# --- what is told of it -------------------------------------------------------------------------


def test_summary_trackers_and_report_tell_of_it(tmp_path):
    logged = {}
    ours = Training(mode="both", directory=tmp_path, log_to=lambda values, step: logged.update({step: values}))
    ours.go(BEGINS)
    assert ours.run.summary().landing == 2 and ours.run.summary().frozen == 0
    assert "2 landing" in repr(ours.run) and "<th>landing</th><td>blocks.0, blocks.1</td>" in ours.run._repr_html_()
    assert "was still landing at step 20" in str(report(tmp_path))
    ours.go(LANDS)
    ours.run.close()
    assert (logged[BEGINS]["egeria/landing"], logged[LANDS]["egeria/landing"]) == (2.0, 0.0)
    page = report(tmp_path).path.read_text()
    assert "weights averaged, learning rate to 0 over 12 steps" in page
    assert "with the average and" in page and "over 3 pairs of steps" in page
