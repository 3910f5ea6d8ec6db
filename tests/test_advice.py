"""`egeria.advise`: it changes nothing of the training, and says what a plan saves."""

import gc
import random
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria import advise
from egeria.errors import ConfigError
from loops import Loop, differences, outside
from menagerie import SPECIMENS

FORWARD_S, BACKWARD_S, NUM_BLOCKS = 0.02, 0.01, 4
PLAIN_S = FORWARD_S + NUM_BLOCKS * BACKWARD_S
CLOCK = SimpleNamespace(now_s=0.0, perf_counter=lambda: spend(1e-9), process_time=lambda: spend(1e-9))
"""Hardly moves except where the toys below spend time, so that what is measured is known."""


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    monkeypatch.setattr("egeria.session.clock.time", CLOCK)


def spend(seconds):
    CLOCK.now_s += seconds
    return CLOCK.now_s


class Slow(torch.autograd.Function):
    """Returns its input; its backward pass takes ten milliseconds of the clock."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        spend(BACKWARD_S)
        return gradient


class Block(nn.Linear):
    """Has a slow backward pass, where there is one."""

    def forward(self, x):
        return Slow.apply(super().forward(x))


def blocks(count=NUM_BLOCKS):
    return nn.Sequential(*(Block(8, 8) for _ in range(count)), nn.Linear(8, 2))


def samples(kind=TensorDataset):
    return kind(torch.randn(40, 8), torch.arange(40) % 2)


def loss(model, batch):
    spend(FORWARD_S)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def step(model, optimizer, run):
    loss(model, next(iter(DataLoader(samples(), batch_size=4)))).backward()
    optimizer.step()
    run.step(1.0)


def ask(model=None, loader=None, optimizer=None, **more):
    model = blocks() if model is None else model
    loader = DataLoader(samples(), batch_size=4) if loader is None else loader
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return advise(model, optimizer, loader, **{"loss": loss, "rounds": 2, **more})


def test_a_plan_saves_the_backward_time_of_what_it_freezes():
    for plan, skipped in [("0.5:2", 1), ("0:9", 4), ("0.25:1 0.5:3 0.75:0", 1), ("", 0)]:
        assert ask().saving(plan) == pytest.approx(skipped * BACKWARD_S / PLAIN_S)


def test_depths_between_those_that_were_measured_are_interpolated():
    advice = ask(blocks(12), config={"modules": {"pattern": r"\d+"}})
    assert [cost.depth for cost in advice.costs] == [0, 2, 3, 5, 7, 9, 10, 12]
    saved_s = [advice.saving(f"0:{depth}") * advice.costs[0].iteration_s for depth in range(13)]
    assert saved_s == pytest.approx([depth * BACKWARD_S for depth in range(13)])
    with pytest.raises(ConfigError, match=r"shares.*no steps or epochs"):
        advice.saving("step 5:1")
    with pytest.raises(ConfigError, match="epochs"):
        advice.saving("epoch 1:1")


def test_it_says_where_freezing_is_worth_nothing():
    late, lone = ask(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Block(8, 2))), ask(nn.Sequential(nn.Linear(8, 2)))
    assert ask().is_worth_it and ask().verdict.startswith("Worth a try: the plan '0.5:2' saves 16.7")
    assert "(16.7 % to 16.7 % by round)" in ask().verdict.replace("\N{NO-BREAK SPACE}", " ")
    assert "50.0 %" in repr(ask()).replace("\N{NO-BREAK SPACE}", " "), "of the steps are at depth 2"
    assert not late.is_worth_it and late.verdict.startswith("Not worth it")
    assert "nothing can be frozen" in lone.verdict and repr(lone).count("at least two layers") == 1


class Dear(TensorDataset):
    """A batch of four takes as long to read as three iterations."""

    def __getitem__(self, place):
        spend(3 * PLAIN_S / 4)
        return super().__getitem__(place)


@pytest.mark.parametrize(("num_workers", "share"), [(0, 0.25), (1, 1.0)])
def test_reading_counts_where_the_training_waits_for_it(num_workers, share):
    advice = ask(loader=DataLoader(samples(Dear), batch_size=4, num_workers=num_workers))
    assert advice.saving("0:4") == pytest.approx(share * ask().saving("0:4"))
    assert (advice.reading_s > 0) is (num_workers == 0)


@pytest.mark.parametrize("is_trained", [False, True])
def test_it_shows_the_layer_modules_and_the_default_plan_of_attach(is_trained):
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), Block(8, 8)) for _ in range(6)), nn.Linear(8, 2))
    for norm in (part for part in model.modules() if is_trained and isinstance(part, nn.LayerNorm)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    advice, optimizer = ask(model), torch.optim.SGD(model.parameters())
    planned = egeria.plan(model, optimizer, total_steps=10_000)
    with egeria.attach(model, optimizer, total_steps=10_000, controller="inline") as run:
        step(model, optimizer, run)
        assert advice.modules == tuple(module.name for module in run.modules) and advice.plan == str(run.plan)
        skipped = sum(name.endswith("1.weight") for name in run.modules[0].parameters)  # as many are in the first
    assert advice.saving("0:1") * advice.costs[0].iteration_s == pytest.approx(skipped * BACKWARD_S)
    assert (str(planned), planned.reason) == (str(run.plan), run.plan.reason)
    assert bool(advice.plan) is is_trained is (advice.to_dict()["plan_saving"] > 0)
    assert ("the default plan" if is_trained else "By default nothing is frozen") in repr(advice)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
def test_an_accelerator_is_measured(monkeypatch):
    monkeypatch.undo()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(8))).cuda()
    batches = [torch.randn(4096, 2048, device="cuda") for _ in range(4)]
    first, *_, last = ask(model, batches, loss=lambda model, batch: model(batch).square().mean()).costs
    assert 0 < last.iteration_s < 0.8 * first.iteration_s and 0 < last.peak_bytes < first.peak_bytes


class Decaying(torch.optim.SGD):
    """Has an attribute that torch leaves out of copies, and a scheduler that replaced its `step`."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.02, momentum=0.9)
        self.factor, self.scheduler = 0.99, torch.optim.lr_scheduler.StepLR(self, 1)

    def step(self, closure=None):
        self.param_groups[0]["lr"] *= self.factor
        return super().step(closure)


