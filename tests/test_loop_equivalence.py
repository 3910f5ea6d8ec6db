"""Training with egeria attached, frozen, thawed and replayed is what it is said to be, over the whole menagerie."""

from __future__ import annotations

import pytest
from torch import nn

from egeria import read_journal, tree
from egeria.events import Declined, ModuleFrozen, PlasticityRead, StageChanged
from egeria.testing import ScriptedController
from loops import FAST, Loop, differences, outside
from menagerie import MENAGERIE, SUPPORTED, each_supported

pytestmark = pytest.mark.slow  # tests/laws has the laws over eight models
UNSUPPORTED = [specimen for specimen in MENAGERIE if specimen.unsupported]
DOZEN = SUPPORTED[:: max(1, len(SUPPORTED) // 12)]
each = pytest.mark.parametrize("specimen", MENAGERIE, ids=lambda specimen: specimen.name)
each_of_a_dozen = pytest.mark.parametrize("specimen", DOZEN, ids=lambda specimen: specimen.name)
each_unsupported = pytest.mark.parametrize("specimen", UNSUPPORTED, ids=lambda specimen: specimen.name)


def settings(**groups):
    return {name: {**FAST.get(name, {}), **groups.get(name, {})} for name in {**FAST, **groups}}


def scripted(loss_scale=1.0, **groups):
    """Attach with readings that freeze a module every four evaluations."""
    return {"controller": ScriptedController(), "config": settings(**groups)}


def test_the_menagerie_is_large_and_described():
    assert len(SUPPORTED) >= 20
    assert len({specimen.name for specimen in MENAGERIE}) == len(MENAGERIE)
    assert all(len(specimen.case) > 10 for specimen in MENAGERIE)


@each
def test_law_1_attached_but_never_freezing_is_the_plain_loop(specimen, tmp_path):
    plain = Loop(specimen)
    config = settings(freezing={"enabled": False})
    watched = Loop(specimen, {"config": config, "directory": tmp_path})
    for loop in (plain, watched):
        loop.step(24)
    assert differences(plain.everything(), watched.everything()) == []
    journal = read_journal(tmp_path)
    if not specimen.unsupported:
        assert len(journal.of(PlasticityRead)) >= 4, "the law is empty without evaluations"
    watched.run.close()
    assert outside(plain.model) == outside(watched.model)


@each_supported
def test_law_4_freeze_then_thaw_leaves_all_as_before(specimen, tmp_path):
    loop = Loop(specimen, {**scripted(), "directory": tmp_path})
    before = outside(specimen.build().train())
    loop.step()
    deepest = len(loop.run.modules) - 1
    while loop.run.frozen < deepest:
        loop.step()
        assert len(loop.losses) < 200
    names = [name for module in loop.run.modules[:deepest] for name in module.parameters]
    kept = {name for module in loop.run.modules for name in module.shared_parameters}
    frozen = [name for name in names if name not in kept]
    roots = [loop.model.get_submodule(name) for module in loop.run.modules[:deepest] for name in module.submodules]
    assert frozen and all(not loop.model.get_parameter(name).requires_grad for name in frozen)
    at_freeze = loop.everything()
    loop.step(3)
    now = loop.everything()
    moved = set(differences(at_freeze, now))
    assert not moved & {f"model.{name}" for name in frozen}, "a frozen parameter moved"
    statistics = {f"model.{name}.{buffer}" for name, buffer in _statistics(loop.model, roots)}
    assert not moved & statistics, "a frozen normalisation layer moved"
    assert moved & {f"model.{name}" for name in loop.run.modules[-1].parameters}, "the last module must train on"
    inside = {module for root in roots for module in root.modules()}
    owners = {loop.model.get_submodule(name.rpartition(".")[0]) for name in frozen if before["gradients"][name]}
    assert not any(owner.training for owner in owners & inside)

    positions = {name: index for index, (name, _) in enumerate(loop.model.named_parameters())}
    momenta = {f"optimizer.{positions[name]}.momentum_buffer" for name in frozen}
    assert not moved & momenta, "optimizer state of a frozen parameter moved"
    groups = [len(group["params"]) for group in loop.optimizer.param_groups]
    assert groups == [len(list(loop.model.parameters()))]

    loop.model.train()
    loop.run.close()
    assert {**outside(loop.model), "attributes": None} == {**before, "attributes": None}
    loop.run = None
    thawed = loop.everything()
    loop.step(2)
    trained = {f"model.{name}" for name in frozen if before["gradients"][name]}
    unused = trained - set(differences(thawed, loop.everything()))
    assert not unused, "a thawed parameter does not train"


def _statistics(model, roots):
    inside = {module for root in roots for module in root.modules()}
    return [
        (name, buffer)
        for name, module in model.named_modules()
        if module in inside and isinstance(module, nn.modules.batchnorm._NormBase)
        for buffer, _ in module.named_buffers()
    ]


@each_of_a_dozen
def test_law_4_close_in_inference_mode_leaves_the_model_there(specimen):
    loop = Loop(specimen, scripted())
    loop.step(20)
    assert loop.run.frozen
    loop.model.eval()
    loop.run.close()
    assert not any(module.training for module in loop.model.modules())


@each_unsupported
def test_the_unsupported_train_on_unfrozen_and_say_why(specimen, tmp_path):
    loop = Loop(specimen, {"config": FAST, "directory": tmp_path})
    plain = Loop(specimen)
    for entry in (plain, loop):
        entry.step(20)
    assert differences(plain.everything(), loop.everything()) == []
    journal = read_journal(tmp_path)
    declined = " ".join(event.reason for event in journal.of(Declined))
    assert specimen.unsupported in declined
    assert not journal.of(ModuleFrozen)


@each_of_a_dozen
def test_frozen_layers_get_no_gradient_and_the_boundary_needs_none(specimen, tmp_path):
    loop = Loop(specimen, {**scripted(), "directory": tmp_path})
    loop.step(40)
    assert loop.run.frozen == len(loop.run.modules) - 1
    declined = [event.what for event in read_journal(tmp_path).of(Declined)]
    assert not [what for what in declined if "full saving" in what]
    assert [event.stage for event in read_journal(tmp_path).of(StageChanged)] == ["knowledge-guided"]
    boundary = []
    tap = loop.model.get_submodule(loop.run.modules[loop.run.frozen - 1].tap)
    tap.register_forward_hook(lambda *call: boundary.append(tree.requires_grad(call[-1])))
    loop.step()
    assert boundary and not any(boundary)
    grads = {name: parameter.grad for name, parameter in loop.model.named_parameters()}
    for module in loop.run.modules[: loop.run.frozen]:
        assert all(grads[name] is None for name in module.parameters if name not in module.shared_parameters)
