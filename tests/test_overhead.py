"""What watching costs where nothing is to be done: counted in calls, not in seconds, and processes that never start."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import egeria
from egeria.controller import ProcessController
from egeria.controller.process import REPAID_S
from egeria.events import ControllerChosen, IntervalMeasured, PlasticityRead
from egeria.session.measuring.timing import IterationTimer

MOST_CALLS = 100
"""Python and C calls of one step. 73 when this was written, 783 where an interval ends and nothing is watched."""

MOST_CALLS_FOR_A_PARAMETER = 125
"""Of the step that ends an interval, where worth is measured. 104 when this was written, 157 with names looked up."""


class Loop:
    """A loop of few operations, in which a layer module is watched."""

    def __init__(self, **arguments):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        config = {
            "modules": {"pattern": r"\d"},
            "plasticity": {"interval_steps": 10},
            "bootstrapping": {"change_threshold": 1.0},
            "controller": {"budget_share": 1000.0},
            "freezing": {"enabled": False},
        }
        self.run = egeria.attach(self.model, self.optimizer, config=config, **arguments)

    def train(self, steps, watch_step=lambda _step: None):
        for step in range(1, steps + 1):
            loss = self.model(torch.ones(2, 4)).square().mean()
            loss.backward()
            watch_step(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.step(loss)


class CountedCalls:
    """The calls made in the frames of egeria, and below them, by step."""

    def __init__(self):
        self.depth = self.count = 0

    def __call__(self, frame, kind, _argument):
        is_ours = "/egeria/" in frame.f_code.co_filename
        if kind == "call" and (is_ours or self.depth):
            self.depth += 1
        elif kind == "return" and self.depth:
            self.depth -= 1
        self.count += (self.depth > 0) and kind in ("call", "c_call")


def calls_by_step(loop, steps):
    counts: dict[int, int] = {}
    counter = CountedCalls()

    def note(step):
        counts[step] = counter.count

    sys.setprofile(counter)
    try:
        loop.train(steps, note)
    finally:
        sys.setprofile(None)
    return {step: counts[step + 1] - counts[step] for step in range(1, steps)}


def test_a_step_that_ends_no_interval_makes_few_calls(tmp_path):
    loop = Loop(total_steps=400, controller="inline", directory=tmp_path)
    loop.train(200)
    assert egeria.read_journal(tmp_path).of(PlasticityRead)
    counts = calls_by_step(loop, 31)
    loop.run.close()
    # The step before the last of an interval keeps the batch for the evaluation; the first one is measured.
    quiet = [count for step, count in counts.items() if step % 10 not in (0, 1, 9)]
    assert 0 < max(quiet) <= MOST_CALLS
    assert max(counts.values()) > 2 * max(quiet), "the end of an interval is not among them"


def test_the_end_of_an_interval_asks_little_of_each_parameter(tmp_path):
    """In a model of many small parameters, where finding each by its name would be most of the overhead."""
    loop = Loop.__new__(Loop)
    blocks = [nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(4))) for _ in range(10)]
    loop.model = nn.Sequential(*blocks)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    config = {"policy": {"pretrained": True}, "plasticity": {"interval_steps": 5}}
    loop.run = egeria.attach(loop.model, loop.optimizer, total_steps=2000, config=config, directory=tmp_path)
    loop.train(10)
    counts = calls_by_step(loop, 31)  # in the first 5 %, in which worth is measured, and times are shared out
    loop.run.close()
    ends = [count for step, count in counts.items() if step % 5 == 0]
    assert egeria.read_journal(tmp_path).of(IntervalMeasured)[-1].worth is not None
    assert 0 < max(ends) <= MOST_CALLS_FOR_A_PARAMETER * len(list(loop.model.parameters()))


@pytest.fixture
def started(monkeypatch):
    found = []
    start = ProcessController._start
    monkeypatch.setattr(ProcessController, "_start", lambda self: (found.append(1), start(self))[1])
    return found


def test_a_controller_process_starts_with_the_first_snapshot(tmp_path, started):
    loop = Loop(total_steps=400, controller="process", directory=tmp_path)
    loop.train(10)
    assert not started
    loop.train(50)
    assert started
    loop.run.close()


@pytest.mark.parametrize(("seconds", "kind"), [(0.9 * REPAID_S, "inline"), (1.1 * REPAID_S, "process")])
def test_a_process_is_started_only_where_the_rest_of_the_run_repays_it(tmp_path, started, monkeypatch, seconds, kind):
    monkeypatch.setattr("egeria.controller.process.usable_cores", lambda: 8.0)
    monkeypatch.setattr(IterationTimer, "left_s", lambda self, step: seconds)
    loop = Loop(total_steps=400, directory=tmp_path)
    loop.train(60)
    loop.run.close()
    chosen = egeria.read_journal(tmp_path).of(ControllerChosen)
    assert bool(started) == (kind == "process") == (len(chosen) == 1)
    assert chosen[0].controller == "process" and chosen[-1].controller == kind
    if kind == "inline":
        assert "540 s are left" in chosen[-1].reason
        assert egeria.read_journal(tmp_path).of(PlasticityRead), "evaluations go on all the same"


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_a_validation_between_steps_is_in_no_iteration_time_however_short_the_intervals_are(num_steps):
    timer, medians = IterationTimer(), []
    for step in range(28):
        timer._iterations.setdefault(0, []).append((30.0, 20.0) if step % 7 == 6 else (1.0, 0.5))
        if step % num_steps == num_steps - 1:
            medians.append(timer.take_medians())
    assert set(medians) == {(1.0, 0.5)}
