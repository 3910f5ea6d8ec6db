"""Each workload of the proving ground, and the script for GPUs, from the command line in their smallest tiers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.micro import accelerator
from benchmarks.proving.comparing.results import read_results
from benchmarks.workloads.registry import WORKLOADS
from benchmarks.workloads.workload import MissingDataError, Setting, Workload
from tests.pieces import ROOT

BY_NAME = {workload.name: workload for workload in WORKLOADS}
# Each is built as another one that the gate has.
OF_BERT = {f"bert-{task}" for task in ("cases", "pairs", "sst2", "sst2-lora", "topics")}
ALIKE = OF_BERT | {name for name in BY_NAME if "cosine" in name or "resnet56" in name or "-sgd" in name}
pytestmark = pytest.mark.bench


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in BY_NAME]
)
def test_trains_watched_and_can_be_compared(name, data, tmp_path, capsys):
    arguments = ["run", name, "--policy", "default", "--seeds", "0", "--tier", "smoke"]
    status = main([*arguments, "--data", str(data), "--results", str(tmp_path)])
    said = capsys.readouterr().out
    if status:
        skip_without_data(BY_NAME[name], data)
    assert status == 0, said
    (outcome,) = read_results(tmp_path)
    assert outcome.final.cpu_s < 60.0
    assert all(math.isfinite(evaluation.value) for evaluation in outcome.evaluations)
    assert not [remark for remark in outcome.remarks if remark.startswith("fault")]
    if not BY_NAME[name].is_relative:
        assert outcome.final.value > 1  # points are per cent, not shares


def skip_without_data(workload: Workload, data: Path) -> None:
    try:
        workload.build(Setting(data=data, tier="smoke", seed=0, device=torch.device("cpu")))
    except MissingDataError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(300)
def test_the_script_for_gpus_runs_tiny_on_a_cpu_and_keeps_what_it_found(tmp_path):
    pytest.importorskip("transformers")
    command = [ROOT / "scripts" / "gpu", tmp_path, "--device", "cpu", "--tiny"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["way"] for row in rows[:6]] == ["plain", "attached", *accelerator.SHARES]
    assert [row["way"] for row in rows[6:]] == ["plain", "attached", *accelerator.COMPILED_SHARES]
    depths = [row["frozen"] for row in rows]
    assert depths[:2] == [0, 0] and depths[2:6] == sorted(depths[2:6]) and depths[5] == rows[0]["num_modules"] - 1
    assert all(row["iteration_ms"] > 0 and row["peak_bytes"] == 0 for row in rows), "a CPU does not say"
    page = (tmp_path / "README.md").read_text()
    assert "| gpt2, compiled | half |" in page and "not told" in page
