"""What happens to the training when the controller process fails: nothing.

Each test breaks something for real, trains to the end, reads in the journal what was said of it, and
counts what is left behind.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import egeria
from egeria import read_journal
from egeria.events import (
    ControllerRestarted,
    Declined,
    FaultCaught,
    IntervalMeasured,
    PlasticityRead,
    ReadingDropped,
    RunClosed,
    RungTaken,
)
from loops import FAST, Loop, differences
from menagerie import MENAGERIE
from strays import is_alive, is_gone_within, nothing_left_behind

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="faults are injected and counted through /proc"),
    pytest.mark.timeout(300),  # a busy machine takes its time to start a process
]

SPECIMENS = {specimen.name: specimen for specimen in MENAGERIE}
LONGEST_WAIT_S = 150
NEVER_FREEZES = {"freezing": {"enabled": False}}


class Training:
    """A run with a controller process, stepped until something is seen."""

    def __init__(self, directory, name="PartsByName", controller=(), **groups):
        settings = {"kind": "process", "load_limit": 1.0, "budget_share": 1000.0, **dict(controller)}
        config = {**FAST, **NEVER_FREEZES, **groups, "controller": settings}
        self.directory = directory
        self.loop = Loop(SPECIMENS[name], {"config": config, "directory": directory})
        self.slowest_step_s = 0.0

    def told(self, kind):
        return read_journal(self.directory).of(kind)

    def step(self):
        begin = time.perf_counter()
        self.loop.step()
        self.slowest_step_s = max(self.slowest_step_s, time.perf_counter() - begin)

    def until(self, seen, pause_s=0.005):
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not seen():
            self.step()
            time.sleep(pause_s)
            assert time.monotonic() < deadline, [event.to_dict() for event in read_journal(self.directory)][-5:]

    def until_read(self, count=2):
        already = len(self.told(PlasticityRead))
        self.until(lambda: len(self.told(PlasticityRead)) >= already + count)

    @property
    def pid(self):
        child = self.loop.run._session.parts.evaluation.controller._child
        return child and child.pid

    def finish(self):
        """Train on, close, and check that it was the plain training all along."""
        self.loop.step(4)
        self.loop.run.close()
        plain = Loop(self.loop.specimen)
        plain.step(len(self.loop.losses))
        assert differences(plain.everything(), self.loop.everything()) == []
        assert self.told(RunClosed)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    with nothing_left_behind():
        yield


def test_a_killed_controller_is_replaced_and_reads_on(tmp_path):
    training = Training(tmp_path, name="residual")
    training.until_read()
    first = training.pid
    os.kill(first, signal.SIGKILL)
    training.until(lambda: training.told(ControllerRestarted))
    training.until_read()
    assert training.pid != first and not is_alive(first)
    (restart,) = training.told(ControllerRestarted)
    assert restart.count == 1 and "it died (status -9" in restart.reason
    assert not training.told(Declined) and training.told(PlasticityRead)[-1].controller_cpu_s > 0
    training.finish()


def test_a_hanging_controller_is_replaced_and_training_does_not_wait_for_it(tmp_path):
    training = Training(tmp_path, controller={"timeout_s": 5.0})
    training.until_read()
    training.slowest_step_s = 0.0
    os.kill(training.pid, signal.SIGSTOP)
    training.until(lambda: training.told(ReadingDropped))
    assert training.slowest_step_s < 2, "a step waited for the controller"
    training.until(lambda: training.told(ControllerRestarted), pause_s=0.05)
    assert "no sign of life for 5 s" in training.told(ControllerRestarted)[0].reason
    training.until_read()
    training.finish()


def test_a_controller_that_dies_again_and_again_is_given_up(tmp_path):
    training = Training(tmp_path, controller={"restarts": 2})
    for count in range(3):
        training.until_read()
        os.kill(training.pid, signal.SIGKILL)
        training.until(lambda count=count: len(training.told(ControllerRestarted)) > min(count, 1))
    training.until(lambda: training.told(Declined))
    assert [restart.count for restart in training.told(ControllerRestarted)] == [1, 2]
    (declined,) = training.told(Declined)
    assert declined.what == "judging plasticity" and "it ended 3 times" in declined.reason
    readings = len(training.told(PlasticityRead))
    training.loop.step(10)
    assert len(training.told(PlasticityRead)) == readings and training.pid is None
    training.finish()


def test_a_controller_that_never_says_a_word_is_given_up_sooner(tmp_path, monkeypatch):
    training = Training(tmp_path)
    training.until_read()
    for _ in range(11):
        pid = training.pid
        os.kill(pid, signal.SIGKILL)
        training.until(lambda pid=pid: training.pid != pid, pause_s=0)
    assert "it ended 11 times" in training.told(Declined)[0].reason
    training.finish()


@pytest.mark.slow
def test_a_controller_without_memory_loses_readings_only(tmp_path):
    training = Training(tmp_path, name="residual")
    training.until_read()
    training.loop.run._session.parts.evaluation._num_samples = 20_000
    training.loop.specimen = _with_batches_of(training.loop.specimen, 20_000)  # for which it finds no memory
    limited = set()

    def complains():
        if training.pid not in {None, *limited}:
            limited.add(training.pid)
            used = int(Path(f"/proc/{training.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.prlimit(training.pid, resource.RLIMIT_AS, (used, used))
        return _complains_of_memory(training)

    training.until(complains, pause_s=0)
    training.loop.run.close()


def _with_batches_of(specimen, count):
    def example(generator):
        (batch,), kwargs = specimen.example(generator)
        return (batch.repeat(-(-count // len(batch)), *[1] * (batch.dim() - 1)),), kwargs

    return dataclasses.replace(specimen, example=example)


def _complains_of_memory(training):
    said = [drop.reason for drop in training.told(ReadingDropped)]
    said += [restart.reason for restart in training.told(ControllerRestarted)]
    return [reason for reason in said if "memory" in reason.lower()]


def test_a_controller_that_raises_is_listened_to_and_given_up(tmp_path):
    def broken():
        raise ZeroDivisionError("broken over there")

    training = _training_of(_acting_elsewhere(broken), tmp_path, reference={"precision": "fp32"})
    training.until(lambda: training.told(Declined))
    assert "ZeroDivisionError: broken over there" in training.told(Declined)[0].reason
    assert len(training.told(ReadingDropped)) >= 3
    training.finish()


def _dropped_as(training, reason):
    return [drop for drop in training.told(ReadingDropped) if drop.reason == reason]


def test_a_starved_controller_still_reads_now_and_then(tmp_path):
    training = Training(tmp_path, controller={"load_limit": 1e-9, "patience_s": 0.5})
    training.until_read(count=3)
    dropped = [drop.reason for drop in training.told(ReadingDropped)]
    assert dropped and all("its queue is full" in reason for reason in dropped)
    assert not training.told(ControllerRestarted), "waiting for room is no hanging"
    training.finish()


def test_a_full_queue_drops_and_counts_and_empties_again(tmp_path):
    training = Training(tmp_path, controller={"queue_length": 1})
    training.until_read()
    os.kill(training.pid, signal.SIGSTOP)
    before = len(training.told(ReadingDropped))
    training.slowest_step_s = 0.0
    training.until(lambda: len(training.told(ReadingDropped)) >= before + 5)
    assert training.slowest_step_s < 2
    os.kill(training.pid, signal.SIGCONT)
    training.until_read()
    assert not training.told(ControllerRestarted) and not training.told(Declined)
    training.finish()


def test_a_snapshot_that_cannot_be_quantized_is_taken_in_the_next_format(tmp_path):
    training = Training(tmp_path, name="double_precision", reference={"precision": "int8"})
    training.until_read()
    rungs = training.told(RungTaken)
    assert rungs[0].before == "" and rungs[0].after not in ("int8-static", "int8-dynamic")
    assert "int8" in rungs[0].reason
    training.finish()


def test_a_refresh_that_fails_is_told_and_training_goes_on(tmp_path):
    class Shy(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies of me")

    specimen = _specimen(lambda: nn.Sequential(*(Shy(8, 8) for _ in range(4))))
    training = _training_of(specimen, tmp_path)
    training.until(lambda: training.told(Declined))
    assert any("no copies of me" in fault.error for fault in training.told(FaultCaught))
    training.loop.run.close()


class Locked(nn.Module):
    """Copies itself, but cannot be sent anywhere."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.lock = threading.Lock()

    def __deepcopy__(self, memo):
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


