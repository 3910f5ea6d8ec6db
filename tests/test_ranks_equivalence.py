"""Law 6: one rank and two ranks decide alike and agree at every step, over the whole menagerie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from egeria import read_journal
from egeria.events import ModuleFrozen, PlasticityRead, Rewrapped, StageChanged, Thawed
from loops import FAST, Loop, differences
from menagerie import SPECIMENS, SUPPORTED_NAMES
from ranks import replica, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]  # tests/laws has the law over eight models
CONFIG = {**FAST, "freezing": {"tolerance_share": 3.0}}
STEPS = 20


@dataclass
class Course:
    """What one process saw of a training run that freezes, goes deeper, and thaws."""

    frozen: list[int]
    """After each step."""
    end: dict[str, Any]
    frozen_tensors: list[dict[str, torch.Tensor]]
    """After each step, everything that is frozen then, normalisation statistics included."""


def train(name: str, folder: str, data_seed: int | None = None) -> Course:
    """Train for some steps, lower the rate, and go on; on other data in each process if there is a seed."""
    attach = {"config": CONFIG, "controller": "inline", "directory": Path(folder, name)}
    loop = Loop(SPECIMENS[name], attach, wrap=replica)
    if data_seed is not None:
        loop.data.manual_seed(data_seed + distributed.get_rank())
    course = Course(frozen=[], end={}, frozen_tensors=[])
    for step in range(2 * STEPS):
        if step == STEPS:
            for group in loop.optimizer.param_groups:
                group["lr"] /= 20
        loop.step()
        course.frozen.append(loop.run.frozen)
        course.frozen_tensors.append(_frozen_tensors(loop))
    course.end = loop.everything()
    loop.run.close()
    return course


def _frozen_tensors(loop: Loop) -> dict[str, torch.Tensor]:
    names = [name for module in loop.run.modules[: loop.run.frozen] for name in module.submodules]
    return {
        f"{name}.{key}": tensor.clone()
        for name in names
        for key, tensor in loop.model.get_submodule(name).state_dict().items()
    }


def decisions(folder: Path) -> list[Any]:
    """Return what a journal says was read and decided, the seconds left out."""
    journal = read_journal(folder)
    read = [(e.kind, e.step, e.evaluation, e.module, e.value) for e in journal.of(PlasticityRead)]
    return [
        *read,
        *[(e.kind, e.step, e.reason) for kind in (StageChanged, ModuleFrozen, Thawed) for e in journal.of(kind)],
    ]


@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_law_6_two_ranks_decide_and_train_like_one(name, tmp_path):
    [one] = run_ranks(train, name, str(tmp_path / "one"), num_ranks=1)
    for course in run_ranks(train, name, str(tmp_path / "two")):
        assert course.frozen == one.frozen
        assert differences(course.end, one.end) == []
    assert decisions(tmp_path / "two" / name) == decisions(tmp_path / "one" / name)
    assert max(one.frozen) > 1 and read_journal(tmp_path / "one" / name).of(Thawed)


@pytest.mark.parametrize("name", SUPPORTED_NAMES[::3])
def test_law_6_ranks_agree_at_every_step_on_data_of_their_own(name, tmp_path):
    first, second = run_ranks(train, name, str(tmp_path), 7)
    assert first.frozen == second.frozen and max(first.frozen) > 0
    for ours, theirs in zip(first.frozen_tensors, second.frozen_tensors, strict=True):
        assert differences(ours, theirs) == []
    weights = [
        {k: v for k, v in c.end.items() if "running_" not in k and k not in ("losses", "random")}
        for c in (first, second)
    ]
    assert differences(*weights) == []
    journal = read_journal(tmp_path / name)
    assert journal.of(Thawed) and len(journal.of(Rewrapped)) >= 2
