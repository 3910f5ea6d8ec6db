"""Runs in pieces: what is stopped, killed or spoilt part-way goes on as if nothing had happened, or begins anew."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.proving import checkpoint, limit, runfile, runs
from benchmarks.proving.checkpoint import Checkpoint, UnusableError
from benchmarks.proving.commands import WorkloadFacts
from benchmarks.proving.execution import PAUSED_STATUS, build, execute
from benchmarks.proving.limit import Experience, Limit
from benchmarks.proving.piece import Piece
from benchmarks.proving.policies import Policy, parse_policy
from benchmarks.proving.randomness import find_generators, read_chance, set_chance
from benchmarks.proving.runfile import RunFile
from benchmarks.proving.training import train
from benchmarks.workloads.workload import Training
from tests import toy_workloads
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from egeria.events import IntervalMeasured, MetricLogged, ModuleFrozen, PlasticityRead, StageChanged, Thawed
from egeria.report.history import read_history

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
STEPS_PER_EPOCH = 32
EAGER = {
    "plasticity": {"interval_steps": 2, "window": 2},
    "bootstrapping": {"change_threshold": 0.99},
    "controller": {"kind": "inline"},
    "freezing": {"tolerance_share": 0.9},
}
STATIC = "static:schedule=0.3:1+0.7:2"
POLICIES = {
    "none": parse_policy("none"),
    "egeria": Policy(text="egeria", name="egeria", settings=EAGER),
    "default": Policy(text="mine", name="default", settings=EAGER),
    "static": parse_policy(STATIC),
}
COMMON = ["--tier", "gpu", "--device", "cpu", "--seeds", "0"]
pytestmark = pytest.mark.timeout(600)  # processes that import torch, on machines that do other things too


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The clock that limits go by, in its only entry."""
    hands = [1000.0]
    monkeypatch.setattr(limit, "now_s", lambda: hands[0])
    return hands


def new_training() -> Training:
    (toy, *_) = toy_workloads.WORKLOADS
    return build(toy, Path("nowhere"), "smoke", 0, CPU)


def told(directory: Path) -> list[dict]:
    """Return what the journal says of metrics, losses, readings and decisions, without times."""
    kinds = (MetricLogged, IntervalMeasured, PlasticityRead, StageChanged, ModuleFrozen, Thawed)
    records = [event.to_dict() for event in read_history(directory).events if isinstance(event, kinds)]
    for record in records:
        record["values"] = {name: value for name, value in record.get("values", {}).items() if name[-2:] != "_s"}
    return [{name: value for name, value in record.items() if name[-2:] != "_s"} for record in records]


def clocks(directory: Path, name: str) -> list[float]:
    return [event.values[name] for event in read_history(directory).of(MetricLogged)]


def make_piece(directory: Path, policy: Policy, clock: list[float], stop: float = math.inf) -> Training | None:
    """Train from the checkpoint until an epoch after which time is over; return the training if it is finished."""
    directory.mkdir(exist_ok=True)
    training = new_training()

    def look(epoch: int, frozen: float, values: dict[str, float]) -> None:
        clock[0] += 1e6 if epoch == stop else 0.0

    piece = Piece(training, CPU, directory, limit=Limit(clock[0] + 1000), begun=checkpoint.load(directory, {}))
    return training if train(training, policy, directory, CPU, look, piece=piece) else None


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_in_pieces_comes_to_what_one_comes_to_that_never_stopped(name, tmp_path, clock, monkeypatch):
    # How long `n` is depends on how long things take; here the steps at which anything happens are to be the same.
    monkeypatch.setattr("egeria.session.budget.Budget.review", lambda *_: None)
    whole = new_training()
    train(whole, POLICIES[name], tmp_path / "whole", CPU)
    parts = tmp_path / "parts"
    assert make_piece(parts, POLICIES[name], clock, stop=1) is None
    assert make_piece(parts, POLICIES[name], clock, stop=3) is None
    finished = make_piece(parts, POLICIES[name], clock)
    assert told(parts) == told(tmp_path / "whole")
    assert read_history(parts).num_processes == 3
    for name_of_tensor, tensor in whole.model.state_dict().items():
        assert torch.equal(finished.model.state_dict()[name_of_tensor], tensor), name_of_tensor
    if name != "none":
        frozen = [event.step for event in read_history(parts).of(ModuleFrozen)]
        assert min(frozen) < 3 * STEPS_PER_EPOCH < max(frozen)  # decisions before a stop and after it


def test_times_add_up_over_pieces_with_the_cost_of_going_on(tmp_path, clock, monkeypatch):
    make_piece(tmp_path, POLICIES["none"], clock, stop=2)
    (*_, before_s) = clocks(tmp_path, "train_wall_s")
    loading = torch.optim.Adam.load_state_dict
    monkeypatch.setattr(torch.optim.Adam, "load_state_dict", lambda *given: (time.sleep(0.5), loading(*given)))
    make_piece(tmp_path, POLICIES["none"], clock)
    for name in ("train_wall_s", "train_cpu_s"):
        assert clocks(tmp_path, name) == sorted(clocks(tmp_path, name))
    assert clocks(tmp_path, "train_wall_s")[2] >= before_s + 0.5


def wanted_run(policy: str = "none") -> RunFile:
    (toy, *_) = toy_workloads.WORKLOADS
    facts = {name: getattr(toy, name) for name in ("name", "metric", "higher_is_better", "is_relative", "paper")}
    return RunFile(
        status=runfile.WAITING,
        workload=WorkloadFacts(**facts),
        module="tests.toy_workloads",
        tier="gpu",
        seed=0,
        policy=parse_policy(policy),
        device="cpu",
    )