@pytest.mark.parametrize("num_good", [5, 999], ids=["fails", "succeeds"])
@pytest.mark.parametrize("name", ["residual", "with_dropout", "Tied", "Remembering"])
def test_a_training_goes_on_to_the_bit_as_if_it_had_not_asked(name, num_good):
    specimen, calls = SPECIMENS[name], iter(range(1000))
    plain, asking = (Loop(specimen, make_optimizer=Decaying) for _ in range(2))
    plain.step(3), asking.step(3)
    gradients = [torch.ones_like(parameter) for parameter in asking.model.parameters()]
    for parameter, gradient in zip(asking.model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before, numbers = outside(asking.model), (torch.get_rng_state().tolist(), random.getstate())
    batches = [{"arguments": specimen.example(torch.Generator().manual_seed(9))} for _ in range(3)]

    def own_loss(model, batch):
        spend(1 if next(calls) < num_good else 1 / 0)
        args, kwargs = batch.pop("arguments")
        return specimen.loss(model(*args, **kwargs)) * (1 + random.random())

    failing = pytest.raises(ConfigError, match=r"as in the loop.*ZeroDivisionError.*Pass loss=")
    with failing if num_good == 5 else nullcontext():
        ask(asking.model, batches, asking.optimizer, loss=own_loss)
    assert outside(asking.model) == before and (torch.get_rng_state().tolist(), random.getstate()) == numbers
    assert all(one.grad is other for one, other in zip(asking.model.parameters(), gradients, strict=True))
    assert all(bool((gradient == 1).all()) for gradient in gradients) and all("arguments" in one for one in batches)
    asking.optimizer.zero_grad()
    plain.step(3), asking.step(3)
    assert differences(plain.everything(), asking.everything()) == []


def test_the_copy_is_in_training_mode_but_for_parts_in_eval_mode_and_is_gone_afterwards(caplog):
    model, seen = blocks().insert(1, nn.BatchNorm1d(8).eval()), []
    gc.disable()
    with caplog.at_level("INFO", logger="egeria"):
        ask(model, loss=lambda twin, batch: seen.append((twin[1].training, weakref.ref(twin))) or loss(twin, batch))
    is_gone = not any(copy() for _, copy in seen)
    gc.enable()
    assert is_gone and {mode for mode, _ in seen} == {False} and not caplog.records and model.training


@pytest.mark.parametrize("uses_original", [False, True])
def test_a_loss_that_trains_the_original_or_a_criterion_is_refused(uses_original):
    model, criterion = nn.Sequential(Block(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    wrong = (lambda _, b: loss(model, b)) if uses_original else (lambda twin, b: loss(lambda x: criterion(twin(x)), b))
    with pytest.raises(ConfigError, match=r"nothing else.*found gradients.*Use the model that loss is given"):
        ask(model, None, optimizer, loss=wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), *criterion.parameters()))


class Sharing(nn.Sequential):
    def __deepcopy__(self, memo):
        return self


def test_bad_input_is_refused_with_the_next_step():
    for wrong, said in [
        ({"loader": iter([1, 2])}, "use up.*Pass a list of batches"),
        ({"loader": []}, "found.*none.*Pass a list"),
        ({"rounds": 0}, "rounds must be.*found 0"),
        ({"loss": None}, "a list and no dictionary.*Pass loss="),
        ({"loss": Mock(side_effect=torch.OutOfMemoryError)}, "memory for a second model.*smaller batches"),
        ({"model": nn.parallel.DataParallel(blocks())}, "the wrapper DataParallel.*before"),
        ({"model": torch.compile(blocks(), backend="eager")}, "a compiled one.*before"),
        ({"model": blocks().to("meta")}, "parameters on meta"),
        ({"model": Sharing(*blocks())}, "shares parameters"),
        ({"optimizer": [3]}, "int as an optimizer"),
    ]:
        with pytest.raises(ConfigError, match=said):
            ask(**wrong)