def _specimen(build):
    return dataclasses.replace(SPECIMENS["PartsByName"], build=build)


def _acting_elsewhere(act):
    """Return a specimen that does this in each forward pass of its front in another process."""
    parent = os.getpid()

    class Acting(nn.Linear):
        def forward(self, x):
            if os.getpid() != parent:
                act()
            return super().forward(x)

    return _specimen(lambda: nn.Sequential(Acting(8, 8), *(nn.Linear(8, 8) for _ in range(3))))


def _training_of(specimen, directory, **groups):
    SPECIMENS["given"] = specimen
    return Training(directory, name="given", **groups)


def test_a_model_that_cannot_be_sent_is_evaluated_inline(tmp_path):
    training = _training_of(_specimen(Locked), tmp_path)
    training.until_read()
    (declined,) = training.told(Declined)
    assert declined.what == "the controller process"
    assert "cannot be sent" in declined.reason and "cannot pickle '_thread.lock' object" in declined.reason
    assert "in the training process instead" in declined.reason
    assert training.told(PlasticityRead)[0].controller_cpu_s == 0
    training.finish()


def test_a_model_that_cannot_be_rebuilt_is_evaluated_inline(tmp_path, monkeypatch):
    module = types.ModuleType("nowhere_to_be_found")
    exec("from torch import nn\nclass Part(nn.Linear): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found", module)
    specimen = _specimen(lambda: nn.Sequential(*(module.Part(8, 8) for _ in range(4))))
    training = _training_of(specimen, tmp_path)
    training.until_read()
    (declined,) = training.told(Declined)
    assert "cannot be rebuilt" in declined.reason and "nowhere_to_be_found" in declined.reason
    training.finish()


