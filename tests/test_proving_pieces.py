"""Runs in pieces: what is stopped, killed or spoilt part-way goes on as if nothing had happened, or begins anew."""

import math
import time
from pathlib import Path

import pytest
import torch
from benchmarks.proving.journal import read_journal
from benchmarks.proving.policies import Policy, parse_policy
from benchmarks.proving.running import checkpoint, limit, runfile
from benchmarks.proving.running.execution import PAUSED_STATUS, execute
from benchmarks.proving.running.limit import Limit
from benchmarks.proving.running.piece import Piece
from benchmarks.proving.running.training import train
from benchmarks.workloads.workload import Training
from tests.pieces import CPU, STATIC, new_training, told, wanted_run

STEPS_PER_EPOCH = 32
EAGER = {
    "policy": {"name": "egeria"},
    "plasticity": {"interval_steps": 2, "window": 2},
    "bootstrapping": {"change_threshold": 0.99},
    "controller": {"kind": "inline", "budget_share": 1000.0},  # how long `n` is does not depend on speed
    "freezing": {"tolerance_share": 0.9},
    "reference": {"precision": "fp32"},  # which of the others is taken depends on their speed
}
POLICIES = {
    "none": parse_policy("none"),
    "egeria": Policy(text="egeria", name="egeria", settings=EAGER),
    "static": STATIC,
    "freezeout": parse_policy("freezeout"),
    "autofreeze": parse_policy("autofreeze:plasticity.interval_steps=20"),
}
# Processes that import torch take long on machines that do other things too.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The clock that limits go by, in its only entry."""
    hands = [1000.0]
    monkeypatch.setattr(limit, "now_s", lambda: hands[0])
    return hands


def clocks(directory: Path, name: str) -> list[float]:
    return [event["values"][name] for event in read_journal(directory).of("metric")]


def make_piece(directory: Path, policy: Policy, clock: list[float], stop: float = math.inf) -> Training | None:
    """Train from the checkpoint until an epoch after which time is over; return the training if it is finished."""
    directory.mkdir(exist_ok=True)
    training = new_training()

    def look(epoch: int, frozen: float, values: dict[str, float]) -> None:
        clock[0] += 1e6 if epoch == stop else 0.0

    piece = Piece(training, CPU, directory, limit=Limit(clock[0] + 1000), begun=checkpoint.load(directory, {}))
    return training if train(training, policy, directory, CPU, look, piece=piece) else None


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_in_pieces_comes_to_what_one_comes_to_that_never_stopped(name, tmp_path, clock):
    whole = new_training()
    left: list[Path] = []
    train(whole, POLICIES[name], tmp_path / "whole", CPU, lambda *_: left.extend(tmp_path.rglob("checkpoint*")))
    assert left == []  # nobody asked for pieces
    parts = tmp_path / "parts"
    assert make_piece(parts, POLICIES[name], clock, stop=1) is None
    assert make_piece(parts, POLICIES[name], clock, stop=3) is None
    finished = make_piece(parts, POLICIES[name], clock)
    assert told(parts) == told(tmp_path / "whole")
    assert read_journal(parts).num_processes == 3
    for name_of_tensor, tensor in whole.model.state_dict().items():
        assert torch.equal(finished.model.state_dict()[name_of_tensor], tensor), name_of_tensor
    if name != "none":
        frozen = [event["step"] for event in read_journal(parts).of("frozen")]
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
    assert [event["values"]["epoch"] for event in read_journal(directory).of("metric")] == [1, 2, 3, 4, 5]
    assert not list(directory.glob("checkpoint*"))
    return said


def spoil_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def spoil_journal(path: Path) -> None:
    journal = path.with_name("journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"epoch":2' not in line))


@pytest.mark.parametrize(
    ("spoil", "reason"), [(spoil_a_bit, "torn or damaged"), (spoil_journal, "does not reach so far")]
)
def test_what_is_damaged_begins_anew_and_says_so(spoil, reason, part_way):
    spoil(part_way / "checkpoint.pt")
    note, *epochs = go_on(part_way)
    assert "begins anew" in note["note"]
    assert reason in note["note"]
    assert [record["epoch"] for record in epochs] == [0, 1, 2, 3, 4, 5]
    assert (part_way / "journal.jsonl").read_text().count('"run_started"') == 1  # the old journal is gone
