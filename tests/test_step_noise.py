"""The part of the loss that is the noise of steps, measured from a step itself."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import egeria
from egeria.events import IntervalMeasured
from egeria.journal import Recorder
from egeria.session.measuring.optimizer_steps import MOST_ELEMENTS, OptimizerHooks, StepNoise
from loops import FAST


def one_step(make_optimizer, parameter, gradient):
    """Return the measure of one step on a model with one parameter."""
    model = nn.Module()
    model.weight = nn.Parameter(parameter.clone())
    optimizer = make_optimizer([model.weight])
    noise = StepNoise(model)
    model.weight.grad = gradient.clone()
    noise.before(optimizer)
    optimizer.step()
    noise.after(optimizer)
    return noise, optimizer, model


class Whole:
    """A layer module that has every parameter."""

    parameters = ("weight",)


GRADIENT = torch.tensor([[3.0, 4.0]])


@pytest.mark.parametrize(
    ("make_optimizer", "expected"),
    [
        (lambda own: torch.optim.SGD(own, lr=0.1), 0.1 * 25 / 4),
        (lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9), 0.1 * 25 / 4 / 0.1),  # its first step has no past
        (
            lambda own: torch.optim.AdamW(own, lr=0.1, weight_decay=0.0),
            0.1 * (3 + 4) / 4 / 0.1,
        ),  # signs of the gradient
        (lambda own: torch.optim.RMSprop(own, lr=0.1, alpha=0.0, eps=0.0), 0.1 * (3 + 4) / 4),
    ],
)
def test_it_is_the_rate_times_what_the_step_did_along_its_own_gradient(make_optimizer, expected):
    noise, _, _ = one_step(make_optimizer, torch.ones(1, 2), GRADIENT)
    assert noise.take([Whole]) == [pytest.approx(expected, rel=1e-4)]


def test_it_is_the_loss_above_the_floor_of_a_bowl_that_sgd_trembles_in():
    """In a bowl h w² / 2 with gradients of variance c, SGD settles at a loss of rate c / 4 above the floor."""
    torch.manual_seed(0)
    rate, height, scatter, width = 0.02, 1.0, 3.0, 2000
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(width))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    noise, measured, losses = StepNoise(model), [], []
    for step in range(400):
        model.weight.grad = height * model.weight.detach() + scatter * torch.randn(width)
        noise.before(optimizer)
        optimizer.step()
        noise.after(optimizer)
        (value,) = noise.take([Whole])
        if step >= 200:
            measured.append(value)
            losses.append(height * float(model.weight.detach().square().sum()) / 2)
    assert sum(measured) / len(measured) == pytest.approx(sum(losses) / len(losses), rel=0.1)


def test_only_the_first_step_of_an_interval_is_measured():
    noise, optimizer, model = one_step(lambda own: torch.optim.SGD(own, lr=0.1), torch.ones(1, 2), GRADIENT)
    model.weight.grad = 10 * GRADIENT
    noise.before(optimizer)
    optimizer.step()
    noise.after(optimizer)
    assert noise.take([Whole]) == [pytest.approx(0.1 * 25 / 4)]
    noise.before(optimizer)
    optimizer.step()
    noise.after(optimizer)
    assert noise.take([Whole]) == [pytest.approx(100 * 0.1 * 25 / 4)]


def test_of_a_large_parameter_rows_stand_for_the_whole():
    torch.manual_seed(0)
    gradient = torch.randn(4 * MOST_ELEMENTS // 64 + 1, 64)
    noise, _, _ = one_step(lambda own: torch.optim.SGD(own, lr=0.1), torch.zeros_like(gradient), gradient)
    assert noise.take([Whole]) == [pytest.approx(0.1 * float(gradient.square().sum()) / 4, rel=0.01)]


def test_an_interval_that_was_measured_before_a_resume_is_not_measured_again():
    noise, optimizer, model = one_step(lambda own: torch.optim.SGD(own, lr=0.1), torch.ones(1, 2), GRADIENT)
    resumed = StepNoise(model)
    resumed.load_state_dict(noise.state_dict())
    model.weight.grad = 10 * GRADIENT
    resumed.before(optimizer)
    optimizer.step()
    resumed.after(optimizer)
    assert resumed.take([Whole]) == noise.take([Whole])


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_scaled_for_half_precision_measure_the_same(fused):
    found = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=1024.0)):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        noise = StepNoise(model)
        optimizer.register_step_pre_hook(lambda own, *_, noise=noise: noise.before(own))
        optimizer.register_step_post_hook(lambda own, *_, noise=noise: noise.after(own))
        scaler.scale(model(torch.ones(8, 4)).square().mean()).backward()
        scaler.step(optimizer)
        found += noise.take([Whole])
    assert found[0] > 0 and found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_no_measure(bad):
    noise, _, _ = one_step(lambda own: torch.optim.SGD(own, lr=0.1), torch.ones(1, 2), GRADIENT * bad)
    assert noise.take([Whole]) == [None]


def test_without_a_step_there_is_no_measure():
    assert StepNoise(nn.Linear(2, 2)).take([Whole]) == [None]


def hooked(recorder, **arguments):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, OptimizerHooks([optimizer], recorder, lambda *_: None, what="testing", **arguments)


@pytest.mark.parametrize("reads_gradients", [True, False])
def test_gradients_are_read_behind_the_closure_that_computes_them(reads_gradients, tmp_path):
    seen = []
    model, optimizer, _ = hooked(
        Recorder(tmp_path),
        before=lambda own: seen.append(own.param_groups[0]["params"][0].grad is not None),
        reads_gradients=reads_gradients,
    )

    def closure():
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    optimizer.zero_grad()
    second = optimizer.step(closure=closure)
    assert seen == [reads_gradients] * 2
    assert second < first, "what the step returns is what the closure did"


def test_a_hook_that_gives_up_leaves_those_behind_it_in_place(tmp_path):
    def fail(_optimizer):
        raise RuntimeError("injected")

    model, optimizer, hooks = hooked(Recorder(tmp_path), before=fail)
    others = []
    optimizer.register_step_pre_hook(lambda *_: others.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert hooks.is_closed and len(others) == 5


def test_a_run_journals_it_for_what_is_not_frozen(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**FAST, "modules": {"pattern": r"\d"}, "policy": {"limit": 1e6, "patience": 1}}
    with egeria.attach(
        model, optimizer, policy="forecast", config=config, total_steps=40, controller="inline", directory=tmp_path
    ) as run:
        for _ in range(40):
            run.model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(1.0)
    intervals = egeria.read_journal(tmp_path).of(IntervalMeasured)
    assert all(event.noise is not None for event in intervals)
    assert intervals[-1].frozen == 2 and intervals[-1].noise[:2] == [None, None] and intervals[-1].noise[2] > 0


def test_what_is_measured_only_at_times_leaves_the_optimizer_alone_in_between():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = OptimizerHooks([optimizer], Recorder(None), lambda *_: None, what="", before=lambda _: called.append(1))
    called: list[int] = []
    for rests in (False, True, True, False):
        (hooks.rest if rests else hooks.wake)()
        assert bool(optimizer._optimizer_step_pre_hooks) != rests and not hooks.is_closed
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(called) == 2
    hooks.rest()
    hooks.close()
    hooks.wake()
    assert hooks.is_closed and not optimizer._optimizer_step_pre_hooks, "what was closed stays closed"
