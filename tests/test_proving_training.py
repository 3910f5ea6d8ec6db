"""One training run of the bench."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from benchmarks.proving.comparison import compare
from benchmarks.proving.policies import parse_policy
from benchmarks.proving.recipe import describe
from benchmarks.proving.results import read_outcome
from benchmarks.proving.training import train
from tests.pieces import CPU, new_training, wanted_run

from egeria.events import MetricLogged
from egeria.report.history import read_history

pytestmark = pytest.mark.bench


@pytest.mark.parametrize("policy", ["none", "static:schedule=0.5:1"])
def test_looking_more_often_changes_nothing_but_what_is_seen(policy, tmp_path):
    seen, weights = {}, {}
    for count in (1, 3):
        training = dataclasses.replace(new_training(), evaluations_per_epoch=count)
        assert train(training, parse_policy(policy), tmp_path / str(count), CPU)
        seen[count] = {
            event.step: (event.values["epoch"], event.values["accuracy"])
            for event in read_history(tmp_path / str(count)).of(MetricLogged)
        }
        weights[count] = training.model.state_dict()
    assert [epoch for epoch, _ in seen[1].values()] == [1, 2, 3, 4, 5]
    assert list(seen[3])[:6] == [10, 21, 32, 42, 53, 64]
    assert [epoch for epoch, _ in seen[3].values()][:6] == [10 / 32, 21 / 32, 1, 1 + 10 / 32, 1 + 21 / 32, 2]
    assert seen[1].items() <= seen[3].items()
    assert all(torch.equal(tensor, weights[3][name]) for name, tensor in weights[1].items())


@pytest.mark.parametrize("policy", ["none", "static:schedule=0.5:1"])
def test_the_judge_is_asked_once_at_the_end_and_decides_on_quality(policy, tmp_path):
    asked = []

    def judge(network):
        asked.append(network.training)
        return {"accuracy": 12.5}

    training = dataclasses.replace(new_training(), judge=judge)
    assert train(training, parse_policy(policy), tmp_path, CPU)
    assert asked == [False]
    logged = [event.values for event in read_history(tmp_path).of(MetricLogged)]
    assert [values.get("judge_accuracy") for values in logged] == [None] * 4 + [12.5]
    assert all("accuracy" in values for values in logged)
    run = wanted_run(policy, recipe=describe(training))
    found = read_outcome(tmp_path, run)
    assert found.quality == 12.5 != found.final.value
    (comparison,) = compare([found], policy)
    assert comparison.policies[0].final.mean == 12.5
    without = read_outcome(
        tmp_path, dataclasses.replace(run, workload=dataclasses.replace(run.workload, metric="train_loss"))
    )
    assert without.quality == without.final.value
