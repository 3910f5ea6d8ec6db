"""The controller: which one is chosen, how a model reaches it, and what the run makes of its readings."""

import os
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import egeria
from egeria.controller.process import choose, pack, unpack
from egeria.events import ReadingDropped, ReferenceRefreshed
from loops import FAST, Loop
from menagerie import SPECIMENS, each_of_the_first
from scripted import ScriptedController


def told(directory, kind):
    return egeria.read_journal(directory).of(kind)


# --- how a model reaches another process ---


def sent(thing):
    file = os.memfd_create("test")
    try:
        pack(torch.ones(1000), file)  # what was there before
        pack(thing, file)
        return unpack(file)
    finally:
        os.close(file)


@each_of_the_first
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_model_arrives_whole_with_its_ties_and_without_the_hooks_that_watch(specimen):
    torch.manual_seed(0)
    model = specimen.build().eval()
    model.register_forward_hook(lambda *call, generator=(entry for entry in "no"): None)  # which no pickle takes
    found = sent(model)
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert not found._forward_hooks
    losses = []
    for network in (model, found):
        args, kwargs = specimen.example(torch.Generator().manual_seed(0))
        torch.manual_seed(1)
        losses.append(specimen.loss(network(*args, **kwargs)))
    torch.testing.assert_close(*losses)


# --- which one is chosen ---


ABSENT = """
import sys, torch, egeria
for policy in ({"plan": "0.5:1"}, {"policy": "none"}, {}):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with egeria.attach(model, optimizer, total_steps=8, directory=sys.argv[1], **policy) as run:
        for _ in range(8):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
        run.state_dict()
    sys.argv[1] += "x"
rooms = ("controller", "reference", "plasticity", "session.evaluation")
print(*(name for name in sys.modules if name.startswith(tuple(f"egeria.{room}" for room in rooms))))
"""


def test_a_run_that_reads_no_plasticity_imports_nothing_of_it(tmp_path):
    command = [sys.executable, "-c", ABSENT, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


class Loader:
    num_workers = 3


class Spread(nn.Linear):
    """Says that its parameters are on devices that this machine need not have."""

    def parameters(self, recurse=True):
        return (types.SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:1", "cuda:0"))


def test_an_accelerator_takes_the_process_where_a_core_is_spare(monkeypatch):
    monkeypatch.setattr("egeria.controller.process.usable_cores", lambda: 8.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    kind, device, reason = choose("auto", "auto", Spread(2, 2))
    assert (kind, device) == ("process", "cpu") and "of 8 cores" in reason
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert choose("auto", "auto", Spread(2, 2), Loader())[:2] == ("inline", "cuda:1")
    assert choose("process", "auto", Spread(2, 2), Loader())[0] == "process"
    assert choose("inline", "auto", nn.Linear(2, 2))[0] == choose("auto", "auto", nn.Linear(2, 2))[0] == "inline"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert choose("auto", "auto", Spread(2, 2), Loader())[0] == "process"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose("auto", "auto", Spread(2, 2), Loader())[0] == "inline", "the other ranks need cores too"


# --- what the run makes of readings ---


class HoldingController(ScriptedController):
    """Holds back what it has read until it is let go; has room for one refresh of two."""

    is_holding = has_room = True

    def refresh(self, model, batch, state=None):
        self.has_room = not self.has_room
        return self.has_room and super().refresh(model, batch, state)

    def poll(self):
        return [] if self.is_holding else super().poll()


def test_readings_from_before_a_thaw_or_a_freeze_are_dropped_and_counted(tmp_path):
    controller = HoldingController()
    attach = {"config": {**FAST, "unfreezing": {"rule": "step"}}, "directory": tmp_path, "controller": controller}
    loop = Loop(SPECIMENS["residual"], attach)
    loop.step(31)
    controller.is_holding = False
    loop.step(1)
    assert told(tmp_path, ReferenceRefreshed), "what found no room is asked for again"
    assert loop.run.frozen == 1
    first, *late = told(tmp_path, ReadingDropped)
    assert "no reference model yet" in first.reason
    assert len(late) >= 5 and all("no longer asks" in drop.reason for drop in late)
    controller.is_holding = True
    loop.step(4)
    loop.optimizer.param_groups[0]["lr"] /= 100
    loop.step(2)
    assert loop.run.frozen == 0
    controller.is_holding = False
    loop.step(1)
    late = told(tmp_path, ReadingDropped)[1 + len(late) :]
    assert len(late) == 2 and all("no longer asks" in drop.reason for drop in late)
    loop.run.close()
    assert controller.closed
