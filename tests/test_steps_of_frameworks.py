"""What frameworks wrap, step with a closure or accumulate is followed as in a loop of one's own."""

import io
import warnings
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import egeria
from egeria import ConfigError, read_journal
from egeria.events import Declined, IntervalMeasured, RunClosed
from loops import FAST

WATCH = {**FAST, "reference": {"precision": "fp32"}, "freezing": {"tolerance_readings": 10**6}}
FREEZE = {**FAST, "policy": {"plan": "0:9 0.25:0 0.5:1"}, "modules": {"pattern": "[024]"}}
STEPS, WIDTH = 24, 4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def batches(count):
    torch.manual_seed(1)
    return [torch.randn(8, WIDTH) for _ in range(count)]


def loss_of(model, batch):
    return model(batch).square().mean()


def attach(model, optimizer, directory, **arguments):
    given = {"config": WATCH, "controller": "inline", "total_steps": STEPS, "directory": directory, **arguments}
    return egeria.attach(model, optimizer, **given)


def plain_step(model, optimizer, batch, backward=torch.Tensor.backward):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    backward(loss)
    optimizer.step()
    return loss


def train(directory, wrap=lambda *parts: parts, step=plain_step, behind=lambda model: None):
    """Train with what a framework makes of model, optimizer and scheduler, and freeze; return weights and journal."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    called, wrapped, scheduler = wrap(model, optimizer, schedulers.CosineAnnealingLR(optimizer, STEPS))
    with attach(called, wrapped, directory, scheduler=scheduler, config=FREEZE) as run:
        for batch in batches(STEPS):
            loss = step(called, wrapped, batch)
            scheduler.step()
            run.step(loss)
            behind(model)
    return [entry.detach().clone() for entry in model.parameters()], read_journal(directory)


def closure_of(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return closure


def by_position(model, optimizer, batch):
    return optimizer.step(closure_of(model, optimizer, batch))


def by_name(model, optimizer, batch):
    return optimizer.step(closure=closure_of(model, optimizer, batch))


# --- wrapped objects -----------------------------------------------------------------------------


class AcceleratedOptimizer:
    """As Accelerate's: the user's optimizer within, and no hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        return self.optimizer.step(closure)


def same_course(first, second):
    """Return whether two trainings gave the same weights, losses and rates, and froze their front."""
    measures = [
        [(event.loss, event.learning_rate, event.frozen) for event in journal.of(IntervalMeasured)]
        for _, journal in (first, second)
    ]
    return measures[0] == measures[1] and measures[0][-1][-1] == 1 and all(map(torch.equal, first[0], second[0]))


def test_what_accelerate_prepares_is_followed(tmp_path):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    assert same_course(train(tmp_path / "plain"), train(tmp_path / "wrapped", accelerator.prepare))


@pytest.mark.filterwarnings("ignore")
def test_what_fabric_sets_up_is_followed(tmp_path):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    step = partial(plain_step, backward=fabric.backward)
    wrapped = train(tmp_path / "wrapped", lambda model, *parts: (*fabric.setup(model, parts[0]), parts[1]), step)
    assert same_course(train(tmp_path / "plain"), wrapped)


def test_an_average_of_the_weights_goes_on_while_layers_are_frozen(tmp_path):
    averages, by_hand = [], []

    def follow(model):
        if not averages:
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
            by_hand[:] = [entry.detach().clone() for entry in model.parameters()]
        averages[0].update_parameters(model)
        for mean, entry in zip(by_hand, model.parameters(), strict=True):
            mean.lerp_(entry.detach(), 0.5)

    assert same_course(train(tmp_path / "plain"), train(tmp_path / "averaged", behind=follow))
    for mean, entry in zip(by_hand, averages[0].module.parameters(), strict=True):
        torch.testing.assert_close(entry, mean)


