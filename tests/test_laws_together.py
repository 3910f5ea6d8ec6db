"""The laws, over the menagerie, with everything on at once.

Worth decides, what is too dear to freeze is updated at some steps only, freezes land, and what a frozen front puts out
comes from memory where an input comes again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from egeria import read_journal
from egeria.events import CacheUsed, FaultCaught, LandingEnded, ModuleFrozen, PeriodsChanged
from egeria.policy import shares, worth
from egeria.session.measuring.measures import Measures
from loops import Loop, differences, outside
from menagerie import each_stateless, each_supported

NUM_STEPS = 90  # of 200, of which ten are measured, and eight are those of a landing
NUM_BATCHES = 3
ALL_AT_ONCE = {"group_norm", "Reader", "Checkpointed", "Tuples", "TorchEncoder", "Translator", "Recurrent"}
"""Of which something is updated more rarely, then lands, and comes from memory then."""


@pytest.fixture(autouse=True)
def decides(monkeypatch):
    """Worth decides whatever it is, and all layer modules take as long, so that every run decides alike."""
    for module in (worth, shares):
        monkeypatch.setattr(module, "helped", lambda *_: True)
    monkeypatch.setattr(Measures, "time_shares", lambda _, __, modules, ___: [0.5 / len(modules)] * len(modules))


def repeating(specimen):
    """The same model, whose batches come again."""

    def example(random):
        seed = int(torch.randint(NUM_BATCHES, (1,), generator=random))
        return specimen.example(torch.Generator().manual_seed(seed))

    return replace(specimen, example=example)


def attached(directory, **cache):
    config = {
        "policy": {"name": "worth", "pretrained": True, "worth_limit": 0.9, "duty_cycle": True},
        "plasticity": {"interval_steps": 2},
        "bootstrapping": {"change_threshold": 1.0},
        "freezing": {"landing": "both", "landing_share": 0.02, "tied": "freeze"},
        "cache": {"gate": "open", "verify_batches": 3, **cache},
    }
    return {"config": config, "total_steps": 200, "directory": directory, "controller": "inline"}


@each_supported
def test_law_3_the_cache_changes_nothing(specimen, tmp_path):
    computed, stored = (
        Loop(repeating(specimen), attached(tmp_path / name, **cache))
        for name, cache in (("computed", {"enabled": False}), ("stored", {}))
    )
    for loop in (computed, stored):
        loop.step(NUM_STEPS)
        loop.run.close()
    assert differences(computed.everything(), stored.everything()) == []
    assert outside(stored.model) == outside(computed.model)
    journal = read_journal(tmp_path / "stored")
    assert not journal.of(FaultCaught)
    if specimen.name in ALL_AT_ONCE:
        assert {event.outcome for event in journal.of(LandingEnded)} == {"landed"} and journal.of(PeriodsChanged)
        assert sum(event.hits for event in journal.of(CacheUsed)) > 200 and journal.of(ModuleFrozen)


@each_stateless
@pytest.mark.parametrize("stop", [20, 60])  # in the midst of landing, and when the cache serves
def test_law_5_a_resumed_run_decides_and_trains_like_one_that_never_stopped(specimen, stop, tmp_path):
    whole, first = (Loop(repeating(specimen), attached(tmp_path / name)) for name in ("whole", "parts"))
    whole.step(NUM_STEPS)
    first.step(stop)
    resumed = Loop(repeating(specimen), attached(tmp_path / "parts"))
    resumed.model.train()
    resumed.load(first.save())
    resumed.step(NUM_STEPS - stop)
    assert differences(whole.everything(), resumed.everything()) == []
    assert (resumed.run.frozen, resumed.run.periods) == (whole.run.frozen, whole.run.periods)
    for loop in (whole, resumed):
        loop.run.close()
    assert outside(resumed.model) == outside(whole.model)
    assert not any(read_journal(tmp_path / name).of(FaultCaught) for name in ("whole", "parts"))
