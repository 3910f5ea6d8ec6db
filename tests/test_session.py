"""What a user of `attach` and `Run` would notice."""

import copy
import gc
import io
import warnings

import pytest
import torch
from torch import nn

import egeria
from egeria import ConfigError, EgeriaWarning, StateError, attach, read_journal
from egeria.events import Declined, FaultCaught, IntervalMeasured, ModuleFrozen, RunStarted, Thawed
from egeria.model.freeze import Freezer
from egeria.policy import Depth, Wants
from loops import FAST, Loop, differences, outside
from menagerie import SPECIMENS
from scripted import ScriptedController, frozen_loop, scripted_loop

PARTS = SPECIMENS["PartsByName"]
PLAN = {"total_steps": 20, "plan": "0.1:1 0.5:3", "config": {"modules": {"pattern": r"parts\.\w|head"}}}


def model_and_optimizer():
    torch.manual_seed(0)
    model = PARTS.build()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(run, model, optimizer, count, *, call=None, loss=None):
    """Train for some steps by a loop of a few lines; the loss that is told may be another one."""
    for number in range(count):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
        found = (call or model)(x).square().mean()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(found if loss is None else loss)


# --- what attach refuses, and what it declines ---------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": len}, r"torch\.nn\.Module.*found builtin_function"),
        ({"optimizer": 0.1}, "takes a torch optimizer.*found float"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "holds none of them"),
        ({"total_steps": 2.5}, "whole number of at least 1"),
        ({"config": {"freezing": {"windw": 3}}}, "windw"),
        ({"config": {"unfreezing": {"rule": "cosin"}}}, "cosin"),
        ({"config": 17}, "dictionary or the path of a TOML file, found int"),
        ({"config": {"modules": {"pattern": "no such layer"}}}, "no such layer"),
        ({"plan": "0.5:1", "total_steps": None}, "total_steps"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_trace(given, said, tmp_path):
    model, optimizer = model_and_optimizer()
    before = outside(model)
    given = {"model": model, "optimizer": optimizer, "total_steps": 9, "directory": tmp_path, **given}
    with pytest.raises(ConfigError, match=said):
        attach(**given)
    assert outside(model) == before and not optimizer._optimizer_step_post_hooks


def test_a_model_that_is_refused_is_told_at_attach_and_trains_on(tmp_path):
    model, optimizer = model_and_optimizer()
    before, lbfgs = outside(model), torch.optim.LBFGS(model.parameters())
    with pytest.warns(EgeriaWarning, match="LBFGS") as told:
        run = attach(model, [optimizer, lbfgs], directory=tmp_path, config=FAST)
    assert len(told) == 1 and outside(model) == before
    train(run, model, optimizer, 6)
    run.close()
    journal = read_journal(tmp_path)
    assert run.modules == () and [event.what for event in journal.of(Declined)] == ["freezing"]
    assert sum(event.num_steps for event in journal.of(IntervalMeasured)) >= 4


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: nn.Linear(8, 2), None),
        (PARTS.build, lambda model, x: nn.functional.linear(x, next(model.parameters()))),
    ],
    ids=["one layer", "never called"],
)
def test_a_model_with_too_few_layers_to_cut_is_told_at_the_first_step(make, call, tmp_path):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attach(model, optimizer, directory=tmp_path, total_steps=9)
    with pytest.warns(EgeriaWarning, match="at least two layers or blocks that run") as told:
        train(run, model, optimizer, 3, call=call and (lambda x: call(model, x)))
    assert len(told) == 1 and run.frozen == 0
    assert not any(any(counts.values()) for counts in outside(model)["hooks"].values())
    run.close()


# --- losses --------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_is_refused_and_counts_nothing(tmp_path):
    model, optimizer = model_and_optimizer()
    with attach(model, optimizer, config={"plasticity": {"interval_steps": 2}}, directory=tmp_path) as run:
        optimizer.step()
        for wrong in (torch.ones(3), "0.5", None):
            with pytest.raises(ConfigError, match="number or a 0-d tensor"):
                run.step(wrong)
        run.step(torch.ones(1, requires_grad=True))
        optimizer.step()
        run.step(2)
    (interval,) = read_journal(tmp_path).of(IntervalMeasured)
    assert interval.step == 2 and interval.loss == 1.5


def test_a_loss_that_is_nan_for_long_freezes_nothing_and_warns_once(tmp_path):
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController())
    train(run, model, optimizer, 8, loss=1.0)
    assert run.stage == "knowledge-guided"
    with pytest.warns(EgeriaWarning, match="not finite for 2 steps;") as caught:
        train(run, model, optimizer, 40, loss=float("nan"))
    assert len(caught) == 1 and run.frozen == 0
    train(run, model, optimizer, 20, loss=torch.tensor(1.0))
    assert run.frozen > 0
    intervals = read_journal(tmp_path).of(IntervalMeasured)
    assert [(interval.loss, interval.num_bad_losses) for interval in intervals[4:24]] == [(None, 2)] * 20


