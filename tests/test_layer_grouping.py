"""How atoms of given sizes are grouped, without any model."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cuts import numbered
from egeria.layers.atoms import group_atoms, split_evenly


def groups(sizes, names=None, **options):
    settings = {"target_share": 0.2, "minimum_share": 0.005, **options}
    names = names or numbered("layers", 0, len(sizes))
    return [(group.start, group.stop) for group in group_atoms(names, sizes, sum(sizes), **settings)]


def test_small_stages_join_the_one_behind_them_or_before_them_at_the_end():
    assert groups([1, 500, 500, 4], target_share=0.4) == [(0, 2), (2, 3), (3, 4)]
    assert groups([1, 2, 4, 8], minimum_share=1.0, target_share=1.0) == [(0, 3), (3, 4)]


def test_alternating_sizes_are_one_stage():
    assert groups([1, 8] * 4, target_share=0.5) == [(0, 4), (4, 7), (7, 8)]


def test_blocks_that_are_wrapped_one_by_one_are_at_home_in_their_list():
    names = [f"layers.{i}.block" for i in range(6)]
    assert groups([5] * 6, names, target_share=0.5) == [(0, 3), (3, 5), (5, 6)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_splits_are_the_best_there_are(sizes, data):
    num_parts = data.draw(st.integers(1, len(sizes)))

    def cost(edges):
        bounds = itertools.pairwise([0, *edges, len(sizes)])
        return sum(sum(sizes[start:stop]) ** 2 for start, stop in bounds)

    edges = split_evenly(sizes, num_parts)
    choices = list(itertools.combinations(range(1, len(sizes)), num_parts - 1))
    best = min(map(cost, choices))
    assert tuple(edges) == max(choice for choice in choices if cost(choice) == best)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=30), st.floats(0.01, 1), st.floats(0.001, 0.3))
def test_groups_cover_all_atoms_and_leave_the_last_alone(sizes, target_share, minimum_share):
    found = groups(sizes, target_share=target_share, minimum_share=minimum_share)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1] == (len(sizes) - 1, len(sizes)) or found[-1][1] - found[-1][0] == 1
