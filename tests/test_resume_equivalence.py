"""Law 5: a run that stops and is resumed is one that never stopped, over the whole menagerie."""

from __future__ import annotations

import dataclasses
import io
import random
from pathlib import Path

import pytest
import torch

from egeria import EgeriaWarning, attach, read_journal
from egeria.events import (
    CacheDecided,
    CacheUsed,
    ComputeProfiled,
    ControllerChosen,
    Declined,
    PlasticityRead,
    Resumed,
    RunStarted,
)
from egeria.report.history import read_history
from egeria.report.summary import summarize
from loops import FAST, Loop, differences
from menagerie import MENAGERIE, SPECIMENS
from ranks import replica, run_ranks

STEPS = 60
ONCE_A_PROCESS = (RunStarted, ControllerChosen, ComputeProfiled, Resumed)
"""Told by each process that trains, and no decision."""
BY_THE_CLOCK = (CacheDecided, CacheUsed)
"""Whether storing pays is measured anew by each process; what training comes to does not depend on it."""
CARRIES = "CarryingState"
"""It keeps numbers in plain attributes, which no checkpoint of a loop has."""
RESUMABLE = [specimen for specimen in MENAGERIE if not specimen.unsupported and specimen.name != CARRIES]
INLINE = {"config": {**FAST, "freezing": {"tolerance_share": 2.0}}, "controller": "inline"}


def course(directory, after):
    """Return all that a journal says of the time after a step, without the seconds that things took."""
    events = [event for event in read_journal(directory) if not isinstance(event, (*ONCE_A_PROCESS, *BY_THE_CLOCK))]
    seconds = ("wall_s", "cpu_s")
    return [
        {name: value for name, value in dataclasses.asdict(event).items() if not name.endswith(seconds)}
        | {"kind": event.kind}
        for event in events
        if event.step > after
    ]


@pytest.mark.slow  # tests/laws has the law over eight models
@pytest.mark.parametrize("specimen", RESUMABLE, ids=lambda specimen: specimen.name)
@pytest.mark.parametrize("half", [0, 1])
def test_law_5_stop_and_resume_is_uninterrupted(specimen, half, tmp_path):
    stop = half * STEPS // 2 + random.Random(f"{specimen.name} {half}").randint(1, STEPS // 2 - 1)
    whole = Loop(specimen, {**INLINE, "directory": tmp_path / "whole"})
    first = Loop(specimen, {**INLINE, "directory": tmp_path / "first"})
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


@pytest.mark.parametrize("place", ["another directory", "the same directory"])
def test_a_resumed_run_names_the_layers_in_the_order_that_the_first_one_saw(place, tmp_path):
    """They run in another order than they are defined in; the second run is told so by the state."""
    first = Loop(SPECIMENS["Backwards"], {**INLINE, "directory": tmp_path / "first"})
    first.step(STEPS // 2)
    names, before = [module.name for module in first.run.modules], first.run.summary()
    assert before.frozen
    checkpoint = first.save()
    folder = tmp_path / "first" if place == "the same directory" else tmp_path / "second"
    second = Loop(SPECIMENS["Backwards"], {**INLINE, "directory": folder}, seed=9)
    assert [module.name for module in second.run.modules] != names
    second.load(checkpoint)
    after = second.run.summary()
    assert list(after.modules) == names and after.parameter_share == before.parameter_share
    second.step(STEPS - STEPS // 2)
    deepest = first.run._session.parts.policy.state_dict()["deepest_freeze"]
    second.run.close()
    summary = summarize(read_history(folder))
    assert [module.name for module in summary.modules] == names and summary.deepest_freeze == deepest


def test_other_settings_of_the_cut_than_those_of_the_saved_run_are_declined(tmp_path):
    first = Loop(SPECIMENS["residual"], {**INLINE, "directory": tmp_path / "first"})
    first.step(STEPS // 2)
    names, checkpoint = [module.name for module in first.run.modules], first.save()
    settings = {**INLINE["config"], "modules": {"pattern": "|".join(first.run.modules[i].tap for i in (0, -1))}}
    second = Loop(SPECIMENS["residual"], {**INLINE, "config": settings, "directory": tmp_path / "second"})
    with pytest.warns(EgeriaWarning, match=r"modules\.pattern=.*but not the state of the run"):
        second.load(checkpoint)
    assert [module.name for module in second.run.modules] == list(second.run.summary().modules) == names
    (declined,) = read_journal(tmp_path / "second").of(Declined)
    assert declined.step == STEPS // 2
    second.step()
    assert list(second.run.summary().modules) == names


@pytest.mark.parametrize("stop", [1, 9])
def test_a_run_from_scratch_is_none_of_fine_tuning_where_it_is_resumed(stop, tmp_path):
    """Its normalisation layers have trained by then, as those of a model that came trained."""
    settings = {"total_steps": 400, "config": {"controller": {"kind": "inline"}}}
    specimen = SPECIMENS["residual"]
    whole = Loop(specimen, {**settings, "directory": tmp_path / "whole"})
    first = Loop(specimen, {**settings, "directory": tmp_path / "first"})
    whole.step(STEPS)
    first.step(stop)
    checkpoint = first.save()
    second = Loop(specimen, seed=9)
    trained = torch.load(io.BytesIO(checkpoint), weights_only=False)["model"]
    second.model.load_state_dict(trained)
    second.run = attach(second.model, second.optimizer, directory=tmp_path / "second", **settings)
    second.load(checkpoint)
    second.step(STEPS - stop)
    assert differences(whole.everything(), second.everything()) == []
    decided = [run._session.parts.policy.state_dict() for run in (whole.run, second.run)]
    assert decided[0] == decided[1] and second.run.state_dict()["norms"] == whole.run.state_dict()["norms"]
    assert str(second.run.plan) == str(whole.run.plan) == ""


# --- on another number of ranks ------------------------------------------------------------------


def train_parts(names, folder, checkpoints, steps):
    """Train each for some steps from its checkpoint, on as many ranks as there are; return the next ones."""
    found = {}
    for name in names:
        loop = Loop(
            SPECIMENS[name],
            {**INLINE, "directory": Path(folder, name)},
            seed=9 if name in checkpoints else 0,
            wrap=replica,
        )
        if name in checkpoints:
            loop.load(checkpoints[name])
        loop.step(steps)
        found[name] = loop.save(), loop.everything(), loop.run.frozen
    return found


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_law_5_a_run_goes_on_on_another_number_of_ranks(tmp_path):
    names = ["residual", "with_dropout", "Backwards"]
    [whole] = run_ranks(train_parts, names, str(tmp_path / "whole"), {}, STEPS, num_ranks=1)
    found = {}
    for part, num_ranks in enumerate((2, 1, 2)):
        checkpoints = {name: found[name][0] for name in found}
        arguments = (names, str(tmp_path / f"part{part}"), checkpoints, STEPS // 3)
        found = run_ranks(train_parts, *arguments, num_ranks=num_ranks)[0]
    for name in names:
        (_, end, frozen), (_, parts_end, parts_frozen) = whole[name], found[name]
        assert differences(end, parts_end) == [] and parts_frozen == frozen > 0
        later = course(tmp_path / "part2" / name, 2 * STEPS // 3)
        assert [e for e in later if e["kind"] != "rewrapped"] == course(tmp_path / "whole" / name, 2 * STEPS // 3)
