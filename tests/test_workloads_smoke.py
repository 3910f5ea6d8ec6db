"""Each workload of the proving ground, from the command line to a comparison, in its smallest tier."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.proving.catalogue import REGISTRY
from benchmarks.proving.comparing.results import read_results
from benchmarks.proving.running.progress import Bars
from benchmarks.proving.running.runfile import ORACLE
from benchmarks.proving.running.runs import Place, make
from benchmarks.workloads.registry import WORKLOADS
from benchmarks.workloads.workload import MissingDataError, Setting, Workload
from rich.console import Console
from tests.pieces import told, wanted_run

BY_NAME = {workload.name: workload for workload in WORKLOADS}
A_MINUTE_S = 60.0
pytestmark = pytest.mark.bench


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BY_NAME)
def test_trains_watched_and_can_be_compared(name, data, tmp_path, capsys):
    arguments = ["run", name, "--policy", "default", "--seeds", "0", "--tier", "smoke"]
    status = main([*arguments, "--data", str(data), "--results", str(tmp_path)])
    said = capsys.readouterr().out
    if status:
        skip_without_data(BY_NAME[name], data)
    assert status == 0, said
    (outcome,) = read_results(tmp_path)
    assert outcome.final.cpu_s < A_MINUTE_S
    assert all(math.isfinite(evaluation.value) for evaluation in outcome.evaluations)
    assert not [remark for remark in outcome.remarks if remark.startswith("fault")]
    if not BY_NAME[name].is_relative:
        assert outcome.final.value > 1  # points are per cent, not shares


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["mobilenetv2-tinyimagenet20", "transformer-tiny-multi30k"])
def test_a_trial_of_the_oracle_that_branches_off_is_one_that_was_made_whole(name, data, tmp_path):
    """With augmentation, batch normalisation and dropout, to the bit."""
    skip_without_data(BY_NAME[name], data)
    found = []
    for results, keeps_epochs in ((tmp_path / "whole", False), (tmp_path / "branched", True)):
        plain = wanted_run("none", BY_NAME[name], REGISTRY, tier="smoke", keeps_epochs=keeps_epochs)
        trial = wanted_run("static:schedule=0.75:2", BY_NAME[name], REGISTRY, tier="smoke", purpose=ORACLE)
        with Bars(Console(file=io.StringIO()), 2) as bars:
            assert make([plain, trial], Place(data=data, results=results), bars).failed == []
        _, outcome = read_results(results)
        found.append([record["values"] for record in told(outcome.directory) if record["event"] == "metric"])
        assert outcome.run.made_with.get("pieces", 1) == 1 + keeps_epochs
        assert outcome.skipped.total > 0
    assert found[0] == found[1]
    losses = [values["train_loss"] for values in found[0]]
    assert len(set(losses)) > 1  # metrics of so short a training may all be chance; losses are not


def skip_without_data(workload: Workload, data: Path) -> None:
    try:
        workload.build(Setting(data=data, tier="smoke", seed=0, device=torch.device("cpu")))
    except MissingDataError as error:
        pytest.skip(str(error))
