"""One training run of the bench."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from benchmarks.proving.policies import parse_policy
from benchmarks.proving.training import train
from tests.pieces import CPU, new_training

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
