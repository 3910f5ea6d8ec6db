"""Front layer modules that are updated at some optimizer steps only: as if the loop itself had left them out."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from egeria import attach, read_journal
from egeria.config import Config
from egeria.errors import ConfigError
from egeria.events import ComputeProfiled, Declined, FaultCaught, IntervalMeasured, PeriodsChanged
from egeria.policy import SetPeriods
from egeria.report import report
from egeria.report.replay import replay
from egeria.report.wording import verdict
from egeria.session.measuring.timing import IterationTimer
from loops import Loop, differences, outside
from menagerie import each_stateless, each_supported

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
}
TOTAL = 40


def static(schedule, **options):
    """Attach with a timetable; its shares are of 40 steps, and moves are made at every 2nd."""
    config = {"policy": {"name": "static", "schedule": schedule}, "plasticity": {"interval_steps": 2}}
    return {"config": config, "total_steps": TOTAL, **options}


def front(loop, depth):
    """Return the parameters of the first layer modules, less those that a module behind uses too."""
    modules = loop.run.modules[:depth]
    kept = {name for module in modules for name in module.shared_parameters}
    return [loop.model.get_parameter(name) for module in modules for name in module.parameters if name not in kept]


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(5)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(kw_only=True)
class Training:
    """An MLP trained under a timetable, or plainly with gradients that the loop itself switches off by periods."""

    schedule: str | None = None
    periods: tuple[int, ...] = ()
    begins: int = 0
    optimizer: str = "sgd"
    clip: float | None = None
    micro: int = 1
    to_none: bool = True
    calls: str = "after"
    directory: Any = None
    lost: int = 0
    """A step before which the gradients of the front get lost."""
    done: int = 0

    def __post_init__(self):
        torch.manual_seed(0)
        self.model = MLP().train()
        self.optim = OPTIMIZERS[self.optimizer](self.model.parameters())
        self.run = None
        if self.schedule is not None:
            self.run = attach(self.model, self.optim, **static(self.schedule, directory=self.directory))
        self.data = torch.Generator().manual_seed(1)

    def go(self, steps=24):
        self.done += steps
        for step in range(self.done - steps + 1, self.done + 1):
            if step > self.begins:
                self.leave_out(step)
            loss = self.backward()
            if step == self.lost:
                self.model.blocks[: len(self.periods)].zero_grad()
            if self.run and self.calls == "before":
                self.run.step(loss)
            self.optim.step()
            self.optim.zero_grad(set_to_none=self.to_none)
            if self.run and self.calls == "after":
                self.run.step(loss)
        return self

    def leave_out(self, step):
        for block, period in zip(self.model.blocks, self.periods, strict=False):
            for parameter in block.parameters():
                parameter.requires_grad = step % period == 0
                parameter.grad = parameter.grad if step % period == 0 else None

    def backward(self):
        for _ in range(self.micro):
            inputs = torch.randn(16, 8, generator=self.data)
            loss = nn.functional.cross_entropy(self.model(inputs), (inputs.sum(1) > 0).long()) / self.micro
            loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss

    def everything(self):
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, entry in self.optim.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{name}": value for name, value in entry.items()}
        return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"clip": 0.1}, {"micro": 3}, {"to_none": False}], ids=str)
def test_a_resting_step_is_one_in_which_the_loop_leaves_the_front_out(optimizer, options):
    ours = Training(schedule="0.05:1/8,2/4,3/2", optimizer=optimizer, **options).go()
    assert ours.run.periods[:3] == (8, 4, 2), ours.run.modules
    theirs = Training(periods=(8, 4, 2), begins=2, optimizer=optimizer, **options).go()
    assert differences(ours.everything(), theirs.everything()) == []
    plain = Training(optimizer=optimizer, **options).go()
    assert not torch.equal(plain.model.blocks[0][0].weight, ours.model.blocks[0][0].weight)
    ours.run.close()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_loop_that_calls_before_the_step_is_followed_too(to_none):
    ours = Training(schedule="0.05:1/8,2/4,3/2", calls="before", to_none=to_none).go()
    # What the first resting step finds unused is lost, as with a freeze.
    theirs = Training(periods=(8, 4, 2), begins=2, to_none=to_none, lost=2).go()
    assert differences(ours.everything(), theirs.everything()) == []
    ours.run.close()


def test_it_is_journaled_and_replayed(tmp_path):
    run = Training(schedule="0.05:1/4,2/2 0.25:1,3/2 0.5:0", directory=tmp_path).go().run
    assert (run.frozen, set(run.periods)) == (0, {1})
    run.close()
    journal = read_journal(tmp_path)
    assert [(event.step, event.periods[:4]) for event in journal.of(PeriodsChanged)] == [
        (2, [4, 2, 1, 1]),
        (10, [4, 2, 2, 1]),
    ]
    assert not journal.of(FaultCaught) and not journal.of(Declined)
    assert [event.periods and event.periods[:3] for event in journal.of(IntervalMeasured)] == (
        [None] + 4 * [[4, 2, 1]] + 5 * [[4, 2, 2]] + 2 * [None]
    )
    found = replay(tmp_path)
    assert found.agrees and len([entry for entry in found.recorded if entry.kind == "periods"]) == 2


# --- the laws, over the menagerie ---------------------------------------------------------------

CYCLE = "0.05:1/8,2/4,9/2"


def attached(directory=None, schedule=CYCLE, **groups):
    given = static(schedule, directory=directory)
    return given | {"config": {**given["config"], "freezing": {"tied": "freeze"}, **groups}}


def leave_out(loop, names, step):
    """Switch off the gradients of parameters that are not to be updated at a step, as a loop may do itself."""
    for name, period in names.items():
        parameter = loop.model.get_parameter(name)
        parameter.requires_grad = step % period == 0
        if step % period:
            parameter.grad = None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@each_supported
def test_what_rests_at_a_step_is_what_a_loop_leaves_out(specimen, optimizer, tmp_path):
    ours = Loop(specimen, attached(tmp_path), make_optimizer=OPTIMIZERS[optimizer])
    ours.step(20)
    modules, periods = ours.run.modules, ours.run.periods
    trained = {name for name, parameter in specimen.build().named_parameters() if parameter.requires_grad}
    names = {}
    for module, period in reversed(list(zip(modules, periods, strict=True))):
        names |= {name: period for name in module.parameters if name in trained and period > 1}
    theirs = Loop(specimen, make_optimizer=OPTIMIZERS[optimizer])
    for step in range(1, 21):
        if step > 2:
            leave_out(theirs, names, step)
        theirs.step()
    assert differences(ours.everything(), theirs.everything()) == []
    journal = read_journal(tmp_path)
    assert not journal.of(FaultCaught)
    assert names or journal.of(Declined), "nothing rested, and nobody says why"
    ours.run.close()
    assert {**outside(ours.model), "gradients": None} == {**outside(theirs.model), "gradients": None}
    assert {name for name, entry in ours.model.named_parameters() if entry.requires_grad} == trained


@each_stateless
def test_law_5_stop_in_the_midst_of_a_cycle_and_resume(specimen, tmp_path):
    whole = Loop(specimen, attached(tmp_path / "whole"))
    whole.step(21)
    first = Loop(specimen, attached(tmp_path / "parts"))
    first.step(11)
    resumed = Loop(specimen, attached(tmp_path / "parts"))
    resumed.load(first.save())
    assert resumed.run.periods == first.run.periods
    resumed.step(10)
    assert differences(whole.everything(), resumed.everything()) == []
    for loop in (resumed, whole):
        loop.run.close()
    assert outside(resumed.model) == outside(whole.model)


@each_stateless
def test_law_4_thawing_returns_to_plain_training(specimen):
    loop = Loop(specimen, attached(schedule="0.05:1,2/4,9/2 0.3:0"))
    loop.step(14)
    assert (loop.run.frozen, set(loop.run.periods)) == (0, {1})
    plain = Loop(specimen)
    plain.step()  # makes what models keep beside their state, and optimizers theirs
    plain.model.load_state_dict(loop.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    plain.data.set_state(loop.data.get_state())
    plain.random, plain.losses = loop.random, list(loop.losses)
    for each in (loop, plain):
        each.step(4)
    assert differences(loop.everything(), plain.everything()) == []
    loop.run.close()
    assert outside(loop.model) == outside(plain.model)


# --- what is told of it -------------------------------------------------------------------------


def test_the_report_counts_what_rests_by_its_period(tmp_path):
    loop = Training(schedule="0.05:1,2/4,4/2", directory=tmp_path).go(steps=2)
    run = loop.run
    run._recorder.write(ComputeProfiled(step=2, forward_shares=[0.1, 0.2, 0.2, 0.2, 0.2, 0.1]))
    loop.go(steps=18)
    share = 2 / 3 * (0.1 + 0.75 * 0.2 + 0.5 * 0.4)
    summary = run.summary()
    assert (summary.frozen, summary.periods) == (1, run.periods)
    assert summary.skipped_share == pytest.approx(share * 18 / 20)
    text = "1 module updated at every 4th step, 2 modules updated at every 2nd step"
    assert text in repr(run) and text in run._repr_html_()
    run.close()
    found = report(tmp_path)
    assert found.summary.mean_skipped_share == pytest.approx(share * 18 / 20)
    assert text in str(found)
    page = found.path.read_text()
    assert "updated at every 4th step" in page and text in page
    assert [(pace.frozen, pace.periods[:3], pace.num_steps) for pace in found.summary.paces] == [
        (0, (), 2),
        (1, (4, 4, 2), 18),
    ]


def test_time_saved_is_that_of_steps_as_they_were_mixed():
    timer = IterationTimer()
    for rests in (0, 2, 2, 2, 0, 2, 2, 2):
        timer.resting, timer._outside = rests, None
        timer._iterations.setdefault(rests, []).append((0.5 if rests else 1.0, 0.4 if rests else 0.8))
    assert timer.take_medians() == pytest.approx((0.625, 0.5))
    assert timer.take_medians() == (0.0, 0.0)


def test_a_run_with_rarer_updates_alone_is_not_told_that_nothing_happened(tmp_path):
    run = Training(schedule="0.05:2/4", directory=tmp_path).go().run
    run.close()
    summary = report(tmp_path).summary
    assert summary.why_nothing_froze is None and summary.has_periods
    assert "Nothing was frozen" not in verdict(summary)


# --- what policies may ask for ------------------------------------------------------------------


@pytest.mark.parametrize("periods", [(3, 1), (128, 1), (2, 4, 1), (2, 2), (), (0, 1)])
def test_periods_by_which_no_front_would_rest_are_refused(periods):
    with pytest.raises(ConfigError, match=r"SetPeriods\.periods must be 1 or one of 2, 4"):
        SetPeriods(periods=periods, reason="")


@pytest.mark.parametrize(
    ("schedule", "contract"),
    [
        ("0.1:2/3", "a period that is none of 2, 4"),
        ("0.1:1,2", "no share of the training"),
        ("0.1:2/4,2/2", "numbers of layer modules in .* rise"),
        ("0.1:1/2,2/4", "periods in .* fall"),
        ("0.1:3,2/4", "numbers of layer modules in .* rise"),
    ],
)
def test_timetables_with_wrong_periods_are_refused(schedule, contract):
    with pytest.raises(ConfigError, match=contract):
        Config.from_dict({"policy": {"name": "static", "schedule": schedule}})
