"""The worth of steps: what is measured, what counts as trained, and what is decided by it."""

from __future__ import annotations

import io
import itertools
import math
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import egeria
from egeria import events
from egeria.cli import main
from egeria.config import Config
from egeria.journal import read_journal
from egeria.layers import backward_times
from egeria.layers.backward_times import BackwardTimes
from egeria.layers.modules import parse_modules
from egeria.layers.pretrained import count_pretrained, find_trained_norms
from egeria.policy import (
    WORTH,
    EndBootstrapping,
    Freeze,
    Interval,
    Reading,
    SetPeriods,
    Thaw,
    find_policy,
    find_rule,
)
from egeria.policy.evidence import TREND_INTERVALS, LossGuard
from egeria.policy.shares import telling
from egeria.report import report
from egeria.report.replay import replay
from egeria.session.measuring.measures import Measures
from egeria.session.measuring.worth import StepWorth

WIDTH, CLASSES, STEPS = 16, 4, 200


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Words(nn.Module):
    """A table, four blocks and a head: the shape of a language model."""

    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(50, WIDTH), nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens)).mean(1))


def batches(task, count, seed=0):
    """Yield sentences whose class is told by how often words of a kind occur; a task is a way to sort the words."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, CLASSES, (50,), generator=torch.Generator().manual_seed(task))
    for _ in range(count):
        tokens = torch.randint(0, 50, (32, 12), generator=draw)
        yield tokens, torch.nn.functional.one_hot(kinds[tokens], CLASSES).sum(1).argmax(1)


def pretrained():
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for tokens, targets in batches(task=1, count=60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
    return model


class FineTuning:
    """A loop that can be halted, saved and gone on with."""

    def __init__(self, directory, model=None, steps=STEPS, **settings):
        torch.manual_seed(0)
        self.model = model or pretrained()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / steps))
        config = {"plasticity": {"interval_steps": 2}, **settings}
        self.run = egeria.attach(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            total_steps=steps,
            directory=directory,
            controller="inline",
            config=config,
        )
        self.data = list(batches(task=2, count=steps, seed=1))
        self.step, self.depths = 0, []

    def go(self, count):
        for tokens, targets in self.data[self.step : self.step + count]:
            loss = nn.functional.cross_entropy(self.run.model(tokens), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.run.step(loss)
            self.step += 1
            self.depths.append(self.run.frozen)
        return self

    def save(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "run": self.run}
        buffer = io.BytesIO()
        torch.save({"step": self.step, **{name: part.state_dict() for name, part in parts.items()}}, buffer)
        return buffer.getvalue()

    def load(self, saved):
        state = torch.load(io.BytesIO(saved), weights_only=False)
        self.step = state.pop("step")
        for name in ("model", "optimizer", "scheduler", "run"):
            getattr(self, name).load_state_dict(state[name])
        return self


def of(directory, kind):
    return read_journal(directory).of(kind)


# What is measured


class Whole:
    def __init__(self, *parameters):
        self.parameters = parameters


def descend(model, loss, optimizer, count, measure):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        losses.append(float(value.detach()))
        measure.before(optimizer)
        optimizer.step()
        measure.after(optimizer)
    return losses


@pytest.mark.parametrize("shape", [(6, 4), (200, 2000)])  # the second is looked at in part
def test_summed_over_small_steps_it_is_the_fall_of_the_loss(shape):
    torch.manual_seed(0)
    model = nn.Module()
    values = torch.randn(shape)
    model.front, model.back = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    measure = StepWorth(model, 1, total_steps=1000)

    def loss():
        return (model.front.square() + 3 * model.back.square()).sum()

    losses = descend(model, loss, optimizer, 40, measure)
    front, back = measure.take([Whole("front"), Whole("back")])
    assert front + back == pytest.approx(losses[0] - losses[-1], rel=0.02)
    assert back / front == pytest.approx(9, rel=0.1)  # its gradients and its steps are three times as large


def test_it_is_judged_by_the_next_batch_and_not_by_its_own():
    """Steps that follow nothing but the noise of their own batch are worth nothing."""
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(500))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    measure = StepWorth(model, 1, total_steps=1000)
    own = 0.0
    for _ in range(200):
        model.weight.grad = torch.randn(500)
        own += 0.01 * float(model.weight.grad.square().sum())
        measure.before(optimizer)
        optimizer.step()
        measure.after(optimizer)
    (worth,) = measure.take([Whole("weight")])
    assert abs(worth) < 0.03 * own


def test_complex_weights_are_pairs_of_real_ones():
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(40, dtype=torch.complex64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    measure = StepWorth(model, 1, total_steps=1000)
    losses = descend(model, lambda: model.weight.abs().square().sum(), optimizer, 10, measure)
    (worth,) = measure.take([Whole("weight")])
    assert worth == pytest.approx(losses[0] - losses[-1], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_any_precision_are_added_up_in_at_least_float32(dtype):
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((4,), 1024.0, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    measure = StepWorth(model, 1, total_steps=1000)
    for _ in range(301):
        model.weight.grad = torch.full((4,), 8.0, dtype=dtype)
        measure.before(optimizer)
        optimizer.step()
        measure.after(optimizer)
        model.weight.data.fill_(1024.0)
    (worth,) = measure.take([Whole("weight")])
    assert worth == 300 * 4 * 64  # in bfloat16 sums stick at 256 times the part


def test_of_a_table_some_columns_of_all_rows_are_looked_at():
    """In a batch few rows have a gradient: evenly spaced rows would miss them."""
    torch.manual_seed(0)
    model = nn.Module()
    model.table = nn.Embedding(10_000, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    measure = StepWorth(model, 1, total_steps=1000)
    losses = descend(model, lambda: model.table(torch.tensor([3, 77, 5001])).square().sum(), optimizer, 10, measure)
    (worth,) = measure.take([Whole("table.weight")])
    assert worth == pytest.approx(losses[0] - losses[-1], rel=0.4)
    (looked_at,) = measure.state_dict()["moved"].values()
    assert len(looked_at) == 10_000 and looked_at.numel() < 100_000


def test_steps_that_were_not_finite_leave_no_number():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measure = StepWorth(model, 1, total_steps=1000)
    for gradient in (1.0, float("nan"), 1.0):
        model.weight.grad = torch.full((3,), gradient)
        measure.before(optimizer)
        optimizer.step()
        measure.after(optimizer)
    assert measure.take([Whole("weight")]) == [None]


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SlowBlock(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear, self.other, self.seconds = nn.Linear(4, 4), nn.Linear(4, 4), seconds

    def forward(self, x):
        return Slow.apply(self.other(self.linear(x)), self.seconds)


@pytest.mark.parametrize("passes", [1, 3])
def test_backward_passes_are_timed_by_layer_module(passes):
    model = nn.Sequential(SlowBlock(0.03), SlowBlock(0.0), SlowBlock(0.06), SlowBlock(0.01))
    modules, times = parse_modules(model, pattern=r"\d"), BackwardTimes()
    model(torch.randn(8, 4)).sum().backward()  # the first pass of a process takes some milliseconds more
    times.arm(model, modules)
    for _ in range(passes):  # accumulated gradients
        model(torch.randn(8, 4)).sum().backward()
    time.sleep(0.02 * passes)  # what the loop does before it steps
    times.end_step()
    shares, loop = times.shares(4, 0.2 * passes)
    assert loop == pytest.approx(0.1, abs=0.03)
    assert shares[:3] == [pytest.approx(0.15, abs=0.04), pytest.approx(0, abs=0.03), pytest.approx(0.3, abs=0.05)]
    assert not any(part._forward_hooks for part in model.modules())


def test_one_backward_pass_through_several_forward_passes_is_timed_by_layer_module_too():
    model = nn.Sequential(*(SlowBlock(0.03) for _ in range(4)))
    modules, times = parse_modules(model, pattern=r"\d"), BackwardTimes()
    times.arm(model, modules)
    (model(torch.randn(8, 4)) * model(torch.randn(8, 4))).sum().backward()
    times.end_step()
    shares, loop = times.shares(4, 0.24)
    assert shares == [pytest.approx(0.25, abs=0.08)] * 4 and loop == pytest.approx(0, abs=0.05)


def test_a_backward_pass_that_fails_is_not_timed_and_the_next_one_is():
    def fail(_gradient):
        raise RuntimeError("the user's own")

    model = nn.Sequential(SlowBlock(0.0), SlowBlock(0.03))
    modules, times = parse_modules(model, pattern=r"\d"), BackwardTimes()
    times.arm(model, modules)
    model[0].register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="the user's own"):
        model(torch.randn(8, 4)).sum().backward()
    times.end_step()
    assert times.shares(2, 0.1) is None
    model[0]._forward_hooks.clear()
    times.arm(model, modules)
    model(torch.randn(8, 4)).sum().backward()
    times.end_step()
    assert times.shares(2, 0.1)[0][1] == pytest.approx(0.3, abs=0.08)


def test_a_step_that_was_held_up_takes_no_more_than_an_iteration():
    model = nn.Sequential(SlowBlock(0.01), SlowBlock(0.03))
    modules, times = parse_modules(model, pattern=r"\d"), BackwardTimes()
    times.arm(model, modules)
    model(torch.randn(8, 4)).sum().backward()
    times.end_step()
    (first, second), loop = times.shares(2, 0.005)
    assert first + second + loop == pytest.approx(1.0) and second > first


def test_a_pass_that_nothing_was_made_of_is_no_pass():
    model = nn.Sequential(SlowBlock(0.0), SlowBlock(0.05))
    modules, times = parse_modules(model, pattern=r"\d"), BackwardTimes()
    times.arm(model, modules)
    model(torch.randn(8, 4))
    model(torch.randn(8, 4)).sum().backward()
    times.end_step()
    assert times.shares(2, 0.1) is not None


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("is_unscaled", [False, True])  # by the loop, before it clips
def test_a_fused_optimizer_under_a_scaler_gives_scaled_gradients_and_skips_steps(found_inf, is_unscaled):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measure = StepWorth(model, 1, total_steps=1000)
    for scale, infinite in ((1.0, 0.0), (1.0 if is_unscaled else 1024.0, found_inf)):
        optimizer.grad_scale, optimizer.found_inf = None if is_unscaled else torch.tensor(scale), torch.tensor(infinite)
        model.weight.grad = torch.full((3,), math.inf if infinite else scale)
        measure.before(optimizer)
        with torch.no_grad():
            model.weight -= 0.0 if infinite else 0.1
        measure.after(optimizer)
    (worth,) = measure.take([Whole("weight")])
    assert worth == pytest.approx(0.0 if found_inf else 0.3)


def test_a_step_that_failed_is_no_step():
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((3,), 100.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measure = StepWorth(model, 1, total_steps=1000)
    for fails in (False, True, False, False):
        model.weight.grad = torch.ones(3)
        measure.before(optimizer)
        if fails:  # for want of memory, say: nothing calls what comes behind it
            continue
        with torch.no_grad():
            model.weight -= 0.1
        measure.after(optimizer)
    (worth,) = measure.take([Whole("weight")])
    assert worth == pytest.approx(0.6, abs=1e-4)  # the first step, and the one before the last


def test_a_fault_in_timing_stays_out_of_the_passes_of_the_user(monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    model = nn.Sequential(SlowBlock(0.0), SlowBlock(0.0))
    modules = parse_modules(model, pattern=r"\d")
    for where in ("_now", "tree", "_seconds"):  # the last as for events of two devices
        times = BackwardTimes()
        with monkeypatch.context() as patched:
            broken = SimpleNamespace(first_activation=fail) if where == "tree" else fail
            patched.setattr(backward_times, where, broken)
            times.arm(model, modules)
            model(torch.randn(8, 4)).sum().backward()
            times.end_step()
            assert times.shares(2, 0.1) is None
        times.arm(model, modules)
        assert not any(part._forward_hooks for part in model.modules())


def test_recomputed_activations_are_no_pass_of_their_own():
    blocks = [SlowBlock(0.05), SlowBlock(0.0), SlowBlock(0.05)]
    model = nn.Sequential(*blocks)
    modules, times = parse_modules(model, pattern=r"\d"), BackwardTimes()
    times.arm(model, modules)
    x = torch.randn(8, 4, requires_grad=True)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    x.sum().backward()
    times.end_step()
    shares, _ = times.shares(3, 0.1)
    assert shares[:2] == [pytest.approx(0.5, abs=0.1), pytest.approx(0, abs=0.1)]


# What came trained


class RootMeanSquareNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


def test_a_model_that_begins_at_random_is_not_trained_and_one_that_was_trained_is():
    torch.manual_seed(0)
    fresh, trained = Words(), pretrained()
    cuts = parse_modules(fresh, tables_apart=True, target_share=0.1)
    assert cuts[0].name == "table"
    assert count_pretrained(find_trained_norms(fresh), cuts) == 0
    assert count_pretrained(find_trained_norms(trained), cuts) == len(cuts)


def test_a_fresh_part_ends_what_came_trained():
    model = pretrained()
    model.blocks[2] = Block()
    cuts = parse_modules(model, tables_apart=True, target_share=0.1)
    norms = find_trained_norms(model)
    assert [module.name for module in cuts[: count_pretrained(norms, cuts)]] == ["table", "blocks.0", "blocks.1"]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(WIDTH, affine=False), nn.GroupNorm(2, WIDTH), RootMeanSquareNorm()])
def test_norms_of_all_kinds_tell(norm):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 2))
    assert find_trained_norms(model) == {"1": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    model(torch.randn(8, WIDTH)).square().sum().backward()
    optimizer.step()
    assert find_trained_norms(model) == {"1": True}


def test_without_norms_nothing_is_known_and_a_setting_says_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, found in (("auto", False), (True, True)):
        with egeria.attach(
            model, optimizer, total_steps=100, directory=tmp_path, config={"policy": {"pretrained": given}}
        ) as run:
            assert run._session.training.is_pretrained is found


@pytest.mark.parametrize(("name", "first"), [("pretrained", "table"), ("Words", "blocks")])
def test_the_command_line_shows_the_cut_that_a_run_has(name, first, capsys):
    assert main(["modules", f"{__name__}:{name}"]) == 0
    found = re.search(r"table|blocks", capsys.readouterr().out)
    assert found and found[0] == first


def test_a_table_that_is_tied_to_the_head_stays_with_its_block():
    model = pretrained()
    model.head = nn.Linear(WIDTH, 50, bias=False)
    model.head.weight = model.table.weight
    assert parse_modules(model, tables_apart=True)[0].name != "table"


# What is decided


TIMES = (0.2, 0.1, 0.1, 0.1)
SHARES = (0.04, 0.06, 0.2, 0.7)  # 2/15, 1/5 and 2/3 without the last, for 0.2, 0.1, 0.1 of an iteration: 2/3, 2, 20/3


def cost_at(price, shares=SHARES):
    """Return what freezing costs at a limit on the price, where the rate falls straight to nothing.

    A module of price `p` freezes at the rate `price / p`, and what it brings from there on falls with the square of it.
    """
    total = sum(shares[:-1])
    parts = [(share / total, share / total / time) for share, time in zip(shares[:-1], TIMES, strict=False)]
    return sum(worth * min(1.0, price / own) ** 2 for worth, own in parts)


def policy(num_modules=4, total_steps=1000, price=1.0, shares=SHARES, **settings):
    settings = {"worth_limit": cost_at(price, shares), "watched_share": 1.0, **settings}
    config = Config.from_dict({"policy": {"name": "worth", **settings}})
    return find_policy("worth")(config, trainable=[True] * num_modules, rule=find_rule("step"), total_steps=total_steps)


def interval(evaluation, rate=1.0, loss=None, worth=None, to_come=None, **measured):
    step = 5 * evaluation
    if worth is not None:
        measured = {"time_shares": TIMES, "num_pretrained": 4, **measured}
    return Interval(
        step=step,
        evaluation=evaluation,
        loss=1.0 if loss is None else loss,
        learning_rate=rate,
        remaining_rate_sum=rate * (1000 - step) / 2 if to_come is None else to_come,
        last_rate=0.0,
        worth=worth,
        **measured,
    )


def measured(made, shares=SHARES, count=10, scatter=0.0, **more):
    """Give the intervals in which worth is measured; each brings about a hundredth of the loss."""
    found = []
    for evaluation in range(1, count + 1):
        part = 0.01 + scatter * (-1) ** evaluation
        worth = tuple(None if share is None else share * part for share in shares)
        found += made.observe_interval(interval(evaluation, worth=worth, **more))
        assert made.monitored is None
    return found


@pytest.mark.parametrize("fresh", [0.01, 10.0])
def test_layers_that_began_untrained_do_not_count_in_the_measure(fresh):
    """As those of a decoder behind a trained encoder: the first two freeze as if there were nothing else."""
    shares = (0.04, 0.06, 0.2)
    made = policy(num_modules=5)
    measured(made, (*shares, fresh, 0.7), num_pretrained=3, time_shares=(*TIMES, 0.1))
    (first,) = made.observe_interval(interval(11))
    assert first.module == 0 and "13.3%" in first.reason


def test_the_front_that_brings_little_freezes_once_it_is_measured_and_the_rest_as_the_rate_falls():
    made = policy()
    assert all(isinstance(decision, EndBootstrapping) for decision in measured(made))
    (first,) = made.observe_interval(interval(11))
    assert isinstance(first, Freeze) and first.module == 0
    assert "13.3%" in first.reason and "20%" in first.reason
    assert made.observe_interval(interval(12, rate=0.51)) == ()
    (second,) = made.observe_interval(interval(13, rate=0.49))
    assert second.module == 1
    assert made.observe_interval(interval(14, rate=0.16)) == ()
    (third,) = made.observe_interval(interval(15, rate=0.14))
    assert third.module == 2 and made.frozen == 3
    assert made.observe_interval(interval(16, rate=0.001)) == ()  # the last never freezes


@pytest.mark.parametrize(
    ("limit", "shares"),
    [
        *itertools.product((0.06, 0.1, 0.3), (SHARES, (0.25, 0.05, 0.05, 0.65), (0.0, 0.3, 0.01, 0.69))),
        *(
            (0.03, shares) for shares in ((0.25, 0.05, 0.05, 0.65), (0.0, 0.3, 0.01, 0.69))
        ),  # else too late for the last
    ],
)
def test_in_a_straight_decay_all_freezes_together_cost_what_the_setting_says(limit, shares):
    made = policy(worth_limit=limit)
    part = [share / sum(shares[:-1]) for share in shares]
    cost, frozen = 0.0, 0
    for evaluation in range(1, 200):
        to_come = 1 - evaluation / 200
        worth = tuple(0.01 * share for share in shares) if evaluation <= 10 else None
        for decision in made.observe_interval(interval(evaluation, rate=to_come, worth=worth)):
            if isinstance(decision, Freeze):
                cost += part[decision.module] * to_come**2  # what its steps bring falls with the rate
                frozen += 1
    assert 0.8 * limit < cost <= limit
    assert frozen == 3


def test_several_freeze_at_once_where_those_behind_bring_less_for_their_time():
    made = policy(worth_limit=0.99)
    measured(made, shares=(0.25, 0.05, 0.05, 0.65))  # 3.6 for the first alone, 2.5 with what follows
    assert made.observe_interval(interval(11)) == ()
    assert [decision.module for decision in made.observe_interval(interval(12, rate=0.99))] == [0, 1, 2]


def test_what_is_too_dear_to_freeze_is_updated_rarely():
    made = policy(duty_cycle=True)
    measured(made)
    first, rarer = made.observe_interval(interval(11))
    assert isinstance(first, Freeze) and first.module == 0
    assert isinstance(rarer, SetPeriods) and rarer.periods == (2, 2, 1, 1)  # 2 times the limit
    (rarer,) = made.observe_interval(interval(12, rate=0.89))  # 1.78 and 5.9 times
    assert rarer.periods == (4, 4, 2, 1) and "89%" in rarer.reason
    assert made.observe_interval(interval(13, rate=0.88)) == ()
    assert made.observe_interval(interval(14, rate=1.0)) == ()  # 2 and 6.7 times: not enough more
    (frozen,) = made.observe_interval(interval(15, rate=0.4))  # 0.8 and 2.7 times
    assert isinstance(frozen, Freeze) and frozen.module == 1
    assert made.observe_interval(replace(interval(16, rate=1.0), remaining_rate_sum=None)) == ()


def test_what_is_updated_rarely_is_updated_oftener_once_it_costs_half_as_much_again():
    made = policy(duty_cycle=True, price=1.2)
    measured(made)
    assert made.observe_interval(interval(11))[-1].periods == (4, 4, 2, 1)  # 1.7 and 5.6 times the limit
    found = [made.observe_interval(interval(evaluation, loss=1.0 + evaluation)) for evaluation in range(12, 50)]
    changed = [it.periods[1:] for it in itertools.chain(*found) if isinstance(it, SetPeriods)]
    assert changed[0] == (2, 1, 1)


def test_a_loss_that_leaves_its_trend_has_what_was_updated_rarely_updated_oftener():
    shares = (0.3, 0.3, 0.3, 0.1)
    made = policy(duty_cycle=True, shares=shares)
    measured(made, shares=shares)  # 1.7, 3.3, 3.3 times the limit
    (rarer,) = made.observe_interval(interval(11))
    assert rarer.periods == (4, 2, 2, 1)
    found = [made.observe_interval(interval(evaluation, loss=1.5)) for evaluation in range(12, 20)]
    (oftener,) = itertools.chain(*found)
    assert oftener.periods == (2, 1, 1, 1)  # at a quarter of the limit: 6.7 times, which is held, and 13


def test_where_steps_did_harm_it_is_measured_for_longer():
    made = policy()
    clear = tuple(0.1 * share for share in SHARES)
    measured(made, shares=tuple(-0.01 * share for share in SHARES))
    for evaluation in (11, 12):
        assert made.observe_interval(interval(evaluation, worth=tuple(-0.01 * part for part in clear))) == ()
        assert made.monitored is None and {"worth", "foresight"} == made.needs
    found = []
    for evaluation in range(13, 17):  # three standard errors of that leap, from then on
        found += made.observe_interval(interval(evaluation, worth=clear))
        assert made.monitored is None and ("worth" in made.needs) == (evaluation < 15)
    (first,) = found
    assert isinstance(first, Freeze)


def test_a_later_look_asks_for_more():
    """With so many looks, one of two standard errors comes by chance."""
    made = policy()
    measured(made, shares=tuple(-0.01 * share for share in SHARES))
    for evaluation in range(11, 41):
        part = 0.01 + 0.012 * (-1) ** evaluation
        made.observe_interval(interval(evaluation, worth=tuple(part * share for share in SHARES)))
        if "worth" not in made.needs:
            break
    assert 30 <= evaluation <= 38  # 0.59 times the root of the number of intervals, less the first ten


def test_what_did_harm_once_the_head_had_settled_is_not_taken_for_cheap():
    made = policy()
    for evaluation in range(1, 11):
        shares = SHARES if evaluation <= 5 else (-0.02, 0.01, -0.005, 0.03)
        made.observe_interval(interval(evaluation, worth=tuple(0.01 * share for share in shares)))
    (first,) = made.observe_interval(interval(11))
    assert first.reason.startswith("at most 11.0%")  # by all of it; by the second half alone it would be nothing


def test_what_batches_make_of_all_modules_alike_is_no_error_of_shares_and_what_of_each_is():
    def rates(*scatter):
        made, found = policy(), []
        for evaluation in range(1, 11):
            sign = (-1) ** evaluation
            parts = [0.01 + scatter[place % len(scatter)] * sign for place in range(len(SHARES))]
            worth = tuple(share * part for share, part in zip(SHARES, parts, strict=True))
            made.observe_interval(interval(evaluation, worth=worth))
        for evaluation in range(11, 111):
            rate = 0.95 ** (evaluation - 11)
            found += [rate] * len(made.observe_interval(interval(evaluation, rate=rate)))
        return found

    known = rates(0.0)
    assert rates(0.1) == known  # 0.1 ± 0.45 as a whole
    unsure = rates(0.1, -0.1)
    assert len(known) == len(unsure) == 3
    assert all(first > 1.5 * second for first, second in zip(known, unsure, strict=True))


def test_what_is_not_known_well_does_not_freeze_early():
    known, unsure = policy(), policy()
    measured(known)
    for evaluation in range(1, 11):
        first = SHARES[0] + 0.06 * (-1) ** evaluation  # the same in all
        unsure.observe_interval(interval(evaluation, worth=tuple(0.01 * share for share in (first, *SHARES[1:]))))
    assert known.observe_interval(interval(11)) and known.frozen == 1
    assert unsure.observe_interval(interval(11)) == () and unsure.needs == known.needs
    for made in (known, unsure):
        made.observe_interval(interval(12, rate=0.2))
    assert (known.frozen, unsure.frozen) == (2, 2)


def test_nothing_but_the_rate_to_come_is_needed_once_worth_decides():
    made = policy()
    assert {"plasticity", "noise", "worth"} <= made.needs
    measured(made)
    assert "plasticity" not in made.needs and "noise" not in made.needs
    made.observe_interval(interval(11))
    assert made.needs == {"foresight"} and made.monitored is None


@pytest.mark.parametrize("course", [lambda at: 0.002 * at**2, lambda at: 0.3 / at**2])
def test_what_grows_or_fades_while_it_is_measured_is_no_error(course):
    """As in a warmup, or where a fresh head learns."""
    made = policy()
    for evaluation in range(1, 11):
        worth = tuple(course(evaluation) * share for share in SHARES)
        made.observe_interval(interval(evaluation, worth=worth))
    assert made.observe_interval(interval(11)) and made.frozen == 1


@pytest.mark.parametrize(
    "found",
    [
        {"shares": (-0.1, -0.1, -0.1, -0.7)},  # steps go up the loss, as at the high rates of training from scratch
        {"shares": (0.04, 0.06, 0.2, -0.7)},  # below nothing as a whole
        {"num_pretrained": 0},
    ],
)
def test_where_steps_harm_or_the_model_came_untrained_plasticity_decides(found):
    made = policy()
    measured(made, **found)
    made.observe_interval(interval(11))
    assert made.monitored == 0 and "plasticity" in made.needs


@pytest.mark.parametrize("worth", [0.001, -0.001])  # by far less than it scatters
def test_of_what_does_not_stand_out_nothing_freezes(worth):
    made = policy()
    for evaluation in range(1, 41):
        scatter = 0.1 * (-1) ** evaluation
        made.observe_interval(interval(evaluation, worth=tuple(scatter + worth for _ in SHARES)))
    decisions = [made.observe_interval(interval(step, rate=1 - step / 100)) for step in range(41, 100)]
    assert not any(decisions) and made.frozen == 0 and made.monitored is None
    assert made.needs == {"foresight"}  # no reference model, and nothing watched


def test_an_interval_without_worth_does_not_end_the_look():
    made = policy()
    for evaluation in range(1, 11):
        worth = None if evaluation == 4 else tuple(0.01 * share for share in SHARES)
        decisions = made.observe_interval(interval(evaluation, worth=worth))
        assert all(isinstance(decision, EndBootstrapping) for decision in decisions) and "worth" in made.needs
    assert made.observe_interval(interval(11)) and made.frozen == 1


def test_two_intervals_say_too_little():
    made = policy()
    measured(made, count=2)
    assert made.observe_interval(interval(11)) == () and made.monitored is None


@pytest.mark.parametrize("lacks", [{"num_pretrained": 0}, {"time_shares": None}])
def test_what_can_never_be_known_is_not_measured_for_longer(lacks):
    made = policy()
    measured(made, **lacks)
    made.observe_interval(interval(11, worth=SHARES, **lacks))
    assert made.monitored == 0 and "worth" not in made.needs


def test_clipped_gradients_that_account_for_little_of_the_fall_of_the_loss_decide_all_the_same():
    made = policy(price=1.2)
    for evaluation in range(1, 11):
        worth = tuple(0.001 * share for share in SHARES)
        made.observe_interval(interval(evaluation, worth=worth, loss=2.0 - 0.06 * evaluation))
    made.observe_interval(interval(11, loss=1.3))
    assert made.frozen == 1


def test_what_the_front_brings_while_the_head_is_fresh_does_not_count():
    made = policy()
    for evaluation in range(1, 11):
        shares = (0.0, 0.0, 0.3, 0.7) if evaluation <= 5 else (0.2, 0.02, 0.02, 0.06)
        made.observe_interval(interval(evaluation, worth=tuple(0.01 * share for share in shares)))
    assert made.observe_interval(interval(11)) == ()  # 83 % for a fifth of the time, though 42 % over all


@pytest.mark.parametrize("last", [5, 6, 7])
def test_where_too_few_intervals_are_settled_all_of_them_count(last):
    """The first five are of the first 2.5 %."""
    made = policy()
    for evaluation in range(1, 11):
        worth = tuple(0.01 * share for share in SHARES) if evaluation <= last else None
        made.observe_interval(interval(evaluation, worth=worth))
    made.observe_interval(interval(11))
    assert made.frozen == 1 and made.needs == {"foresight"}


def test_an_interval_that_lacks_a_module_is_left_out():
    made = policy()
    for evaluation in range(1, 11):
        parts = [0.01 * share for share in SHARES]
        worth = (*parts[:2], None if evaluation == 4 else parts[2], parts[3])
        made.observe_interval(interval(evaluation, worth=worth))
    made.observe_interval(interval(11))
    made.observe_interval(interval(12, rate=0.1, to_come=40.0))
    assert made.frozen == 3


def test_what_did_not_come_trained_and_what_could_not_be_measured_stays_in_training():
    made = policy()
    measured(made, num_pretrained=2)
    made.observe_interval(interval(11))
    made.observe_interval(interval(12, rate=1e-4))
    assert made.observe_interval(interval(13, rate=1e-4)) == () and made.frozen == 2
    made = policy()
    measured(made, shares=(0.04, None, 0.2, 0.7))
    made.observe_interval(interval(11))
    assert made.observe_interval(interval(12, rate=1e-4)) == () and made.frozen == 1


def test_while_the_rate_rises_only_what_is_cheap_at_its_highest_freezes():
    made = policy()
    for evaluation in range(1, 11):
        worth = tuple(0.01 * share for share in SHARES)
        made.observe_interval(interval(evaluation, rate=0.01 * evaluation, worth=worth, to_come=500.0))
    frozen = [made.observe_interval(interval(step, rate=0.01 * step, to_come=450.0)) for step in range(11, 20)]
    assert sum(len(decisions) for decisions in frozen) == 1 and made.frozen == 1


def test_while_the_rate_to_come_is_unknown_nothing_freezes():
    made = policy()
    measured(made)
    assert made.observe_interval(replace(interval(11), remaining_rate_sum=None, last_rate=None)) == ()


def test_a_rate_that_rises_to_more_than_twice_what_it_was_thaws():
    made = policy(price=0.5)
    measured(made)
    made.observe_interval(interval(12, rate=0.07, to_come=40.0))
    assert made.frozen == 3  # 6.7 times the rate is 0.47
    for evaluation, rate in ((13, 0.05), (14, 0.2), (15, 0.39)):  # on average 2.5: at most 0.98
        assert made.observe_interval(interval(evaluation, rate=rate, to_come=40.0)) == ()
    decisions = made.observe_interval(interval(16, rate=0.5, to_come=40.0))
    assert isinstance(decisions[0], Thaw) and "rose" in decisions[0].reason


def test_warm_restarts_do_not_thaw_in_every_cycle():
    made = policy(price=0.4)
    rates = [(1 + math.cos(math.pi * (step % 250) / 250)) / 2 for step in range(0, 1000, 5)]
    decisions = []
    for evaluation, rate in enumerate(rates[1:], start=1):
        worth = tuple(0.01 * share for share in SHARES) if evaluation <= 10 else None
        decisions += made.observe_interval(
            interval(evaluation, rate=rate, to_come=5 * math.fsum(rates[evaluation + 1 :]), worth=worth)
        )
    assert any(isinstance(decision, Freeze) for decision in decisions)
    assert not any(isinstance(decision, Thaw) for decision in decisions)


def test_the_end_of_the_schedule_thaws_nothing():
    """Behind the last step no rate is to come, and the one there is may be any."""
    made = policy()
    measured(made)
    made.observe_interval(interval(11))
    made.observe_interval(interval(150, rate=0.001))
    assert made.frozen == 3
    assert made.observe_interval(replace(interval(200, rate=0.0), remaining_rate_sum=None, last_rate=None)) == ()


def test_a_loss_that_leaves_its_trend_thaws_and_the_limit_is_stricter_then():
    made = policy()
    measured(made)
    for evaluation in range(11, 40):
        made.observe_interval(interval(evaluation))
    found = [
        made.observe_interval(
            interval(evaluation, rate=0.49 if evaluation == 40 else 0.48, loss=1.0 if evaluation == 40 else 1.5)
        )
        for evaluation in range(40, 50)
    ]
    decisions = list(itertools.chain(*found))
    assert any(isinstance(decision, Thaw) and "trend" in decision.reason for decision in decisions)
    assert made.frozen == 0  # at a quarter of the limit nothing is cheap enough at half of the rate


def with_an_alarm(made, evaluations=range(1, 70)):
    """Give intervals in which the loss rises three intervals behind a freeze, and comes back; return what was decided.

    Only the first module takes any time, and the rate falls to a half at interval 50.
    """
    found = {}
    for evaluation in evaluations:
        measures = {"worth": tuple(0.01 * share for share in SHARES), "time_shares": (0.2, 0.0, 0.0, 0.0)}
        measures = measures if evaluation <= 10 else {}
        loss, rate = 0.5 if made.frozen and 14 <= evaluation < 40 else 0.25, 1.0 if evaluation < 50 else 0.5
        for decision in made.observe_interval(interval(evaluation, rate=rate, loss=loss, **measures)):
            found.setdefault(type(decision), []).append(evaluation)
    return found


def test_after_an_alarm_what_had_no_limit_has_one():
    """At a loss of 0.25 all freezes together may cost 24 %, and the module brings 13 %."""
    found = with_an_alarm(policy(worth_limit=0.12))
    assert found[Thaw] == [14]
    assert found[Freeze] == [11, 50], "a quarter of that is enough at half of the rate"


def test_after_an_alarm_nothing_freezes_unwatched():
    """Even a quarter of what all freezes may cost is more than the module brings here."""
    found = with_an_alarm(policy(worth_limit=0.4))
    assert found[Freeze] == [11, 19, 50], "the loss is seen for five intervals before"
    assert found[Thaw] == [14, 22], "and leaves its trend behind it once more"


@pytest.mark.parametrize("halt", [14, 15, 19, 21, 22])
def test_a_policy_goes_on_from_its_state_behind_an_alarm(halt):
    whole, first, second = (policy(worth_limit=0.4) for _ in range(3))
    expected = with_an_alarm(whole)
    begun = with_an_alarm(first, range(1, halt + 1))
    second.load_state_dict(first.state_dict())
    for kind, places in with_an_alarm(second, range(halt + 1, 70)).items():
        begun[kind] = [*begun.get(kind, ()), *places]
    assert begun == expected and second.state_dict() == whole.state_dict()


def test_where_all_may_be_lost_an_alarm_is_an_alarm_too():
    found = with_an_alarm(policy(worth_limit=1.0))
    assert found[Thaw][0] == 14 and found[Freeze][:2] == [11, 19]


def course(made, loss, until=100, rates=lambda at: 1 - at):
    """Give a whole run of 200 intervals up to one, with a rate and a loss by share of it; return when what froze."""
    found, made.reasons = {}, []
    for evaluation in range(1, until + 1):
        at = evaluation / 200
        worth = tuple(0.01 * share for share in SHARES) if evaluation <= 10 else None
        to_come = 5 * math.fsum(rates(later / 200) for later in range(evaluation + 1, 201))
        given = interval(evaluation, rate=rates(at), loss=loss(at), worth=worth, to_come=to_come)
        for decision in made.observe_interval(given):
            if isinstance(decision, Freeze):
                found[decision.module] = at
            elif isinstance(decision, Thaw):
                found = {}
                made.reasons.append(decision.reason)
    return found


def begun_at(loss, made):
    """Return a policy that has seen this loss in its first interval, long ago."""
    made.load_state_dict({**made.state_dict(), "first_loss": loss})
    return made


@pytest.mark.parametrize(
    ("loss", "times"),
    [
        (900.0, 0.5),
        (4.0, 0.5),
        (0.5, math.sqrt(2)),
        (0.25, 2.0),
        (0.1, 2.0),
        (0.05, 4.0),
        (0.02, math.sqrt(50)),  # not 10: no more than the root ever
        (0.001, 10.0),
    ],
)
def test_all_freezes_may_cost_more_where_little_of_the_loss_is_left(loss, times):
    found = course(begun_at(2.0, policy(worth_limit=0.06)), loss=lambda at: loss, until=199)
    assert found == course(policy(worth_limit=0.06 * times), loss=lambda at: 1.0, until=199)
    assert len(found) >= 2


def brought(*fronts):
    """Return intervals in which the layer modules but the last brought so much, each in its share."""
    return [(*(0.2 * front, 0.8 * front), 0.1) for front in fronts]


def test_where_the_first_steps_brought_all_there_was_they_tell_the_shares():
    early, nothing = brought(3.0, 9.0, 12.0, 8.0, 3.0), brought(0.4, -0.5, 0.6, -0.4, 0.3)
    assert telling([*early, *nothing], 5, 2) == [*early, *nothing]
    assert telling([*early, *brought(1.0, 0.9, 1.1, 0.8)], 5, 2) == brought(1.0, 0.9, 1.1, 0.8), "they bring a little"
    as_much = brought(2.0, -1.0, 3.0, -2.0, 4.0)
    assert telling([*brought(1.0, 1.1, 0.9, 1.0, 1.2), *as_much], 5, 2) == as_much, "they bring as much as the first"
    weak = brought(0.3, -0.2, 0.4, -0.3, 0.2)
    assert telling([*weak, *nothing], 5, 2) == nothing, "nothing stands out: nor do the first"
    harmful = brought(0.1, -0.5, 0.1, -0.4, -0.3)
    assert telling([*weak, *harmful], 5, 2) == [*weak, *harmful]
    assert telling([(None, 1.0, 0.1), *early], 1, 2) == early


def test_a_loss_that_was_small_from_the_beginning_does_not_say_that_little_is_left():
    """As one in other units, such as that of a regression."""
    twice = course(policy(worth_limit=0.06), loss=lambda at: 0.2, until=199)
    assert course(begun_at(0.02, policy(worth_limit=0.06)), loss=lambda at: 0.002, until=199) == twice
    assert course(begun_at(0.02, policy(worth_limit=0.06)), loss=lambda at: 0.0002, until=199)[1] < twice[1]


@pytest.mark.parametrize("loss", [0.0, -3.0])
def test_a_loss_that_may_fall_below_nothing_does_not_say_what_is_left(loss):
    found = course(policy(), loss=lambda at: loss, until=190)
    assert found == course(policy(), loss=lambda at: 1.0, until=190)


def test_it_is_the_loss_of_late_that_counts_and_not_its_scatter():
    scatter = torch.rand(201, generator=torch.Generator().manual_seed(0))
    even = course(policy(), loss=lambda at: 1.0, until=190)
    scattered = course(policy(), loss=lambda at: 0.5 + float(scatter[round(200 * at)]), until=190)
    falling = course(policy(), loss=lambda at: 4.0 if at < 0.1 else 0.5, until=190)
    low = course(policy(), loss=lambda at: 0.5, until=190)
    assert all(abs(scattered[module] - even[module]) < 0.02 for module in even)
    assert falling[0] > low[0] and falling[1] > low[1]  # at 0.05 and 0.13, while what it was counts
    assert falling[2] == low[2]


def test_a_loss_that_rises_while_the_rate_falls_is_no_rate_that_rose():
    made, found = policy(worth_limit=0.06), []
    for evaluation in range(1, 190):
        worth = (0.0005, 0.0011, 0.0084, 0.005) if evaluation <= 10 else None
        loss = 0.2 + min(1.0, max(0.0, (evaluation - 80) / 3)) + 3 * min(1.0, max(0.0, (evaluation - 100) / 10))
        given = interval(evaluation, rate=1 - evaluation / 200, loss=loss, worth=worth)
        found += made.observe_interval(given if worth is None else replace(given, time_shares=(0.3, 0.05, 0.1, 0.1)))
    thaws = [decision.reason for decision in found if isinstance(decision, Thaw)]
    assert len(thaws) == 1 and "trend" in thaws[0]
    assert made.frozen


def test_a_loss_that_scatters_does_not_move_periods_to_and_fro():
    scatter = torch.rand(201, generator=torch.Generator().manual_seed(0))
    for price in (0.9, 1.0, 1.05, 1.1, 1.2):
        made = policy(duty_cycle=True, price=price)
        measured(made)
        decisions = [
            made.observe_interval(interval(evaluation, loss=0.5 + float(scatter[evaluation])))
            for evaluation in range(11, 190)
        ]
        assert sum(isinstance(it, SetPeriods) for it in itertools.chain(*decisions)) <= 3


@pytest.mark.parametrize("duty_cycle", [False, True])
@pytest.mark.parametrize("halt", [5, 10, 11, 13])
def test_a_policy_goes_on_from_its_state(halt, duty_cycle):
    def give(made, evaluations):
        found = []
        for evaluation in evaluations:
            worth = tuple(0.01 * share for share in SHARES) if evaluation <= 10 else None
            found += made.observe_interval(interval(evaluation, rate=1.0 if evaluation < 12 else 0.4, worth=worth))
        return found

    whole, first, second = (policy(duty_cycle=duty_cycle) for _ in range(3))
    expected = give(whole, range(1, 20))
    begun = give(first, range(1, halt + 1))
    second.load_state_dict(first.state_dict())
    assert second.needs == first.needs
    assert [*begun, *give(second, range(halt + 1, 20))] == expected
    assert second.state_dict() == whole.state_dict()


def test_of_a_model_that_begins_untrained_it_decides_as_forecast():
    found = {}
    for name in ("worth", "forecast"):
        made = find_policy(name)(
            Config.from_dict({"policy": {"name": name}}),
            trainable=[True] * 4,
            rule=find_rule("step"),
            total_steps=1000,
        )
        found[name] = decisions = []
        for evaluation in range(1, 150):
            decisions += made.observe_interval(interval(evaluation, rate=1.0 - evaluation / 200))
            if made.monitored is not None:
                reading = Reading(
                    step=5 * evaluation,
                    evaluation=evaluation,
                    module=made.monitored,
                    value=1e-9,
                    age=evaluation % 8 + 1,
                )
                decisions += made.observe_reading(reading).decisions
    assert found["worth"] == found["forecast"]
    assert any(isinstance(decision, Freeze) for decision in found["worth"])


# What a freeze saves


class Timed:
    """Stands for the worth of steps: half of an iteration is the optimizer's, a tenth the loop's between."""

    def __init__(self, num_modules, each):
        self.backward = SimpleNamespace(shares=lambda *_: ([each] * num_modules, 0.1))

    def optimizer_share(self, _iteration_s):
        return 0.5


def time_shares(model, modules, *, is_alone=True, tied="keep", each=0.05):
    config, ranks = Config.from_dict({"freezing": {"tied": tied}}), SimpleNamespace(is_alone=is_alone)
    training = SimpleNamespace(model=model, ranks=ranks, config=config)
    measures = SimpleNamespace(training=training, _parts={WORTH: Timed(len(modules), each)})
    return Measures.time_shares(measures, 1.0, modules, [0.2] * len(modules))


@pytest.mark.parametrize(
    ("device", "is_alone", "of_first"),
    [("cpu", True, 1904 / 2992), ("meta", True, 7 / 12), ("meta", False, 1904 / 2992)],
)
def test_the_optimizer_goes_by_elements_and_on_one_accelerator_by_tensors(device, is_alone, of_first):
    """On an accelerator the time to queue it is what is timed; among processes reducing goes by elements."""
    model = Words().to(device)
    modules = parse_modules(model)  # the table and a block, three more blocks, the head
    for module in modules[2:]:
        for name in module.parameters:
            model.get_parameter(name).requires_grad_(False)
    model.blocks[1].norm.bias.requires_grad_(False)
    shares = time_shares(model, modules, is_alone=is_alone)
    assert shares[0] == pytest.approx(0.05 + 0.6 * of_first)
    assert sum(shares) == pytest.approx(0.05 * len(modules) + 0.6)


def test_with_the_optimizer_too_a_step_that_was_held_up_takes_no_more_than_an_iteration():
    model = Words()
    modules = parse_modules(model)
    shares = time_shares(model, modules, each=0.9 / len(modules))  # all of an iteration, and the optimizer half of one
    assert sum(shares) == pytest.approx(1.0)


def tied_words():
    """Return a small language model, whose table is its head too."""
    model = pretrained()
    model.head = nn.Linear(WIDTH, 50, bias=False)
    model.head.weight = model.table.weight
    return model


@pytest.mark.parametrize(("tied", "table"), [("keep", 0), ("freeze", 50 * WIDTH)])
def test_a_freeze_saves_no_step_of_a_tied_table_that_trains_on(tied, table):
    model = tied_words()
    modules = parse_modules(model)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    shares = time_shares(model, modules, tied=tied)
    assert modules[0].shared_parameters == ("table.weight",)
    assert shares[0] == pytest.approx(0.05 + 0.6 * (table + block) / whole)
    assert sum(shares) == pytest.approx(0.05 * len(modules) + 0.6 * (whole - 50 * WIDTH + table) / whole)


# In a run


@pytest.mark.parametrize("tied", ["keep", "freeze"])
def test_what_a_tied_table_brings_that_trains_on_is_not_lost_by_a_freeze(tmp_path, tied):
    model = tied_words()
    measure, optimizer = StepWorth(model, 1, STEPS), torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    for tokens, targets in list(batches(task=2, count=STEPS, seed=1))[:4]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()
        measure.before(optimizer)
        optimizer.step()
        measure.after(optimizer)
        scheduler.step()
    table, block = Whole("table.weight"), Whole(*(name for name, _ in model.named_parameters() if "blocks.0." in name))
    of_table, of_block = measure.take([table, block])
    settings = {"plasticity": {"interval_steps": 4}, "modules": {"pattern": r"blocks\.\d|head"}}
    loop = FineTuning(tmp_path, model=tied_words(), freezing={"tied": tied}, **settings).go(4)
    (found,) = [entry.worth for entry in of(tmp_path, events.IntervalMeasured)]
    assert loop.run.modules[0].submodules == ("table", "blocks.0") and abs(of_table) > 1e-4
    assert found[0] == pytest.approx(of_block if tied == "keep" else of_block + of_table, rel=1e-4)


class Later(FineTuning):
    """The table and the first two blocks have a schedule of their own, which begins later."""

    begins_at = 20

    def __init__(self, directory, **settings):
        super().__init__(directory, **settings)
        self.run.close()
        front = [*self.model.table.parameters(), *self.model.blocks[:2].parameters()]
        back = [*self.model.blocks[2:].parameters(), *self.model.head.parameters()]
        self.optimizer = torch.optim.AdamW([{"params": front}, {"params": back}], lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, [lambda step: (step >= self.begins_at) * (1 - step / STEPS), lambda step: 1 - step / STEPS]
        )
        self.run = egeria.attach(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            total_steps=STEPS,
            directory=directory,
            controller="inline",
            config={"plasticity": {"interval_steps": 2}, "policy": {"worth_limit": 1.0}},
        )


def test_a_front_whose_own_rate_begins_at_zero_is_not_judged_before_it_has_trained(tmp_path):
    loop = Later(tmp_path / "0").go(STEPS)
    loop.run.close()
    depths = loop.depths
    assert max(depths[: Later.begins_at]) == 0, "it brought nothing so far, since it did not train"
    assert max(depths) == len(loop.run.modules) - 1, "all at once, once it is known"
    assert replay(tmp_path / "0").agrees


@pytest.mark.parametrize("back", [[1.0, 1.0, 1.0, 1.0], [0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4]])
def test_a_front_whose_own_rate_still_rises_does_not_show_what_it_will_bring(back):
    model = nn.Module()
    model.front, model.back = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [model.front]}, {"params": [model.back]}], lr=0.01)
    measure, taken = StepWorth(model, 1, total_steps=1000), []
    for front, rate in zip([0.01, 0.02, 0.03, 0.03], back, strict=True):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.01 * front, 0.01 * rate
        descend(model, lambda: (model.front + model.back).square().sum(), optimizer, 1, measure)
        taken.append(measure.take([Whole("front"), Whole("back")]))
    rises_alone = back[0] >= back[-1]
    # What one step brought shows at the next: of the second and third nothing is taken where the front rises alone.
    assert [front is None for front, _ in taken] == [True, False, *([rises_alone] * 2)]
    assert all(worth is not None for _, worth in taken[1:])


def test_what_has_a_rate_of_zero_all_along_is_worth_nothing_known():
    model = nn.Module()
    model.front, model.back = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [model.front], "lr": 0.0}, {"params": [model.back]}], lr=0.1)
    measure = StepWorth(model, 1, total_steps=1000)
    descend(model, lambda: (model.front + model.back).square().sum(), optimizer, 3, measure)
    front, back = measure.take([Whole("front"), Whole("back")])
    assert front is None and back > 0
    optimizer.param_groups[0]["lr"] = 0.1
    descend(model, lambda: (model.front + model.back).square().sum(), optimizer, 3, measure)
    assert measure.take([Whole("front")])[0] > 0


def test_a_fine_tuning_freezes_its_table_and_needs_no_reference(tmp_path):
    loop = FineTuning(tmp_path, policy={"worth_limit": 0.1}).go(STEPS)
    loop.run.close()
    assert [module.name for module in loop.run.modules][:2] == ["table", "blocks.0"]
    measured = [entry for entry in of(tmp_path, events.IntervalMeasured) if entry.worth is not None]
    assert {entry.step for entry in measured} == set(range(2, STEPS // 20 + 3, 2))  # up to the decision
    assert measured[-1].num_pretrained == len(loop.run.modules)
    assert 0 < sum(measured[-1].time_shares) <= 1
    assert loop.depths[STEPS // 20] == 0 and max(loop.depths) >= 1
    assert not of(tmp_path, events.PlasticityRead) and not of(tmp_path, events.ReferenceRefreshed)
    assert not of(tmp_path, events.FaultCaught)
    assert not any(part._forward_hooks for part in loop.model.modules())
    assert replay(tmp_path).agrees
    stricter = replay(tmp_path, Config.from_dict({"policy": {"worth_limit": 1e-6}}))
    assert {decision.kind for decision in stricter.replayed} == {"knowledge-guided"}


def test_once_worth_decides_intervals_are_a_hundredth_of_the_run(tmp_path):
    loop = FineTuning(tmp_path, policy={"worth_limit": 0.3}, plasticity={"interval_steps": 1}).go(STEPS)
    loop.run.close()
    steps = [entry.step for entry in of(tmp_path, events.IntervalMeasured)]
    (changed,) = of(tmp_path, events.IntervalChanged)
    assert (changed.before, changed.after) == (1, STEPS // 100)
    assert steps == [*range(1, changed.step), *range(changed.step, STEPS + 1, changed.after)]
    frozen = [event.step for event in of(tmp_path, events.ModuleFrozen)]
    assert frozen[0] == STEPS // 20 + 1, "the first behind the look"
    assert changed.step >= frozen[0] + TREND_INTERVALS, "while it was watched they stayed as short"
    assert replay(tmp_path).agrees


def test_where_nothing_may_freeze_intervals_are_longer_at_once(tmp_path):
    loop = FineTuning(tmp_path, freezing={"enabled": False}, plasticity={"interval_steps": 1}).go(60)
    loop.run.close()
    (changed,) = of(tmp_path, events.IntervalChanged)
    assert (changed.step, changed.after) == (STEPS // 20 + 1, STEPS // 100)


def test_a_guard_takes_what_it_has_seen_together_where_intervals_become_longer():
    guard = LossGuard(before=(9.0, 8.0, 6.0, 4.0, 2.0))
    assert guard.in_longer(2.0).before == (7.0, 3.0)  # the oldest makes no whole one
    assert guard.in_longer(1.2) == guard.in_longer(0.5) == guard
    assert LossGuard(before=(3.0, 1.0), since=(2.0,)).in_longer(2.0).before == (3.0, 1.0), "a freeze is watched"


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_a_freeze_that_lands_first_is_watched_from_when_it_is_in_force(times, tmp_path, monkeypatch):
    settings = {"plasticity": {"interval_steps": 1}, "freezing": {"landing": "anneal"}}
    loop = FineTuning(tmp_path, policy={"worth_limit": 0.3}, **settings)
    tell = loop.run.step
    monkeypatch.setattr(loop.run, "step", lambda loss: tell(times * loss if loop.run.frozen else loss))
    loop.go(STEPS // 2)
    loop.run.close()
    began, frozen = of(tmp_path, events.LandingBegan)[0].step, of(tmp_path, events.ModuleFrozen)[0].step
    assert frozen - began > TREND_INTERVALS, "as long as a freeze is watched"
    thawed = [event.step for event in of(tmp_path, events.Thawed)]
    assert bool(thawed) == (times > 1) and all(frozen < step <= frozen + TREND_INTERVALS for step in thawed[:1])
    assert replay(tmp_path).agrees


def test_what_freezes_in_turn_is_watched_from_the_first_on():
    guard = LossGuard(before=(1.0,) * 5).await_freeze(1).observe(1.0).await_freeze(3)
    assert guard.in_force(0) == guard and guard.is_watching and guard.since is None
    guard = guard.in_force(1).observe(2.0).observe(2.0)
    assert guard.since == (2.0, 2.0) and guard.before == (1.0,) * 6
    assert guard.in_force(2) == guard and guard.in_force(None).since == guard.in_force(4).since == ()


def test_a_run_from_scratch_measures_no_worth(tmp_path):
    torch.manual_seed(3)
    loop = FineTuning(tmp_path, model=Words()).go(40)
    loop.run.close()
    assert all(entry.worth is None for entry in of(tmp_path, events.IntervalMeasured))
    assert loop.run.modules[0].name != "table"


@pytest.mark.parametrize(("halt", "interval_steps"), [(5, 2), (9, 2), (60, 2), (62, 1)])
def test_a_resumed_run_measures_and_freezes_as_one_that_never_stopped(tmp_path, halt, interval_steps):
    # All at once, whatever the times are.
    settings = {"policy": {"worth_limit": 1.0}, "plasticity": {"interval_steps": interval_steps}}
    whole = FineTuning(tmp_path / "whole", **settings).go(100)
    first = FineTuning(tmp_path / "first", **settings).go(halt)
    saved = first.save()
    first.run.close()
    second = FineTuning(tmp_path / "second", **settings).load(saved).go(100 - halt)
    assert [*first.depths, *second.depths] == whole.depths and whole.depths[-1] == len(whole.run.modules) - 1

    def worths(*folders):
        return [
            (entry.step, entry.worth)
            for folder in folders
            for entry in of(tmp_path / folder, events.IntervalMeasured)
            if entry.worth is not None
        ]

    for loop in (whole, second):
        loop.run.close()
    # What was journaled before the halt is in the first journal, the rest in the second.
    assert dict(worths("first", "second")) == dict(worths("whole"))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))


def test_nothing_but_the_frozen_front_is_changed_by_measuring(tmp_path):
    """Law 1: as long as nothing is frozen, the run is the plain one to the bit."""
    watched = FineTuning(tmp_path, freezing={"enabled": False}).go(60)
    watched.run.close()
    torch.manual_seed(0)
    plain = pretrained()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / STEPS))
    for tokens, targets in list(batches(task=2, count=STEPS, seed=1))[:60]:
        loss = nn.functional.cross_entropy(plain(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.model.parameters(), strict=True))


def test_a_fault_in_measuring_leaves_the_training_as_it_is(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(StepWorth, "after", fail)
    with pytest.warns(UserWarning):
        loop = FineTuning(tmp_path).go(60)
    loop.run.close()
    assert any("broken" in entry.error for entry in of(tmp_path, events.FaultCaught))
    assert all(torch.isfinite(parameter).all() for parameter in loop.model.parameters())


def test_the_report_says_how_rough_it_is_where_little_ran_unfrozen(tmp_path):
    FineTuning(tmp_path, policy={"worth_limit": 1.0}).go(STEPS).run.close()  # all at once, once it is measured
    assert "The time saved is a rough estimate: only 1" in report(tmp_path).path.read_text(encoding="utf8")


def test_the_report_says_why_nothing_froze(tmp_path):
    FineTuning(tmp_path, policy={"worth_limit": 1e-6}).go(STEPS).run.close()
    assert "worth little enough for its time" in report(tmp_path).path.read_text(encoding="utf8")