@pytest.fixture
def part_way(tmp_path, clock) -> Path:
    """The directory of a plain run that stopped after its second epoch."""

    def say(record: dict) -> None:
        clock[0] += 1e6 if record["epoch"] == 2 else 0.0

    assert execute(wanted_run(), tmp_path, Path("nowhere"), say, Limit(2000.0)) == PAUSED_STATUS
    found = runfile.load(tmp_path)
    assert (found.status, found.epoch, found.pid) == ("paused", 2, 0)
    return tmp_path


def go_on(directory: Path) -> list[dict]:
    """Make a run without a limit to its end; return what it says of itself."""
    said: list[dict] = []
    assert execute(wanted_run(), directory, Path("nowhere"), said.append) == 0
    assert [event.values["epoch"] for event in read_history(directory).of(MetricLogged)] == [1, 2, 3, 4, 5]
    assert not list(directory.glob("checkpoint*"))
    return said


def test_a_sound_checkpoint_is_used_also_without_a_limit_and_removed_at_the_end(part_way):
    assert [record["epoch"] for record in go_on(part_way)] == [2, 3, 4, 5]
    found = runfile.load(part_way)
    assert (found.status, found.epoch, found.made_with["pieces"]) == ("finished", 0, 2)


def test_a_run_without_a_limit_leaves_no_checkpoint_on_its_way(tmp_path):
    seen = []
    train(new_training(), POLICIES["none"], tmp_path, CPU, lambda *_: seen.append(list(tmp_path.glob("checkpoint*"))))
    assert seen == [[], [], [], [], []]


def spoil_torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def spoil_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def spoil_journal(path: Path) -> None:
    journal = path.with_name("journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"epoch":2' not in line))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_torn, "torn or damaged"),
        (spoil_a_bit, "torn or damaged"),
        (spoil_journal, "does not reach so far"),
    ],
)
def test_what_is_damaged_begins_anew_and_says_so(spoil, reason, part_way):
    spoil(part_way / "checkpoint.pt")
    note, *epochs = go_on(part_way)
    assert "begins anew" in note["note"]
    assert reason in note["note"]
    assert [record["epoch"] for record in epochs] == [0, 1, 2, 3, 4, 5]
    assert read_history(part_way).num_earlier_runs == 0  # the old journal is gone


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(part_way):
    identity = checkpoint.identify(runfile.load(part_way))
    assert checkpoint.load(part_way, identity).epoch == 2
    others = {"torch": "1.0", "its settings": {"policy": {"seed": 1}}, "batch_size": 7, "the device": "cuda"}
    for name, value in others.items():
        with pytest.raises(UnusableError, match=f"{name} was .*, now "):
            checkpoint.load(part_way, {**identity, name: value})


def test_a_checkpoint_under_way_does_not_spoil_the_last_one(part_way, monkeypatch):
    identity = checkpoint.identify(runfile.load(part_way))
    found = checkpoint.load(part_way, identity)

    def crash(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(found, part_way)
    assert checkpoint.load(part_way, identity).epoch == 2
    assert [record["epoch"] for record in go_on(part_way)] == [2, 3, 4, 5]


@pytest.mark.parametrize(("left_s", "expected"), [(105, False), (115, False), (125, True)])
def test_an_epoch_begins_only_if_those_before_it_would_have_ended_in_time(left_s, expected, clock, tmp_path):
    nothing = {"identity": {}, "epoch": 9, "commits": [], "num_pieces": 1, "training": {}, "egeria": None}
    begun = Checkpoint(**nothing, wall_s=1.0, cpu_s=1.0, lengths_s=[100.0, 900.0, 100.0])  # one of them stalled
    piece = Piece(new_training(), CPU, tmp_path, limit=Limit(clock[0] + left_s), begun=begun)
    assert piece.has_time() is expected


def test_a_run_is_expected_to_take_as_long_as_its_like():
    seen = Experience()
    assert seen.needed_s("small") == 0
    seen.note("large", 300)
    assert seen.needed_s("small") == 300
    seen.note("small", 20)
    seen.note("small", 10)
    assert (seen.needed_s("small"), seen.needed_s("large")) == (20, 300)


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
    return ["run", "stops", "--policy", STATIC, *COMMON, *own]


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
    train(new_training(), POLICIES["static"], tmp_path / "whole", CPU)
    assert told(run.parent) == told(tmp_path / "whole")
    assert read_history(run.parent).num_processes == 3
    assert main(["compare", "stops", "--results", str(tmp_path)]) == 0


def test_an_epoch_that_outlasts_the_command_is_broken_off_in_time(tmp_path, monkeypatch, capsys):
    hanging = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(runs, "_command", lambda *_: hanging)
    monkeypatch.setattr(runs, "LAST_S", 57.0)
    began_s = time.monotonic()
    assert main(bench(tmp_path, minutes=1)) == 1
    assert 2 < time.monotonic() - began_s < 60
    assert "No epoch ended in this time: give more --minutes." in capsys.readouterr().out
    (run,) = tmp_path.rglob("run.json")
    assert runfile.load(run.parent).status != runfile.FINISHED


def test_minutes_must_be_above_0(capsys):
    with pytest.raises(SystemExit):
        main(["run", "stops", "--policy", "none", "--minutes", "0"])
    assert "must be above 0" in capsys.readouterr().err
