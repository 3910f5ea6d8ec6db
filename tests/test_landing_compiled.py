"""Landing in a compiled model: as in an eager one, with no graph of its own."""

from __future__ import annotations

import pytest
import torch

from egeria import read_journal
from egeria.events import Declined, FaultCaught, LandingEnded, ModuleFrozen
from egeria.session.measuring.compiling import Compiling
from test_compile import Training, _clean  # noqa: F401  # the fixture cleans up after each test

pytestmark = pytest.mark.timeout(300)
CONFIG = {
    "policy": {"name": "static", "schedule": "0.03:2"},
    "plasticity": {"interval_steps": 2},
    "freezing": {"landing": "both"},
}


@pytest.mark.parametrize("way", ["before", "in place", "after"])
def test_it_lands_as_in_an_eager_model_and_compiles_nothing_for_it(way, tmp_path, monkeypatch):
    monkeypatch.setattr(Compiling, "reason_to_wait", lambda *_: None)  # a run this short pays for no graph
    given = {"config": CONFIG, "total_steps": 80, "controller": "inline"}
    plain = Training("eager", tmp_path / "eager", **given)
    compiled = Training(way, tmp_path / "compiled", **given)
    plain.step(30)
    counts = []
    for _ in range(30):
        compiled.step(1)
        counts.append(compiled.graphs.num_compiled)
    torch.testing.assert_close(compiled.losses, plain.losses, rtol=1e-4, atol=1e-5)
    journals = [read_journal(tmp_path / name) for name in ("eager", "compiled")]
    ends = [[(event.step, event.outcome) for event in journal.of(LandingEnded)] for journal in journals]
    assert ends[0] == ends[1] and len(ends[0]) == 1
    frozen = journals[1].of(ModuleFrozen)[0].step
    assert counts[frozen - 1] == counts[0], "compiled for the landing"
    assert not journals[1].of(FaultCaught) and not journals[1].of(Declined)
