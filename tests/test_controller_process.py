"""The controller process: training never waits for it, and whatever becomes of it is as if there had been none.

Each test breaks something for real and counts what is left behind.
"""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from egeria import read_journal
from egeria.events import Declined, FaultCaught, IntervalMeasured, PlasticityRead, ReadingDropped, RunClosed
from loops import FAST, Loop, differences
from menagerie import SPECIMENS
from strays import is_alive, is_gone_within, nothing_left_behind

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="faults are injected and counted through /proc"),
    pytest.mark.timeout(600),  # a busy machine takes its time to start a process
    pytest.mark.dist,
]
LONGEST_WAIT_S = 150
STEADY = {"freezing": {"tolerance_readings": 10**6}, "reference": {"precision": "fp32"}}
"""Nothing freezes: training is to be what it is without a controller."""


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    with nothing_left_behind():
        yield


def controllers(parent=None):
    """Return the controller processes of a process."""
    children = psutil.Process(parent).children()
    return [child.pid for child in children if "egeria.controller.process" in " ".join(child.cmdline())]


class Training:
    """A run with a controller process, stepped until something is seen."""

    def __init__(self, directory, specimen=SPECIMENS["PartsByName"], kind="process", **controller):
        config = {
            **FAST,
            **STEADY,
            "controller": {"budget_share": 1000.0, "load_limit": 1.0, "kind": kind, **controller},
        }
        self.directory, self.slowest_step_s = directory, 0.0
        self.loop = Loop(specimen, {"config": config, "directory": directory})

    def told(self, kind):
        return read_journal(self.directory).of(kind)

    def until(self, seen, pause_s=0.02):
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not seen():
            begin = time.perf_counter()
            self.loop.step()
            self.slowest_step_s = max(self.slowest_step_s, time.perf_counter() - begin)
            time.sleep(pause_s)
            assert time.monotonic() < deadline, [event.to_dict() for event in read_journal(self.directory)][-5:]

    def until_read(self, count=2):
        already = len(self.told(PlasticityRead))
        self.until(lambda: len(self.told(PlasticityRead)) >= already + count)

    def until_declined(self):
        """Return why there is no controller process any more; training has never waited for it."""
        self.until(lambda: self.told(Declined))
        (declined,) = self.told(Declined)
        assert declined.what == "evaluating in a process of its own" and not controllers()
        assert "in the training process from here on" in declined.reason
        (warned,) = self.loop.warned
        assert declined.what in warned and declined.reason in warned
        return declined.reason

    @property
    def pid(self):
        (pid,) = controllers()
        return pid

    def finish(self):
        """Train on, close, and check that it was the plain training all along, with nothing missing in the journal."""
        self.loop.step(4)
        self.loop.run.close()
        plain = Loop(self.loop.specimen)
        plain.step(len(self.loop.losses))
        assert differences(plain.everything(), self.loop.everything()) == []
        assert self.told(RunClosed) and not self.told(FaultCaught) and len(self.told(Declined)) <= 1
        asked = {event.evaluation for event in self.told(IntervalMeasured) if event.evaluation > 2}
        answered = {event.evaluation for kind in (PlasticityRead, ReadingDropped) for event in self.told(kind)}
        assert asked == answered, "an evaluation is neither read nor dropped"


# --- faults, at whatever moment ---


def acting_elsewhere(act):
    """Return a specimen that does this in each forward pass of its front in another process."""
    parent = os.getpid()

    class Acting(nn.Linear):
        def forward(self, x):
            if os.getpid() != parent:
                act()
            return super().forward(x)

    return specimen_of(lambda: nn.Sequential(Acting(8, 8), *(nn.Linear(8, 8) for _ in range(3))))


def specimen_of(build):
    return dataclasses.replace(SPECIMENS["PartsByName"], build=build)


def failing_by(flag):
    """Return a specimen that hangs, or has no memory, in another process once a file says so."""

    def act():
        import resource  # noqa: PLC0415  (where this runs there is nothing of this file)

        fault = flag.read_text()
        if fault == "hung":
            time.sleep(1000)
        if fault == "out of memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))
            torch.empty(2**28)

    return acting_elsewhere(act)


FAULTS = {  # what is said of each
    "killed": "it died (status -9)",
    "stopped": "it gave no answer for over 2 s",
    "hung": "it gave no answer for over 2 s",
    "out of memory": "memory",
}
LONGEST_DELAYS_S = {"while it starts": 2.0, "later": 0.3}
GATE, MOMENTS = {"killed": 1}, []
for fault in FAULTS:
    draw = random.Random(fault)
    for number in range(4):
        when = "while it starts" if number % 3 == 1 else "later"
        moment = fault, when, round(draw.uniform(0, LONGEST_DELAYS_S[when]), 3)
        MOMENTS.append(pytest.param(*moment, marks=[] if number in (0, GATE.get(fault)) else [pytest.mark.slow]))


