"""A rank that dies, lags, fails or differs: the job ends or goes on as plain data-parallel training would."""

from __future__ import annotations

import ast
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import egeria
from egeria.events import Declined, FaultCaught
from egeria.policy import Freeze
from egeria.testing import ScriptedController
from loops import FAST
from ranks import run_cases, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
STEPS = 40


def small_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 2))


class Job:
    """A training loop of one rank that can be disturbed at a step."""

    def __init__(self, make=small_model, **attach):
        self.rank = distributed.get_rank()
        self.model = make()
        self.called = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        attach = {"config": FAST, "controller": ScriptedController(), **attach}
        directory = "journal" if self.rank == 0 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", egeria.EgeriaWarning)
            self.run = egeria.attach(self.model, self.optimizer, directory=directory, **attach)
        self.frozen = []

    def step(self, between=lambda: None):
        self.called.train()
        generator = torch.Generator().manual_seed(100 * len(self.frozen) + self.rank)
        loss = self.called(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        between()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", egeria.EgeriaWarning)
            self.run.step(loss)
        self.frozen.append(self.run.frozen)

    def unfreeze(self):
        self.model[0].requires_grad_(True)

    def answer(self):
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        recent = list(self.run._recorder.recent)
        told = [event.reason for event in recent if isinstance(event, Declined)]
        told += [event.error for event in recent if isinstance(event, FaultCaught)]
        return self.frozen, weights, trained, " | ".join(told)


def train_disturbed(disturb, steps=STEPS):
    job = Job()
    for step in range(steps):
        if step == 26 and job.rank == 1:
            disturb(job)
        job.step()
    return job.answer()


def break_policy(job):
    """Let this rank's policy fail in the midst of a meeting."""
    policy = job.run._session.parts.policy
    policy.observe_interval = lambda interval: 1 / 0


def break_measuring(job):
    """Let this rank fail before the others hear of its interval."""
    job.run._session.meter.timer.take_medians = lambda: 1 / 0


def break_freezing(job):
    """Let this rank fail to freeze what all have decided to freeze."""
    job.run._session.parts.applier._freezer.freeze_to = lambda *args, **kwargs: 1 / 0


def break_ordering(job):
    """Let this rank fail outside of meetings, again and again."""
    job.run._session._arm = lambda: 1 / 0


def decide_alone(job):
    """Let this rank decide what nobody else does."""
    policy = job.run._session.parts.policy
    policy.observe_interval = lambda interval: (Freeze(module=policy.frozen, reason="alone"),)


DISTURBANCES = {
    break_policy: "ZeroDivisionError",
    break_measuring: "ZeroDivisionError",
    break_freezing: "ZeroDivisionError",
    break_ordering: "ZeroDivisionError",
    decide_alone: "does not have what rank 0 has",
}


@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda disturb: disturb.__name__)
def test_one_rank_that_cannot_go_on_thaws_all_at_the_same_step(disturb):
    (first, weights, trained, told), (second, others, _, told_there) = run_ranks(train_disturbed, disturb)
    assert max(first[:26]) > 0, "nothing was frozen yet"
    assert first == second
    assert first[-1] == second[-1] == 0 and all(trained)
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    assert DISTURBANCES[disturb] in told_there and ("rank 1" in told)


def unfreeze_by_hand():
    job = Job()
    for step in range(STEPS):
        if step == 21:
            job.model[0].requires_grad_(True)
        job.step()
    return job.answer()


def test_layers_that_the_loop_unfreezes_are_reduced_again():
    (first, weights, trained, told), (second, others, *_) = run_ranks(unfreeze_by_hand)
    assert first == second and first[20] > 0 and first[23] == first[-1] == 0 and all(trained)
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    assert "last word" in told


def unfreeze_on_one_rank(when):
    job = Job()
    for step in range(STEPS):
        if when == "before" and step == 21 and job.rank == 0:
            job.model[0].requires_grad_(True)
        job.step(between=lambda at=step: when == "between" and at == 21 and job.rank == 0 and job.unfreeze())
    return job.answer()


@pytest.mark.parametrize("when", ["before", "between"])
def test_layers_that_the_loop_unfreezes_on_one_rank_thaw_on_all(when):
    (first, weights, trained, told), (second, others, _, told_there) = run_ranks(unfreeze_on_one_rank, when)
    assert first == second and first[20] > 0 and first[-1] == 0 and all(trained)
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    assert "last word" in told and "rank 0 cannot go on" in told_there


def unfreeze_what_the_owner_froze():
    job = Job(make=partly_frozen)
    for step in range(STEPS):
        if step == 21:
            job.model.requires_grad_(True)
        job.step()
    return job.answer()


def partly_frozen():
    model = small_model()
    model[0].requires_grad_(False)
    return model


