"""The laws over every model of the menagerie (`tests/laws` has them over eight), and runs that go on elsewhere."""

import io
import random
from pathlib import Path

import pytest
import torch

from egeria import StateError, attach, read_journal, tree
from egeria.events import Declined, ModuleFrozen, PlasticityRead, RunStarted, Thawed
from loops import FAST, Loop, differences, outside
from menagerie import MENAGERIE, SPECIMENS, SUPPORTED
from ranks import replica, run_ranks
from scripted import scripted_loop

STEPS = 60
# One number format: 'auto' takes the fastest, which two trainings may time differently.
INLINE = {
    "config": {**FAST, "freezing": {"tolerance_share": 2.0}, "reference": {"precision": "fp32"}},
    "controller": "inline",
}


ALWAYS = ("KeepingAll", "BreakingInInference", "Uncopyable", "Wrapped", "norms_kept_in_inference", "spectral_norm")


def over(specimens):
    return pytest.mark.parametrize("specimen", specimens, ids=lambda specimen: specimen.name)


@pytest.mark.parametrize(
    "specimen",
    [pytest.param(each, marks=() if each.name in ALWAYS else pytest.mark.slow, id=each.name) for each in MENAGERIE],
)
def test_law_1_attached_but_never_freezing_is_the_plain_loop_and_the_unsupported_are_told_why(specimen, tmp_path):
    plain = Loop(specimen)
    config = {**FAST, "freezing": {"tolerance_readings": 10**6}, "reference": {"precision": "fp32"}}
    watched = Loop(specimen, {"config": config, "directory": tmp_path})
    for loop in (plain, watched):
        loop.step(24)
    assert differences(plain.everything(), watched.everything()) == []
    journal = read_journal(tmp_path)
    if specimen.unsupported:
        assert specimen.unsupported in " ".join(event.reason for event in journal.of(Declined))
    else:
        assert len(journal.of(PlasticityRead)) >= 4, "the law is empty without evaluations"
    watched.run.close()
    assert outside(plain.model) == outside(watched.model)


@pytest.mark.slow
@over(SUPPORTED)
def test_law_4_freeze_then_thaw_leaves_all_as_before(specimen, tmp_path):
    loop = scripted_loop(tmp_path, specimen.name)
    before = outside(specimen.build().train())
    loop.step(40)
    run, deepest = loop.run, read_journal(tmp_path).first(RunStarted).deepest_freeze
    assert run.frozen == deepest > 0
    names = [name for module in run.modules[:deepest] for name in module.parameters]
    assert names and not any(loop.model.get_parameter(name).requires_grad for name in names)
    boundary = []
    tap = loop.model.get_submodule(run.modules[deepest - 1].tap)
    handle = tap.register_forward_hook(lambda *call: boundary.append(tree.requires_grad(call[-1])))
    at_freeze = loop.everything()
    loop.step(3)
    handle.remove()
    assert boundary and not any(boundary)
    moved = set(differences(at_freeze, loop.everything()))
    assert not moved & {f"model.{name}" for name in names}, "a frozen parameter moved"
    assert moved & {f"model.{name}" for name in run.modules[-1].parameters}, "the last module must train on"
    positions = {name: index for index, (name, _) in enumerate(loop.model.named_parameters())}
    assert not moved & {f"optimizer.{positions[name]}.momentum_buffer" for name in names}

    loop.model.train()
    run.close()
    assert {**outside(loop.model), "attributes": None} == {**before, "attributes": None}  # some models set their own
    loop.run = None
    thawed = loop.everything()
    loop.step(8)
    unused = {f"model.{name}" for name in names} - set(differences(thawed, loop.everything()))
    assert not unused, "a thawed parameter does not train"


# --- law 5 ---------------------------------------------------------------------------------------


def course(directory, after):
    """Return what a journal says was read and decided after a step."""
    events = [e for e in read_journal(directory) if isinstance(e, (PlasticityRead, ModuleFrozen, Thawed))]
    return [(e.kind, e.step, getattr(e, "module", 0), getattr(e, "value", 0)) for e in events if e.step > after]