class Exits:
    """Ends whatever process unpickles it, as a script without a guard does that reads arguments of its own."""

    def __reduce__(self):
        return sys.exit, (2,)

    def __deepcopy__(self, memo):
        return self


def _with_an_exit():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model.arguments = Exits()
    return model


def test_a_model_that_exits_where_it_is_rebuilt_is_evaluated_inline(tmp_path):
    training = _training_of(_specimen(_with_an_exit), tmp_path, controller={"restarts": 0})
    training.until(lambda: training.told(Declined))
    (declined,) = training.told(Declined)
    assert "cannot be rebuilt" in declined.reason and "SystemExit: 2" in declined.reason
    training.until_read()
    training.finish()


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/false"])
def test_a_process_that_cannot_be_started_is_done_without(program, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", program)
    training = Training(tmp_path)
    training.until_read()
    (declined,) = training.told(Declined)
    assert "cannot be started" in declined.reason or "does not come up" in declined.reason
    training.finish()


def test_forked_data_workers_neither_hold_nor_end_the_controller(tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    torch.manual_seed(0)
    model = SPECIMENS["PartsByName"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
    config = {**FAST, **NEVER_FREEZES, "controller": {"kind": "process", "load_limit": 1.0, "budget_share": 1000.0}}
    run = egeria.attach(model, optimizer, loader, config=config, directory=tmp_path)
    pids, deadline = set(), time.monotonic() + LONGEST_WAIT_S
    while len(read_journal(tmp_path).of(PlasticityRead)) < 12 and time.monotonic() < deadline:
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(0.0)
        pids.add(getattr(run._session.parts.evaluation.controller._child, "pid", None))
    assert len(pids - {None}) == 1, "the end of a worker ended the controller"
    assert len(read_journal(tmp_path).of(PlasticityRead)) >= 12
    (pid,) = pids - {None}
    iterator = iter(loader)  # workers that hold what they inherited
    next(iterator)
    run.close()
    assert is_gone_within(pid, 5)
    del iterator


ENDING = """
import os, signal, sys, time, torch
from torch import nn
import egeria

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {
    "policy": {"name": "egeria"},
    "plasticity": {"interval_steps": 2, "window": 2},
    "bootstrapping": {"change_threshold": 1.0},
    "freezing": {"enabled": False},
    "controller": {"load_limit": 1.0, "budget_share": 1000.0, "kind": "process"},
}
run = egeria.attach(model, optimizer, config=config, directory=sys.argv[1])
from egeria.events import PlasticityRead
def step():
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss)
    time.sleep(0.01)
while not egeria.read_journal(sys.argv[1]).of(PlasticityRead):
    step()
controller = run._session.parts.evaluation.controller
print("pid", controller._child.pid, flush=True)
"""


def _end_with(how, directory):
    command = [sys.executable, "-c", ENDING + how, str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("", 0),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.slow),
        pytest.param("os._exit(4)", 4, marks=pytest.mark.slow),
        pytest.param("raise ValueError('mine')", 1, marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        pytest.param("os.kill(controller._child.pid, signal.SIGSTOP); sys.exit(5)", 5, marks=pytest.mark.slow),
        pytest.param("if os.fork() == 0: time.sleep(3); os._exit(0)\nos._exit(6)", 6, marks=pytest.mark.slow),
    ],
    ids=["end of the script", "sys.exit", "os._exit", "an exception", "SIGKILL", "with a hanging controller", "forked"],
)
def test_a_parent_that_ends_without_close_leaves_no_controller(how, status, tmp_path):
    with _end_with(how, tmp_path) as process:
        pid = int(process.stdout.readline().split()[1])
        _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert is_gone_within(pid, 5)
    assert "resource_tracker" not in said and "leaked" not in said
    assert not read_journal(tmp_path).of(FaultCaught)


def test_ctrl_c_reaches_the_user_s_loop_and_nothing_else(tmp_path):
    how = """
try:
    print("looping", flush=True)
    while True:
        step()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    before = controller._child.pid
    for _ in range(5):
        step()
    print(controller._child.pid == before, flush=True)
    run.close()
"""
    with _end_with(how, tmp_path) as process:
        pid = int(process.stdout.readline().split()[1])
        assert process.stdout.readline() == "looping\n"
        os.killpg(process.pid, signal.SIGINT)
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out.split()) == (0, ["interrupted", "True"]), said
    assert "Traceback" not in said and is_gone_within(pid, 5)


def test_a_process_with_a_thousand_open_files_evaluates_too(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2048
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        training = Training(tmp_path)
        training.until_read()
        assert not training.told(FaultCaught) and not training.told(Declined)
        training.finish()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_controller_that_computes_for_long_is_not_taken_for_dead(tmp_path):
    def slow():
        deadline = time.process_time() + 4
        while time.process_time() < deadline:
            pass

    specimen, settings = _acting_elsewhere(slow), {"reference": {"precision": "fp32"}}
    training = _training_of(specimen, tmp_path, controller={"timeout_s": 3.0}, **settings)
    training.until_read(count=1)
    assert not training.told(ControllerRestarted)
    training.finish()


def test_evaluations_under_way_at_the_end_are_counted(tmp_path):
    training = Training(tmp_path)
    training.until_read()
    os.kill(training.pid, signal.SIGSTOP)
    training.loop.step(4)
    training.finish()
    lost = _dropped_as(training, "the run ended before the controller came to it")
    assert len(lost) >= 2
    asked = {event.evaluation for event in training.told(IntervalMeasured) if event.evaluation > 2}
    told = {event.evaluation for kind in (PlasticityRead, ReadingDropped) for event in training.told(kind)}
    assert asked == told, "an evaluation is neither read nor dropped"


def test_a_model_that_carries_too_much_along_is_evaluated_inline(tmp_path, monkeypatch):
    monkeypatch.setattr("egeria.controller.process.LARGEST_SKELETON_BYTES", 100)
    training = Training(tmp_path)
    training.until_read()
    assert "MiB along" in training.told(Declined)[0].reason
    training.finish()


class Plain(nn.Module):
    """Makes a tensor in the default type of the moment."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x.to(torch.get_default_dtype()) @ torch.eye(8)))
        return x


def test_torch_s_settings_travel_along(tmp_path):
    torch.set_default_dtype(torch.float64)
    try:
        training = _training_of(_specimen(Plain), tmp_path)
        training.until_read()
        assert not training.told(Declined) and training.told(PlasticityRead)[0].controller_cpu_s > 0
        training.finish()
    finally:
        torch.set_default_dtype(torch.float32)
