"""Analysis of plain training afterwards: what its verdicts mean, and the command on a toy."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.proving.studies.posthoc import SLOPE, STABLE, Analysis, Probe, Reading
from benchmarks.proving.studies.posthoc_record import describe_analysis, in_any_order

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


QUARTER = STABLE * 4  # the change that counts as stable in a stretch of a quarter
MOVING = [0.9, 0.6, 0.4, 0.2, 0.0]
FOUND = analysis(
    distances=[[0.5, 0.1, 0.1 + QUARTER / 2, 0.3, 0.3], [0.5, 0.5, 0.5, 0.2, 0.2], MOVING],
    moved=[[9.0, 1.0, SLOPE, 0.1], [9.0, 0.9, 0.8, 0.1], [9.0, 0.9, 0.8, 0.7]],
)


class TestVerdicts:
    def test_stable_is_what_keeps_its_distance_and_stationary_what_hardly_moves(self):
        assert FOUND.stable(0) == [False, True, False, True]
        assert FOUND.stationary(0) == [False, False, True, True], "the first stretch is no measure of the others"
        assert FOUND.stationary(1) == [False, False, False, True]
        assert not any(FOUND.stable(2)) and not any(FOUND.stationary(2))

    def test_what_is_to_come_does_not_make_a_module_stationary(self):
        late = analysis(distances=[MOVING] * 3, moved=[[0.1, 0.1, 1.0, 0.1]] * 3)
        assert late.stationary(0) == [False, False, False, True]

    def test_a_longer_stretch_may_change_by_more(self):
        fine = [Reading(module=0, share=share, distance=share * QUARTER * 3, moved=1.0) for share in (0, 0.25, 0.75, 1)]
        found = Analysis(names=["a", "b"], weights=[0.3], readings=[fine, fine])
        assert found.stable(0) == [True, True, True]

    def test_front_to_back_nothing_rests_behind_what_does_not(self):
        assert FOUND.stable(1) == [True, True, False, True]
        assert FOUND.front(FOUND.stable) == [0, 2, 0, 2]
        assert FOUND.front(FOUND.stationary) == [0, 0, 1, 2]

    def test_the_saving_is_that_of_what_rests_for_as_long_as_it_does(self):
        assert FOUND.saving(FOUND.stable) == pytest.approx(2 / 4 * (0.3 + 0.2))
        assert FOUND.saving(FOUND.stable, in_any_order=True) == pytest.approx(2 / 4 * 0.3 + 3 / 4 * 0.2)
        assert FOUND.saving(FOUND.stationary) == pytest.approx(2 / 4 * 0.3 + 1 / 4 * 0.2)

    def test_the_delay_is_between_the_ends_of_the_last_movements(self):
        assert FOUND.delay(0) == pytest.approx(2 / 4 - 3 / 4)  # stationary from 50 % on, stable from 75 %
        assert FOUND.delay(1) == pytest.approx(0)
        assert FOUND.delay(2) is None

    def test_measures_agree_where_the_one_ranks_stretches_as_the_other(self):
        distances = [[1.0, 0.9, 0.5, 0.2, 0.1]] * 3
        same = analysis(distances=distances, moved=[[0.0, 5.0, 2.0, 1.0]] * 3)
        assert same.agreement() == pytest.approx(1.0)
        other_way = analysis(distances=distances, moved=[[99.0, 0.0, 2.0, 5.0]] * 3)
        assert other_way.agreement() == pytest.approx(-1.0)

    def test_without_a_distance_nothing_is_stable_and_it_is_said(self):
        unknown = analysis(distances=[[None] * 5] * 3, moved=[[1.0, 0.9, 0.1, 0.1]] * 3)
        assert unknown.saving(unknown.stable) == 0 and unknown.agreement() is None
        assert "too few samples for PWCCA" in describe_analysis(unknown)[0]
        partly = analysis(distances=[MOVING, [None] * 5, MOVING], moved=[[1.0, 0.9, 0.1, 0.1]] * 3)
        assert "Not known of, and counted as moving: b." in describe_analysis(partly)[0]


def test_what_smartfrz_would_freeze_in_any_order_counts_for_as_long_as_it_says_so():
    final = SimpleNamespace(epoch=4)
    predicted = ((1.0, (True, False, True)), (2.0, (True, True, False)), (3.0, (False, False, False)))
    outcome = SimpleNamespace(predicted=predicted, final=final)
    assert in_any_order(FOUND, outcome) == pytest.approx(1 / 4 * 0.3 + 1 / 4 * (0.3 + 0.2))


def test_padding_is_no_sample_and_samples_come_from_everywhere():
    probe = Probe(SimpleNamespace(loader=[None]), [])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    probe._batch, found = {"attention_mask": mask}, {}
    probe._note(found, 0, torch.arange(16.0).reshape(2, 4, 2))
    assert sorted(found[0].samples[0][:, 0].tolist()) == [0, 2, 8]
    probe._batch, found = (torch.zeros(1),), {}
    probe._note(found, 0, torch.arange(64.0).reshape(1, 1, 8, 8).expand(4, 2, 8, 8))
    columns = {int(value) % 8 for value in found[0].samples[0][:, 0]}
    assert len(found[0].samples[0]) == 120 and columns == set(range(8))


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
        assert distances[-1] == pytest.approx(0, abs=1e-6) and distances[0] > distances[-2] and distances[0] > 0.05
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