@pytest.mark.parametrize(("fault", "when", "delay_s"), MOMENTS)
def test_a_fault_is_done_without(fault, when, delay_s, tmp_path, monkeypatch):
    monkeypatch.setattr("egeria.controller.process.START_S", 20.0)  # a stopped one is waited for
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    flag = tmp_path / "flag"
    flag.write_text("")
    training = Training(tmp_path / "run", failing_by(flag), timeout_s=2.0)
    training.until(controllers) if when == "while it starts" else training.until_read()
    pid = training.pid

    def inject():
        if fault in ("killed", "stopped"):
            os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        else:
            flag.write_text(fault)

    timer = threading.Timer(delay_s, inject)  # between two statements of the training, or amid one
    timer.start()
    reason = training.until_declined()
    timer.join()
    assert FAULTS[fault] in reason and not is_alive(pid)
    training.until_read()
    assert training.told(PlasticityRead)[-1].controller_cpu_s == 0
    training.finish()
    assert len(training.loop.warned) == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"journal.jsonl", "report.html"}
    left = {path.name for path in (tmp_path / "temporary").iterdir()}
    assert not {name for name in left if not name.startswith("torchinductor")}, "torch's optimizers make that folder"


# --- a process that is behind ---


def test_a_full_queue_drops_and_counts_and_empties_again(tmp_path):
    training = Training(tmp_path)
    training.until_read()
    os.kill(training.pid, signal.SIGSTOP)
    before, training.slowest_step_s = len(training.told(ReadingDropped)), 0.0
    training.until(lambda: len(training.told(ReadingDropped)) >= before + 5)
    assert training.slowest_step_s < 4
    assert "its queue is full" in training.told(ReadingDropped)[-1].reason
    os.kill(training.pid, signal.SIGCONT)
    training.until_read()
    assert not training.told(Declined)
    training.finish()


# --- a process that refuses ---


class Locked:
    """Can be copied, and not pickled."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("locked")


def holding_a_lock():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model.attribute = Locked()
    return model


def test_a_model_that_cannot_be_sent_is_read_inline(tmp_path):
    training = Training(tmp_path, specimen_of(holding_a_lock))
    assert "cannot be sent there (TypeError: locked)" in training.until_declined()
    training.until_read(5)
    training.finish()


def test_a_process_that_cannot_be_started_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    training = Training(tmp_path)
    training.until_declined()
    training.until_read()
    training.finish()


# --- a training process that ends, forks or is interrupted ---


def test_forked_data_workers_neither_hold_nor_end_the_controller(tmp_path):
    training = Training(tmp_path)
    training.until_read()
    pid, data = training.pid, torch.utils.data.TensorDataset(torch.randn(64, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 8
    training.until_read()
    iterator = iter(loader)  # a worker that holds what it inherited
    next(iterator)
    assert training.pid == pid, "the end of a worker ended the controller"
    training.finish()
    assert is_gone_within(pid, 5)
    del iterator


SCRIPT = """
import os, signal, sys, time, torch, egeria
from torch import nn
from egeria.events import PlasticityRead
print("imported", flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
class Part(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))

model = nn.Sequential(*(Part(8, 8) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {
    "policy": {"name": "egeria"},
    "plasticity": {"interval_steps": 2, "window": 2}, "bootstrapping": {"change_threshold": 1.0},
    "controller": {"budget_share": 1000.0, "load_limit": 1.0, "kind": "process"},
}
run = egeria.attach(model, optimizer, config=config, directory=sys.argv[1])
def step():
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss)
    time.sleep(0.01)
while not egeria.read_journal(sys.argv[1]).of(PlasticityRead):
    step()
print("read", flush=True)
input()
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that runs a script without `__main__` guard until it has read, then its last lines."""

    def begin(last=""):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT + last)
        process = subprocess.Popen(
            [sys.executable, str(path), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        begun.append(process)
        assert process.stdout.readline() + process.stdout.readline() == "imported\nread\n", "it was run again"
        (pid,) = controllers(process.pid)
        return process, pid

    begun = []
    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def test_a_script_that_ends_without_close_leaves_no_controller(script, tmp_path):
    process, pid = script()
    _, said = process.communicate("\n", timeout=60)
    assert process.returncode == 0 and is_gone_within(pid, 5)
    assert "leaked" not in said and not read_journal(tmp_path).of(FaultCaught)


@pytest.mark.parametrize("stopped", ["training", "controller"])
def test_a_training_that_is_killed_leaves_no_controller(stopped, script):
    process, pid = script()
    victim = psutil.Process(process.pid if stopped == "training" else pid)
    victim.suspend()
    while victim.status() != psutil.STATUS_STOPPED:  # the kernel wakes only what has stopped
        time.sleep(0.01)
    process.kill()
    assert is_gone_within(pid, 10)


def test_ctrl_c_reaches_the_user_s_loop_and_nothing_else(script, tmp_path):
    last = """
try:
    print("looping", flush=True)
    while True:
        step()
except KeyboardInterrupt:
    for _ in range(5):
        step()
    run.close()
    print("closed", flush=True)
"""
    process, pid = script(last)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "looping\n"
    os.killpg(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "closed\n"), said
    assert "Traceback" not in said and is_gone_within(pid, 5)
    assert not read_journal(tmp_path).of(Declined)