def test_what_its_owner_froze_and_unfreezes_trains():
    (first, weights, trained, _), (second, others, *_) = run_ranks(unfreeze_what_the_owner_froze)
    assert first == second and first[20] > 1 and first[-1] == 0 and all(trained)
    assert not torch.equal(weights[0], small_model()[0][0].weight)
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))


class Gathering(nn.Sequential):
    """Compares the features of all processes in its forward pass, as contrastive models do."""

    def forward(self, x):
        features = x
        for part in list(self)[:-1]:
            features = part(features)
        others = [torch.empty_like(features) for _ in range(distributed.get_world_size())]
        distributed.all_gather(others, features.detach().contiguous())
        return self[-1](features + sum(others))


def gather_in_forward(policy):
    job = Job(make=lambda: Gathering(*small_model()), total_steps=STEPS, config={**FAST, "policy": {**policy}})
    for _ in range(STEPS):
        job.step()
    return job.answer()


@pytest.mark.parametrize("policy", [{"name": "egeria"}, {"plan": "0.2:2"}])
def test_a_model_that_talks_to_the_others_in_forward_trains_on_unfrozen(policy):
    (first, weights, trained, told), (second, others, *_) = run_ranks(gather_in_forward, policy)
    assert first == second and first[-1] == 0 and all(trained)
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    assert "communicates between processes" in told


def join_uneven():
    job = Job()
    for _ in range(4):
        with job.called.join():
            for _ in range(7 if job.rank == 0 else 6):
                job.step()
    return job.answer()


def test_ranks_with_unequally_many_batches_train_on_unfrozen():
    (first, weights, _, told), (second, others, *_) = run_ranks(join_uneven)
    assert len(first) == 28 and len(second) == 24 and not any(first + second)
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    assert "join()" in told


def controller_fails():
    controller = ScriptedController()
    job = Job(controller=controller)
    for step in range(STEPS):
        if step == 16 and job.rank == 0:
            controller.submit = lambda request: 1 / 0
            controller.poll = lambda: 1 / 0
        job.step()
    return job.answer()


def test_a_leader_whose_controller_fails_ends_freezing_and_not_training():
    (first, weights, trained, told), (second, others, _, _) = run_ranks(controller_fails)
    assert first == second and first[15] > 0 and first[-1] == 0 and all(trained)
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    assert "ZeroDivisionError" in told


def lag():
    job = Job()
    for step in range(STEPS):
        if step in (9, 20) and job.rank == 1:
            time.sleep(1.0)
        job.step()
    return job.answer()


def test_a_rank_that_lags_is_waited_for():
    (first, weights, *_), (second, others, *_) = run_ranks(lag)
    assert first == second and first[-1] > 0
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))


def die(plain):
    """Return what the survivor of a rank that dies sees: an error from its own collective, in time."""
    job = Job(policy="none") if plain else Job()
    began = time.monotonic()
    try:
        for step in range(STEPS):
            if step == 21 and job.rank == 1:
                os._exit(0)
            job.step()
    except RuntimeError as error:
        return type(error).__name__, str(error)[:200], len(job.frozen), time.monotonic() - began
    return "ended", "", len(job.frozen), time.monotonic() - began


def survivor(plain, folder):
    found = die(plain)
    Path(folder).write_text(repr(found), encoding="utf-8")
    return found


def test_a_rank_that_dies_ends_the_job_as_it_would_without_egeria(tmp_path):
    found = {}
    for plain in (True, False):
        path = tmp_path / str(plain)
        with pytest.raises(AssertionError, match="rank 1:\nit ended without an answer"):
            run_ranks(survivor, plain, str(path), fresh=True)
        found[plain] = ast.literal_eval(path.read_text())
    assert found[True][0] == found[False][0] == "RuntimeError"
    assert found[True][2] == found[False][2] == 21, "training ends at the same step"
    assert found[False][3] < 30


def hang(timeout_s):
    job = Job()
    began = time.monotonic()
    try:
        for step in range(STEPS):
            if step == 21 and job.rank == 1:
                time.sleep(3 * timeout_s)
            job.step()
    except RuntimeError:
        return len(job.frozen), time.monotonic() - began
    return len(job.frozen), time.monotonic() - began


def test_nobody_waits_longer_than_the_timeout_of_the_process_group():
    (steps, seconds), _ = run_ranks(hang, 2.0, timeout_s=2.0, fresh=True)
    assert steps == 21 and seconds < 6


def attach_otherwise(what):
    rank = distributed.get_rank()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = {**FAST, "policy": {"name": "egeria"}}
    if what == "settings" and rank:
        config["plasticity"] = {**FAST["plasticity"], "window": 3}
    total_steps = 100 + (rank if what == "total_steps" else 0)
    try:
        egeria.attach(model, optimizer, total_steps=total_steps, config=config, directory=f"journal{rank}")
    except egeria.ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_attach_otherwise_are_told_so():
    for what, messages in run_cases(attach_otherwise, ["total_steps", "settings"]).items():
        assert all(f"same {what}; rank 1" in message for message in messages)
