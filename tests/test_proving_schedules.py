"""The search for the best schedule, with a made-up truth in place of training."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
from benchmarks.proving.policies import parse_policies, parse_policy
from benchmarks.proving.schedules import (
    EARLIEST,
    FROZEN,
    LEAST_GAIN,
    Found,
    Freezes,
    Row,
    Schedule,
    Search,
    Verdict,
    all_at_once,
    cut_into_blocks,
    front_first,
    landed,
    moves,
    naps,
    rarer,
    settings_of,
    to_text,
)

from egeria.config.checks import read_timetable, timetable

pytestmark = pytest.mark.bench
WEIGHTS = (0.1, 0.15, 0.2)


class Truth:
    """Tells of a schedule what `holds` does, and counts what it saves; knows nothing once the budget is spent."""

    def __init__(self, holds: Callable[[Schedule], bool], weights: Sequence[float] = WEIGHTS, budget: int = 1000):
        self.holds, self.weights, self.budget = holds, weights, budget
        self.asked: list[Schedule] = []

    def __call__(self, schedule: Schedule) -> Verdict | None:
        if len(self.asked) == self.budget:
            return None
        self.asked.append(schedule)
        return Verdict(self.holds(schedule), schedule.rest(self.weights))


def frozen_from(earliest: Freezes) -> Callable[[Schedule], bool]:
    """Module `i` may rest from share `earliest[i]` on."""
    return lambda schedule: all(
        period == 1 or share >= limit
        for share, row in schedule.stages
        for period, limit in zip(row, earliest, strict=True)
    )


def at_most(*allowed: tuple[float, Row]) -> Callable[[Schedule], bool]:
    """Nothing may rest more than in this schedule."""
    return Schedule(allowed).risks_as_much


def search(holds: Callable[[Schedule], bool], budget: int = 1000, **given) -> tuple[Found, Truth]:
    truth = Truth(holds, budget=budget)
    return Search(WEIGHTS, truth, **given).run(), truth


@pytest.mark.parametrize(
    ("earliest", "most_trials"),
    [
        ((0.25, 0.5, 0.75), 40),
        ((EARLIEST, EARLIEST, 1.0), 20),
        ((0.5, 0.5, 0.5), 30),
        ((1.0, 1.0, 1.0), 25),
        ((EARLIEST, EARLIEST, EARLIEST), 10),
    ],
)
def test_finds_the_best_schedule_on_its_grid(earliest, most_trials):
    found, truth = search(frozen_from(earliest))
    assert found.finished
    best = sum(weight * (1 - limit) for weight, limit in zip(WEIGHTS, earliest, strict=True))
    assert found.saving == pytest.approx(best)
    assert next(iter(found.lossless), Schedule.freezing((1.0,) * 3)) == Schedule.freezing(earliest)
    assert len(truth.asked) == len(set(truth.asked)) <= most_trials


def test_between_the_points_of_the_grid_it_comes_close():
    earliest = (0.2, 0.45, 0.8)
    found, truth = search(frozen_from(earliest))
    best = sum(weight * (1 - limit) for weight, limit in zip(WEIGHTS, earliest, strict=True))
    assert best - 0.03 < found.saving <= best
    assert truth.holds(found.lossless[0])
    assert len(truth.asked) <= 40


def test_finds_the_first_modules_frozen_from_the_first_per_cent_on_where_the_rest_freezes_late():
    """Moving by steps would have to pass what does not hold: two modules freeze at once, or not before 0.9."""
    early, late = (FROZEN, FROZEN, 1.0), (FROZEN, FROZEN, FROZEN)
    best = Schedule(((0.0, (1.0, 1.0, 1.0)), (EARLIEST, early), (0.75, late)))
    found, truth = search(at_most(*best.stages))
    assert found.lossless[0] == best
    first = truth.asked.index(best)
    assert first < 12


@pytest.mark.parametrize(
    ("best", "within"),
    [
        (((0.0, (4.0, 2.0, 1.0)), (0.5, (FROZEN, 2.0, 1.0))), 35),  # before a freeze, and without one
        (((0.0, (2.0, 2.0, 2.0)),), 20),  # where nothing may freeze at all
        (((0.0, (1.0, 1.0, 1.0)), (EARLIEST, (FROZEN, 1.0, 1.0)), (0.1, (FROZEN, 4.0, 4.0))), 30),
    ],
)
def test_finds_periods(best, within):
    found, truth = search(at_most(*best))
    assert found.saving > Schedule(best).rest(WEIGHTS) - LEAST_GAIN
    assert truth.asked.index(found.lossless[0]) < within


def test_finds_a_nap_in_a_plateau():
    best = Schedule(
        (
            (0.0, (1.0, 1.0, 1.0)),
            (0.125, (FROZEN, FROZEN, 1.0)),
            (0.5, (1.0, 1.0, 1.0)),
            (0.55, (FROZEN, FROZEN, 1.0)),
        )
    )
    found, truth = search(at_most(*best.stages), falls=[0.5])
    assert found.saving > best.rest(WEIGHTS) - LEAST_GAIN
    assert truth.asked.index(found.lossless[0]) < 20
    assert to_text(best) == "static:schedule=0.125:2+0.5:0+0.55:2"


def test_a_fall_late_in_the_training_keeps_what_freezes_behind_it():
    awake, asleep = (1.0, 1.0, 1.0), (FROZEN, FROZEN, FROZEN)
    best = Schedule(((0.0, awake), (0.25, asleep), (0.5, awake), (0.75, asleep)))
    found, _ = search(at_most(*best.stages), falls=[0.5])
    assert found.lossless[0] == best


def test_under_a_schedule_without_falls_nothing_naps():
    _, truth = search(frozen_from((0.25, 0.5, 1.0)))
    for schedule in truth.asked:
        rows = [row for _, row in schedule.stages]
        assert all(after >= before for pair in itertools.pairwise(rows) for before, after in zip(*pair, strict=True))


@pytest.mark.parametrize("may_land", [True, False])
def test_freezes_that_land_may_come_earlier(may_land):
    raw, with_landing = frozen_from((0.5, 0.5, 0.75)), frozen_from((0.375, 0.375, 0.625))
    found, truth = search(lambda schedule: (with_landing if schedule.lands else raw)(schedule), may_land=may_land)
    assert found.lossless[0].lands == any(schedule.lands for schedule in truth.asked) == may_land
    if may_land:
        assert found.lossless[0].stages == Schedule.freezing((0.375, 0.375, 0.625)).stages
        assert to_text(found.lossless[0]) == "static:schedule=0.375:2+0.625:3,freezing.landing=both"


def test_a_move_that_skips_less_than_was_foretold_is_not_taken():
    """As where landing takes so long that nothing is gained."""

    def judge(schedule: Schedule) -> Verdict:
        holds = schedule.lands or frozen_from((0.5, 0.5, 0.5))(schedule)
        return Verdict(holds, 0.1 if schedule.lands else schedule.rest(WEIGHTS))

    found = Search(WEIGHTS, judge, may_land=True).run()
    assert any(schedule.lands for schedule in found.tried)
    assert found.lossless[0] == Schedule.freezing((0.5, 0.5, 0.5))
    assert found.saving == pytest.approx(sum(WEIGHTS) / 2)


def test_where_nobody_counted_what_was_skipped_what_is_foretold_stands_for_it():
    found = Search(WEIGHTS, lambda schedule: Verdict(frozen_from((0.5, 0.5, 0.5))(schedule), None)).run()
    assert found.lossless[0] == Schedule.freezing((0.5, 0.5, 0.5))
    assert found.saving == pytest.approx(sum(WEIGHTS) / 2)


def test_never_tries_what_an_earlier_failure_rules_out():
    _, truth = search(frozen_from((0.4, 0.6, 0.9)), falls=[0.5], may_land=True)
    for place, schedule in enumerate(truth.asked):
        for before in truth.asked[:place]:
            assert truth.holds(before) or not schedule.risks_as_much(before)


def test_the_budget_ends_it_with_the_best_so_far():
    everything, _ = search(frozen_from((0.25, 0.5, 0.75)))
    for budget in range(1, 30):
        some, truth = search(frozen_from((0.25, 0.5, 0.75)), budget=budget)
        assert not some.finished
        assert len(some.tried) == len(truth.asked) == budget
        assert some.saving <= everything.saving
        assert all(some.tried[schedule].is_lossless for schedule in some.lossless)
    nothing, _ = search(frozen_from((0.25, 0.5, 0.75)), budget=0)
    assert (nothing.lossless, nothing.saving) == ((), 0)


def test_a_search_with_more_budget_begins_like_one_with_less():
    given = {"falls": [0.5], "may_land": True}
    holds = at_most((0.0, (4.0, 2.0, 1.0)), (0.3, (FROZEN, FROZEN, 4.0)))
    _, long = search(holds, **given)
    _, again = search(holds, **given)
    assert again.asked == long.asked
    for budget in (3, 10, 17):
        _, short = search(holds, budget=budget, **given)
        assert short.asked == long.asked[:budget]


def test_few_trials_find_most_of_what_can_be_saved():
    draw = random.Random(0)
    found, possible, nothing = 0.0, 0.0, 0
    for weights in [(0.28, 0.19), (0.26, 0.16, 0.08), (0.14, 0.12, 0.12, 0.07), (0.23, 0.22, 0.07, 0.05, 0.05)] * 25:
        middle = draw.uniform(0.3, 0.95)
        earliest = tuple(sorted(min(1.0, max(0.0, draw.gauss(middle, 0.15))) for _ in weights))
        saving = Search(weights, Truth(frozen_from(earliest), weights, budget=5)).run().saving
        found, nothing = found + saving, nothing + (not saving)
        possible += sum(weight * (1 - limit) for weight, limit in zip(weights, earliest, strict=True))
    assert found > 0.6 * possible
    assert nothing < 10  # of a hundred


def worth(weights: Sequence[float], draw: random.Random) -> Callable[[Schedule], bool]:
    """Steps are worth less and less, those of the front less than others; some of it is lost with rare updates."""
    first, tilt, decay = 10 ** draw.uniform(0, 1), draw.uniform(0.5, 3), draw.choice([0.1, 0.3, 1.0])
    rare = draw.uniform(0.02, 0.3)
    lost = {1: 0.0, 2: rare, 4: 2 * rare, math.inf: 1.0}

    def holds(schedule: Schedule) -> bool:
        times = [step / 100 for step in range(100)]
        total = sum(
            first * tilt ** (place / len(weights)) * math.exp(-time / decay) * lost[period] / len(times)
            for time in times
            for place, period in enumerate(schedule.at(time))
        )
        return total <= 0.3

    return holds


def test_more_is_found_than_by_freezing_alone():
    shapes = [(0.28, 0.19), (0.26, 0.16, 0.08), (0.14, 0.12, 0.12, 0.07)] * 8
    wide, narrow = 0.0, 0.0
    for number, weights in enumerate(shapes):
        truth = Truth(worth(weights, random.Random(number)), weights, budget=40)
        found = Search(weights, truth).run()
        froze = [
            schedule
            for schedule in found.lossless
            if all(period in (1, FROZEN) for _, row in schedule.stages for period in row)
        ]
        assert found.saving >= max((schedule.rest(weights) for schedule in froze), default=0.0)
        wide += found.saving
        narrow += max((schedule.rest(weights) for schedule in froze), default=0.0)
    assert wide > 1.1 * narrow


def test_many_modules_freeze_in_blocks_of_similar_weight():
    assert cut_into_blocks((0.1, 0.2, 0.3)) == [1, 1, 1]
    assert cut_into_blocks((0.4, *[0.05] * 8)) == [1, 4, 4]
    earliest = (0.25,) * 5 + (0.5,) * 5 + (1.0,) * 10
    truth = Truth(frozen_from(earliest), (0.03,) * 20)
    found = Search((0.03,) * 20, truth).run()
    assert found.lossless[0] == Schedule.freezing(earliest)
    assert len(truth.asked) <= 60


def test_where_nothing_may_freeze_nothing_is_tried():
    found = Search((), Truth(lambda _: True)).run()
    assert (found.finished, found.lossless, found.saving, found.tried) == (True, (), 0, {})


def test_proposals_are_schedules():
    for freezes in [*all_at_once(3), *moves((0.25, 0.5, 1.0), 0.125)]:
        assert all(before <= after for before, after in itertools.pairwise(freezes))
        assert min(freezes) >= 0
        assert max(freezes) <= 1
    starts = [Schedule.freezing((0.25, 0.5, 1.0))]
    for _ in range(2):  # each kind of move made from what each other kind made
        kinds = (front_first, rarer, lambda start: naps(start, [0.3, 0.6]), landed)
        proposed = sorted({schedule for start in starts for kind in kinds for schedule in kind(start)})
        starts = proposed[::7]
    assert len(proposed) > 300
    for schedule in proposed:
        for _, row in schedule.stages:
            assert all(front >= behind for front, behind in itertools.pairwise(row))
        shares = [share for share, _ in schedule.stages]
        assert shares == sorted(set(shares))
        assert (shares[0], shares[-1] < 1) == (0.0, True)
        assert schedule.stages[0] == (0.0, (1.0,) * 3)


def test_a_policy_does_what_its_schedule_says():
    starts = [Schedule.freezing((0.25, 0.5, 1.0)), Schedule.freezing((1.0, 1.0, 1.0))]
    kinds = (front_first, rarer, lambda start: naps(start, [0.333]), landed)
    for schedule in (schedule for start in starts for kind in kinds for schedule in kind(start)):
        policy = parse_policy(to_text(schedule))
        text = policy.settings["policy"]["schedule"]
        assert timetable(text) == ""
        assert policy.settings.get("freezing", {}) == ({"landing": "both"} if schedule.lands else {})
        entries = read_timetable(text)
        for share in {*(share for share, _ in schedule.stages), 0.05, 0.99}:
            front = next((front for begin, front in reversed(entries) if begin <= share), None)
            periods = (*front.periods, 1, 1, 1) if front else (1, 1, 1)
            told = tuple(FROZEN if front and place < front.frozen else periods[place] for place in range(3))
            assert told == schedule.at(share)


def test_a_schedule_is_written_as_a_policy():
    assert to_text(Schedule.freezing((0.0, 0.5, 0.5, 1.0))) == "static:schedule=0.01:1+0.5:3"
    rare = Schedule(((0.0, (4.0, 4.0, 2.0)), (0.1, (FROZEN, 4.0, 4.0))))
    text = to_text(rare, ["modules.target_share=0.1", "cache.enabled=false"])
    assert text == "static:schedule=0:2/4,3/2+0.1:1,3/4,modules.target_share=0.1,cache.enabled=false"
    policy = parse_policy(text)
    assert policy.settings["policy"] == {"schedule": "0:2/4,3/2 0.1:1,3/4"}
    assert policy.settings["modules"] == {"target_share": 0.1}
    assert settings_of(text) == ("modules.target_share=0.1", "cache.enabled=false")
    assert [policy.text for policy in parse_policies([f"none,{text},egeria"])] == ["none", text, "egeria"]


def test_modules_of_a_block_rest_together():
    schedule = Schedule(((0.0, (4.0, 2.0)), (0.5, (FROZEN, 1.0))), lands=True)
    assert schedule.spelled([2, 1]) == Schedule(((0.0, (4.0, 4.0, 2.0)), (0.5, (FROZEN, FROZEN, 1.0))), lands=True)
    assert schedule.rest([0.2, 0.1]) == pytest.approx(0.5 * (0.2 * 3 / 4 + 0.1 / 2) + 0.5 * 0.2)
