"""A policy of the user's own under a run: when it is asked, and what becomes of nonsense; the soak has random ones."""

import pytest

from egeria import read_journal
from egeria.events import FaultCaught, ModuleFrozen, RunStarted
from egeria.policy import Depth, Wants
from loops import FAST, Loop, differences
from menagerie import SPECIMENS

RESIDUAL = SPECIMENS["residual"]


class AtSteps:
    """Freezes one more at each of three steps, down to all that may be frozen; keeps no state."""

    def __init__(self, *, deepest, **_):
        self.wants, self.deepest, self.asked = Wants(steps=(3, 7, 9)), deepest, []

    def observe(self, interval):
        self.asked.append((interval.step, interval.frozen))
        depth = sum(step <= interval.step for step in self.wants.steps)
        return Depth(min(depth, self.deepest), "its step has come")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def attaching(directory, policy):
    return {"config": {**FAST, "policy": {}}, "policy": policy, "directory": directory, "total_steps": 60}


def test_it_is_asked_before_the_first_step_and_after_those_it_names_and_obeyed(tmp_path):
    made = []

    def calm(**facts):
        return made.append(AtSteps(**facts)) or made[-1]

    loop = Loop(RESIDUAL, attaching(tmp_path, calm))
    loop.step(12)
    assert made[-1].asked[0] == (0, 0) and {(3, 0), (7, 1), (9, 2)} < set(made[-1].asked)
    assert loop.run.frozen == 3 and loop.run.plan is None
    journal = read_journal(tmp_path)
    moves = [(event.step, event.reason) for event in journal.of(ModuleFrozen)]
    assert moves == [(step, "its step has come") for step in (3, 7, 9)]
    assert "calm" in journal.first(RunStarted).config["policy"]["name"]


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
    class Nonsense(AtSteps):
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
