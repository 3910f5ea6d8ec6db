"""The worth of steps in two processes: measured and decided as in one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from egeria import read_journal
from egeria.events import FaultCaught, IntervalChanged, IntervalMeasured
from egeria.layers.modules import parse_modules
from egeria.session.measuring.worth import StepWorth
from ranks import run_ranks
from test_worth import STEPS, FineTuning, Words, batches, pretrained

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
ALL_AT_ONCE = {"policy": {"worth_limit": 1.0}}  # whatever the times of a busy machine are
SHORT = {"plasticity": {"interval_steps": 1}}  # becomes 2 once worth decides


def fine_tune(folder, is_sharded=False, **settings):
    """Fine-tune half of a run; return how deep the freeze was after each step."""
    model = pretrained()
    if is_sharded and distributed.get_world_size() > 1:
        for part in (*model.blocks, model):
            fully_shard(part)
    loop = FineTuning(Path(folder), model=model, **ALL_AT_ONCE, **settings).go(STEPS // 4)
    loop.run.close()
    return loop.depths


def worths(folder):
    return {event.step: event.worth for event in read_journal(folder).of(IntervalMeasured) if event.worth is not None}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_two_ranks_measure_and_freeze_as_one(tmp_path, is_sharded):
    one, two = tmp_path / "one", tmp_path / "two"
    [alone] = run_ranks(fine_tune, str(one), num_ranks=1)
    assert run_ranks(fine_tune, str(two), is_sharded) == [alone, alone]
    assert alone[-1] > 0
    measured, also = worths(one), worths(two)
    assert measured.keys() == also.keys() and len(measured) == STEPS // 20 // 2 + 1  # up to the decision
    for step, worth in measured.items():
        assert worth == pytest.approx(also[step], rel=1e-3, abs=1e-6)
    assert not read_journal(two).of(FaultCaught)


def fine_tune_with_shorter_intervals(folder, is_sharded=False):
    return fine_tune(folder, is_sharded, **SHORT)


def test_two_ranks_have_longer_intervals_from_the_same_step_on(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    [alone] = run_ranks(fine_tune_with_shorter_intervals, str(one), num_ranks=1)
    assert run_ranks(fine_tune_with_shorter_intervals, str(two)) == [alone, alone]
    changes = [
        [(event.step, event.after) for event in read_journal(folder).of(IntervalChanged)] for folder in (one, two)
    ]
    assert changes[0] == changes[1] and [after for _, after in changes[0]] == [STEPS // 100]
    assert not read_journal(two).of(FaultCaught)


def take_worth_behind_a_validation(validates):
    """Return what a sharded model's worth comes to; the root, with table and head, is whole behind a validation."""
    torch.manual_seed(0)
    model = Words()
    for part in (*model.blocks, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measure, modules = (
        StepWorth(model, 1, total_steps=1000),
        parse_modules(model, pattern=r"table|blocks\.\d|head"),
    )
    for tokens, targets in batches(task=2, count=3):
        nn.functional.cross_entropy(model(tokens), targets).backward()
        measure.before(optimizer)
        optimizer.step()
        measure.after(optimizer)
        optimizer.zero_grad()
    if validates:
        with torch.no_grad():
            model(tokens)
    return measure.take(modules)


def test_a_validation_before_the_end_of_a_step_changes_no_worth():
    assert run_ranks(take_worth_behind_a_validation, True) == run_ranks(take_worth_behind_a_validation, False)
