"""Layer modules that freeze at the same step: rehearsed once, refused as they would be one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import egeria
from egeria import events
from egeria.journal import read_journal
from egeria.policy import EndBootstrapping, Freeze, Thaw
from egeria.session.applying import in_groups

EVERY = 4
"""Steps of an interval."""


class Branches(nn.Module):
    """`a` leads to nothing that trains, `b` to a hidden state, which is put out beside the rest."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        hidden = self.b(x)
        return {"hidden": hidden, "logits": self.d(self.c(hidden)), "monitor": self.a(x).detach()}


def chain(count=5):
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(count)), nn.Linear(8, 8))


def train(model, directory, plan, steps=40, on_event=None):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {
        "plasticity": {"interval_steps": EVERY},
        "modules": {"pattern": r"[a-z\d]"},
        "cache": {"enabled": False},
    }
    arguments = {"total_steps": 100, "controller": "inline", "directory": directory, "config": config}
    run = egeria.attach(model, optimizer, plan=plan, **arguments)
    if on_event is not None:
        run.on_event(lambda event: on_event(run, event))
    for _ in range(steps):
        output = model(torch.randn(4, 8))
        loss = (output["logits"] if isinstance(output, dict) else output).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)
    return run, optimizer


def frozen(directory):
    return [(event.step, event.module, event.frozen) for event in read_journal(directory).of(events.ModuleFrozen)]


def test_decisions_are_applied_in_order_and_freezes_that_follow_each_other_as_one():
    first, second, third = (Freeze(module=module, reason="") for module in range(3))
    ended, thaw = EndBootstrapping(reason=""), Thaw(reason="", window=2)
    assert list(in_groups([ended, first, second, thaw, third])) == [
        (ended, []),
        (first, [first, second]),
        (thaw, []),
        (third, [third]),
    ]
    assert list(in_groups([])) == []


def test_several_are_rehearsed_once_and_journaled_each(tmp_path):
    calls = []
    for depth in (1, 4):
        model = chain()
        model.register_forward_hook(lambda *_: calls.append(1))
        calls.clear()
        run, _ = train(model, tmp_path / str(depth), f"0.1:{depth}", steps=20)
        run.close()
        assert frozen(tmp_path / str(depth)) == [(12, module, module + 1) for module in range(depth)]
        if depth == 1:
            single = len(calls)
    assert len(calls) == single
    shares = [event.parameter_share for event in read_journal(tmp_path / "4").of(events.ModuleFrozen)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(4 / 6)


def test_what_is_accepted_one_by_one_is_accepted_together(tmp_path):
    run, _ = train(Branches(), tmp_path, "0.1:2")
    run.close()
    assert frozen(tmp_path) == [(12, 0, 1), (12, 1, 2)]
    assert not read_journal(tmp_path).of(events.Declined)


def test_what_would_break_the_training_is_refused_by_its_own_name(tmp_path):
    model = nn.Module()
    model.a, model.b, model.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(x):
        return {"own": model.a(x), "logits": model.c(model.b(x))}

    model.forward = forward
    run, _ = train(model, tmp_path, "0.1:2")
    (declined,) = [event for event in read_journal(tmp_path).of(events.Declined) if event.what == "freezing"]
    assert declined.reason.startswith("with a frozen an output of the model would have no gradient left")
    assert run.frozen == 0 and all(parameter.requires_grad for parameter in model.parameters())
    assert frozen(tmp_path) == [], "the other one was not frozen either"


def test_a_run_that_is_closed_at_the_first_of_them_leaves_all_as_it_was(tmp_path):
    def close(run, event):
        if isinstance(event, events.ModuleFrozen):
            run.close()

    model = chain()
    _, optimizer = train(model, tmp_path, "0.1:3", on_event=close)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert len(read_journal(tmp_path).of(events.ModuleFrozen)) == 1
