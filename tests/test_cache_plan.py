"""The plan of the read-ahead: what is read, hinted, kept and dropped, as plain values."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import egeria.cache.prefetch.plan
from egeria.cache.prefetch.plan import MAX_NOTED, PrefetchPlan, Standing

DEPTH, HINTED, KEPT = 3, 2, 5


def rows(*positions):
    return np.array(positions, dtype=np.int64)


def batch(number, size=4):
    return number, np.arange(number * size, (number + 1) * size)


def numbers(planned):
    return [one.number for one in planned]


def read(plan):
    """Read everything there is room for; return the numbers."""
    found = []
    while (planned := plan.start()) is not None:
        assert plan.finish(planned)
        found.append(planned.number)
    return found


def test_reads_as_far_ahead_as_the_ring_and_hints_beyond():
    plan = PrefetchPlan(depth=3, num_hinted=2)
    plan.expect([batch(number) for number in range(10)])
    assert read(plan) == [0, 1, 2]
    assert numbers(plan.hints()) == [3, 4]
    assert plan.take(*batch(0)).standing is Standing.READY
    plan.expect([batch(number) for number in range(1, 11)])
    assert read(plan) == [3]
    assert numbers(plan.hints()) == [5], "each batch is hinted once"


def test_a_batch_taken_while_it_is_read_is_waited_for_and_keeps_its_place_in_the_ring():
    plan = PrefetchPlan(depth=1)
    plan.expect([batch(0), batch(1)])
    first = plan.start()
    taken = plan.take(*batch(0))
    assert (taken.standing, taken.planned) == (Standing.READING, first)
    assert plan.start() is None
    assert plan.finish(first)
    plan.hand_over(first)
    assert plan.start().number == 1


def test_a_read_that_was_given_up_is_of_no_use():
    plan = PrefetchPlan()
    plan.expect([batch(0)])
    first = plan.start()
    plan.take(*batch(0))
    plan.hand_over(first)
    assert not plan.finish(first)
    assert plan.num_ahead == 0


def test_what_is_passed_over_is_dropped():
    plan = PrefetchPlan()
    plan.expect([batch(number) for number in range(5)])
    read(plan)
    taken = plan.take(*batch(2))
    assert taken.standing is Standing.READY
    assert numbers(taken.dropped) == [0, 1]
    assert read(plan) == [3, 4]


def test_what_is_expected_no_more_is_dropped_and_a_read_under_way_is_discarded():
    plan = PrefetchPlan()
    plan.expect([batch(number) for number in range(3)])
    read(plan)
    plan.take(*batch(0))
    plan.expect([batch(1), batch(2), batch(3)])
    third = plan.start()
    assert numbers(plan.expect([batch(2), batch(7)])) == [1]
    assert not plan.finish(third)
    assert plan.take(*batch(2)).standing is Standing.READY
    assert read(plan) == [7]


def test_a_batch_expected_again_while_its_read_goes_on_is_not_read_twice():
    plan = PrefetchPlan()
    plan.expect([batch(0), batch(1)])
    first = plan.start()
    plan.expect([batch(1)])
    plan.expect([batch(0), batch(1)])
    assert plan.start().number == 1
    assert plan.finish(first)
    assert plan.take(*batch(0)).planned is first


@pytest.mark.parametrize("number", [-1, 0, 3, 100])
def test_an_unknown_or_lower_number_disturbs_nothing(number):
    plan = PrefetchPlan()
    plan.take(*batch(4))
    plan.expect([batch(number) for number in range(5, 10)])
    read(plan)
    assert plan.take(*batch(number)).standing is Standing.UNPLANNED
    assert [plan.take(*batch(number)).standing for number in range(5, 8)] == [Standing.READY] * 3


def test_a_known_number_with_other_rows_is_another_batch():
    plan = PrefetchPlan()
    plan.expect([(0, rows(1, 2)), batch(1)])
    read(plan)
    taken = plan.take(0, rows(1, 3))
    assert taken.standing is Standing.UNPLANNED
    assert numbers(taken.dropped) == [0]
    assert plan.take(*batch(1)).standing is Standing.READY


def test_numbers_that_start_over_are_read_again_although_the_rows_are_the_same():
    plan = PrefetchPlan()
    order = [*range(6), *range(6), *range(6)]
    standings = []
    for step, number in enumerate(order):
        plan.expect([batch(later) for later in order[step : step + 4]])
        read(plan)
        standings.append(plan.take(*batch(number)).standing)
    assert standings == [Standing.READY] * len(order)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.integers(0, 4)), max_size=40))
def test_no_number_is_read_twice_while_numbers_rise(steps):
    plan, started, number = PrefetchPlan(), [], 0
    for forward, num_listed, num_starts in steps:
        plan.expect([batch(later) for later in range(number, number + num_listed)])  # may list the one taken last
        for planned in [plan.start() for _ in range(num_starts)]:
            if planned is not None:
                started.append(planned.number)
                plan.finish(planned)
        number += forward
        plan.take(*batch(number))
    assert len(started) == len(set(started))


def test_expectations_that_never_come_true_do_not_pile_up():
    plan = PrefetchPlan()
    for number in range(0, 3000, 3):
        plan.expect([batch(number), batch(number + 1)])
        read(plan)
        plan.hints()
    assert len(plan._started) <= MAX_NOTED
    assert plan.num_ahead <= DEPTH


def test_rows_come_from_the_newest_of_the_last_five_batches():
    plan = PrefetchPlan()
    assert plan.remember(0, rows(1, 2, 3)) == ()
    plan.remember(1, rows(3, 4))
    found = plan.recall(rows(2, 3, 4, 5))
    assert found.found.tolist() == [True, True, True, False]
    assert found.numbers[:3].tolist() == [0, 1, 1]
    assert found.rows[:3].tolist() == [1, 0, 1]
    for number in range(2, 6):
        displaced = plan.remember(number, rows(100 + number))
    assert displaced == (0,)
    assert plan.recall(rows(1, 2, 3)).found.tolist() == [False, False, True]
    assert plan.remembered == (1, 2, 3, 4, 5)


def test_rows_that_were_invalidated_are_found_again_only_when_they_are_new():
    plan = PrefetchPlan()
    plan.remember(0, rows(1, 2))
    plan.remember(1, rows(2, 3))
    plan.invalidate(rows(2, 9))
    assert plan.recall(rows(1, 2, 3)).found.tolist() == [True, False, True]
    plan.remember(2, rows(2))
    assert plan.recall(rows(2)).numbers.tolist() == [2]
    plan.forget(2)
    plan.forget(2)
    assert not plan.recall(rows(2)).found.any()


def test_nothing_is_kept_where_nothing_is_to_be():
    plan = PrefetchPlan(num_remembered=0)
    assert plan.remember(0, rows(1)) == (0,)
    assert not plan.recall(rows(1)).found.any()
    assert not PrefetchPlan().recall(rows()).found.any()


def test_the_plan_needs_no_torch():
    tree = ast.parse(Path(egeria.cache.prefetch.plan.__file__).read_text(encoding="utf-8"))
    imported = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert imported <= {"__future__", "collections", "dataclasses", "enum", "numpy"}


class PlanUnderAnyCalls(RuleBasedStateMachine):
    """Any order of calls, with numbers that repeat, fall back and come with other rows."""

    def __init__(self):
        super().__init__()
        self.plan = PrefetchPlan(depth=DEPTH, num_hinted=HINTED, num_remembered=KEPT)
        self.reading = []
        self.ready = set()
        self.open_starts = set()
        self.last_listed = []
        self.rows_listed = {}
        self.last = None
        self.memory = []

    def positions(self, number, variant):
        return (np.arange(3) + number + 5 * variant) % 17

    batches = st.tuples(st.integers(0, 9), st.integers(0, 1))

    @rule(listed=st.lists(batches, max_size=7))
    def expect(self, listed):
        self.drop(self.plan.expect([(number, self.positions(number, variant)) for number, variant in listed]))
        first = {number: self.positions(number, variant).tobytes() for number, variant in reversed(listed)}
        self.last_listed = list(dict.fromkeys(number for number, _ in listed if number != self.last))
        self.rows_listed = first

    @rule()
    def start(self):
        planned = self.plan.start()
        if planned is not None:
            assert planned.key not in self.open_starts, "read twice"
            assert self.rows_listed[planned.number] == planned.positions.tobytes(), "read though not expected"
            self.open_starts.add(planned.key)
            self.reading.append(planned)

    @rule(data=st.data())
    def finish(self, data):
        if self.reading:
            planned = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
            if self.plan.finish(planned):
                self.ready.add(planned)

    @rule()
    def hint(self):
        for planned in self.plan.hints():
            assert planned.number in self.last_listed[: DEPTH + HINTED]
            assert planned.key not in self.open_starts

    @rule(one=batches)
    def take(self, one):
        number, positions = one[0], self.positions(*one)
        taken = self.plan.take(number, positions)
        self.drop(taken.dropped)
        self.last = number
        if number in self.last_listed:
            passed = self.last_listed[: self.last_listed.index(number) + 1]
            self.last_listed = self.last_listed[len(passed) :]
            self.open_starts = {key for key in self.open_starts if key[0] not in passed}
        if taken.standing is Standing.READY:
            assert taken.planned in self.ready
            self.ready.discard(taken.planned)
        if taken.standing is Standing.READING:
            assert taken.planned in self.reading
        if taken.planned is not None:
            assert (taken.planned.number, taken.planned.positions.tolist()) == (number, positions.tolist())
            self.plan.hand_over(taken.planned)

    @rule(one=batches)
    def remember(self, one):
        number, positions = one[0], self.positions(*one)
        displaced = self.plan.remember(number, positions)
        self.memory = [kept for kept in self.memory if kept[0] != number]
        self.memory.append((number, positions.tolist(), set()))
        assert [kept[0] for kept in self.memory[:-KEPT]] == list(displaced)
        self.memory = self.memory[-KEPT:]

    @rule(positions=st.lists(st.integers(0, 20), max_size=4))
    def invalidate(self, positions):
        self.plan.invalidate(rows(*positions))
        for *_, stale in self.memory:
            stale.update(positions)

    @rule(positions=st.lists(st.integers(0, 20), max_size=6))
    def recall(self, positions):
        found = self.plan.recall(rows(*positions))
        for index, position in enumerate(positions):
            holders = [(n, kept.index(position)) for n, kept, stale in self.memory if position in set(kept) - stale]
            assert bool(found.found[index]) == bool(holders)
            if holders:
                assert (found.numbers[index], found.rows[index]) == holders[-1]

    @invariant()
    def never_holds_more_than_the_ring_and_the_memory(self):
        assert self.plan.num_ahead <= DEPTH
        assert len(self.ready | set(self.reading)) <= DEPTH
        assert len(self.plan.remembered) <= KEPT

    def drop(self, dropped):
        assert set(dropped) <= self.ready
        self.ready -= set(dropped)


TestPlanUnderAnyCalls = PlanUnderAnyCalls.TestCase
TestPlanUnderAnyCalls.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
