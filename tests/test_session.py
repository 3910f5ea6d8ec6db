"""What a user of `attach` and `Run` would notice."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import statistics
import time
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import egeria
from egeria import ConfigError, EgeriaWarning, StateError, attach, read_journal
from egeria.events import (
    Declined,
    FaultCaught,
    IntervalChanged,
    IntervalMeasured,
    ModuleFrozen,
    ModulesOrdered,
    RunStarted,
    Thawed,
)
from egeria.layers.freezing import Freezer
from egeria.policy import find_policy
from egeria.session import evaluation, rehearsing
from egeria.testing import ScriptedController
from loops import FAST, Loop, differences, outside
from menagerie import SPECIMENS

PARTS = SPECIMENS["PartsByName"]


def model_and_optimizer(name="PartsByName"):
    torch.manual_seed(0)
    model = SPECIMENS[name].build()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def frozen_loop(tmp_path, name="PartsByName", **attach):
    """A loop that has frozen all it may."""
    loop = Loop(SPECIMENS[name], {"controller": ScriptedController(), "config": FAST, "directory": tmp_path, **attach})
    loop.step(40)
    assert loop.run.frozen > 0
    return loop


# --- bad input ---------------------------------------------------------------------------------


def test_a_model_that_is_no_module_is_refused():
    _, optimizer = model_and_optimizer()
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module.*found function"):
        egeria.attach(lambda x: x, optimizer)


def test_an_optimizer_that_is_none_is_refused():
    model, _ = model_and_optimizer()
    with pytest.raises(ConfigError, match=r"takes a torch optimizer.*found float"):
        egeria.attach(model, 0.1)


def test_an_optimizer_of_another_model_is_refused_and_leaves_no_trace():
    model, _ = model_and_optimizer()
    before = outside(model)
    with pytest.raises(ConfigError, match="holds none of them"):
        egeria.attach(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert outside(model) == before


def test_a_length_that_is_no_count_is_refused():
    for total_steps in [0, -5, 2.5, "100", True]:
        with pytest.raises(ConfigError, match="whole number above 0"):
            egeria.attach(*model_and_optimizer(), total_steps=total_steps)


def test_a_wrong_configuration_is_refused():
    for config, message in [
        ({"freezing": {"windw": 3}}, "windw"),
        ({"freezin": {}}, "freezin"),
        ({"unfreezing": {"rule": "cosin"}}, "cosin"),
        (17, "dictionary or the path of a TOML file, found int"),
    ]:
        with pytest.raises(ConfigError, match=message):
            egeria.attach(*model_and_optimizer(), config=config)


def test_a_malformed_toml_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("[plasticity\nwindow = 3")
    with pytest.raises(ConfigError, match=r"settings\.toml.*must be TOML"):
        egeria.attach(*model_and_optimizer(), config=path)


def test_a_model_of_one_layer_trains_on_with_a_warning(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(EgeriaWarning, match="two layers"):
        run = egeria.attach(model, optimizer, directory=tmp_path, config=FAST)
    assert run.modules == ()
    for _ in range(6):
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        run.step(loss)
    run.close()
    journal = read_journal(tmp_path)
    assert [event.what for event in journal.of(Declined)] == ["freezing"]
    assert len(journal.of(IntervalMeasured)) == 3


def test_activations_that_are_no_tensors_stop_the_judging_after_three_tries(tmp_path):
    loop = Loop(SPECIMENS["Wrapped"], {"config": FAST, "directory": tmp_path})
    loop.step(40)
    journal = read_journal(tmp_path)
    assert [event.what for event in journal.of(Declined)] == ["judging plasticity"]
    assert len([event for event in journal if event.kind == "reading_dropped"]) == 3


def test_a_directory_that_cannot_be_made_keeps_the_journal_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    model, optimizer = model_and_optimizer()
    with pytest.warns(EgeriaWarning, match="cannot be written"):
        run = egeria.attach(model, optimizer, config=FAST, directory=tmp_path / "file" / "run")
    (x,), _ = PARTS.example(torch.Generator())
    for _ in range(12):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        run.step(loss)
    assert run.stage == "knowledge-guided"
    run.close()


def test_a_loss_that_is_nan_for_long_freezes_nothing_and_warns_once(tmp_path):
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController())
    (x,), _ = PARTS.example(torch.Generator())

    def steps(count, loss):
        for _ in range(count):
            model(x)
            optimizer.step()
            run.step(loss)

    steps(8, 1.0)
    assert run.stage == "knowledge-guided"
    with pytest.warns(EgeriaWarning, match="not finite for 2 steps;") as caught:
        steps(40, float("nan"))
    assert len(caught) == 1
    assert run.frozen == 0
    steps(20, torch.tensor(1.0))
    assert run.frozen > 0
    intervals = read_journal(tmp_path).of(IntervalMeasured)
    assert [interval.loss for interval in intervals[4:24]] == [None] * 20
    assert {interval.num_bad_losses for interval in intervals[4:24]} == {2}


@pytest.mark.parametrize("loss", [torch.ones(3), "0.5", None])
def test_a_loss_that_is_no_number_is_refused_and_counts_nothing(loss, tmp_path):
    model, optimizer = model_and_optimizer()
    with egeria.attach(model, optimizer, config=FAST, directory=tmp_path) as run:
        optimizer.step()
        with pytest.raises(ConfigError, match="number or a 0-d tensor"):
            run.step(loss)
        run.step(torch.ones(1, requires_grad=True))
        optimizer.step()
        run.step(2)
    (interval,) = read_journal(tmp_path).of(IntervalMeasured)
    assert interval.step == 2 and interval.loss == 1.5


def test_a_single_loss_that_is_nan_is_one_step(tmp_path):
    config = {**FAST, "plasticity": {**FAST["plasticity"], "interval_steps": 1}}
    (x,), _ = PARTS.example(torch.Generator())
    model, optimizer = model_and_optimizer()
    run = egeria.attach(model, optimizer, config=config, controller="inline", directory=tmp_path)
    model(x)
    optimizer.step()
    with pytest.warns(EgeriaWarning, match="not finite for 1 step;"):
        run.step(float("nan"))
    run.close()


def test_the_loop_goes_on_calling_its_own_model(tmp_path):
    loops = [Loop(PARTS), Loop(PARTS, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})]
    run = loops[1].run
    for _ in range(60):
        for loop in loops:
            loop.step()
        if run.frozen:
            break
    assert run.frozen and loops[0].losses == loops[1].losses
    run.close()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model, x: model.head(model.parts.a(x)), r"calls parts of it \(parts.a, head\)"),
        (lambda model, x: torch.nn.functional.linear(x, next(model.parameters())), "no call in training mode"),
        (lambda model, x: model.eval()(x), "no call in training mode"),
    ],
)
def test_a_loop_that_never_calls_the_model_in_training_is_told_at_its_first_step(call, told, tmp_path):
    model, optimizer = model_and_optimizer()
    (x,), _ = PARTS.example(torch.Generator())
    with egeria.attach(model, optimizer, config=FAST, directory=tmp_path) as run:
        with pytest.warns(EgeriaWarning, match=told):
            run.step(step_of(call, model, optimizer, x))
        run.step(step_of(call, model, optimizer, x))


def step_of(call, model, optimizer, x):
    loss = call(model, x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("wrapper", ["DeepSpeedEngine", "FullyShardedDataParallel"])
def test_a_wrapped_model_is_left_alone_with_the_reason(wrapper, tmp_path):
    model, optimizer = model_and_optimizer()
    wrapped = type(wrapper, (nn.Sequential,), {})(model)
    with pytest.warns(EgeriaWarning, match=wrapper.removesuffix("Engine")):
        run = egeria.attach(wrapped, optimizer, directory=tmp_path)
    assert run.modules == ()
    run.close()


def test_a_cache_without_a_loader_is_declined(tmp_path):
    with pytest.warns(EgeriaWarning, match="pass the DataLoader that the batches come from"):
        config = {"cache": {"enabled": True}}
        egeria.attach(*model_and_optimizer(), config=config, total_steps=9, directory=tmp_path).close()


# --- faults of ours ------------------------------------------------------------------------------


def failing(*_):
    raise RuntimeError("injected")


class FromMapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, batch):
        x = batch["x"]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Stubborn(dict):
    def items(self):
        raise ValueError("mine alone")


def test_a_batch_that_we_cannot_read_never_reaches_the_loop(tmp_path):
    torch.manual_seed(0)
    model = FromMapping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"config": FAST, "directory": tmp_path, "controller": ScriptedController()}
    with warnings.catch_warnings(record=True) as told, egeria.attach(model, optimizer, **options) as run:
        warnings.simplefilter("always")
        for _ in range(20):
            loss = model(Stubborn(x=torch.randn(3, 4))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
    assert any("mine alone" in str(warning.message) for warning in told)
    assert {"mine alone" in fault.error for fault in read_journal(tmp_path).of(FaultCaught)} == {True}


def test_a_run_that_its_own_callback_closes_leaves_the_model_as_it_was_found(tmp_path):
    policy = {"plan": "0.1:2"}
    loop = Loop(PARTS, {"config": {**FAST, "policy": policy}, "total_steps": 20, "directory": tmp_path})
    loop.run.on_event(lambda event: loop.run.close() if isinstance(event, ModuleFrozen) else None)
    loop.step(10)
    assert read_journal(tmp_path).of(ModuleFrozen)
    assert outside(loop.model) == outside(Loop(PARTS).model.train())


def test_an_attach_that_raises_leaves_the_model_as_it_was_found(tmp_path):
    made = []

    def make(config, **given):
        made.append(given)
        if len(made) > 1:
            raise ValueError("the policy of the user")
        return find_policy("egeria")(config, **given)

    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match="the policy of the user"):
        egeria.attach(model, optimizer, policy=make, total_steps=9, config=FAST, directory=tmp_path)
    assert outside(model) == outside(model_and_optimizer()[0])


def test_a_failing_controller_never_reaches_the_loop(tmp_path):
    plain = Loop(PARTS)
    loop = Loop(PARTS, {"controller": ScriptedController(readings=failing), "config": FAST, "directory": tmp_path})
    for entry in (plain, loop):
        entry.step(40)
    assert differences(plain.everything(), loop.everything()) == []
    faults = read_journal(tmp_path).of(FaultCaught)
    assert [fault.count for fault in faults] == [1, 2, 3]
    assert "injected" in faults[0].error
    assert outside(loop.model)["hooks"] == outside(plain.model)["hooks"]


def test_a_reading_that_is_not_finite_is_dropped(tmp_path):
    values = {3: float("nan"), 4: float("inf")}
    controller = ScriptedController(readings=lambda evaluation, module: values.get(evaluation, 1.0))
    loop = Loop(PARTS, {"controller": controller, "config": FAST, "directory": tmp_path})
    loop.step(30)
    dropped = [event for event in read_journal(tmp_path) if event.kind == "reading_dropped"]
    assert [event.evaluation for event in dropped] == [3, 4]
    assert loop.run.frozen > 0


def test_a_freeze_that_fails_half_way_thaws_everything(tmp_path, monkeypatch):
    plain = Loop(PARTS)
    loop = Loop(PARTS, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})
    monkeypatch.setattr(Freezer, "freeze_to", failing)
    for entry in (plain, loop):
        entry.step(40)
    assert differences(plain.everything(), loop.everything()) == []
    assert loop.run.frozen == 0
    assert "freezing" in [event.what for event in read_journal(tmp_path).of(Declined)]


# --- what the run does ---------------------------------------------------------------------------


def test_the_device_is_asked_once_an_interval(monkeypatch, tmp_path):
    model, optimizer = model_and_optimizer()
    config = {"plasticity": {"interval_steps": 10}}
    run = egeria.attach(model, optimizer, config=config, directory=tmp_path)
    asked = []
    for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, _original=original, **rest: (asked.append(1), _original(*args, **rest))[1]
        )
    per_step = []
    for _ in range(20):
        before = len(asked)
        optimizer.step()
        run.step(torch.tensor(1.0))
        per_step.append(len(asked) - before)
    monkeypatch.undo()
    assert [index for index, count in enumerate(per_step, start=1) if count] == [10, 20]
    assert max(per_step) == 1
    run.close()


def test_layers_come_in_execution_order(tmp_path):
    loop = Loop(SPECIMENS["Backwards"], {"config": FAST, "directory": tmp_path})
    assert loop.run.modules[0].tap != "first"
    loop.step()
    assert loop.run.modules[0].tap == "first"
    assert "head" in loop.run.modules[-1].submodules
    (event,) = read_journal(tmp_path).of(ModulesOrdered)
    assert event.modules[0]["tap"] == "first"


def test_a_model_can_be_saved_at_the_very_step_of_a_freeze(tmp_path):
    loop = Loop(PARTS, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})
    while not loop.run.frozen:
        loop.step()
    torch.save(loop.model, io.BytesIO())
    loop.run.close()
    assert not any(outside(loop.model)["hooks"].values())


def test_a_frozen_model_can_be_saved_copied_and_loaded(tmp_path):
    loop = frozen_loop(tmp_path)
    buffer = io.BytesIO()
    torch.save(loop.model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    args, _ = PARTS.example(torch.Generator().manual_seed(1))
    loop.model.eval()
    assert torch.equal(loaded.eval()(*args), loop.model(*args))
    assert torch.equal(copy.deepcopy(loop.model)(*args), loop.model(*args))


def test_close_may_be_called_twice_and_steps_after_it_do_nothing(tmp_path):
    loop = frozen_loop(tmp_path)
    loop.run.close()
    loop.run.close()
    events = len(read_journal(tmp_path))
    loop.step(5)
    assert len(read_journal(tmp_path)) == events
    assert all(parameter.requires_grad for parameter in loop.model.parameters())


def test_a_run_that_is_dropped_thaws_the_model(tmp_path):
    loop = frozen_loop(tmp_path)
    model = loop.model
    loop.run = None
    gc.collect()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(outside(model)["hooks"].values())


def test_an_exception_in_the_loop_closes_the_run_in_a_with_block(tmp_path):
    model, optimizer = model_and_optimizer()
    with pytest.raises(ZeroDivisionError), egeria.attach(model, optimizer, total_steps=9, directory=tmp_path) as run:
        run.log(accuracy=0.5)
        raise ZeroDivisionError
    kinds = [event.kind for event in read_journal(tmp_path)]
    assert kinds == ["run_started", "controller", "metric", "run_closed"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_crash_in_a_with_block_leaves_the_frozen_model_as_it_was_found(error, tmp_path):
    loop = frozen_loop(tmp_path)
    assert outside(loop.model) != outside(Loop(PARTS).model.train())
    with pytest.raises(type(error)), loop.run:
        raise error
    assert outside(loop.model) == outside(Loop(PARTS).model.train())


def test_the_scheduler_names_the_rule_and_total_steps_the_interval(tmp_path):
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    egeria.attach(model, optimizer, scheduler=scheduler, total_steps=7000, directory=tmp_path).close()
    started = read_journal(tmp_path).first(RunStarted)
    assert started.rule == "cosine"
    assert started.interval_steps == round(7000 / 20 / len(started.modules) / 1.75)


def test_a_fall_of_the_learning_rate_thaws(tmp_path):
    loop = frozen_loop(tmp_path)
    for group in loop.optimizer.param_groups:
        group["lr"] /= 10
    loop.step(2)
    assert loop.run.frozen == 0
    (thawed,) = read_journal(tmp_path).of(Thawed)
    assert thawed.step == 42


def test_parameters_the_user_froze_stay_frozen_after_a_thaw(tmp_path):
    loop = frozen_loop(tmp_path, "front_frozen_before")
    assert read_journal(tmp_path).of(ModuleFrozen)[0].reason == "it has no parameters to train"
    loop.run.close()
    needs = {name: parameter.requires_grad for name, parameter in loop.model.named_parameters()}
    assert needs == {name: not name.startswith("parts.0.") for name in needs}


def test_tied_weights_train_on(tmp_path):
    loop = frozen_loop(tmp_path, "Tied")
    weight = loop.model.embed.weight
    before = weight.detach().clone()
    loop.step()
    assert weight.requires_grad and not torch.equal(weight, before)


# --- loops of other shapes -----------------------------------------------------------------------


def test_gradient_accumulation(tmp_path):
    torch.manual_seed(0)
    model = PARTS.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = attach(model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController())
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        for _ in range(3):
            args, _ = PARTS.example(generator)
            loss = PARTS.loss(model(*args)) / 3
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    assert run.frozen == len(run.modules) - 1
    assert read_journal(tmp_path).of(IntervalMeasured)[-1].step == 40
    run.close()


def first_change_of_the_interval(directory, *, passes=1, slower_s=0.0, monkeypatch):
    """Train with evaluations that take longer, or on batches in parts; return `n` after the first look at a module."""
    plain = evaluation.capture
    monkeypatch.setattr(evaluation, "capture", lambda *args: (time.sleep(slower_s), plain(*args))[1])
    model, optimizer = model_and_optimizer()
    config = {**FAST, "controller": {"budget_share": 0.02, "kind": "inline"}, "freezing": {"enabled": False}}
    run = attach(model, optimizer, config=config, directory=directory)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        for _ in range(passes):
            args, _ = PARTS.example(generator)
            loss = PARTS.loss(model(*args))
            loss.backward()
        optimizer.step()
        run.step(loss)
    run.close()
    monkeypatch.undo()
    return read_journal(directory).of(IntervalChanged)[0].after


def test_how_often_is_evaluated_does_not_hang_on_how_busy_the_machine_is(tmp_path, monkeypatch):
    plain = first_change_of_the_interval(tmp_path / "plain", monkeypatch=monkeypatch)
    slow = first_change_of_the_interval(tmp_path / "slow", slower_s=0.02, monkeypatch=monkeypatch)
    assert plain == slow and 4 < plain < 20
    in_parts = first_change_of_the_interval(tmp_path / "parts", passes=3, monkeypatch=monkeypatch)
    assert in_parts == pytest.approx(plain / 3, abs=1)  # an iteration is as much longer


@pytest.mark.parametrize("split", [False, True])
def test_grad_scaler_with_one_or_several_optimizers(split, tmp_path, device):
    torch.manual_seed(0)
    model = SPECIMENS["residual"].build().to(device)
    front = list(model.stem.parameters()) + list(model.blocks[0].parameters())
    held = {id(parameter) for parameter in front}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in held]
    groups = [front, rest] if split else [[*front, *rest]]
    optimizers = [torch.optim.SGD(group, lr=0.01) for group in groups]
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    run = attach(model, optimizers, config=FAST, directory=tmp_path, controller=ScriptedController())
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        (images,), _ = SPECIMENS["residual"].example(generator)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(images.to(device)).float().square().mean()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        run.step(loss)
    # An optimizer with nothing to train makes GradScaler raise: the front one keeps its last module.
    assert run.frozen == (0 if split else len(run.modules) - 1)
    assert read_journal(tmp_path).first(RunStarted).deepest_freeze == run.frozen
    run.close()


def test_plasticity_is_read(tmp_path):
    loop = Loop(SPECIMENS["residual"], {"config": FAST, "directory": tmp_path})
    loop.step(16)
    values = [event.value for event in read_journal(tmp_path) if event.kind == "plasticity"]
    assert len(values) == 6
    assert all(value > 0 for value in values)


class Graph(nn.Module):
    """Its samples are the nodes of one graph, whose edges it holds itself."""

    def __init__(self, num_nodes):
        super().__init__()
        self.register_buffer("edges", torch.eye(num_nodes) + torch.ones(num_nodes, num_nodes))
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, nodes):
        for layer in self.layers:
            nodes = torch.relu(layer(self.edges @ nodes / len(nodes)))
        return nodes


def test_a_batch_that_cannot_be_cut_is_read_whole(tmp_path):
    torch.manual_seed(0)
    model = Graph(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**FAST, "plasticity": {**FAST["plasticity"], "num_samples": 8}}
    with egeria.attach(model, optimizer, config=config, directory=tmp_path) as run:
        for _ in range(12):
            loss = model(torch.randn(40, 4)).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
    journal = read_journal(tmp_path)
    assert len([event for event in journal if event.kind == "plasticity"]) == 4
    assert not [event for event in journal if event.kind == "reading_dropped"]


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stop"), [("Backwards", 1), ("with_dropout", 23)])
def test_a_job_that_died_after_its_checkpoint_resumes_into_the_same_journal(name, stop, tmp_path):
    config = {**FAST, "freezing": {"tolerance_share": 2.0}}
    whole = Loop(SPECIMENS[name], {"config": config, "directory": tmp_path / "whole"})
    first = Loop(SPECIMENS[name], {"config": config, "directory": tmp_path / "parts"})
    whole.step(60)
    first.step(stop)
    checkpoint = first.save()
    first.step(5)  # lost: the job died after its last checkpoint
    del first
    second = Loop(SPECIMENS[name], {"config": config, "directory": tmp_path / "parts"}, seed=9)
    second.load(checkpoint)
    second.step(60 - stop)
    assert second.run.frozen == whole.run.frozen
    assert differences(whole.everything(), second.everything()) == []

    def decisions(journal):
        start = max((index for index, event in enumerate(journal) if event.kind == "resumed"), default=0)
        late = [event for event in list(journal)[start:] if isinstance(event, (ModuleFrozen, Thawed))]
        return [(event.kind, event.step) for event in late if event.step > stop]

    assert decisions(read_journal(tmp_path / "parts")) == decisions(read_journal(tmp_path / "whole"))


def test_a_state_of_another_egeria_or_of_another_model_is_refused(tmp_path):
    loop = frozen_loop(tmp_path / "parts")
    state = loop.run.state_dict()
    other = Loop(SPECIMENS["residual"], {"config": FAST, "directory": tmp_path / "other"})
    before = other.run.state_dict()
    for schema in (1, 99, None):
        with pytest.raises(StateError, match=f"schema 2, found {schema}"):
            other.run.load_state_dict({**state, "schema": schema})
    with pytest.raises(StateError, match="damaged"):
        other.run.load_state_dict({"schema": 2})
    with pytest.raises(StateError, match="another model"):
        other.run.load_state_dict(state)
    assert other.run.state_dict()["engine"]["policy"] == before["engine"]["policy"]
    assert other.run.modules and other.run.frozen == 0


def test_a_run_can_be_rolled_back_in_place(tmp_path):
    loop = Loop(PARTS, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})
    loop.step(8)
    assert loop.run.frozen == 0
    state = loop.run.state_dict()
    loop.step(30)
    deepest = loop.run.frozen
    assert deepest == len(loop.run.modules) - 1
    loop.run.load_state_dict(state)
    assert loop.run.frozen == 0
    assert all(parameter.requires_grad for parameter in loop.model.parameters())
    frozen = []
    for _ in range(30):
        loop.step()
        frozen.append(loop.run.frozen)
    assert frozen[3] < deepest == frozen[-1], "modules freeze one by one again"


def test_a_run_can_be_rolled_back_to_its_beginning(tmp_path):
    loop = Loop(PARTS, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})
    beginning = loop.save()
    loop.step(40)
    first, deepest = loop.losses, loop.run.frozen
    assert deepest == len(loop.run.modules) - 1
    loop.load(beginning)
    assert loop.run.frozen == 0 and loop.run.stage == "bootstrapping"
    assert all(parameter.requires_grad for parameter in loop.model.parameters())
    loop.step(40)
    assert loop.run.frozen == deepest and loop.losses == first


def test_a_run_that_has_given_up_freezing_can_be_rolled_back(tmp_path):
    loop = Loop(PARTS, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})
    loop.step(8)
    state = loop.run.state_dict()
    loop.step(32)
    loop.model.requires_grad_(True)  # the last word
    loop.step(2)
    loop.run.load_state_dict(state)
    loop.step(40)
    assert loop.run.frozen == 0
    assert all(parameter.requires_grad for parameter in loop.model.parameters())


def test_a_closed_run_refuses_a_state(tmp_path):
    loop = frozen_loop(tmp_path)
    state = loop.run.state_dict()
    loop.run.close()
    with pytest.raises(StateError, match="Attach anew"):
        loop.run.load_state_dict(state)


def test_a_state_saved_after_close_goes_on_unfrozen(tmp_path):
    first = frozen_loop(tmp_path / "first")
    first.run.close()
    second = frozen_loop(tmp_path / "second")
    second.run.load_state_dict(first.run.state_dict())
    assert second.run.frozen == 0
    second.step(10)
    assert second.run.frozen == 0


# --- the user's own doings -----------------------------------------------------------------------


def test_layers_that_the_user_unfreezes_later_stay_unfrozen(tmp_path):
    loop = frozen_loop(tmp_path, "front_frozen_before")
    loop.model.parts[0].requires_grad_(True)
    for group in loop.optimizer.param_groups:
        group["lr"] /= 10
    loop.step(2)
    assert loop.run.frozen == 0
    loop.run.close()
    assert all(parameter.requires_grad for parameter in loop.model.parameters())


@pytest.mark.parametrize("way", ["at once", "resumed", "rolled back"])
def test_what_the_user_froze_before_and_trains_later_is_never_frozen_by_us(way, tmp_path):
    """A probe of the head first, then everything: the front trains on however the run goes on."""
    loop = frozen_loop(tmp_path / "probe", "front_frozen_before")
    state = loop.run.state_dict()
    if way == "resumed":
        loop.run.close()
        loop = Loop(loop.specimen)
        loop.model.requires_grad_(True)
        loop.run = attach(
            loop.model,
            loop.optimizer,
            controller=ScriptedController(),
            config=FAST,
            directory=tmp_path / "all",
        )
    loop.model.parts[0].requires_grad_(True)
    if way != "at once":
        loop.run.load_state_dict(state)
    before = [parameter.clone() for parameter in loop.model.parts[0].parameters()]
    loop.step(1)
    for _ in range(20):
        loop.step(2)
        assert all(parameter.requires_grad for parameter in loop.model.parts[0].parameters())
    assert not any(map(torch.equal, before, loop.model.parts[0].parameters()))


def test_a_front_that_the_model_itself_runs_without_gradient_does_not_stop_the_rest(tmp_path):
    class Probed(type(PARTS.build())):
        def forward(self, x):
            parts = list(self.parts.values())
            with torch.no_grad():
                x = parts[0](x)
            for part in parts[1:]:
                x = part(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Probed()
    model.parts["a"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = attach(model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController())
    for _ in range(40):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    assert run.frozen == len(run.modules) - 1
    assert not read_journal(tmp_path).of(Declined)
    run.close()


def test_a_loop_that_switches_gradients_on_has_the_last_word(tmp_path):
    loop = frozen_loop(tmp_path)
    loop.model.requires_grad_(True)
    loop.step(2)
    assert loop.run.frozen == 0
    (declined,) = read_journal(tmp_path).of(Declined)
    assert "the last word" in declined.reason


class Prompted(SPECIMENS["Tied"].build):
    """Begins with the output of its embedding."""

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(hidden)


def test_a_soft_prompt_in_front_of_tied_weights_keeps_its_gradient(tmp_path):
    torch.manual_seed(0)
    model = Prompted()
    prompt = nn.Parameter(torch.randn(6, 5, 8))
    optimizer = torch.optim.SGD([*model.parameters(), prompt], lr=0.01)
    run = attach(model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController())
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(prompt).square().mean()
        loss.backward()
        optimizer.step()
        run.step(loss)
    assert run.frozen > 0
    assert prompt.grad is not None and prompt.grad.any()
    assert "the full saving" in " ".join(event.what for event in read_journal(tmp_path).of(Declined))
    run.close()


@pytest.mark.parametrize("settings", [{}, {"policy": {"plan": "0.2:1"}}])
def test_a_resumed_run_keeps_the_gradient_of_a_soft_prompt(settings, tmp_path):
    torch.manual_seed(0)
    model = Prompted()
    prompt = nn.Parameter(torch.randn(6, 5, 8))
    optimizer = torch.optim.SGD([*model.parameters(), prompt], lr=0.01)

    def train(directory, steps, state=None):
        run = attach(
            model,
            optimizer,
            total_steps=80,
            config={**FAST, **settings},
            directory=directory,
            controller=None if settings else ScriptedController(),
        )
        if state is not None:
            run.load_state_dict(state)
        gradients = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(prompt).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
            gradients.append(prompt.grad is not None and bool(prompt.grad.any()))
        state = run.state_dict()
        assert run.frozen
        run.close()
        return state, gradients

    state, first = train(tmp_path / "first", 40)
    _, second = train(tmp_path / "second", 4, state)
    assert all(first) and all(second)


class Recomputing(nn.Module):
    """Four parts; recomputes those in the middle in the backward pass, reentrantly, while it trains."""

    def __init__(self, recomputes=True):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.recomputes = recomputes

    def forward(self, x):
        x = self.parts[0](x)
        middle = nn.Sequential(*self.parts[1:3])
        does = self.recomputes and self.training
        x = torch.utils.checkpoint.checkpoint(middle, x, use_reentrant=True) if does else middle(x)
        return self.parts[3](x)


def train_recomputing(directory, steps, *, evaluates=False, recomputes=True, state=None):
    torch.manual_seed(0)
    model = Recomputing(recomputes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controller = ScriptedController(lambda evaluation, module: 1.0 if module < 1 else 2.0**evaluation)
    with attach(model, optimizer, config=FAST, directory=directory, controller=controller) as run:
        if state is not None:
            run.load_state_dict(state)
        if evaluates:
            model.eval()
            model(torch.ones(4, 8))
            with torch.no_grad():
                model.train()(torch.ones(4, 8))
        model.train()
        for step in range(steps):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss)
        return run.frozen, run.state_dict(), model


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("evaluates", [False, True])
def test_reentrant_checkpointing_is_seen_also_where_the_model_is_evaluated_first(evaluates, tmp_path):
    with pytest.warns(EgeriaWarning, match="use_reentrant=False"):
        frozen, _, model = train_recomputing(tmp_path, 40, evaluates=evaluates)
    assert frozen == 0 and all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpointing_is_seen_where_a_resumed_run_begins_it(tmp_path):
    frozen, state, _ = train_recomputing(tmp_path / "first", 40, recomputes=False)
    assert frozen == 1
    with pytest.warns(EgeriaWarning, match="use_reentrant=False"):
        frozen, _, model = train_recomputing(tmp_path / "second", 4, state=state)
    assert frozen == 0 and all(parameter.grad is not None for parameter in model.parameters())


class TwoPlayers(nn.Module):
    """A trunk and two heads of one class, trained in turn."""

    def __init__(self):
        super().__init__()
        part = type(SPECIMENS["PartsByName"].build().parts["a"])
        self.trunk = nn.ModuleList([part() for _ in range(3)])
        self.policy, self.value = part(), part()

    def forward(self, x):
        for part in self.trunk:
            x = part(x)
        return self.policy(x), self.value(x)


def test_a_head_of_its_own_is_never_frozen(tmp_path):
    torch.manual_seed(0)
    model = TwoPlayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = attach(model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController())
    for step in range(80):
        loss = model(torch.randn(6, 8))[step % 2].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    (declined,) = read_journal(tmp_path).of(Declined)
    assert "a branch of its own" in declined.reason
    assert len(read_journal(tmp_path).of(ModuleFrozen)) == 3
    assert all(parameter.requires_grad for parameter in model.parameters())
    run.close()


def test_lbfgs_and_a_scripted_model_are_left_alone(tmp_path):
    model, _ = model_and_optimizer("chain")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(SPECIMENS["chain"].build())
        traced = torch.jit.trace(SPECIMENS["chain"].build(), torch.ones(2, 8))
    cases = [
        (model, torch.optim.LBFGS(model.parameters()), "LBFGS"),
        *((made, torch.optim.SGD(made.parameters(), lr=0.1), "TorchScript") for made in (scripted, traced)),
    ]
    for index, (subject, optimizer, reason) in enumerate(cases):
        with pytest.warns(EgeriaWarning, match=reason):
            run = egeria.attach(subject, optimizer, directory=tmp_path / str(index))
        assert run.modules == ()
        subject(torch.ones(2, 8))
        run.step(1.0)
        run.close()


def test_a_controller_that_fails_to_close_leaves_the_model_thawed(tmp_path):
    controller = ScriptedController()
    controller.close = failing
    loop = frozen_loop(tmp_path, controller=controller)
    with pytest.warns(EgeriaWarning, match="closing the controller"):
        loop.run.close()
    assert all(parameter.requires_grad for parameter in loop.model.parameters())


def test_warnings_that_are_errors_do_not_stop_the_loop(tmp_path):
    model, optimizer = model_and_optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = attach(
            model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController(refreshing=failing)
        )
        for _ in range(30):
            model(torch.ones(2, 8))
            optimizer.step()
            run.step(1.0)
        run.close()
    assert read_journal(tmp_path).of(FaultCaught)


# --- what is measured ----------------------------------------------------------------------------


def test_the_reference_is_refreshed_every_window(tmp_path):
    config = {**FAST, "plasticity": {"interval_steps": 1, "window": 4}, "freezing": {"enabled": False}}
    loop = Loop(PARTS, {"config": config, "directory": tmp_path})
    loop.step(30)
    refreshed = [event.evaluation for event in read_journal(tmp_path) if event.kind == "reference"]
    assert len(refreshed) > 5
    assert {later - earlier for earlier, later in itertools.pairwise(refreshed)} == {4}


def test_all_that_egeria_does_is_counted_as_overhead(tmp_path):
    def slow(evaluation, module):
        time.sleep(0.02)
        return 1.0

    loop = Loop(PARTS, {"controller": ScriptedController(readings=slow), "config": FAST, "directory": tmp_path})
    loop.step(20)
    loop.run.close()
    journal = read_journal(tmp_path)
    evaluations = [event for event in journal if event.kind == "plasticity"]
    closed = journal.events[-1]
    assert closed.overhead_wall_s > sum(event.wall_s for event in evaluations) > 0.02 * len(evaluations) > 0
    assert closed.overhead_wall_s > closed.overhead_cpu_s > 0
    assert statistics.median(event.iteration_wall_s for event in journal.of(IntervalMeasured)) < 0.02, (
        "an iteration is the user's own"
    )


def test_the_rate_of_the_layers_that_may_freeze_counts(tmp_path):
    torch.manual_seed(0)
    model = PARTS.build()
    groups = [{"params": model.parts.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    run = attach(model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController())
    for step in range(60):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
        run.step(1.0)
        if step == 40:
            assert run.frozen
            optimizer.param_groups[0]["lr"] = 0.001
    assert len(read_journal(tmp_path).of(Thawed)) == 1
    run.close()


@pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")
def test_a_freeze_that_cannot_be_rehearsed_is_taken_back(tmp_path, monkeypatch):
    """Such as for a lack of memory: in its journal, and in the model, nothing was frozen then."""
    loop = Loop(PARTS, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})
    run_through, passes = rehearsing._run, []

    def fail_with_something_frozen(model, *arguments):
        passes.append(arguments)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            raise torch.OutOfMemoryError("injected")
        return run_through(model, *arguments)

    monkeypatch.setattr(rehearsing, "_run", fail_with_something_frozen)
    loop.step(40)
    assert passes and loop.run.frozen == 0
    assert all(parameter.requires_grad for parameter in loop.model.parameters())
    journal = read_journal(tmp_path)
    assert not journal.of(ModuleFrozen) and "injected" in journal.of(FaultCaught)[0].error


def test_a_freeze_is_rehearsed_on_a_few_samples(tmp_path, monkeypatch):
    loop = Loop(PARTS, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})
    run_through, rows = rehearsing._run, []
    monkeypatch.setattr(rehearsing, "_run", lambda *a: rows.append(a[-1].num_rows) or run_through(*a))
    loop.step(40)
    assert loop.run.frozen > 0 and set(rows) == {rehearsing.MOST_ROWS}


class Adaptive(torch.optim.SGD):
    """Finds its learning rate by itself, as `Adafactor` of transformers does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        for group in self.param_groups:
            group["lr"] = None

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.01
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = None


def test_an_optimizer_that_keeps_its_learning_rate_to_itself_is_told_and_left_alone(tmp_path):
    loop = Loop(PARTS, {"config": FAST, "directory": tmp_path}, make_optimizer=Adaptive)
    loop.step(40)
    assert loop.run.frozen == 0
    journal = read_journal(tmp_path)
    assert "relative_step=False" in journal.of(Declined)[0].reason
    assert journal.of(FaultCaught) == [] and len(journal.of(IntervalMeasured)) == 20
    assert len(loop.run.state_dict()["losses"]) <= 2
