"""Which batches are read ahead."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import egeria.cache.prefetch.plan
from egeria.cache.prefetch.plan import PrefetchPlan, batch_key


def rows(number):
    return np.array([number * 10, number * 10 + 1])


def batches(*numbers):
    return [(number, rows(number)) for number in numbers]


def numbers(step):
    """Numbers of the batches to read, to hint at, and to drop."""
    return (
        [read.key[0] for read in step.reads],
        [hint[0] // 10 for hint in step.hints],
        [key[0] for key in step.dropped],
    )


def test_the_next_batches_are_read_and_the_ones_behind_them_hinted_at():
    plan = PrefetchPlan(depth=3, num_hinted=2)
    assert numbers(plan.expect(batches(*range(9)))) == ([0, 1, 2], [3, 4], [])
    assert numbers(plan.expect(batches(*range(9)))) == ([], [], [])


def test_a_batch_that_is_taken_makes_room_for_the_next():
    plan = PrefetchPlan(depth=3, num_hinted=2)
    plan.expect(batches(*range(9)))
    assert plan.take(0, rows(0)) == (True, [])
    step = plan.expect(batches(*range(1, 9)))
    assert numbers(step) == ([3], [5], [])
    assert step.reads[0].was_hinted and step.reads[0].key == batch_key(3, rows(3))


def test_a_hint_that_never_came_is_no_hint():
    plan = PrefetchPlan(depth=1, num_hinted=1)
    plan.expect(batches(0, 1))
    plan.expect(batches(0, 2))
    plan.take(0, rows(0))
    assert not plan.expect(batches(1, 2)).reads[0].was_hinted


def test_batches_passed_over_are_dropped():
    plan = PrefetchPlan()
    plan.expect(batches(0, 1, 2))
    assert plan.take(2, rows(2)) == (True, [batch_key(0, rows(0)), batch_key(1, rows(1))])


def test_batches_not_expected_any_more_are_dropped_and_read_again_if_they_come_back():
    plan = PrefetchPlan()
    plan.expect(batches(0, 1, 2))
    assert numbers(plan.expect(batches(2, 5)))[0] == [5]
    assert numbers(plan.expect(batches(0, 2, 5)))[0] == [0]


def test_a_batch_with_other_rows_is_another_batch():
    plan = PrefetchPlan()
    plan.expect(batches(0, 1))
    assert numbers(plan.expect([(0, rows(7)), (1, rows(1))])) == ([0], [], [0])
    assert plan.take(0, rows(8)) == (False, [batch_key(0, rows(7))])
    assert plan.take(1, rows(1)) == (True, [])


def test_an_unknown_batch_leaves_the_plan_as_it_is():
    plan = PrefetchPlan()
    plan.expect(batches(1, 2))
    assert plan.take(9, rows(9)) == (False, [])
    assert plan.take(1, rows(1)) == (True, [])


def test_the_batch_taken_last_is_not_read_again():
    plan = PrefetchPlan()
    plan.take(0, rows(0))
    assert numbers(plan.expect(batches(0, 1))) == ([1], [], [])


@pytest.mark.parametrize("depth", [1, 3])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 6)), max_size=40))
def test_whatever_happens_no_more_than_depth_are_read_and_each_read_ends_once(depth, calls):
    plan, open_reads = PrefetchPlan(depth=depth), set()
    for is_take, first, count in calls:
        if is_take:
            is_started, dropped = plan.take(first, rows(first))
            assert is_started == (batch_key(first, rows(first)) in open_reads)
            open_reads.discard(batch_key(first, rows(first)))
        else:
            step = plan.expect(batches(*range(first, first + count)))
            dropped = step.dropped
            assert all(read.key not in open_reads for read in step.reads)
            open_reads |= {read.key for read in step.reads}
        assert open_reads.issuperset(dropped)
        open_reads.difference_update(dropped)
        assert len(open_reads) <= depth


def test_the_plan_knows_neither_torch_nor_threads_clocks_or_files():
    tree = ast.parse(Path(egeria.cache.prefetch.plan.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"__future__", "collections.abc", "dataclasses", "numpy", "numpy.typing"}
