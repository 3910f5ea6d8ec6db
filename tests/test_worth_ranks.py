"""The worth of steps in two processes: measured and decided as in one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed
from torch.distributed.fsdp import fully_shard

from egeria import read_journal
from egeria.events import FaultCaught, IntervalMeasured
from ranks import run_ranks
from test_worth import STEPS, FineTuning, pretrained

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
ALL_AT_ONCE = {"policy": {"worth_limit": 1.0}}  # whatever the times of a busy machine are


def fine_tune(folder, is_sharded=False):
    """Fine-tune half of a run; return how deep the freeze was after each step."""
    model = pretrained()
    if is_sharded and distributed.get_world_size() > 1:
        for part in (*model.blocks, model):
            fully_shard(part)
    loop = FineTuning(Path(folder), model=model, **ALL_AT_ONCE).go(STEPS // 4)
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
