"""Copies, averages and pickles of a model that a run watches have nothing of ours, from `attach` to `close`."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import egeria
from egeria.journal import EgeriaWarning
from egeria.layers.freezing import Freezer
from egeria.layers.modules import parse_modules
from egeria.testing import ScriptedController
from loops import FAST, Loop, outside
from menagerie import SPECIMENS

SPECIMEN = SPECIMENS["residual"]


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "average": lambda model: AveragedModel(model).module,
    "cloudpickle": lambda model: pickle.loads(cloudpickle.dumps(model)),
    "torch.save": saved,
}


def frozen_loop(tmp_path, specimen=SPECIMEN, steps=None, **options):
    loop = Loop(specimen, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path, **options})
    loop.step(steps or 1)
    while steps is None and not loop.run.frozen:
        loop.step()
    return loop


def ours_in(module):
    """Return the names of what a module or its parameters have of this library."""
    found = []
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            entries = value.values() if attribute.endswith("_hooks") and isinstance(value, dict) else [value]
            found += [
                f"{name}.{attribute}"
                for entry in entries
                if str(getattr(getattr(entry, "func", entry), "__module__", "")).startswith("egeria")
                or str(type(entry).__module__).startswith("egeria")
            ]
    return found + [name for name, parameter in module.named_parameters() if "__deepcopy__" in vars(parameter)]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_as_if_nothing_had_been_attached(way, tmp_path):
    loop, plain = frozen_loop(tmp_path), Loop(SPECIMEN)
    copied = WAYS[way](loop.model)
    assert ours_in(loop.model), "the test is empty if there is nothing to leave out"
    assert ours_in(copied) == []
    assert outside(copied) == outside(WAYS[way](plain.model.train()))
    assert all(torch.equal(*pair) for pair in zip(loop.model.parameters(), copied.parameters(), strict=True))
    before = loop.run.frozen
    loop.step(2)
    assert loop.run.frozen >= before > 0, "the run goes on with what is frozen"
    assert not all(parameter.requires_grad for parameter in loop.model.parameters())
    loop.run.close()
    assert outside(loop.model) == outside(plain.model)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_made_before_the_first_step_is_clean(way, tmp_path):
    loop = Loop(SPECIMEN, {"controller": ScriptedController(), "config": FAST, "directory": tmp_path})
    assert ours_in(loop.model) and ours_in(WAYS[way](loop.model)) == []
    loop.run.close()


def test_tied_weights_stay_tied_in_a_copy():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    freezer = Freezer(model, parse_modules(model, pattern=r"\d"))
    freezer.freeze_to(2)
    for way in WAYS.values():
        copied = way(model)
        assert copied[0].weight is copied[1].weight and copied[0].weight.requires_grad


def test_a_copy_trains_on_as_plain_training_would(tmp_path):
    loop = frozen_loop(tmp_path)
    copied = copy.deepcopy(loop.model)
    args, kwargs = SPECIMEN.example(torch.Generator().manual_seed(3))
    SPECIMEN.loss(copied(*args, **kwargs)).backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(module.training for module in copied.modules())
    loop.run.close()


def test_a_run_that_is_dropped_leaves_nothing_to_copy(tmp_path):
    loop = frozen_loop(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EgeriaWarning)
        loop.run = None
    assert ours_in(loop.model) == []
    assert isinstance(egeria.attach(loop.model, loop.optimizer, config=FAST).close(), type(None))


class CopiesItself(nn.Sequential):
    """Its class copies its attributes one by one."""

    def __deepcopy__(self, memo):
        made = memo[id(self)] = type(self)()
        made.__dict__.update(copy.deepcopy(vars(self), memo))
        return made


def layers():
    torch.manual_seed(0)
    return [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make", [lambda: torch.fx.symbolic_trace(nn.Sequential(*layers())), lambda: CopiesItself(*layers())]
)
def test_a_model_whose_class_copies_itself_is_watched_and_copied_like_any_other(way, make, tmp_path):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = egeria.attach(
        model, optimizer, total_steps=60, directory=tmp_path, controller=ScriptedController(), config=FAST
    )
    copies = [WAYS[way](model)]
    for _ in range(60):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
        if run.frozen:
            break
    assert run.frozen
    copies.append(WAYS[way](model))
    assert [ours_in(copied) for copied in copies] == [[], []]
    assert all(parameter.requires_grad for parameter in copies[1].parameters())
    inputs = torch.randn(3, 8)
    assert torch.equal(model(inputs), copies[1](inputs))
    run.close()
