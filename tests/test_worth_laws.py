"""The laws, over the menagerie, where worth is measured and decides."""

from __future__ import annotations

import pytest

from egeria import read_journal
from egeria.events import FaultCaught, IntervalMeasured
from egeria.policy import shares, worth
from egeria.report.replay import replay
from loops import Loop, differences, outside
from menagerie import each_stateless, each_supported

NUM_STEPS = 24  # of 200, of which ten are measured


@pytest.fixture(autouse=True)
def decides(monkeypatch):
    """Worth decides whatever it is: these few steps of untrained models do harm as often as not."""
    for module in (worth, shares):
        monkeypatch.setattr(module, "helped", lambda *_: True)


def attached(directory=None, **groups):
    config = {
        "policy": {"name": "worth", "pretrained": True, "worth_limit": 1.0},  # all at once, whatever the times are
        "plasticity": {"interval_steps": 2},
        "bootstrapping": {"change_threshold": 1.0},
        **groups,
    }
    return {"config": config, "total_steps": 200, "directory": directory, "controller": "inline"}


@each_supported
def test_law_1_measuring_without_freezing_is_plain_training(specimen, tmp_path):
    plain, watched = Loop(specimen), Loop(specimen, attached(tmp_path, freezing={"enabled": False}))
    for loop in (plain, watched):
        loop.step(NUM_STEPS)
    watched.run.close()
    assert differences(plain.everything(), watched.everything()) == []
    assert outside(watched.model) == outside(plain.model)
    journal = read_journal(tmp_path)
    assert not journal.of(FaultCaught)
    assert any(event.worth for event in journal.of(IntervalMeasured))


@each_stateless
@pytest.mark.parametrize("stop", [5, 9, 15])  # two in the midst of measuring
def test_law_5_a_resumed_run_decides_and_trains_like_one_that_never_stopped(specimen, stop, tmp_path):
    whole, first = (Loop(specimen, attached(tmp_path / name)) for name in ("whole", "parts"))
    whole.step(NUM_STEPS)
    first.step(stop)
    resumed = Loop(specimen, attached(tmp_path / "parts"))
    resumed.model.train()
    resumed.load(first.save())
    resumed.step(NUM_STEPS - stop)
    assert differences(whole.everything(), resumed.everything()) == []
    assert resumed.run.frozen == whole.run.frozen
    for loop in (whole, resumed):
        loop.run.close()
    assert outside(resumed.model) == outside(whole.model)
    journals = [read_journal(tmp_path / name) for name in ("whole", "parts")]
    worths = [[(event.step, event.worth) for event in journal.of(IntervalMeasured)] for journal in journals]
    assert worths[0] == worths[1]
    assert not any(journal.of(FaultCaught) for journal in journals)


@each_supported
def test_law_7_a_replayed_journal_decides_alike(specimen, tmp_path):
    loop = Loop(specimen, attached(tmp_path))
    loop.step(NUM_STEPS)
    loop.run.close()
    journal = read_journal(tmp_path)
    assert replay(tmp_path).agrees
    assert any(event.worth for event in journal.of(IntervalMeasured)) and not journal.of(FaultCaught)