class OnDevice(torch.Tensor):
    """Says that it is not in the CPU's memory, where reading it means waiting."""

    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_the_device_is_asked_once_an_interval(monkeypatch, tmp_path):
    model, optimizer = model_and_optimizer()
    run = attach(model, optimizer, config={"plasticity": {"interval_steps": 10}}, policy="none", directory=tmp_path)
    train(run, model, optimizer, 1)
    asked, per_step = [], []
    for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, _plain=plain, **rest: (asked.append(1), _plain(*args, **rest))[1]
        )
    for _ in range(20):
        before = len(asked)
        optimizer.step()
        run.step(torch.tensor(1.0).as_subclass(OnDevice))
        per_step.append(len(asked) - before)
    monkeypatch.undo()
    assert [number for number, count in enumerate(per_step, start=2) if count] == [10, 20] and max(per_step) == 1
    run.close()


# --- faults of ours ------------------------------------------------------------------------------


def failing(*_, **__):
    raise RuntimeError("injected")


WAYS = {
    "a reading": {"controller": ScriptedController(readings=failing)},
    "a refresh": {"controller": ScriptedController(refreshing=failing)},
    "a policy": {"policy": failing},
    "a freeze": {},
    "a hook": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fault_never_reaches_the_loop_and_nothing_stays_frozen(way, tmp_path, monkeypatch):
    plain, loop = Loop(PARTS), scripted_loop(tmp_path, total_steps=40, **WAYS[way])
    if way == "a freeze":
        monkeypatch.setattr(Freezer, "_set_modes", failing)
    elif way == "a hook":
        monkeypatch.setattr("egeria.tree.contents", failing)
    plain.step(30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in test runs of a user: they stop no step either
        loop.step(30)
    assert differences(plain.everything(), loop.everything()) == [] and loop.run.frozen == 0
    journal = read_journal(tmp_path)
    told = journal.of(Declined)
    assert "injected" in (journal.of(FaultCaught)[0].error if way != "a hook" else told[0].reason)
    assert len(told) == 1 and "freezing" in told[0].what + told[0].reason
    assert {**outside(loop.model), "attributes": None} == {**outside(plain.model), "attributes": None}


class Stubborn(dict):
    def items(self):
        raise ValueError("mine alone")


@pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")
def test_a_batch_that_we_cannot_read_never_reaches_the_loop(tmp_path):
    model, optimizer = model_and_optimizer()
    model.forward = lambda batch, own=model.forward: own(batch["x"])
    with attach(model, optimizer, config=FAST, directory=tmp_path) as run:
        train(run, model, optimizer, 20, call=lambda x: model(Stubborn(x=x)))
    assert {"mine alone" in fault.error for fault in read_journal(tmp_path).of(FaultCaught)} == {True}


def test_a_reading_that_is_not_finite_is_dropped(tmp_path):
    values = {3: float("nan"), 4: float("inf")}
    controller = ScriptedController(readings=lambda evaluation, module: values.get(evaluation, 1.0))
    loop = frozen_loop(tmp_path, controller=controller)
    dropped = [event for event in read_journal(tmp_path) if event.kind == "reading_dropped"]
    assert [event.evaluation for event in dropped] == [3, 4] and loop.run.frozen


def test_a_controller_that_fails_to_close_leaves_the_model_thawed(tmp_path):
    controller = ScriptedController()
    controller.close = failing
    loop = frozen_loop(tmp_path, controller=controller)
    with pytest.warns(EgeriaWarning, match="injected"):
        loop.run.close()
    assert all(parameter.requires_grad for parameter in loop.model.parameters())


# --- what the run does ---------------------------------------------------------------------------


def test_the_model_is_cut_at_the_first_step_in_the_order_of_execution(tmp_path):
    loop = Loop(SPECIMENS["Backwards"], {"plan": "0:1", "total_steps": 9, "directory": tmp_path})
    assert loop.run.modules == () and loop.run.plan is None and loop.run.frozen == 0
    loop.step()
    assert loop.run.modules[0].tap == "first" and "head" in loop.run.modules[-1].submodules
    assert str(loop.run.plan) == "0:1" and loop.run.frozen == 1
    first, gradients = list(loop.model.first.parameters()), []
    loop.optimizer.register_step_pre_hook(lambda *_: gradients.extend(entry.grad for entry in first))
    loop.step()
    assert gradients == [None] * len(first) and not set(first) & set(loop.optimizer.state), "they take no memory"
    assert read_journal(tmp_path).first(RunStarted).modules[0]["tap"] == "first"


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"egeria" not in buffer.getvalue(), "it can be read without the library"
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_watched_model_can_be_copied_and_saved_at_any_time(tmp_path):
    loop = Loop(PARTS, {**PLAN, "directory": tmp_path})
    (x,), _ = PARTS.example(torch.Generator().manual_seed(1))
    for steps in (0, 2, 9):
        loop.step(steps)
        twin = saved(copy.deepcopy(loop.model))
        assert torch.equal(twin.eval()(x), copy.deepcopy(loop.model).eval()(x))
    assert loop.run.frozen == 3
    twin.train().requires_grad_(True)
    assert all(part.training for part in twin.modules())
    twin(x).sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters()) and loop.run.frozen == 3


@pytest.mark.parametrize("end", ["dropped", "closed by its own callback", KeyboardInterrupt])
def test_however_a_run_ends_the_model_is_as_it_was_found(end, tmp_path):
    loop = Loop(PARTS, {**PLAN, "directory": tmp_path})
    if end == "closed by its own callback":
        loop.run.on_event(lambda event: loop.run.close() if isinstance(event, ModuleFrozen) else None)
    loop.step(12)
    if end == "dropped":
        loop.run = None
        gc.collect()
    elif isinstance(end, type):
        with pytest.raises(end), loop.run:
            raise end
    assert outside(loop.model) == outside(Loop(PARTS).model.train())


def test_the_scheduler_names_the_rule_and_total_steps_the_interval(tmp_path):
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    with attach(
        model,
        optimizer,
        scheduler=scheduler,
        total_steps=7000,
        policy="egeria",
        controller="inline",
        directory=tmp_path,
    ) as run:
        train(run, model, optimizer, 1)
    started = read_journal(tmp_path).first(RunStarted)
    assert started.rule == "cosine"
    assert started.interval_steps == round(7000 / 20 / len(started.modules) / 1.75)


@pytest.mark.parametrize("split", [False, True])
def test_grad_scaler_with_one_or_several_optimizers(split, tmp_path, device):
    torch.manual_seed(0)
    model = SPECIMENS["residual"].build().to(device)
    front = [*model.stem.parameters(), *model.blocks[0].parameters()]
    held = set(map(id, front))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in held]
    optimizers = [torch.optim.SGD(group, lr=0.01) for group in ([front, rest] if split else [[*front, *rest]])]
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    run = attach(model, optimizers, total_steps=20, plan="0.1:9", directory=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EgeriaWarning)
        for step in range(8):
            (images,), _ = SPECIMENS["residual"].example(torch.Generator().manual_seed(step))
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
    declined = [event.reason for event in read_journal(tmp_path).of(Declined)]
    assert any("one of the optimizers" in reason for reason in declined) == split
    run.close()


