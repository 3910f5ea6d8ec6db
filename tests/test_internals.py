"""The walks of docs/internals.md: each step exists and is taken, in the order of the page, and the page stays short."""

from __future__ import annotations

import ast
import re
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria.events import ModuleFrozen

ROOT = Path(__file__).parent.parent
SOURCES = Path(egeria.__file__).parent
STEP = re.compile(r"^\d+\. (?P<ahead>\*read ahead\* )?`(?P<file>[\w/]+\.py): (?P<function>[\w.]+)`", re.MULTILINE)
BATCH, READING = "One batch through the cache", "One reading until a freeze"
MOST_FILES = {BATCH: 20, READING: 22}


def walk(heading):
    """Return (file, function, whether another thread takes it) of each step under a heading of the page."""
    page = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [(match["file"], match["function"], bool(match["ahead"])) for match in STEP.finditer(section)]


def functions_of(file):
    def names(node, prefix=""):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                yield f"{prefix}{child.name}"
                yield from names(child, f"{prefix}{child.name}.")

    return set(names(ast.parse((SOURCES / file).read_text(encoding="utf-8"))))


@pytest.mark.parametrize("heading", MOST_FILES)
def test_a_walk_opens_few_files_and_each_has_what_it_names(heading):
    steps = walk(heading)
    assert len(steps) > 15 and len({file for file, _, _ in steps}) <= MOST_FILES[heading]
    assert [(file, function) for file, function, _ in steps if function not in functions_of(file)] == []


class Calls:
    """The functions of the library that were called, each once, in order; those of our threads apart."""

    def __init__(self):
        self.ours = []
        self.theirs = set()
        self.is_on = False

    def __call__(self, frame, event, _):
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(f"{SOURCES}/"):
            return
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).replace(".<locals>", "")
        called = (path.removeprefix(f"{SOURCES}/"), name)
        if threading.current_thread() is not threading.main_thread():
            self.theirs.add(called)
        elif self.is_on and called not in self.ours:
            self.ours.append(called)


@contextmanager
def watched():
    calls = Calls()
    before = sys.getprofile()
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def train(calls, directory, policy, settings, is_watched):
    """Train until a step was watched: one for which `is_watched(run, step)` holds before it."""
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,))), batch_size=8, shuffle=True)
    steps, step = 60 * len(loader), 0
    config = {"controller": {"kind": "inline", "budget_share": 1e6}, "policy": policy, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", egeria.EgeriaWarning)
        with egeria.attach(model, optimizer, loader, total_steps=steps, config=config, directory=directory) as run:
            for _ in range(60):
                batches = iter(loader)
                for _ in range(len(loader)):
                    calls.is_on = is_watched(run, step)
                    calls.ours = [] if calls.is_on else calls.ours
                    x, y = next(batches)
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    run.step(0.5)
                    step += 1
                    if calls.is_on and (run.frozen == 1 or policy["name"] == "static"):
                        calls.is_on = False
                        return
    raise AssertionError("the step to be watched never came")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize("heading", MOST_FILES)
def test_the_steps_are_taken_in_the_order_of_the_page(heading, tmp_path):
    with watched() as calls:
        if heading == BATCH:
            settings = {"cache": {"enabled": True, "gate": "open", "minimum_epochs": 0}}
            settings["plasticity"] = {"interval_steps": 8}
            policy = {"name": "static", "schedule": "0.1:2"}
            # In the fourth epoch of the store, in the midst of an interval.
            train(calls, tmp_path, policy, settings, lambda run, step: run.frozen == 2 and step == 8 * 12 + 3)
        else:
            settings = {"plasticity": {"interval_steps": 2}, "bootstrapping": {"change_threshold": 1.0}}
            train(
                calls, tmp_path, {"name": "forecast", "limit": 10.0, "loss_limit": 10.0}, settings, lambda run, _: True
            )
    if heading == READING:
        assert egeria.read_journal(tmp_path).of(ModuleFrozen)
    steps = [(file, function) for file, function, ahead in walk(heading) if not ahead]
    assert [step for step in steps if step not in calls.ours] == []
    assert steps == sorted(steps, key=calls.ours.index)
    assert {(file, function) for file, function, ahead in walk(heading) if ahead} <= calls.theirs
