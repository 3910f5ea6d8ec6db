"""The controller process as a user meets it: law 2, late readings, scripts and notebooks."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import egeria
from egeria import read_journal
from egeria.config import ControllerConfig
from egeria.controller import ControllerStatus, EvaluationPlan
from egeria.controller.child import Unusable
from egeria.controller.process import ProcessController
from egeria.events import (
    ControllerChosen,
    ControllerRestarted,
    Declined,
    FaultCaught,
    FidelityChecked,
    IntervalMeasured,
    ModuleFrozen,
    PlasticityRead,
    ReadingDropped,
    ReferenceRefreshed,
    RunClosed,
    RungTaken,
    RunStarted,
    StageChanged,
    Thawed,
)
from egeria.layers.batch import Batch
from egeria.testing import ScriptedController
from loops import FAST, Loop, differences
from menagerie import SPECIMENS, each_supported
from strays import is_gone_within, nothing_left_behind

OPEN = {"load_limit": 1.0, "budget_share": 1000.0}
LONGEST_WAIT_S = 60


def settings(**groups):
    return {**FAST, "controller": OPEN, **groups}


@pytest.fixture
def patient(monkeypatch):
    """A controller process that is waited for at every evaluation, as the inline one is by its nature."""
    poll = ProcessController.poll

    def wait(self):
        status, deadline = poll(self), time.monotonic() + LONGEST_WAIT_S
        while self._child is not None and self._child.num_owed and time.monotonic() < deadline:
            time.sleep(0.001)
            newer = poll(self)
            status = dataclasses.replace(newer, reports=status.reports + newer.reports)
        return status

    monkeypatch.setattr(ProcessController, "poll", wait)


@pytest.fixture(scope="module")
def started():
    controller = ProcessController(plan_for(()), ControllerConfig(load_limit=1.0))
    yield controller
    controller.close()


@pytest.fixture
def lent(started, patient, monkeypatch):
    """One process for many runs: it takes another model as it does when the shapes of a model change."""

    def lend(plan, config, *_):
        started._plan, started._precision, started._shapes = plan, plan.precision, None
        return started

    monkeypatch.setattr("egeria.session.checks.ProcessController", lend)
    monkeypatch.setattr(started, "close", started.poll)


def plan_for(taps, precision="auto"):
    settings = {"largest_map": 16, "window": 4, "device": "cpu", "fidelity_share": 0.1}
    return EvaluationPlan(taps=taps, precision=precision, **settings)


def told(directory, *kinds):
    return [event for event in read_journal(directory).events if isinstance(event, kinds)]


def decisions(directory):
    return [(event.kind, event.step) for event in told(directory, StageChanged, ModuleFrozen, Thawed)]


@pytest.mark.slow
@each_supported
def test_law_2_inline_and_process_read_and_decide_alike(specimen, tmp_path, lent):
    loops = {}
    for kind in ("process", "inline"):
        attach = {"config": settings(), "directory": tmp_path / kind, "controller": kind}
        loops[kind] = Loop(specimen, attach)
        loops[kind].step(40)
        loops[kind].run.close()
    assert differences(loops["inline"].everything(), loops["process"].everything()) == []
    inline, process = (told(tmp_path / kind, PlasticityRead) for kind in ("inline", "process"))
    assert len(inline) >= 4, "the law is empty without evaluations"
    assert [(read.step, read.evaluation, read.module) for read in inline] == [
        (read.step, read.evaluation, read.module) for read in process
    ]
    for ours, theirs in zip(inline, process, strict=True):
        assert theirs.value == pytest.approx(ours.value, rel=1e-5, abs=1e-12)
    assert decisions(tmp_path / "inline") == decisions(tmp_path / "process")
    for kind in (RungTaken, FidelityChecked, ReferenceRefreshed):
        assert len(told(tmp_path / "inline", kind)) == len(told(tmp_path / "process", kind))
    assert [rung.after for rung in told(tmp_path / "inline", RungTaken)] == [
        rung.after for rung in told(tmp_path / "process", RungTaken)
    ]
    assert told(tmp_path / "process", ControllerChosen)[0].controller == "process"
    assert told(tmp_path / "process", RunClosed)[0].controller_cpu_s > 0


def test_training_never_waits_and_late_readings_still_decide(tmp_path):
    with nothing_left_behind():
        loop = Loop(SPECIMENS["residual"], {"config": settings(), "directory": tmp_path, "controller": "process"})
        deadline = time.monotonic() + LONGEST_WAIT_S
        while loop.run.frozen < 2 and time.monotonic() < deadline:
            loop.step()
            time.sleep(0.005)
        assert loop.run.frozen >= 2
        loop.run.close()
    readings = told(tmp_path, PlasticityRead)
    assert any(read.step > 2 * read.evaluation for read in readings), "no reading was late"
    assert all(later.evaluation > read.evaluation for read, later in itertools.pairwise(readings))


def test_late_readings_are_those_of_the_same_moment(tmp_path):
    """Law 2 without waiting: each evaluation meets the snapshot it was asked on, however late it is made.

    In float32: int8 keeps ranges of earlier snapshots, and which those were depends on how late it was.
    """
    reference = {"precision": "fp32", "refresh_evaluations": 8}
    config = settings(freezing={"enabled": False}, controller={**OPEN, "queue_length": 20}, reference=reference)
    loops = {
        kind: Loop(SPECIMENS["residual"], {"config": config, "directory": tmp_path / kind, "controller": kind})
        for kind in ("inline", "process")
    }
    loops["inline"].step(60)
    for _ in range(60):
        loops["process"].step()
    deadline = time.monotonic() + LONGEST_WAIT_S
    while len(told(tmp_path / "process", PlasticityRead)) < 20 and time.monotonic() < deadline:
        time.sleep(0.1)
        loops["process"].step()  # takes in what has come meanwhile
    for loop in loops.values():
        loop.run.close()
    inline, process = (_by_snapshot(tmp_path / kind) for kind in ("inline", "process"))
    assert any(read.step > 2 * read.evaluation for read in told(tmp_path / "process", PlasticityRead))
    same = inline.keys() & process.keys()
    assert len(same) >= 6
    assert {key: process[key] for key in same} == pytest.approx({key: inline[key] for key in same}, rel=1e-5, abs=1e-12)


def _by_snapshot(directory):
    """Return the readings by their evaluation and that of the snapshot they are against."""
    refreshes = [event.evaluation for event in told(directory, ReferenceRefreshed)]
    readings = told(directory, PlasticityRead)
    return {
        (read.evaluation, max(number for number in refreshes if number < read.evaluation)): read.value
        for read in readings
    }


def test_a_snapshot_that_finds_no_room_is_asked_for_again(tmp_path):
    model = SPECIMENS["residual"].build()
    controller = ProcessController(plan_for(("blocks.0",), "fp32"), ControllerConfig(load_limit=1.0))
    with nothing_left_behind():
        assert [controller.refresh(number, model, None) for number in range(4)] == [True, True, False, False]
        reports, deadline = [], time.monotonic() + LONGEST_WAIT_S
        while len(reports) < 3 and time.monotonic() < deadline:
            reports += controller.poll().reports
        assert [report.evaluation for report in reports if isinstance(report, ReferenceRefreshed)] == [0, 1]
        assert controller.refresh(4, model, None)
        controller.close()


def test_a_process_that_had_no_batch_to_try_formats_on_does_not_stay_with_the_last_one(tmp_path):
    model = SPECIMENS["residual"].build()
    args, kwargs = SPECIMENS["residual"].example(torch.Generator().manual_seed(0))
    controller = ProcessController(plan_for(("blocks.0",)), ControllerConfig(load_limit=1.0))
    try:
        rungs = []
        for batch in (None, Batch.of_call(args, kwargs, "cpu")):
            assert controller.refresh(0, model, batch)
            deadline = time.monotonic() + LONGEST_WAIT_S
            while rungs[-1:] != ["fp32" if batch is None else "int8-static"] and time.monotonic() < deadline:
                rungs += [report.after for report in controller.poll().reports if isinstance(report, RungTaken)]
            if batch is None:
                os.kill(controller._child.pid, signal.SIGKILL)
                while not any(isinstance(report, ControllerRestarted) for report in controller.poll().reports):
                    assert time.monotonic() < deadline
        assert rungs[0] == "fp32" and rungs[-1] == "int8-static"
    finally:
        controller.close()


def test_a_refresh_that_failed_is_made_again_at_the_next_evaluation(tmp_path):
    class Unlucky(ScriptedController):
        def refresh(self, evaluation, model, batch, state=None):
            self.failed.append(evaluation)
            if len(self.failed) > 2:
                return super().refresh(evaluation, model, batch)
            self._reports.append(FaultCaught(step=0, where="refreshing the reference", error="no luck", count=1))
            return True

    controller = Unlucky()
    controller.failed = []
    loop = Loop(SPECIMENS["residual"], {"config": FAST, "directory": tmp_path, "controller": controller})
    loop.step(12)
    assert controller.failed[:3] == [2, 3, 4] and told(tmp_path, PlasticityRead)
    loop.run.close()


def test_a_controller_of_the_user_s_own_survives_a_resume(tmp_path):
    controller = ScriptedController()
    loop = Loop(SPECIMENS["residual"], {"config": FAST, "directory": tmp_path, "controller": controller})
    loop.step(8)
    loop.run.load_state_dict(loop.run.state_dict())
    assert not controller.closed
    loop.run.close()
    assert controller.closed


class HoldingController(ScriptedController):
    """Holds back what it has read until it is let go."""

    is_holding = True

    def poll(self):
        reports = [] if self.is_holding else super().poll().reports
        return ControllerStatus(reports=reports, is_asynchronous=True)


def test_readings_from_before_a_thaw_or_a_freeze_are_dropped_and_counted(tmp_path):
    controller = HoldingController()
    attach = {"config": {**FAST, "unfreezing": {"rule": "step"}}, "directory": tmp_path, "controller": controller}
    loop = Loop(SPECIMENS["residual"], attach)
    loop.step(31)
    controller.is_holding = False
    loop.step(1)
    assert loop.run.frozen == 1
    late = told(tmp_path, ReadingDropped)
    assert len(late) >= 5 and all("no longer monitored" in drop.reason for drop in late)
    controller.is_holding = True
    loop.step(4)
    loop.optimizer.param_groups[0]["lr"] /= 100
    loop.step(2)
    assert loop.run.frozen == 0
    controller.is_holding = False
    loop.step(1)
    late = told(tmp_path, ReadingDropped)[len(late) :]
    assert len(late) == 2 and all("everything thawed meanwhile" in drop.reason for drop in late)
    loop.run.close()


def test_the_choice_is_told_once_with_its_reason(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("egeria.controller.process.usable_cores", lambda: 1.0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with caplog.at_level("INFO", logger="egeria"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        egeria.attach(model, optimizer, total_steps=9, directory=tmp_path, policy="egeria").close()
    assert [record.message for record in caplog.records] == [
        "the controller runs inline: training is on the CPU, 1 cores can be used and 0 of them are spare"
    ]
    assert told(tmp_path, ControllerChosen)[0].controller == "inline"


def test_an_unknown_kind_of_controller_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(egeria.ConfigError, match=r"controller\.kind must be one of 'auto', 'inline', 'process'"):
        egeria.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), controller="thread")


def test_a_saved_state_goes_on_in_the_other_kind_of_controller(tmp_path, patient):
    for first, second in (("inline", "process"), ("process", "inline")):
        loop = Loop(SPECIMENS["residual"], {"config": settings(), "directory": tmp_path / first, "controller": first})
        loop.step(12)
        states = loop.model.state_dict(), loop.optimizer.state_dict(), loop.run.state_dict()
        frozen = loop.run.frozen
        resumed = Loop(
            SPECIMENS["residual"], {"config": settings(), "directory": tmp_path / f"{first}2", "controller": second}
        )
        resumed.model.load_state_dict(states[0])
        resumed.optimizer.load_state_dict(states[1])
        resumed.run.load_state_dict(states[2])
        assert resumed.run.frozen == frozen
        resumed.step(12)
        resumed.run.close()
        loop.run.close()
        assert len(told(tmp_path / f"{first}2", PlasticityRead)) >= 3


class LateRefusal:
    """A controller process that says at one of the steps that it cannot rebuild the model."""

    is_ready, cpu_s, refuses_at = True, 0.0, 0

    def __init__(self, *_):
        self.num_polls = 0

    def send(self, message):
        pass

    def receive(self):
        self.num_polls += 1
        return [Unusable("no such module")] if self.num_polls == self.refuses_at else [], ""

    def end(self):
        return "status 0"


@pytest.mark.parametrize("refuses_at", [7, 8])
def test_a_reference_made_inline_instead_has_the_number_of_the_evaluation_its_weights_are_of(
    refuses_at, tmp_path, monkeypatch
):
    monkeypatch.setattr("egeria.controller.process.Child", LateRefusal)
    monkeypatch.setattr(LateRefusal, "refuses_at", refuses_at)
    loop = Loop(SPECIMENS["residual"], {"config": settings(), "directory": tmp_path, "controller": "process"})
    loop.step(30)
    loop.run.close()
    (declined,) = told(tmp_path, Declined)
    assert "cannot be rebuilt" in declined.reason and not told(tmp_path, FaultCaught)
    ends = {interval.evaluation: interval.step for interval in told(tmp_path, IntervalMeasured)}
    refreshed = told(tmp_path, ReferenceRefreshed)
    assert refreshed[0].step >= declined.step and all(ends[event.evaluation] == event.step for event in refreshed)
    made = {event.evaluation for event in refreshed}
    readings = told(tmp_path, PlasticityRead)
    assert readings and all(event.evaluation - event.age in made for event in readings)


SCRIPT = """
import sys, torch
from torch import nn
import egeria
print("imported")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {
    "policy": {"name": "egeria"},
    "plasticity": {"interval_steps": 2, "window": 2},
    "bootstrapping": {"change_threshold": 1.0},
    "controller": {"load_limit": 1.0, "budget_share": 1000.0, "kind": "process"},
}
run = egeria.attach(model, optimizer, config=config, directory=sys.argv[1])
import time
begin = time.monotonic()
while run.frozen < 1 and time.monotonic() - begin < 60:
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss)
    time.sleep(0.005)
import psutil
print("frozen", run.frozen, "controller", *(child.pid for child in psutil.Process().children()))
run.close()
"""


@pytest.mark.parametrize(
    "how",
    [
        "a script without a __main__ guard",
        pytest.param("a notebook, whose code is in no file", marks=pytest.mark.slow),
    ],
)
def test_the_user_s_code_is_never_run_again(how, tmp_path):
    if "script" in how:
        path = tmp_path / "train.py"
        path.write_text(SCRIPT)
        command, text = [sys.executable, str(path), str(tmp_path)], None
    else:
        command, text = [sys.executable, "-", str(tmp_path)], SCRIPT
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    *said, pid = done.stdout.split()
    assert said == ["imported", "frozen", "1", "controller"]
    assert is_gone_within(int(pid), 5)
    assert told(tmp_path, PlasticityRead)[0].controller_cpu_s > 0, "it was not the process that read"
    assert told(tmp_path, RunStarted)
