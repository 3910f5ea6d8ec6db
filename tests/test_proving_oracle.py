"""The search for the best schedule, with a made-up truth in place of training."""

from __future__ import annotations

import itertools

import pytest
from benchmarks.proving.policies import parse_policy
from benchmarks.proving.schedules import Schedule, Search, coarse_grid, cut_into_blocks, moves, to_text


class Truth:
    """Freezing module `i` is without loss from share `earliest[i]` on."""

    def __init__(self, earliest: Schedule, budget: int = 1000) -> None:
        self.earliest = earliest
        self.asked: list[Schedule] = []
        self.budget = budget

    def __call__(self, schedule: Schedule) -> bool | None:
        if len(self.asked) == self.budget:
            return None
        self.asked.append(schedule)
        return all(share >= limit for share, limit in zip(schedule, self.earliest, strict=True))


WEIGHTS = (0.1, 0.15, 0.2)


@pytest.mark.parametrize(
    "earliest",
    [(0.25, 0.5, 0.75), (0.0, 0.0, 1.0), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)],
)
def test_finds_the_best_schedule_on_its_grid(earliest):
    truth = Truth(earliest)
    found = Search(WEIGHTS, truth).run()
    assert found.finished
    best = sum(weight * (1 - limit) for weight, limit in zip(WEIGHTS, earliest, strict=True))
    assert found.saving == pytest.approx(best)
    assert found.best == earliest
    assert len(truth.asked) == len(set(truth.asked)) <= 20


def test_between_the_points_of_the_grid_it_comes_close():
    earliest = (0.2, 0.45, 0.8)
    found = Search(WEIGHTS, truth := Truth(earliest)).run()
    best = sum(weight * (1 - limit) for weight, limit in zip(WEIGHTS, earliest, strict=True))
    assert best - 0.03 < found.saving <= best
    assert all(share >= limit for share, limit in zip(found.best, earliest, strict=True))
    assert len(truth.asked) <= 25


def test_never_tries_what_an_earlier_failure_rules_out():
    truth = Truth((0.4, 0.6, 0.9))
    Search(WEIGHTS, truth).run()
    for place, schedule in enumerate(truth.asked):
        for before in truth.asked[:place]:
            failed = any(share < limit for share, limit in zip(before, truth.earliest, strict=True))
            assert not (failed and all(share <= other for share, other in zip(schedule, before, strict=True)))


def test_the_budget_ends_it_with_the_best_so_far():
    everything = Search(WEIGHTS, Truth((0.25, 0.5, 0.75))).run()
    some = Search(WEIGHTS, Truth((0.25, 0.5, 0.75), budget=4)).run()
    assert not some.finished
    assert len(some.tried) == 4
    assert 0 < some.saving <= everything.saving
    assert some.tried[some.best]
    nothing = Search(WEIGHTS, Truth((0.25, 0.5, 0.75), budget=0)).run()
    assert (nothing.best, nothing.saving) == ((1, 1, 1), 0)


def test_many_modules_freeze_in_blocks_of_similar_weight():
    assert cut_into_blocks((0.1, 0.2, 0.3)) == [1, 1, 1]
    assert cut_into_blocks((0.4, *[0.05] * 8)) == [1, 4, 4]
    truth = Truth((0.25,) * 5 + (0.5,) * 5 + (1.0,) * 10)
    found = Search((0.03,) * 20, truth).run()
    assert found.best == truth.earliest
    assert len(truth.asked) <= 25


def test_proposals_are_schedules():
    proposed = [*coarse_grid(3), *moves((0.25, 0.5, 1.0), 0.125)]
    for schedule in proposed:
        assert all(before <= after for before, after in itertools.pairwise(schedule))
        assert min(schedule) >= 0
        assert max(schedule) <= 1


def test_a_schedule_is_written_as_a_policy():
    assert to_text((0.0, 0.5, 0.5, 1.0)) == "static:schedule=0:1+0.5:3"
    policy = parse_policy(to_text((0.125, 0.5, 0.5, 1.0)))
    assert policy.settings["policy"]["schedule"] == "0.125:1 0.5:3"
