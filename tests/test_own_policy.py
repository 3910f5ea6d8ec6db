"""A policy of the user's own under a run, and what `attach` makes of the names of policies."""

import pytest

from egeria import read_journal
from egeria.events import (
    FaultCaught,
    ModuleFrozen,
    RunStarted,
    Thawed,
)
from egeria.policy import Depth, Interval, Wants
from loops import FAST, Loop, differences
from menagerie import SPECIMENS

RESIDUAL = SPECIMENS["residual"]


def attaching(directory, policy, **more):
    return {"config": {**FAST, "policy": {}}, "policy": policy, "directory": directory, "total_steps": 60, **more}


class FreezeOnceCalm:
    """Freezes two modules once three losses were seen, and one of them after six."""

    wants = Wants(interval_steps=2)

    def __init__(self, **facts):
        self.facts, self.losses = facts, 0

    def observe(self, interval):
        self.losses += interval.loss is not None
        depth = {3: 2, 6: 1}.get(self.losses)
        return None if depth is None else Depth(depth, "calm")

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


class AtSteps:
    """Freezes one more at each of three steps, down to all that may be frozen; keeps no state."""

    asked: list[Interval]

    def __init__(self, *, deepest, **_):
        self.wants, self.deepest, self.asked = Wants(steps=(3, 7, 9)), deepest, []

    def observe(self, interval):
        self.asked.append(interval)
        depth = sum(step <= interval.step for step in self.wants.steps)
        return Depth(min(depth, self.deepest), "its step has come")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def frozen_at(directory):
    journal = read_journal(directory)
    return [(event.kind, event.step) for event in journal if isinstance(event, (ModuleFrozen, Thawed))]


def test_a_policy_of_the_users_own_is_asked_and_obeyed(tmp_path):
    loop = Loop(RESIDUAL, attaching(tmp_path, FreezeOnceCalm))
    loop.step(20)
    assert frozen_at(tmp_path) == [("frozen", 6), ("frozen", 6), ("thawed", 12), ("frozen", 12)]
    assert loop.run.frozen == 1 and loop.run.plan is None
    assert {event.reason for event in read_journal(tmp_path).of(ModuleFrozen)} == {"calm"}
    assert "FreezeOnceCalm" in read_journal(tmp_path).first(RunStarted).config["policy"]["name"]


def test_it_is_asked_before_the_first_step_and_after_those_it_names(tmp_path):
    made = []
    loop = Loop(RESIDUAL, attaching(tmp_path, lambda **facts: made.append(AtSteps(**facts)) or made[-1]))
    loop.step(12)
    asked = [(interval.step, interval.frozen) for interval in made[-1].asked]
    assert asked[0] == (0, 0) and {(3, 0), (7, 1), (9, 2)} < set(asked)
    assert frozen_at(tmp_path) == [("frozen", 3), ("frozen", 7), ("frozen", 9)]


def test_it_goes_on_from_its_own_state(tmp_path):
    first = Loop(RESIDUAL, attaching(tmp_path / "first", FreezeOnceCalm))
    first.step(8)
    second = Loop(RESIDUAL, attaching(tmp_path / "second", FreezeOnceCalm))
    second.run.load_state_dict(first.run.state_dict())
    assert second.run.frozen == 2
    second.step(6)
    assert frozen_at(tmp_path / "second") == [("thawed", 12), ("frozen", 12)]


@pytest.mark.parametrize(
    ("answer", "wants"),
    [
        (Depth(1.5, "no whole number"), {}),
        (True, {}),
        (None, {"interval_steps": "3"}),
        (None, {"interval_steps": float("nan")}),
        (None, {"steps": ("3",)}),
    ],
)
def test_nonsense_of_a_policy_never_reaches_the_loop(answer, wants, tmp_path):
    class Nonsense(FreezeOnceCalm):
        def __init__(self, **facts):
            super().__init__(**facts)
            self.wants = Wants(**{"interval_steps": 2, **(wants if "interval_steps" in wants else {})})

        def observe(self, interval):
            self.wants = Wants(**{"interval_steps": 2, **wants}) if interval.step else self.wants
            return answer

    plain, loop = Loop(RESIDUAL), Loop(RESIDUAL, attaching(tmp_path, Nonsense))
    for entry in (plain, loop):
        entry.step(8)
    assert differences(plain.everything(), loop.everything()) == []
    assert len(read_journal(tmp_path).of(FaultCaught)) == 1
