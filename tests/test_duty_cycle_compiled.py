"""Layer modules that rest at some steps in a compiled model: one graph for each depth of rest."""

from __future__ import annotations

import pytest
import torch

from egeria import read_journal
from egeria.events import Declined, FaultCaught, PeriodsChanged, Recompiled
from egeria.session.measuring.compiling import Compiling
from test_compile import Training, _clean  # noqa: F401  # the fixture cleans up after each test

pytestmark = pytest.mark.timeout(300)
CONFIG = {
    "policy": {"name": "static", "schedule": "0.03:2/8,4/4,6/2 0.5:1,4/4,6/2 0.9:0"},
    "plasticity": {"interval_steps": 2},
}


@pytest.mark.parametrize("way", ["before", "in place", "after"])
def test_each_depth_of_rest_is_compiled_once_and_equal_to_eager(way, tmp_path, monkeypatch):
    monkeypatch.setattr(Compiling, "reason_to_wait", lambda *_: None)  # a run this short pays for no graph
    given = {"config": CONFIG, "total_steps": 80, "controller": "inline"}
    plain = Training("eager", tmp_path / "eager", **given)
    compiled = Training(way, tmp_path / "compiled", **given)
    plain.step(80)
    counts = []
    for _ in range(80):
        runs = compiled.graphs.num_runs
        compiled.step(1)
        assert compiled.graphs.num_runs == runs + 1, "it ran uncompiled"
        counts.append(compiled.graphs.num_compiled)
    torch.testing.assert_close(compiled.losses, plain.losses, rtol=1e-4, atol=1e-5)
    assert counts[1] == 1 and counts[11] == 4, "full, and three depths of rest"
    assert counts[39] == counts[11], "compiled anew at a step"
    assert counts[-1] <= 2 * 4, "with the first module frozen once more"
    journal = read_journal(tmp_path / "compiled")
    assert not journal.of(FaultCaught) and not journal.of(Declined)
    seen = journal.of(Recompiled)
    assert [event.by_freezing for event in seen] == [False] + [True] * (len(seen) - 1) and len(seen) >= 4


def test_periods_that_do_not_repay_their_graphs_are_declined(tmp_path, monkeypatch):
    monkeypatch.setattr(Compiling, "reason_to_wait", lambda *_: "it would save 1 s")
    loop = Training("before", tmp_path, config=CONFIG, total_steps=80, controller="inline")
    loop.step(12)
    assert set(loop.run.periods) == {1} and loop.graphs.num_compiled == 1
    journal = read_journal(tmp_path)
    assert not journal.of(PeriodsChanged)[0].is_in_force
    assert "it would save 1 s" in journal.of(Declined)[-1].reason
