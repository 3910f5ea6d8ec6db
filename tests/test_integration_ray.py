"""Ray Train: what its workers are given, workers that are killed, and a cluster that shrinks and grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import egeria
from egeria.events import ModuleFrozen, Resumed
from egeria.journal import EgeriaWarning

pytest.importorskip("ray.train", reason="Ray Train is what this is for")
pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")
from ray import train

from egeria.integrations import ray as egeria_ray

HERE = Path(__file__).resolve().parent


class Worker:
    """What Ray tells a worker, and what the worker reports."""

    def __init__(self, monkeypatch, folder, rank=0, kind="local"):
        self.reported, self.checkpoint = [], None
        storage = SimpleNamespace(
            storage_filesystem=SimpleNamespace(type_name=kind), experiment_fs_path=str(folder / "name")
        )
        context = SimpleNamespace(get_world_rank=lambda: rank, get_storage=lambda: storage)
        monkeypatch.setattr(train, "get_context", lambda: context)
        monkeypatch.setattr(train, "get_checkpoint", lambda: self.checkpoint)
        monkeypatch.setattr(train, "report", self.report)

    def report(self, metrics, checkpoint=None, **options):
        names = sorted(entry.name for entry in Path(checkpoint.path).iterdir()) if checkpoint else []
        self.reported.append((metrics, names, options))


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        settings = {"policy": {"plan": "0.5:2"}, "plasticity": {"interval_steps": 2}}
        self.run = egeria_ray.attach(self.model, self.optimizer, total_steps=40, config=settings)

    def go(self, count):
        for _ in range(count):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.run.step(loss)
        return self


def test_the_state_rides_in_the_checkpoint_and_the_numbers_in_the_results(tmp_path, monkeypatch):
    worker, kept = Worker(monkeypatch, tmp_path), tmp_path / "kept"
    kept.mkdir()
    (kept / "states.pt").touch()
    loop = Loop()
    assert not loop.run.restore()
    with loop.go(30).run as run:
        run.report({"loss": 1.5}, train.Checkpoint.from_directory(kept), checkpoint_dir_name="here")
        run.report({"loss": 1.4, "egeria/frozen": "mine"})
    (metrics, names, options), (later, none, _) = worker.reported
    assert (metrics["loss"], metrics["egeria/frozen"]) == (1.5, 2.0) and names == ["egeria.pt", "states.pt"]
    assert options == {"checkpoint_dir_name": "here"} and later["egeria/frozen"] == "mine" and none == []
    assert len(egeria.read_journal(tmp_path / "name" / "egeria").of(ModuleFrozen)) == 2

    worker.checkpoint = train.Checkpoint.from_directory(kept)
    again = Loop()
    with again.run as run:
        assert run.restore() and run.frozen == 2
    assert egeria.read_journal(tmp_path / "name" / "egeria").of(Resumed)[0].step == 30


def test_only_the_first_worker_writes(tmp_path, monkeypatch):
    worker, kept = Worker(monkeypatch, tmp_path, rank=1), tmp_path / "kept"
    kept.mkdir()
    with Loop().go(2).run as run:
        run.report({}, train.Checkpoint.from_directory(kept))
    ((metrics, names, _),) = worker.reported
    assert names == [] and "egeria/frozen" in metrics


def test_a_checkpoint_without_a_state_begins_unfrozen_and_one_that_cannot_have_it_goes_without(tmp_path, monkeypatch):
    worker, kept = Worker(monkeypatch, tmp_path), tmp_path / "kept"
    kept.mkdir()
    worker.checkpoint = train.Checkpoint.from_directory(kept)
    loop = Loop().go(30)
    with pytest.warns(EgeriaWarning, match=r"resuming: the checkpoint .* has no egeria\.pt"):
        assert not loop.run.restore()
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with loop.run as run, pytest.warns(EgeriaWarning, match="no space left"):
        run.report({"loss": 1.0}, worker.checkpoint)
    ((metrics, names, _),) = worker.reported
    assert metrics["loss"] == 1.0 and names == []


@pytest.mark.parametrize("kind", ["s3", "py::fsspec+x", None])
def test_where_ray_keeps_the_run_in_a_bucket_or_does_not_tell_the_journal_goes_where_it_always_does(
    kind, tmp_path, monkeypatch
):
    Worker(monkeypatch, Path("bucket"), kind=kind)
    if kind is None:  # Ray's local mode
        train.get_context().get_storage = lambda: (_ for _ in ()).throw(NotImplementedError)
    monkeypatch.chdir(tmp_path)
    loop = Loop().go(2)
    loop.run.close()
    assert loop.run.directory.parent.name == "egeria_runs"


def in_ray(what, folder):
    command = [sys.executable, str(HERE / "ray_jobs.py"), what, str(folder)]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[{")))


SAME = ("loss", "accuracy", "epoch", "egeria/frozen")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_worker_that_is_killed_costs_nothing_but_time(tmp_path):
    """To the bit: the run goes on from the last checkpoint, which is that of the run that was never stopped."""
    whole, *killed = in_ray("kill", tmp_path)
    assert whole["began"] == 1 and whole["egeria/frozen"] == 3 and len(killed) == 5
    for run in killed:
        assert run["began"] >= 2, "a worker was killed, and Ray began again"
        assert [run[name] for name in SAME] == [whole[name] for name in SAME]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_cluster_that_shrinks_and_grows_trains_as_one_that_stays(tmp_path):
    (run,) = in_ray("elastic", tmp_path)
    assert run["epoch"] == len(run["kept"])
    sizes = [processes for _, processes in run["kept"]]
    changes = [size for place, size in enumerate(sizes) if place == 0 or size != sizes[place - 1]]
    assert changes == [2, 1, 2]
    assert egeria.read_journal(tmp_path / "elastic" / "egeria").of(Resumed)
    assert run["egeria/frozen"] == 3
