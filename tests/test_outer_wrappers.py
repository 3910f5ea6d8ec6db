"""Two ranks whose model a framework wraps, before or after `attach`, or in a container of its own."""

from __future__ import annotations

import copy
import tempfile
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import egeria
from egeria.testing import ScriptedController
from loops import FAST
from menagerie import SPECIMENS
from ranks import run_cases, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
SPECIMEN = SPECIMENS["residual"]
STEPS = 40
WHERE = ["given", "before", "after", "container", "container before"]


class Container(nn.Module):
    """Holds the model, as Lightning's strategies hold a module."""

    def __init__(self, model):
        super().__init__()
        self.inner = nn.ModuleDict({"model": model})

    def forward(self, *args, **kwargs):
        return self.inner["model"](*args, **kwargs)


def wrapped(model, sizes=None):
    wrapper = DistributedDataParallel(model)
    if sizes is not None:
        wrapper.register_comm_hook(sizes, count_bytes)
    return wrapper


def count_bytes(sizes, bucket):
    """Reduce as ever, and note how much."""
    sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
    return default_hooks.allreduce_hook(None, bucket)


class Training:
    """A loop under an outer wrapper that calls what the framework calls."""

    def __init__(self, where, *, resumed=None, **options):
        torch.manual_seed(0)
        self.model, self.sizes, self.told = SPECIMEN.build(), [], []
        if resumed is not None:
            self.model.load_state_dict(resumed["model"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        given = called = self.model
        if where in ("given", "before"):
            called = wrapped(self.model, self.sizes)
            given = called if where == "given" else given
        elif where == "container before":
            called = wrapped(Container(self.model), self.sizes)
        directory = tempfile.mkdtemp(dir=".") if distributed.get_rank() == 0 else None
        options = {"config": FAST, "controller": ScriptedController(), **options}
        self.run = egeria.attach(given, self.optimizer, directory=directory, **options)
        if resumed is not None:
            self.optimizer.load_state_dict(resumed["optimizer"])
            self.run.load_state_dict(resumed["run"])
        if where == "after":
            called = wrapped(self.model, self.sizes)
        elif where == "container":
            called = wrapped(Container(self.model), self.sizes)
        self.called = called

    def train(self, first, last):
        """Return how many modules are frozen after each step."""
        frozen = []
        for step in range(first, last):
            args, kwargs = SPECIMEN.example(torch.Generator().manual_seed(2 * step + distributed.get_rank()))
            self.called.train()
            loss = SPECIMEN.loss(self.called(*args, **kwargs))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                self.run.step(loss)
            self.told += [str(warning.message) for warning in told]
            frozen.append(self.run.frozen)
        return frozen

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def checkpoint(self):
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "run")}
        return copy.deepcopy(parts)


def course(where):
    training = Training(where)
    frozen = training.train(0, STEPS)
    trained = sum(entry.numel() * entry.element_size() for entry in training.model.parameters() if entry.requires_grad)
    last = training.sizes[-1] if training.sizes else None
    training.run.close()
    left = [name for name, entry in training.model.named_parameters() if not entry.requires_grad]
    hooks = len(training.model._forward_pre_hooks)
    return frozen, training.weights(), trained, last, training.told, left, hooks


def test_an_outer_wrapper_is_followed_wherever_it_comes_from():
    found = run_cases(course, WHERE)
    assert found["given"][0][0][-1] == 3
    for where, ranks in found.items():
        for expected, (frozen, weights, trained, last, told, left, hooks) in zip(found["given"], ranks, strict=True):
            assert frozen == expected[0], where
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected[1].items()), where
            assert last == trained, f"{where}: what is frozen is not reduced"
            assert (told, left, hooks) == ([], [], 0)


def resumed(where):
    whole = Training(where)
    whole.train(0, 26)
    saved, at_save = whole.checkpoint(), whole.run.frozen
    whole.train(26, STEPS)
    whole.run.close()
    again = Training(where, resumed=saved)
    again.train(26, STEPS)
    sizes, told = again.sizes[-1] if again.sizes else None, again.told
    trained = sum(entry.numel() * entry.element_size() for entry in again.model.parameters() if entry.requires_grad)
    again.run.close()
    pairs = zip(whole.weights().values(), again.weights().values(), strict=True)
    return at_save, all(torch.equal(*pair) for pair in pairs), sizes, trained, told


def test_a_run_goes_on_frozen_under_a_wrapper_that_it_has_yet_to_see():
    for where, ranks in run_cases(resumed, ["before", "after", "container"]).items():
        for at_save, same, last, trained, told in ranks:
            assert at_save > 0 and same, where
            assert last == trained, where
            assert told == []


def never_freezing(where):
    losses = []
    for attaches in (False, True):
        torch.manual_seed(0)
        model = SPECIMEN.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        called = wrapped(model) if where == "before" else None
        run = egeria.attach(model, optimizer, config=FAST, directory=None) if attaches else None
        called = called or wrapped(Container(model))
        for step in range(12):
            args, kwargs = SPECIMEN.example(torch.Generator().manual_seed(2 * step + distributed.get_rank()))
            loss = SPECIMEN.loss(called(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if run:
                run.step(loss)
        if run:
            run.close()
    return losses[:12] == losses[12:]


def test_watching_under_an_outer_wrapper_changes_nothing():
    assert run_cases(never_freezing, ["before", "container"]) == {"before": [True] * 2, "container": [True] * 2}


def with_a_dry_run():
    torch.manual_seed(0)
    training = Training("bare")
    args, kwargs = SPECIMEN.example(torch.Generator().manual_seed(0))
    SPECIMEN.loss(training.model.train()(*args, **kwargs))
    training.called = wrapped(training.model)
    frozen = training.train(0, STEPS)
    training.run.close()
    return frozen, training.told


def test_a_call_of_the_bare_model_before_it_is_wrapped_does_no_harm():
    for frozen, told in run_ranks(with_a_dry_run):
        assert frozen[-1] == 3 and told == []


def without_any_wrapper():
    training = Training("bare")
    frozen = training.train(0, STEPS)
    training.run.close()
    return frozen, training.told


def test_a_bare_model_that_nothing_joins_is_declined():
    for frozen, told in run_ranks(without_any_wrapper):
        assert set(frozen) == {0}
        assert len(told) == 1 and "called without DistributedDataParallel" in told[0]


def in_a_wrapper_that_fixes_what_is_reduced():
    torch.manual_seed(0)
    training = Training("bare")
    training.called = DistributedDataParallel(training.model, static_graph=True)
    frozen = training.train(0, STEPS)
    training.run.close()
    return frozen, training.told


def test_options_of_an_outer_wrapper_that_cannot_follow_are_declined():
    for frozen, told in run_ranks(in_a_wrapper_that_fixes_what_is_reduced):
        assert set(frozen) == {0}
        assert len(told) == 1 and "static_graph=True" in told[0]
