"""The bench from its command line to its record, on a toy."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.proving.comparing.archive import opened
from benchmarks.proving.journal import read_journal
from benchmarks.proving.running import runfile
from tests.pieces import COMMON, ROOT, bench

EAGER = (
    "egeria:plasticity.interval_steps=2,plasticity.window=2,bootstrapping.change_threshold=0.99,"
    "controller.kind=inline,controller.budget_share=1.0,freezing.tolerance_share=0.9"
)
# Processes that import torch take long on machines that do other things too.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
# Each process takes seconds to import torch: one set of runs serves all tests that only read it.


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Two policies with one seed, made by the real command line."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "benchmarks", "run", "toy", "--policy", f"none,{EAGER}", "--seeds", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    made = subprocess.run(
        [*command, *COMMON, "--results", str(folder), "--jobs", "2"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture
def copy(results, tmp_path) -> Path:
    """A copy of the runs, to be spoilt."""
    return Path(shutil.copytree(results, tmp_path / "results"))


def run_directory(results: Path, policy: str) -> Path:
    (found,) = (results / "toy" / "smoke").glob(f"{policy}*/seed0")
    return found


def test_each_run_is_a_journal_with_times_that_grow(results):
    for policy in ("none", "egeria"):
        metrics = read_journal(run_directory(results, policy)).of("metric")
        logged = [event["values"] for event in metrics]
        assert [values["epoch"] for values in logged] == [1, 2, 3, 4, 5]
        assert [event["step"] for event in metrics] == [32, 64, 96, 128, 160]
        for clock in ("train_wall_s", "train_cpu_s"):
            seconds = [values[clock] for values in logged]
            assert seconds == sorted(seconds)
            assert seconds[0] > 0
        assert logged[-1]["accuracy"] > 30  # of 16 classes: it learns
        assert logged[-1]["train_loss"] < logged[0]["train_loss"]


def test_finished_runs_are_left_out_and_broken_ones_made_again(copy, capsys):
    whole = run_directory(copy, "egeria") / "journal.jsonl"
    before = whole.stat().st_mtime_ns
    broken = run_directory(copy, "none")
    file = runfile.load(broken)
    broken.joinpath("run.json").write_text(broken.joinpath("run.json").read_text().replace("finished", "running"))
    journal = broken / "journal.jsonl"
    journal.write_text(journal.read_text()[:400])
    assert bench("run", "toy", "--policy", f"none,{EAGER}", "--seeds", "0", *COMMON, "--results", copy) == 0
    assert "finished before: 1 of 2 runs" in capsys.readouterr().out
    assert whole.stat().st_mtime_ns == before
    assert runfile.load(broken).status == "finished"
    assert len(read_journal(broken).of("metric")) == 5
    assert runfile.load(broken).recipe == file.recipe


def test_comparing_a_record_gives_the_same_record(results, tmp_path, capsys):
    assert bench("compare", "toy", "--results", results, "--out", tmp_path / "one") == 0
    assert not (tmp_path / "one" / "journals").exists()
    assert bench("compare", "--results", tmp_path / "one" / "journals", "--out", tmp_path / "two") == 0
    assert bench("compare", "--results", tmp_path / "one", "--out", tmp_path / "one") == 0  # what is kept stays
    names = sorted(
        str(path.relative_to(tmp_path / "one")) for path in (tmp_path / "one").rglob("*.*") if path.is_file()
    )
    assert names == sorted(str(p.relative_to(tmp_path / "two")) for p in (tmp_path / "two").rglob("*.*") if p.is_file())
    assert {"README.md", "journals.tar.xz", "toy-smoke-accuracy.svg", "toy-smoke-frozen.svg"} <= set(names)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    shown = capsys.readouterr().out
    assert "| none | 0 |" in shown
    with opened(tmp_path / "one") as journals:
        (comparison,) = json.loads((journals / "results.json").read_text())
    assert [policy["policy"] for policy in comparison["policies"]] == ["none", EAGER]
    assert comparison["policies"][1]["skipped"]["mean"] > 0
    page = (tmp_path / "one" / "README.md").read_text()
    assert str(tmp_path) not in page
    for name in re.findall(r"\]\(([^)]+)\)", page):
        assert (tmp_path / "one" / name).exists(), name


def test_a_replay_decides_alike_and_shows_the_first_difference(copy, capsys):
    assert bench("replay", copy) == 0
    assert "1 of 1 runs decide alike; of other policies: 1" in capsys.readouterr().out
    journal = run_directory(copy, "egeria") / "journal.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    (first, *_) = [event for event in events if event["event"] == "frozen"]
    for event in events:
        if event["event"] == "plasticity" and event["step"] <= first["step"]:
            event["value"] = 2.0 ** event["step"]  # it never becomes stationary
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert bench("replay", copy) == 1
    assert f"recorded is freeze 0 at step {first['step']}, replayed" in capsys.readouterr().out


def test_another_recipe_is_refused_by_what_changed(copy, monkeypatch, capsys):
    monkeypatch.setenv("TOY_RATE", "0.001")
    assert bench("run", "toy", "--policy", "none", "--seeds", "0,1", *COMMON, "--results", copy) == 2
    said = capsys.readouterr().err
    assert "another recipe" in said
    assert "0.01" in said
    assert "--again" in said
    assert not list(copy.rglob("seed1"))


def test_a_run_that_fails_says_why_and_is_not_a_result(tmp_path, capsys):
    assert bench("run", "broken", "--policy", "none", "--seeds", "0", *COMMON, "--results", tmp_path) == 1
    assert "ValueError: a fault in the workload" in capsys.readouterr().out
    directory = tmp_path / "broken" / "smoke" / "none" / "seed0"
    assert runfile.load(directory).status == "failed"
    assert "a fault in the workload" in (directory / "output.txt").read_text()
    assert bench("compare", "broken", "--results", tmp_path) == 2
