"""Runs in pieces by the command line: what may begin, what is broken off, and the gpu tier, dry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.proving.journal import read_journal
from benchmarks.proving.running import limit
from benchmarks.proving.running.checkpoint import Checkpoint
from benchmarks.proving.running.limit import Limit
from benchmarks.proving.running.piece import Piece
from benchmarks.proving.running.randomness import find_generators, read_chance, set_chance
from benchmarks.proving.running.training import train
from tests.pieces import CPU, ROOT, STATIC, new_training, told
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

COMMON = ["--tier", "gpu", "--device", "cpu", "--seeds", "0"]
# Processes that import torch take long on machines that do other things too.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("left_s", "expected"), [(105, False), (115, False), (125, True)])
def test_an_epoch_begins_only_if_those_before_it_would_have_ended_in_time(left_s, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(limit, "now_s", lambda: 1000.0)
    nothing = {"identity": {}, "epoch": 9, "commits": [], "num_pieces": 1, "training": {}, "egeria": None}
    begun = Checkpoint(**nothing, wall_s=1.0, cpu_s=1.0, lengths_s=[100.0, 900.0, 100.0])  # one of them stalled
    piece = Piece(new_training(), CPU, tmp_path, limit=Limit(1000.0 + left_s), begun=begun)
    assert piece.has_time() is expected


class Noisy(Dataset):
    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return index + torch.rand(1, generator=self.noise).item()


def test_chance_goes_on_from_where_it_was_read():
    data = Noisy()
    sampler = BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(2)), 4, drop_last=False)
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator().manual_seed(3))
    generators = find_generators(loader)
    assert len(generators) == 3
    state = read_chance(generators, CPU)
    first = [batch.tolist() for batch in loader] + torch.rand(2).tolist()
    set_chance(state, generators, CPU)
    assert [batch.tolist() for batch in loader] + torch.rand(2).tolist() == first


# --- the command line: the gpu tier, dry -----------------------------------------------------------


def bench(results: Path, minutes: float = 30.0) -> list[str]:
    own = ["--workloads", "tests.toy_that_stops", "--results", str(results), "--minutes", str(minutes)]
    return ["run", "stops", "--policy", STATIC.text, *COMMON, *own]


def test_one_command_makes_the_gpu_tier_in_pieces(tmp_path, monkeypatch, capsys):
    command = [sys.executable, "-m", "benchmarks", *bench(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TOY_LATE_AFTER": "2"}
    first = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert first.returncode == 75, first.stdout + first.stderr
    assert "2 of 5 epochs" in first.stdout
    assert "finished: 0 of 1 runs; left: 1. Again, please" in first.stdout

    monkeypatch.setenv("TOY_KILLED_AFTER", "1")
    assert main(bench(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "its process ended with status -9" in said
    assert "3 of 5 epochs" in said

    monkeypatch.delenv("TOY_KILLED_AFTER")
    assert main(bench(tmp_path)) == 0
    assert "finished: 1 of 1 runs; left: 0." in capsys.readouterr().out
    (run,) = tmp_path.rglob("run.json")
    train(new_training(), STATIC, tmp_path / "whole", CPU)
    assert told(run.parent) == told(tmp_path / "whole")
    assert read_journal(run.parent).num_processes == 3
    assert main(["compare", "stops", "--results", str(tmp_path)]) == 0
