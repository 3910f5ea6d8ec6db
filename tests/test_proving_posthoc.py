"""Analysis of plain training afterwards: what its verdicts mean, and the command on a toy."""

from __future__ import annotations

import json
import shutil

import pytest
from benchmarks.__main__ import main
from benchmarks.proving.posthoc import SLOPE, STABLE, Analysis, Reading
from benchmarks.proving.posthoc_record import describe_analysis

COMMON = ["--workloads", "tests.toy_workloads", "--tier", "smoke", "--seeds", "0"]
pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


def analysis(distances, moved, weights=(0.3, 0.2)):
    """Four stretches of a quarter each."""
    readings = [
        [
            Reading(module=module, share=place / 4, distance=distance, moved=None if place == 0 else changes[place - 1])
            for place, distance in enumerate(own)
        ]
        for module, (own, changes) in enumerate(zip(distances, moved, strict=True))
    ]
    return Analysis(names=["a", "b", "c"], weights=list(weights), readings=readings)


MOVING = [0.9, 0.6, 0.4, 0.2, 0.0]
FOUND = analysis(
    distances=[[0.5, 0.1, 0.1 + STABLE / 2, 0.05, 0.05], [0.5, 0.5, 0.5, 0.2, 0.2], MOVING],
    moved=[[1.0, SLOPE, 0.1, 0.1], [1.0, 0.9, 0.8, 0.1], [1.0, 0.9, 0.8, 0.7]],
)


class TestVerdicts:
    def test_stable_is_what_keeps_its_distance_and_stationary_what_hardly_moves(self):
        assert FOUND.stable(0) == [False, True, False, True]
        assert FOUND.stationary(0) == [False, True, True, True]
        assert not any(FOUND.stable(2))

    def test_front_to_back_nothing_rests_behind_what_does_not(self):
        assert FOUND.stable(1) == [True, True, False, True]
        assert FOUND.front(FOUND.stable) == [0, 2, 0, 2]
        assert FOUND.front(FOUND.stationary) == [0, 1, 1, 2]

    def test_the_saving_is_that_of_what_rests_for_as_long_as_it_does(self):
        assert FOUND.saving(FOUND.stable) == pytest.approx(2 / 4 * (0.3 + 0.2))
        assert FOUND.saving(FOUND.stable, in_any_order=True) == pytest.approx(2 / 4 * 0.3 + 3 / 4 * 0.2)
        assert FOUND.saving(FOUND.stationary) == pytest.approx(3 / 4 * 0.3 + 1 / 4 * 0.2)

    def test_the_delay_is_between_the_ends_of_the_last_movements(self):
        assert FOUND.delay(0) == pytest.approx(1 / 4 - 3 / 4)  # stationary from 25 % on, stable from 75 %
        assert FOUND.delay(1) == pytest.approx(0)
        assert FOUND.delay(2) is None

    def test_measures_agree_where_the_one_ranks_stretches_as_the_other(self):
        same = analysis(distances=[[1.0, 0.5, 0.2, 0.1, 0.1]] * 3, moved=[[9.0, 5.0, 2.0, 0.0]] * 3)
        assert same.agreement().value == pytest.approx(1.0)
        other_way = analysis(distances=[[1.0, 0.5, 0.2, 0.1, 0.1]] * 3, moved=[[0.0, 2.0, 5.0, 9.0]] * 3)
        assert other_way.agreement().value == pytest.approx(-1.0)

    def test_without_a_distance_nothing_is_stable_and_it_is_said(self):
        unknown = analysis(distances=[[None] * 5] * 3, moved=[[1.0, 0.9, 0.1, 0.1]] * 3)
        assert unknown.saving(unknown.stable) == 0 and unknown.agreement().value is None
        assert "too few samples for PWCCA" in describe_analysis(unknown)[0]


def test_the_command_follows_each_module_to_the_trained_network(tmp_path, capsys):
    results, record = tmp_path / "results", tmp_path / "record"
    place = ["--results", str(results)]
    assert main(["run", "toy-narrow", "--policy", "static:schedule=0.4:2", *COMMON, *place]) == 0
    assert main(["posthoc", "toy-narrow", *COMMON, *place, "--out", str(record)]) == 0
    assert "front to back" in capsys.readouterr().out
    (found,) = json.loads((record / "results.json").read_text())["analyses"]
    *followed, last = found["readings"]
    assert {reading["distance"] for reading in last} == {None}, "512 samples are too few for 16 classes"
    for readings in followed:
        distances = [reading["distance"] for reading in readings]
        assert [reading["share"] for reading in readings] == [0, 0.2, 0.4, 0.6, 0.8, 1]
        assert distances[-1] == pytest.approx(0, abs=1e-6) and distances[0] == max(distances) > 0.05
        assert all(reading["moved"] > 0 for reading in readings[1:])
    page = (record / "README.md").read_text()
    assert "toy-narrow-smoke-seed0.svg" in page and "tests.toy_workloads" not in page
    assert "static:schedule=0.4:2" in (record / "toy-narrow-smoke-seed0.svg").read_text(), "what froze is beside it"
    # Again: the runs are there, and say the same.
    assert main(["posthoc", "toy-narrow", *COMMON, *place, "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "README.md").read_text() == page
    shutil.rmtree(results / "toy-narrow" / "smoke" / "none" / "seed0" / "epochs" / "5")
    assert main(["posthoc", "toy-narrow", *COMMON, *place]) == 2
    assert "no checkpoint of its last epoch" in capsys.readouterr().err
