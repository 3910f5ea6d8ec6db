"""What holds of two ranks holds of three: to the bit among the three; like one but for rounding, since a mean of three
equal gradients is not always their own value."""

from __future__ import annotations

import pytest
import torch

import test_cache_ranks
import test_distributed_checkpoint as checkpoints
import test_rank_faults as faults
import test_ranks_equivalence as equivalence
from egeria import read_journal
from egeria.events import FaultCaught, ModuleFrozen, Resumed, Rewrapped, Thawed
from loops import differences
from menagerie import SUPPORTED_NAMES
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]
OWN = ("losses", "random")
"""What a process has for itself where data is its own, beside statistics of its last batch."""


def run_three(work, *arguments, **options):
    return run_ranks(work, *arguments, num_ranks=3, **options)


def far(first, second, tolerance=2e-3):
    """Return the names of tensors that differ by more than what rounding grows to in a short training."""
    return [
        name
        for name, value in first.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and not torch.allclose(value, second[name], rtol=tolerance, atol=tolerance)
    ]


def one_and_three(work, name, tmp_path):
    """Return the course of one process and those of three, on the same data in each."""
    [one] = run_ranks(work, name, str(tmp_path / "one"), num_ranks=1)
    three = run_three(work, name, str(tmp_path / "three"))
    assert len(three) == 3
    assert not read_journal(tmp_path / "three" / name).of(FaultCaught)
    return one, three


DRIFTS = {"stochastic_depth"}
"""Where a block that is skipped or not makes so much of rounding that a decision comes an interval later."""


@pytest.mark.parametrize("name", [name for name in SUPPORTED_NAMES[::3] if name not in DRIFTS])
def test_law_6_three_ranks_decide_and_train_like_one(name, tmp_path):
    one, three = one_and_three(equivalence.train, name, tmp_path)
    for course in three:
        assert course.frozen == one.frozen
        assert differences(course.end, three[0].end) == [] and far(course.end, one.end) == []
    frozen = [
        [(event.step, event.module) for event in read_journal(tmp_path / folder / name).of(ModuleFrozen)]
        for folder in ("one", "three")
    ]
    assert frozen[0] == frozen[1]
    assert max(one.frozen) > 1 and read_journal(tmp_path / "three" / name).of(Thawed)


@pytest.mark.parametrize("name", SUPPORTED_NAMES[::3])
def test_law_6_three_ranks_agree_at_every_step_on_data_of_their_own(name, tmp_path):
    courses = run_three(equivalence.train, name, str(tmp_path), 7)
    shared = [
        {key: value for key, value in course.end.items() if "running_" not in key and key not in OWN}
        for course in courses
    ]
    for course, weights in zip(courses, shared, strict=True):
        assert course.frozen == courses[0].frozen and max(course.frozen) > 0
        assert differences(weights, shared[0]) == []
        for ours, theirs in zip(course.frozen_tensors, courses[0].frozen_tensors, strict=True):
            assert differences(ours, theirs) == []
    assert len(read_journal(tmp_path / name).of(Rewrapped)) >= 2


@pytest.mark.parametrize("disturb", faults.DISTURBANCES, ids=lambda disturb: disturb.__name__)
def test_one_rank_of_three_that_cannot_go_on_thaws_all_at_the_same_step(disturb):
    first, disturbed, third = run_three(faults.train_disturbed, disturb)
    assert max(first[0][:26]) > 0 and first[0][-1] == 0 and all(first[2])
    for frozen, weights, _, _ in (disturbed, third):
        assert frozen == first[0]
        assert all(torch.equal(*pair) for pair in zip(weights, first[1], strict=True))
    assert faults.DISTURBANCES[disturb] in disturbed[3]
    assert "rank 1" in first[3] and "rank 1" in third[3]


@pytest.mark.parametrize("work", [faults.unfreeze_by_hand, faults.controller_fails, faults.lag])
def test_three_ranks_go_one_way_whatever_happens_to_one(work):
    first, *others = run_three(work)
    for frozen, weights, *_ in others:
        assert frozen == first[0]
        assert all(torch.equal(*pair) for pair in zip(weights, first[1], strict=True))


def test_nobody_of_three_waits_longer_than_the_timeout():
    for rank, (steps, seconds) in enumerate(run_three(faults.hang, 2.0, timeout_s=2.0, fresh=True)):
        assert rank == 1 or (steps == 21 and seconds < 8)


def test_three_ranks_of_one_host_share_a_cache_and_train_as_without(tmp_path):
    names = ("without", "one host", "in memory", "cannot join", "cannot write", "not in all")
    found = run_three(in_all, names, str(tmp_path))
    for answers in found:
        for name in names[1:]:
            assert differences(answers[name]["weights"], answers["without"]["weights"]) == []
            assert torch.equal(answers[name]["losses"], answers["without"]["losses"])
            assert answers[name]["mismatches"] == 0
        assert answers["one host"]["modes"][0] == "stored" and answers["one host"]["hits"] > 0


def in_all(names, folder):
    return {name: test_cache_ranks.train(name, folder) for name in names}


@pytest.mark.parametrize("in_parts", [False, True])
def test_three_ranks_go_on_as_if_they_had_never_stopped(in_parts, tmp_path):
    for _, depth, at_once, depths, ends in run_three(checkpoints.in_two_pieces, "residual", str(tmp_path), in_parts):
        assert depth == at_once > 0 and min(depths) >= depth
        assert differences(ends[0], ends[1]) == []
    journal = read_journal(tmp_path / "resumed")
    assert journal.of(Resumed) and not journal.of(FaultCaught)


def test_three_ranks_go_on_where_two_have_stopped(tmp_path):
    rest, depth, *_ = run_ranks(checkpoints.in_two_pieces, "residual", str(tmp_path), False)[0]
    found = run_three(go_on, rest, str(tmp_path))
    for at_once, end in found:
        assert at_once == depth
        assert differences(end, found[0][1]) == []


def go_on(rest, folder):
    loop = checkpoints.begin("residual", checkpoints.Path(folder, "three"), seed=9)
    checkpoints.load(loop, f"{folder}/checkpoint", rest)
    at_once = loop.run.frozen
    loop.step(checkpoints.STEPS)
    end = loop.everything()
    loop.run.close()
    return at_once, end