def test_the_rate_of_the_layers_that_may_freeze_counts(tmp_path):
    model, _ = model_and_optimizer()
    groups = [{"params": model.parts.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    run = attach(model, optimizer, config=FAST, directory=tmp_path, controller=ScriptedController())
    train(run, model, optimizer, 40, loss=1.0)
    assert run.frozen
    optimizer.param_groups[0]["lr"] = 0.001
    train(run, model, optimizer, 4, loss=1.0)
    assert len(read_journal(tmp_path).of(Thawed)) == 1
    run.close()


# --- resuming ------------------------------------------------------------------------------------


def test_a_state_of_another_egeria_or_of_another_model_is_refused(tmp_path):
    state = frozen_loop(tmp_path / "parts").run.state_dict()
    other = scripted_loop(tmp_path / "other", "residual")
    for schema in (1, 99, None):
        with pytest.raises(StateError, match=f"schema 8, found {schema}"):
            other.run.load_state_dict({**state, "schema": schema})
    with pytest.raises(StateError, match="another model"):
        other.run.load_state_dict(state)
    with pytest.raises(StateError, match=r"under the policy that it began with.*policy='egeria'"):
        scripted_loop(tmp_path / "none", policy="none").run.load_state_dict(state)
    other.step(40)
    assert other.run.frozen > 0, "nothing of it is left"
    grown = scripted_loop(tmp_path / "grown")
    grown.model.register_parameter("more", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(StateError, match="differs in more"):
        grown.run.load_state_dict(state)


def test_a_run_can_be_rolled_back_in_place(tmp_path):
    loop = scripted_loop(tmp_path)
    loop.step(8)
    checkpoint = loop.save()
    loop.step(32)
    losses, deepest = loop.losses, loop.run.frozen
    assert deepest == len(loop.run.modules) - 1
    loop.load(checkpoint)
    assert loop.run.frozen == 0
    assert all(parameter.requires_grad for parameter in loop.model.parameters())
    loop.step(32)
    assert loop.run.frozen == deepest and loop.losses == losses


def test_a_closed_run_refuses_a_state_and_has_that_from_before_it_was_closed(tmp_path):
    first, second = frozen_loop(tmp_path / "first"), scripted_loop(tmp_path / "second")
    first.run.close()
    state = first.run.state_dict()
    with pytest.raises(StateError, match="Attach anew"):
        first.run.load_state_dict(state)
    second.run.load_state_dict(state)
    assert second.run.frozen == first.run.summary().frozen > 0


# --- the user's own doings -----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["at once", "resumed", "rolled back"])
def test_what_the_user_froze_before_and_trains_later_is_never_frozen_by_us(way, tmp_path):
    """A probe of the head first, then everything: the front trains on however the run goes on."""
    loop = scripted_loop(tmp_path / "probe", "front_frozen_before")
    loop.step(40)
    assert loop.run.frozen
    state = loop.run.state_dict()
    if way == "resumed":
        loop.run.close()
        loop = Loop(loop.specimen)
        directory = tmp_path / "all"
        loop.run = attach(loop.model, loop.optimizer, controller=ScriptedController(), config=FAST, directory=directory)
    loop.model.parts[0].requires_grad_(True)
    if way != "at once":
        loop.run.load_state_dict(state)
    before = [parameter.clone() for parameter in loop.model.parts[0].parameters()]
    for _ in range(20):
        loop.step(2)
        assert all(parameter.requires_grad for parameter in loop.model.parts[0].parameters())
    assert not any(map(torch.equal, before, loop.model.parts[0].parameters()))
    loop.run.close()
    assert all(parameter.requires_grad for parameter in loop.model.parameters())


def test_a_model_is_exported_while_layers_are_frozen(tmp_path):
    loop = Loop(PARTS, {**PLAN, "directory": tmp_path})
    loop.step(12)
    x = torch.ones(6, 8)
    mine, program = (torch.export.export(each.eval(), (x,)) for each in (loop.model, copy.deepcopy(loop.model)))
    torch.testing.assert_close(mine.module()(x), program.module()(x))
    assert loop.run.frozen == 3 and egeria.read_journal(tmp_path).of(FaultCaught) == []


# --- a policy of the user's own; the soak has random ones ---


class AtSteps:
    """Freezes one more at each of three steps, down to all that may be frozen; keeps no state."""

    def __init__(self, *, deepest, **_):
        self.wants, self.deepest, self.asked = Wants(steps=(3, 7, 9)), deepest, []

    def observe(self, interval):
        self.asked.append((interval.step, interval.frozen))
        depth = sum(step <= interval.step for step in self.wants.steps)
        return Depth(min(depth, self.deepest), "its step has come")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def attaching(directory, policy):
    return {"config": {**FAST, "policy": {}}, "policy": policy, "directory": directory, "total_steps": 60}


def test_it_is_asked_before_the_first_step_and_after_those_it_names_and_obeyed(tmp_path):
    made = []

    def calm(**facts):
        return made.append(AtSteps(**facts)) or made[-1]

    loop = Loop(SPECIMENS["residual"], attaching(tmp_path, calm))
    loop.step(12)
    assert made[-1].asked[0] == (0, 0) and {(3, 0), (7, 1), (9, 2)} < set(made[-1].asked)
    assert loop.run.frozen == 3 and loop.run.plan is None
    journal = read_journal(tmp_path)
    moves = [(event.step, event.reason) for event in journal.of(ModuleFrozen)]
    assert moves == [(step, "its step has come") for step in (3, 7, 9)]
    assert "calm" in journal.first(RunStarted).config["policy"]["name"]


@pytest.mark.parametrize(
    ("answer", "wants"),
    [
        (Depth(1.5, "no whole number"), {}),
        (True, {}),
        (None, {"interval_steps": "3"}),
        (None, {"interval_steps": float("nan")}),
        (None, {"steps": ("3",)}),
    ],
)
def test_nonsense_of_a_policy_never_reaches_the_loop(answer, wants, tmp_path):
    class Nonsense(AtSteps):
        def __init__(self, **facts):
            super().__init__(**facts)
            self.wants = Wants(**{"interval_steps": 2, **(wants if "interval_steps" in wants else {})})

        def observe(self, interval):
            self.wants = Wants(**{"interval_steps": 2, **wants}) if interval.step else self.wants
            return answer

    plain, loop = Loop(SPECIMENS["residual"]), Loop(SPECIMENS["residual"], attaching(tmp_path, Nonsense))
    for entry in (plain, loop):
        entry.step(8)
    assert differences(plain.everything(), loop.everything()) == []
    assert len(read_journal(tmp_path).of(FaultCaught)) == 1