@pytest.mark.slow
@over([each for each in SUPPORTED if each.name != "KeepingAll"])  # which keeps what no checkpoint has
def test_law_5_stop_and_resume_is_uninterrupted(specimen, tmp_path):
    stop = random.Random(specimen.name).randint(1, STEPS - 1)
    whole, first = (Loop(specimen, {**INLINE, "directory": tmp_path / part}) for part in ("whole", "first"))
    whole.step(STEPS)
    first.step(stop)
    checkpoint = first.save()
    del first
    second = Loop(specimen, {**INLINE, "directory": tmp_path / "second"}, seed=9)
    second.load(checkpoint)
    second.step(STEPS - stop)
    assert differences(whole.everything(), second.everything()) == []
    assert second.run.frozen == whole.run.frozen
    assert course(tmp_path / "second", stop) == course(tmp_path / "whole", stop)
    assert read_journal(tmp_path / "whole").of(PlasticityRead)


def test_a_resumed_run_has_the_layer_modules_of_the_first_one(tmp_path):
    first = Loop(SPECIMENS["Backwards"], {**INLINE, "directory": tmp_path / "first"})
    first.step(STEPS // 2)
    names, before = [module.name for module in first.run.modules], first.run.summary()
    assert before.frozen
    checkpoint = first.save()
    second = Loop(SPECIMENS["Backwards"], {**INLINE, "directory": tmp_path / "second"}, seed=9)
    assert second.run.modules == ()
    second.load(checkpoint)
    after = second.run.summary()
    assert second.run.modules == first.run.modules
    assert list(after.modules) == names and after.parameter_share == before.parameter_share


def test_other_settings_of_the_cut_than_those_of_the_saved_run_are_refused(tmp_path):
    first = Loop(SPECIMENS["residual"], {**INLINE, "directory": tmp_path / "first"})
    first.step(STEPS // 2)
    modules, checkpoint = first.run.modules, first.save()
    settings = {**INLINE["config"], "modules": {"pattern": "|".join(modules[i].tap for i in (0, -1))}}
    second = Loop(SPECIMENS["residual"], {**INLINE, "config": settings, "directory": tmp_path / "second"})
    with pytest.raises(StateError, match="keeps its layer modules"):
        second.load(checkpoint)


@pytest.mark.parametrize("plan", [None, "step 5:99"])
def test_a_run_from_scratch_is_none_of_fine_tuning_where_it_is_resumed(plan, tmp_path):
    """Its normalisation layers have trained by then, as those of a model that came trained."""
    specimen = SPECIMENS["residual"]
    first = Loop(specimen, {"total_steps": 400, "plan": plan, "directory": tmp_path / "first"})
    first.step(9)
    checkpoint = first.save()
    second = Loop(specimen, seed=9)
    second.model.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=False)["model"])
    second.run = attach(second.model, second.optimizer, plan=plan, directory=tmp_path / "second", total_steps=400)
    second.load(checkpoint)
    second.step(5)
    assert second.run.modules == first.run.modules
    assert str(second.run.plan) == str(first.run.plan) == (plan or "")
    counts = {int(value) for name, value in second.model.state_dict().items() if "num_batches" in name}
    assert counts == {14 if plan is None else 5}, "also in the last layer module, while that trains alone"


def train_parts(names, folder, checkpoints, steps):
    """Train each for some steps from its checkpoint, on as many ranks as there are; return the next ones."""
    found = {}
    for name in names:
        attach = {**INLINE, "directory": Path(folder, name)}
        loop = Loop(SPECIMENS[name], attach, seed=9 if name in checkpoints else 0, wrap=replica)
        if name in checkpoints:
            loop.load(checkpoints[name])
        loop.step(steps)
        found[name] = loop.save(), loop.everything(), loop.run.frozen
    return found


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_law_5_a_run_goes_on_on_another_number_of_ranks(tmp_path):
    names = ["with_dropout", "Backwards"]
    [whole] = run_ranks(train_parts, names, str(tmp_path / "whole"), {}, STEPS, num_ranks=1)
    found = {}
    for part, num_ranks in enumerate((2, 1, 2)):
        checkpoints = {name: found[name][0] for name in found}
        arguments = (names, str(tmp_path / f"part{part}"), checkpoints, STEPS // 3)
        found = run_ranks(train_parts, *arguments, num_ranks=num_ranks)[0]
    for name in names:
        (_, end, frozen), (_, parts_end, parts_frozen) = whole[name], found[name]
        assert differences(end, parts_end) == [] and parts_frozen == frozen > 0
        after = 2 * STEPS // 3
        assert course(tmp_path / "part2" / name, after) == course(tmp_path / "whole" / name, after)
