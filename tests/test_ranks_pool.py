"""The processes that the tests of several ranks share: each job finds them as new, whatever the last one did."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import distributed

from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def seen():
    """Return the process, and what a job of it finds."""
    numbers = torch.rand(1).item(), random.random()
    state = numbers, torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    return os.getpid(), (*state, "EGERIA_LEFT_OVER" in os.environ, [path.name for path in Path.cwd().iterdir()])


def disturb():
    found = seen()
    torch.manual_seed(7)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["EGERIA_LEFT_OVER"] = "1"
    os.chdir("/")
    return found


def fail_in_one():
    if distributed.get_rank() == 1:
        raise ValueError("injected")
    distributed.barrier()


def die_in_one():
    if distributed.get_rank() == 1:
        os._exit(1)


def test_a_job_finds_nothing_of_the_one_before():
    assert run_ranks(disturb) == (found := run_ranks(seen))
    assert all(state[-2:] == (False, ["store"]) for _, state in found)
    assert len({process for process, _ in run_ranks(seen)}) == 2
    assert len(run_ranks(seen, num_ranks=1)) == 1


@pytest.mark.parametrize(("work", "said"), [(fail_in_one, "ValueError: injected"), (die_in_one, "without an answer")])
def test_after_a_failure_the_processes_are_others(work, said):
    before = run_ranks(seen)
    with pytest.raises(AssertionError, match=said):
        run_ranks(work)
    after = run_ranks(seen)
    assert not {process for process, _ in before} & {process for process, _ in after}
    assert [state for _, state in before] == [state for _, state in after]


def test_a_job_of_its_own_leaves_the_pool_as_it_is():
    before = run_ranks(seen)
    [alone] = run_ranks(seen, num_ranks=1, fresh=True)
    assert alone[0] not in {process for process, _ in before} and run_ranks(seen) == before
