"""Plans of how many front layer modules are frozen when: their text, what is drawn up, and a run that follows one."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import egeria
from egeria import Config, ConfigError, StateError, read_journal
from egeria.events import Declined, FaultCaught, ModuleFrozen, PlanMade, Thawed
from egeria.moves import resolve
from egeria.policy import Interval, Plan, draw_up, find_maker, find_plan, find_rule
from egeria.policy.plan import even_moves

MODULES = tuple("abcd")
TOTAL = 40


def plan(text, total_steps=100, modules=MODULES):
    return Plan.parse(text, modules, total_steps)


def depths(text, steps, **given):
    return [plan(text, **given).depth_at(step) for step in steps]


TEXTS = {
    "": [],
    " .5:1\n0.75:0  ": [(0.5, 1, False), (0.75, 0, False)],
    "0:2 step 500:12": [(0.0, 2, False), (500.0, 12, True)],
}


def test_another_text_is_refused_with_what_was_found_and_the_next_step():
    for text, said in [
        (3, "a moment, and how many"),
        ("0.5:", "entry 1, '0.5:', is no"),
        ("0.5:-1", "entry 1, '0.5:-1', is no"),
        ("0.5:1.5", "entry 1, '0.5:1.5', is no"),
        ("0.5:1,0.6:2", "entry 1, '0.5:1,0.6:2', is no"),
        ("0.3:1 0.5 : 1", "entry 2, '0.5', is no"),
        ("0.3:1 step 500", "entry 2, 'step 500', is no"),
        ("step 5.5:1", "entry 1, 'step 5.5:1', is no"),
        ("epochs 2:1", "entry 1, 'epochs', is no"),
        ("1.0:1", "shares of the steps below 1 and not 1"),
        ("0.6:1 0.5:2", "shares of the steps that rise from entry to entry"),
        ("step 9:1 step 8:2", "steps that rise from entry to entry"),
        ("epoch 2:1 0.5:2 epoch 2:3", "epochs that rise from entry to entry"),
    ]:
        with pytest.raises(ConfigError) as caught:
            Config.from_dict({"policy": {"plan": text}})
        message = str(caught.value)
        assert message.startswith("policy.plan must be text such as") and said in message
        assert f"found {text!r}" in message and "Correct it" in message


PARTS = [("embeddings",), ("encoder.0", "encoder.1"), ("encoder.2", "encoder.2.dense"), ("head",)]


def test_names_and_epochs_become_numbers_and_steps():
    for text, expected in [
        ("0.1:encoder.1", "0.1:2"),  # in a layer module of two blocks: frozen up to and with that
        ("0.1:encoder 0.5:0", "0.1:3 0.5:0"),
        ("step 5:encoder.2.dense", "step 5:3"),
        ("epoch 2:embeddings", "step 50:1"),
        ("epoch 1.12:1", "step 28:1"),  # 1.12 * 25 is a little more than 28
        ("0.5:encoder.0-encoder.1", "0.5:2"),  # as `run.modules` has it
        ("epoch 0.1:20", "step 3:20"),
    ]:
        for prefix in ("", "model.bert."):
            parts = [tuple(prefix + name for name in names) for names in PARTS]
            assert resolve(text, parts, 25.0) == expected
        assert resolve(expected, parts, None) == expected, "what needs no length asks for none"


def test_a_name_that_is_none_or_several_and_epochs_of_unknown_length_are_refused():
    with pytest.raises(
        ConfigError, match=r"found 'encoder\.5', which is none\. Give a whole name such as 'encoder\.\d'"
    ):
        resolve("0.5:encoder.5", PARTS, 1.0)
    twice = [("left.block",), ("right.block",)]
    with pytest.raises(ConfigError, match=r"found 'block', which is several\. Give a whole name such as 'left\.block'"):
        resolve("0.5:block", twice, 1.0)
    assert resolve("0.5:right.block", twice, 1.0) == "0.5:2"
    with pytest.raises(ConfigError, match="epochs needs a loader that has a length, found 'epoch 1:1'"):
        resolve("epoch 1:1", PARTS, None)


def test_shares_need_the_length_of_the_training_and_all_are_in_the_order_of_time():
    with pytest.raises(ConfigError, match=r"'0\.5:1' has shares.*found total_steps=None.*Pass total_steps="):
        plan("0.5:1", total_steps=None)
    assert depths("step 20:1 step 30:2", [19, 20, 29, 30, 9999], total_steps=None) == [0, 1, 1, 2, 2]
    assert depths("step 20:1 0.5:2", [19, 20, 49, 50]) == [0, 1, 1, 2]
    for text in ("step 60:1 0.5:2", "0.5:1 step 50:2"):
        with pytest.raises(ConfigError, match=rf"order of time.*found '{text}' for 100 steps\. Sort"):
            plan(text)


def test_more_than_there_are_means_all_but_the_last_and_fewer_thaw():
    assert depths("0.1:9 0.5:1 0.7:0", [0, 10, 50, 70, 100]) == [0, 3, 1, 0, 0]
    assert depths("0.1:9", [100], modules=("only",)) == [0]
    assert plan("0.1:9 0.335:1 step 70:0").steps == (10, 34, 70)


def test_the_share_that_it_skips_is_that_of_the_backward_passes():
    shares = (0.1, 0.2, 0.2, 0.1)
    assert plan("0.5:1 0.75:3").skipped_share(shares) == pytest.approx(0.25 * 0.1 + 0.25 * 0.5)
    assert plan("step 50:1 step 500:3").skipped_share(shares) == pytest.approx(0.5 * 0.1), "the end comes first"
    assert plan("").skipped_share(shares) == plan("step 5:1", total_steps=None).skipped_share(shares) == 0


def test_with_adam_the_last_module_begins_alone_and_without_it_the_front_freezes_late():
    facts = {"pretrained": True, "total_steps": 1000, "convolutional": False, "adapted": False}
    adam, sgd = (draw_up(MODULES, **facts, adaptive=adaptive) for adaptive in (True, False))
    assert draw_up(MODULES, **{**facts, "convolutional": True}, adaptive=True) == sgd
    assert str(adam) == "0:3 0.25:0 0.8:1 0.9:2" and "trains alone up to 25% of the steps" in adam.reason
    assert str(sgd) == "0.8666:1 0.9333:2" and "pretrained: everything trains up to 80%" in sgd.reason
    slow = draw_up(MODULES, **{**facts, "convolutional": True}, adaptive=True, norm_steps=101.0)
    assert str(slow) == "0.9:3" and "everything trains up to 90%" in slow.reason
    adapted = draw_up(MODULES, **{**facts, "adapted": True}, adaptive=True)
    assert str(adapted) == "0.8:1 0.9:2" and "everything trains up to 70%" in adapted.reason
    assert (adam.modules, adam.total_steps) == (MODULES, 1000)
    for epoch_steps, share in [(500, 0.25), (100, 0.25), (20, 0.05), (1, 0.0025)]:
        assert draw_up(MODULES, **facts, adaptive=True, epoch_steps=epoch_steps).moves[1] == (share, 0, False)
    assert [adam.share_at(depth) for depth in range(4)] == pytest.approx([0.55, 0.1, 0.1, 0.25])
    assert [str(draw_up(MODULES[:n], **facts, adaptive=True)) for n in (0, 1, 2)] == ["", "", "0:1 0.25:0"]
    assert [tuple(move)[:2] for move in even_moves(6, start=0.0)] == [(0.2, 1), (0.4, 2), (0.6, 3), (0.8, 4)]
    assert [even_moves(count, 0.5) for count in (0, 1, 2)] == [()] * 3


def test_convolutions_tell_a_convolutional_network_also_without_batch_normalisation():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.Linear(8, 2))
    made = egeria.plan(net, torch.optim.AdamW(net.parameters()), total_steps=9, config={"policy": {"pretrained": True}})
    assert "everything trains up to 80%" in made.reason


def test_little_that_trains_among_many_weights_is_taken_for_adapters():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4)))
    for name, entry in net.named_parameters():
        entry.requires_grad_(name.endswith("0.bias"))
    made = egeria.plan(net, torch.optim.AdamW(net.parameters()), total_steps=9, config={"policy": {"pretrained": True}})
    assert "everything trains up to 70%" in made.reason


def test_from_scratch_and_for_an_unknown_length_nothing_is_frozen():
    facts = {"adaptive": True, "convolutional": False, "adapted": False}
    scratch = draw_up(MODULES, 1000, pretrained=False, **facts)
    unknown = draw_up(MODULES, None, pretrained=True, **facts)
    assert not scratch.moves and "from scratch; policy='egeria'" in scratch.reason
    assert not unknown.moves and "total_steps is not known; pass it" in unknown.reason


def make(name="plan", modules=4, total_steps=100, deepest=None, **policy):
    settings, names = Config.from_dict({"policy": {"name": name, **policy}}).policy, ("",) * modules
    facts = {"pretrained": settings.pretrained is True, "adaptive": False, "convolutional": False, "adapted": False}
    found = find_plan(settings, names, total_steps, **facts)
    config = Config(policy=replace(settings, plan=found and str(found)))
    return find_maker(config)(
        modules=names,
        trainable=(True,) * modules,
        deepest=modules - 1 if deepest is None else deepest,
        total_steps=total_steps,
        lr_rule=find_rule("step"),
    )


def decided(policy, last=100):
    """The depths that a policy decides, by step, asked at the steps it wants to be asked after."""
    found, frozen, step = {}, 0, 0
    while step <= last:
        depth = policy.observe(Interval(step=step, frozen=frozen))
        if depth is not None:
            assert depth.frozen != frozen and depth.reason
            found[step] = frozen = depth.frozen
        step = policy.wants.next_step(step)
    return found


def test_a_move_is_made_at_the_first_whole_step_not_before_it():
    policy = make(plan="0.54:2 0.785:3 step 90:1 0.95:0")
    assert policy.wants.steps == (54, 79, 90, 95) and policy.wants.plasticity_of is policy.wants.interval_steps is None
    assert decided(policy) == {54: 2, 79: 3, 90: 1, 95: 0}
    assert "54.0% of the training is done" in policy.observe(Interval(step=54, frozen=0)).reason
    assert decided(make(plan="0.07:1", total_steps=300)) == {21: 1}, "0.07 * 300 is a little more than 21"
    assert decided(make(plan="0.504:1 0.508:2")) == {51: 2}, "two moves within one step"


def test_a_loss_that_explodes_thaws_until_the_next_move():
    for losses, said in [
        ([1.0, 2.5], "rose from 1 to 2.5 within an interval"),
        ([1.0, None], "is not finite"),
        ([4.0, 1.0, 2.5], None),  # it was higher before: noise
        ([1.0, 1.9, 3.7], None),
        ([-0.9, -0.89], None),  # of a cosine similarity, say
        ([-1.0, 0.5], "rose from -1 to 0.5"),
        ([0.0, 0.0], None),
    ]:
        policy, step = make(plan="0:2 0.5:3"), 0
        for step, loss in enumerate(losses, start=1):
            found = policy.observe(Interval(step=step, frozen=2, num_steps=8, loss=loss))
        if said is None:
            assert found is None
            continue
        assert found.frozen == 0 and said in found.reason
        resumed = make(plan=policy.state_dict()["plan"])
        resumed.load_state_dict(policy.state_dict())
        for told in (policy, resumed):
            assert told.observe(Interval(step=step + 1, frozen=0, num_steps=8, loss=2.5)) is None
            assert told.observe(Interval(step=50, frozen=0)).frozen == 3
        for step in range(1, 8):
            alone = policy.observe(Interval(step=60 + step, frozen=3, num_steps=1, loss=99.0))
            assert alone is None, "so few steps tell little"
        assert policy.observe(Interval(step=68, frozen=3, num_steps=1, loss=99.0)).frozen == 0
        assert make(plan="0.9:2").observe(Interval(step=2, frozen=0, num_steps=8, loss=None)) is None, (
            "nothing is frozen"
        )


def test_no_more_freeze_than_may():
    for deepest, expected in ((None, {30: 3}), (2, {30: 2}), (0, {})):
        assert decided(make(deepest=deepest, plan="0.3:9 0.4:8")) == expected
    assert make(plan="0.5:1 0.9:3 0.95:9").wants.steps == (50, 90), "9 of 4 are 3, as before"


def test_a_policy_that_follows_no_plan_takes_none():
    for name in ["egeria", "none"]:
        with pytest.raises(
            ConfigError, match=rf"policy\.plan must be None where policy\.name is '{name}', found '0\.5:1'"
        ):
            Config.from_dict({"policy": {"name": name, "plan": "0.5:1"}})


class Training:
    """A chain of four layer modules in training."""

    def __init__(self, directory, optimizer=torch.optim.SGD, norm=nn.Identity, **arguments):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm(8)) for _ in range(4)))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        config = {"modules": {"pattern": r"\d"}, "plasticity": {"interval_steps": 2}}
        arguments = {"total_steps": TOTAL, "config": config, "directory": directory, **arguments}
        self.run = egeria.attach(self.model, self.optimizer, **arguments)

    def train(self, steps):
        for _ in range(steps):
            loss = self.model(torch.randn(4, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.step(loss)
        return self


def moves(directory):
    journal = read_journal(directory)
    assert not journal.of(FaultCaught)
    return [(event.step, getattr(event, "frozen", 0)) for event in journal if isinstance(event, (ModuleFrozen, Thawed))]


def test_a_run_freezes_by_its_plan_and_says_so_at_its_first_step(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="egeria")
    training = Training(tmp_path, plan="0.5:1 0.75:3 0.9:0")
    assert not read_journal(tmp_path).of(PlanMade)
    training.train(1)
    assert str(training.run.plan) == "0.5:1 0.75:3 0.9:0" and len(training.run.plan.modules) == 4
    (made,) = read_journal(tmp_path).of(PlanMade)
    assert (made.step, made.plan, made.reason) == (0, str(training.run.plan), "given by the user")
    # A layer is a quarter of the iteration, of which two thirds are the backward pass.
    assert made.skipped_share == pytest.approx((0.25 * 1 + 0.15 * 3) / 6, rel=0.1)
    (line,) = (line for record in caplog.records if "plan is" in (line := record.getMessage()))
    assert line == "the plan is '0.5:1 0.75:3 0.9:0', skips 12% of the compute: given by the user"
    training.train(TOTAL - 1).run.close()
    assert moves(tmp_path) == [(20, 1), (30, 2), (30, 3), (36, 0)]
    assert len(read_journal(tmp_path).of(PlanMade)) == 1
    assert all(parameter.requires_grad for parameter in training.model.parameters())


@pytest.mark.parametrize(
    ("pretrained", "optimizer", "norm", "expected"),
    [
        (True, torch.optim.SGD, nn.LayerNorm, "0.8666:1 0.9333:2"),
        (True, torch.optim.AdamW, nn.BatchNorm1d, "0.9:3"),  # which averages over 10 of 40 steps
        (True, torch.optim.AdamW, nn.LayerNorm, "0:3 0.25:0 0.8:1 0.9:2"),
        (False, torch.optim.AdamW, nn.LayerNorm, ""),
    ],
)
def test_by_default_a_fine_tuning_follows_a_plan_and_scratch_none(
    pretrained, optimizer, norm, expected, tmp_path, caplog
):
    caplog.set_level(logging.INFO, logger="egeria")
    config = {"modules": {"pattern": r"\d"}, "plasticity": {"interval_steps": 2}, "policy": {"pretrained": pretrained}}
    training = Training(tmp_path, optimizer, norm, config=config).train(TOTAL)
    assert str(training.run.plan) == expected
    (made,) = read_journal(tmp_path).of(PlanMade)
    assert made.plan == expected and bool(made.skipped_share) == pretrained
    assert ("nothing is frozen: the model is trained from scratch" in caplog.text) != pretrained
    assert training.run.frozen == int(expected[-1:] or 0)
    training.run.close()


@pytest.mark.parametrize(
    ("changes", "rate", "saved_at", "planned", "thaws_at"),
    [
        ({}, 0.1, 20, 80, 160),
        ({}, 0.1, 40, 80, 160),
        ({}, 0.0, 20, 80, 80),
        ({"loader": [0] * 16}, 0.1, 10, 40, 80),  # twenty epochs
        ({"loader": [0] * 34}, 0.1, 20, 80, 80),  # nine
        ({"loader": None}, 0.1, 20, 80, 80),
        ({"plan": "0:3 0.25:0"}, 0.1, 20, 80, 80),
    ],
)
def test_the_first_phase_is_longer_where_the_loss_falls_far_in_the_first_of_many_epochs(
    changes, rate, saved_at, planned, thaws_at, tmp_path
):
    config = {"modules": {"pattern": r"\d"}, "policy": {"pretrained": True}}
    given = {"total_steps": 320, "config": config, "loader": [0] * 32, **changes}
    runs = [Training(tmp_path / name, torch.optim.AdamW, nn.LayerNorm, **given) for name in "ab"]
    length = len(given["loader"]) if given["loader"] else None
    shown = egeria.plan(runs[0].model, runs[0].optimizer, total_steps=320, epoch_steps=length, config=config)
    runs[0].optimizer.param_groups[0]["lr"] = runs[1].optimizer.param_groups[0]["lr"] = rate
    runs[0].train(saved_at)
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    runs[1].run.load_state_dict(runs[0].run.state_dict())
    for training in runs:
        training.train(170 - saved_at).run.close()
        assert f"0:3 {thaws_at / 320}:0" in str(training.run.plan)
    assert moves(tmp_path / "a")[3:] == moves(tmp_path / "b") == [(thaws_at, 0)]
    made, *changed = read_journal(tmp_path / "a").of(PlanMade)
    assert f"0:3 {planned / 320}:0" in made.plan and len(changed) == (thaws_at > planned)
    assert str(shown) == made.plan or "plan" in changes
    for event in changed:
        assert 0 <= event.step - length < 4 and event.skipped_share > made.skipped_share
        assert "alone for longer: the training loss fell from" in event.reason == runs[0].run.plan.reason


class Named(nn.Module):
    """Blocks with names, of which the first is never called, as in a loop over part of a list."""

    def __init__(self):
        super().__init__()
        self.unused, self.body, self.head = nn.Linear(8, 8), nn.ModuleDict(), nn.Linear(8, 8)
        for name in ("first", "second", "third"):
            self.body[name] = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.body.values():
            x = torch.relu(block(x))
        return self.head(x)


@pytest.mark.parametrize("before", ["nothing", "a dry pass", "a step that is skipped"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_plan_in_epochs_and_names_is_followed_to_the_step(accumulation, before, tmp_path):
    torch.manual_seed(0)
    model, batches = Named(), [torch.randn(4, 8) for _ in range(12)]
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.01), 12 // accumulation
    plan = "epoch 1:second epoch 2.5:0"
    run = egeria.attach(model, optimizer, batches, total_steps=4 * steps, plan=plan, directory=tmp_path)
    if before != "nothing":
        loss = model(batches[0]).sum()
        if before == "a step that is skipped":  # as GradScaler does
            loss.backward()
            optimizer.zero_grad()
            run.step(loss)
    for number, batch in enumerate(batches * 4, start=1):
        loss = model(batch).square().mean()
        (loss / accumulation).backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        run.step(loss)
    run.close()
    depth = [module.name for module in run.modules].index("body.second") + 1
    assert str(run.plan) == f"step {steps}:{depth} step {5 * steps // 2}:0"
    assert moves(tmp_path) == [*((steps, frozen) for frozen in range(1, depth + 1)), (5 * steps // 2, 0)]


def test_a_plan_that_names_what_the_model_has_not_is_refused_and_what_never_runs_is_declined(tmp_path):
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arguments = {"total_steps": 10, "directory": tmp_path}
    with pytest.raises(ConfigError, match=r"found 'body\.fourth', which is none"):
        egeria.attach(model, optimizer, plan="0.5:body.fourth", **arguments)
    ordered = {"loader": range(40), "plan": "epoch 1:1 0.5:2"}  # it is, with four micro-batches for a step
    egeria.attach(model, optimizer, **ordered, **arguments).close()
    with pytest.raises(ConfigError, match=r"found 'epoch 1:1' and none\. Pass the loader"):
        egeria.attach(model, optimizer, plan="epoch 1:1", **arguments)
    with (
        egeria.attach(model, optimizer, plan="0.5:unused", **arguments) as run,
        pytest.warns(UserWarning, match="unused"),
    ):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        run.step(1.0)
    (declined,) = read_journal(tmp_path).of(Declined)
    assert declined.what == "freezing" and "found 'unused'" in declined.reason
    assert not read_journal(tmp_path).of(FaultCaught)


def test_a_resumed_run_follows_the_plan_that_it_began_with(tmp_path):
    first = Training(tmp_path / "first", plan="0.5:1 0.75:2").train(24)
    state = first.run.state_dict()
    second = Training(tmp_path / "second", plan="0.6:3")
    with pytest.warns(UserWarning, match=r"another plan: the state goes on with '0.5:1 0.75:2'"):
        second.run.load_state_dict(state)
    assert second.run.frozen == 1 and str(second.run.plan) == "0.5:1 0.75:2"
    second.train(TOTAL - 24)
    assert moves(tmp_path / "second") == [(30, 2)]
    third = Training(tmp_path / "third", policy="linear")
    with pytest.raises(StateError, match=r"'plan'.*'linear'"):
        third.run.load_state_dict(state)
