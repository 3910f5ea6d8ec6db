"""Each workload of the proving ground, from the command line to a comparison, in its smallest tier."""

import math
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.proving.comparing.results import read_results
from benchmarks.workloads.registry import WORKLOADS
from benchmarks.workloads.workload import MissingDataError, Setting, Workload

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
