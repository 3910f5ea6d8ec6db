"""Copies, averages and pickles of a model made in the middle of a run have nothing of ours."""

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
from menagerie import MENAGERIE

SPECIMEN = next(specimen for specimen in MENAGERIE if specimen.name == "residual")


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "average": lambda model: AveragedModel(model).module,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "python pickle": lambda model: pickle.loads(pickle._dumps(model)),
    "cloudpickle": lambda model: pickle.loads(cloudpickle.dumps(model)),
    "torch.save": saved,
}


class OwnCopy(nn.Sequential):
    """A model that says itself how it is copied."""

    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        copied.note = "copied by itself"
        return copied


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
            entries = value.values() if attribute.endswith("_hooks") else [value]
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


@pytest.mark.parametrize("way", WAYS)
def test_a_part_is_copied_clean_too(way, tmp_path):
    loop = frozen_loop(tmp_path)
    for name in loop.run.modules[0].submodules:
        part = loop.model.get_submodule(name)
        copied = WAYS[way](part)
        assert ours_in(copied) == [] and all(parameter.requires_grad for parameter in copied.parameters())
        assert all(entry.training for entry in copied.modules())
    loop.run.close()


def test_what_the_user_has_frozen_and_hooked_is_copied_as_it_is(tmp_path):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(4)])
    model[0][0].bias.requires_grad_(False)
    model[1][1].eval()
    model[0].register_forward_hook(print_nothing)
    freezer = Freezer(model, parse_modules(model, pattern=r"\d"))
    freezer.freeze_to(2)
    copied = copy.deepcopy(model)
    assert [name for name, entry in copied.named_parameters() if not entry.requires_grad] == ["0.0.bias"]
    assert [name for name, entry in copied.named_modules() if not entry.training] == ["1.1"]
    assert len(copied[0]._forward_hooks) == 1
    model.eval()
    assert not any(entry.training for entry in copy.deepcopy(model).modules())
    freezer.thaw()
    assert ours_in(model) == []


def print_nothing(*_):
    pass


def test_a_model_that_copies_itself_gives_clean_copies():
    model = OwnCopy(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)])
    freezer = Freezer(model, parse_modules(model, pattern=r"\d"))
    freezer.freeze_to(1)
    copied = copy.deepcopy(model)
    assert copied.note == "copied by itself" and ours_in(copied) == []
    assert all(parameter.requires_grad for parameter in copied.parameters())


def test_model_and_optimizer_stay_together_in_a_copy(tmp_path):
    loop = frozen_loop(tmp_path)
    for way in (copy.deepcopy, WAYS["pickle"], WAYS["torch.save"]):
        model, optimizer = way((loop.model, loop.optimizer))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in model.parameters()}
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
