"""Trials of the oracle that begin where they first differ from plain training come to what whole ones come to."""

from __future__ import annotations

import dataclasses
import errno
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.proving.comparing.results import read_outcome
from benchmarks.proving.running import checkpoint, runfile
from benchmarks.proving.running.branching import begin_epochs, branch_off
from benchmarks.proving.running.checkpoint import Checkpoint
from benchmarks.proving.running.execution import execute
from benchmarks.proving.running.progress import Bars
from benchmarks.proving.running.runfile import RunFile
from benchmarks.proving.running.runs import Place, Queue, make
from benchmarks.proving.schedules import EARLIEST, FROZEN, Schedule, to_text
from benchmarks.proving.studies.oracle import Trials, survey
from rich.console import Console
from tests.pieces import new_training, told, wanted_run

from egeria.events import IntervalMeasured
from egeria.report.history import read_history

NUM_EPOCHS = 5
# Processes that import torch take long on machines that do other things too.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


def finish(run: RunFile, directory: Path) -> list[int]:
    """Make a run to its end; return the epochs it told of."""
    said: list[dict] = []
    directory.mkdir(parents=True, exist_ok=True)
    assert execute(run, directory, Path("nowhere"), said.append) == 0, (directory / runfile.FILE_NAME).read_text()
    assert [record for record in said if "note" in record] == []
    return [record["epoch"] for record in said]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Plain training that kept its epochs."""
    folder = tmp_path_factory.mktemp("results")
    plain = wanted_run("none", keeps_epochs=True)
    finish(plain, folder / plain.place)
    assert not (folder / plain.place / checkpoint.FILE_NAME).exists()
    return folder


@pytest.mark.parametrize(
    ("schedule", "first"),
    [
        ("0.3:1+0.7:2", 1),
        ("0.4:1+0.8:3", 1),
        ("0.41:2+0.9:0", 2),
        ("0.9:3", 4),
        ("0.45:1+0.7:3,plasticity.interval_steps=7", 2),
        ("0.61:2,plasticity.interval_steps=50", 3),
        ("0.41:1,3/4+0.7:2,3/2", 2),
        ("0.41:2/2", 2),
        ("0.41:2+0.6:0+0.65:2", 2),
    ],
)
def test_what_branches_off_comes_to_what_a_whole_trial_comes_to(schedule, first, results, tmp_path):
    run = wanted_run(f"static:schedule={schedule}", purpose=runfile.ORACLE)
    finish(run, tmp_path)
    assert branch_off(run, results) == first
    branch = results / run.place
    assert finish(run, branch) == list(range(first, NUM_EPOCHS + 1))
    decided = [record for record in told(branch) if record["event"] in ("frozen", "thawed", "metric")]
    assert decided == [record for record in told(tmp_path) if record["event"] in ("frozen", "thawed", "metric")]
    found, whole = (read_outcome(place, runfile.load(place)) for place in (branch, tmp_path))
    assert found.skipped == whole.skipped
    assert whole.skipped.total > 0
    assert found.spans == whole.spans
    intervals = [event.step for event in read_history(branch).of(IntervalMeasured)]
    assert intervals == [event.step for event in read_history(tmp_path).of(IntervalMeasured)][-len(intervals) :]
    assert (found.num_modules, found.interval_steps) == (whole.num_modules, whole.interval_steps)
    times = [evaluation.cpu_s for evaluation in found.evaluations]
    assert 0 < times[0] < times[-1]
    assert times == sorted(times)  # those of plain training, then its own on top


@pytest.mark.parametrize(
    ("begin", "end", "change"),
    [
        (EARLIEST, 1.0, lambda row: (2.0, *row[1:])),
        (0.1, 1.0, lambda row: (4.0, 4.0, 2.0)),
        (EARLIEST, 1.0, lambda row: (FROZEN, FROZEN, row[2])),
        (0.125, 0.8, lambda row: (FROZEN, 4.0, row[2])),
    ],
)
def test_a_trial_skips_what_its_schedule_foretold(begin, end, change, tmp_path):
    schedule = Schedule.freezing((1.0, 1.0, 1.0)).put(begin, end, change)
    run = wanted_run(to_text(schedule), purpose=runfile.ORACLE)
    finish(run, tmp_path)
    found = read_outcome(tmp_path, runfile.load(tmp_path))
    assert found.skipped.backward == pytest.approx(schedule.rest(survey(new_training()).weights), abs=0.005)


def test_what_freezes_in_the_first_epoch_trains_whole(results):
    run = wanted_run("static:schedule=0.2:1", purpose=runfile.ORACLE)
    assert branch_off(run, results) is None
    assert not (results / run.place).exists()


def test_an_epoch_that_is_damaged_or_gone_gives_way_to_one_before(results):
    run = wanted_run("static:schedule=0.95:1", purpose=runfile.ORACLE)
    source = results / wanted_run("none").place
    path = checkpoint.kept(source, 4) / checkpoint.FILE_NAME
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1])
        assert branch_off(run, results) == 3
        path.unlink()
        assert branch_off(run, results) == 3
    finally:
        path.write_bytes(content)
    assert branch_off(run, results) == 4


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    saving = checkpoint.save

    def fill(found: Checkpoint, directory: Path) -> None:
        if found.epoch == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        saving(found, directory)

    monkeypatch.setattr(checkpoint, "save", fill)
    plain = wanted_run("none", keeps_epochs=True)
    with pytest.warns(UserWarning, match="epoch 3 is not kept .* No space left"):
        finish(plain, tmp_path / plain.place)
    assert sorted(path.name for path in (tmp_path / plain.place / "epochs").iterdir()) == ["1", "2", "4", "5"]
    assert branch_off(wanted_run("static:schedule=0.8:1"), tmp_path) == 2


def test_few_epochs_of_a_long_training_are_kept():
    assert begin_epochs(5) == {1, 2, 3, 4}
    assert begin_epochs(20) == {1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17, 18}
    assert len(begin_epochs(200)) == 15
    assert begin_epochs(1) == frozenset()


def test_a_trial_that_was_broken_off_branches_off_again(results):
    """What lies there may stem from plain training that was made again since."""
    run = wanted_run("static:schedule=0.55:1", purpose=runfile.ORACLE)
    assert branch_off(run, results) == 2
    leftover = results / run.place / checkpoint.FILE_NAME
    content = leftover.read_bytes()
    for left in (None, run):
        leftover.write_bytes(b"of another plain run")
        if left:
            left.save(results / run.place)
        assert find_epoch(run, results) == 2
        assert leftover.read_bytes() == content
    assert find_epoch(dataclasses.replace(run, purpose=runfile.COMPARISON), results) is None
    assert not leftover.exists()


def find_epoch(run: RunFile, results: Path) -> int | None:
    """Return the epoch a run would go on from, as the queue that makes it finds it."""
    with Bars(Console(file=io.StringIO()), 1) as bars:
        queue = Queue([run], Place(data=Path("nowhere"), results=results), bars)
        return queue._find_epoch(run, results / run.place)


def test_without_plain_training_there_is_nothing_to_branch_off_from(tmp_path, results):
    assert branch_off(wanted_run("static:schedule=0.5:1"), tmp_path) is None
    assert branch_off(wanted_run("static:schedule=0.5:1", seed=1), results) is None


def test_a_search_branches_off_by_itself(tmp_path):
    place = Place(data=Path("nowhere"), results=tmp_path)

    def make_all(wanted: Sequence[RunFile]) -> None:
        with Bars(Console(file=io.StringIO()), len(wanted)) as bars:
            assert make(wanted, place, bars).failed == []

    Trials(wanted_run("none"), [0], tmp_path, make_all, most_runs=3).search([0.1, 0.1, 0.1])
    made = [runfile.load(path.parent) for path in sorted(tmp_path.rglob(runfile.FILE_NAME))]
    assert {run.status for run in made} == {runfile.FINISHED}
    tried = {run.policy.text: run for run in made if run.purpose == runfile.ORACLE}
    assert len(tried) == 2
    assert tried["static:schedule=0.5:3"].made_with["pieces"] == 2