class _FabricModule(nn.Module):
    """Holds a model twice, as the wrapper of Lightning Fabric does, and casts what it gives."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = self._original_module = model

    def forward(self, x):
        return self._forward_module(x).double()


def test_the_wrapper_of_fabric_is_what_the_handle_calls(tmp_path):
    model = _FabricModule(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, tmp_path, config=FREEZE) as run:
        for batch in batches(STEPS):
            run.step(plain_step(model, optimizer, batch))
        assert model(batches(1)[0]).dtype == torch.float64
        assert run.frozen == 1 and run.modules[0].tap == "0"
        assert not model._original_module[0].weight.requires_grad


# --- schedules -----------------------------------------------------------------------------------


def test_what_is_no_scheduler_or_no_loader_is_refused(tmp_path):
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    for name, given, found in [
        ("scheduler", "cosine", "'cosine'"),
        ("scheduler", 0.1, "0.1"),
        ("scheduler", lambda step: 0.1, "function"),
        ("scheduler", optimizer, "SGD"),
        ("scheduler", schedulers.CosineAnnealingLR, "the class CosineAnnealingLR"),
        ("scheduler", [schedulers.StepLR(optimizer, 1), optimizer], "SGD"),
        ("loader", schedulers.StepLR(optimizer, 1), "StepLR"),
        ("loader", AcceleratedOptimizer(optimizer), "AcceleratedOptimizer"),
        ("loader", "train", "'train'"),
        ("loader", model, "Sequential"),
    ]:
        way_out = "leave it out" if name == "scheduler" else r" scheduler=\.\.\."
        with pytest.raises(ConfigError, match=rf"{name} is .* found {found}\..*{way_out}"):
            attach(model, optimizer, tmp_path, **{name: given})


# --- closures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [by_position, by_name])
def test_steps_with_a_closure_are_steps(step, tmp_path):
    plain, closed = train(tmp_path / "plain"), train(tmp_path / "closed", step=step)
    assert same_course(plain, closed)


# --- accumulation --------------------------------------------------------------------------------

MICRO = 4


def count(directory):
    return read_journal(directory).first(RunClosed).step


def accumulate(directory, num_batches=STEPS, *, watch="micro", resume_at=None):
    """Step once for `MICRO` batches; call `run.step` for each of them, or once behind the step."""
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    run = attach(model, optimizer, directory, total_steps=100)
    losses = []
    for index, batch in enumerate(batches(num_batches)):
        loss = loss_of(model, batch)
        (loss / MICRO).backward()
        losses.append(loss)
        if (index + 1) % MICRO == 0:
            optimizer.step()
            optimizer.zero_grad()
            if watch == "step":
                run.step(torch.stack(losses[-MICRO:]).detach().double().mean())
        if watch == "micro":
            run.step(loss)
        if index + 1 == resume_at:
            state = io.BytesIO()
            torch.save(run.state_dict(), state)
            run.close()
            run = attach(model, optimizer, directory / "resumed", total_steps=100)
            run.load_state_dict(torch.load(io.BytesIO(state.getvalue()), weights_only=True))
    run.close()
    return run.directory


def losses_of(directory):
    return [event.loss for event in read_journal(directory).of(IntervalMeasured)]


def test_micro_batches_count_once_for_each_optimizer_step(tmp_path):
    accumulate(tmp_path / "step", watch="step")
    accumulate(tmp_path / "micro")
    assert count(tmp_path / "micro") == count(tmp_path / "step") == STEPS // MICRO
    assert losses_of(tmp_path / "micro") == pytest.approx(losses_of(tmp_path / "step"), rel=1e-6)


@pytest.mark.parametrize("resume_at", [8, 9])
def test_a_run_resumed_among_micro_batches_goes_on_as_if_never_stopped(resume_at, tmp_path):
    accumulate(tmp_path / "whole")
    directory = accumulate(tmp_path / "parts", resume_at=resume_at)
    assert count(directory) == count(tmp_path / "whole")
    assert losses_of(directory) == losses_of(tmp_path / "whole")[-len(losses_of(directory)) :]


def test_steps_of_an_optimizer_that_attach_was_not_given_are_missed_once(tmp_path):
    model = network()
    with (
        pytest.warns(egeria.EgeriaWarning, match="made a step .* Give attach the optimizer") as found,
        attach(model, SGD(model.parameters(), lr=0.1), tmp_path) as run,
    ):
        other = SGD(model.parameters(), lr=0.1)
        for batch in batches(120):
            run.step(plain_step(model, other, batch))
    assert len(found) == 1 and count(tmp_path) == 0


class WithoutHooks:
    """An optimizer of the user's own that takes no hooks."""

    def __init__(self, inner):
        self._inner, self.param_groups, self.zero_grad = inner, inner.param_groups, inner.zero_grad

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(0.1 * parameter.grad)


def test_an_optimizer_without_hooks_is_counted_by_calls(tmp_path):
    model = network()
    optimizer = WithoutHooks(SGD(model.parameters(), lr=0.1))
    with attach(model, optimizer, tmp_path) as run:
        for batch in batches(STEPS):
            model.zero_grad(set_to_none=False)
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.step(loss)
    assert count(tmp_path) == STEPS


def test_steps_that_a_scaler_skips_do_not_count(tmp_path):
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    skipped = {0, 1, 2, 9, 10}
    with attach(model, optimizer, tmp_path) as run:
        for index, batch in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            loss = loss_of(model, batch) * (torch.inf if index in skipped else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            run.step(loss.detach().nan_to_num(posinf=1.0))
    assert count(tmp_path) == STEPS - len(skipped)


# --- the length of the run -----------------------------------------------------------------------


def test_more_steps_than_the_run_was_to_have_are_told_of_once(tmp_path):
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(egeria.EgeriaWarning, match=f"total_steps={STEPS}.*steps of the whole run") as found,
        attach(model, optimizer, tmp_path) as run,
    ):
        for batch in batches(2 * STEPS):
            run.step(plain_step(model, optimizer, batch))
    assert len(found) == 1
    (declined,) = read_journal(tmp_path).of(Declined)
    assert STEPS < declined.step <= STEPS + 2


# --- loops that never call run.step --------------------------------------------------------------


def train_unheard(directory, num_steps, act=lambda run: None):
    """Step an optimizer, never call `run.step`; return the warnings from attach to close."""
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, suppress(KeyError):
        warnings.simplefilter("always", egeria.EgeriaWarning)
        with attach(model, optimizer, directory) as run:
            for batch in batches(num_steps):
                plain_step(model, optimizer, batch)
            act(run)
        run.close()
    return [str(entry.message) for entry in caught]


def test_a_loop_that_never_calls_run_step_is_told_at_the_end(tmp_path):
    [told] = train_unheard(tmp_path, 3)
    assert "run.step was called 0 times, but the optimizer made 3 steps" in told
    assert [event.what for event in read_journal(tmp_path).of(Declined)] == ["watching this training"]
