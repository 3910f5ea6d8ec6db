"""A policy of the user's own under a run, and what `attach` makes of the names of policies."""

from __future__ import annotations

import multiprocessing

import pytest

import egeria
from egeria import Config, ConfigError, read_journal
from egeria.events import ControllerChosen, FaultCaught, ModuleFrozen, PlasticityRead, RunStarted, Thawed
from egeria.policy import POLICIES, Policy, find_policy, find_rule
from egeria.policy.base import FrontPolicy
from egeria.testing import ScriptedController
from loops import FAST, Loop, differences
from menagerie import SPECIMENS

RESIDUAL = SPECIMENS["residual"]


def attaching(directory, policy, **more):
    return {"config": {**FAST, "policy": {}}, "policy": policy, "directory": directory, "total_steps": 60, **more}


class FreezeOnceCalm(FrontPolicy):
    """Freezes two modules once three losses were seen, and one of them again behind a thaw."""

    seen = 0

    def observe_interval(self, interval):
        self.seen += interval.loss is not None
        return self._move_to({3: 2, 6: 1}.get(self.seen, self.frozen), "calm")


def frozen_at(directory):
    journal = read_journal(directory)
    return [(event.kind, event.step) for event in journal if isinstance(event, (ModuleFrozen, Thawed))]


def test_a_policy_of_the_users_own_is_asked_and_obeyed(tmp_path):
    loop = Loop(RESIDUAL, attaching(tmp_path, FreezeOnceCalm))
    loop.step(20)
    assert frozen_at(tmp_path) == [("frozen", 6), ("frozen", 6), ("thawed", 12), ("frozen", 12)]
    assert loop.run.frozen == 1 and loop.run.plan is None
    assert "FreezeOnceCalm" in read_journal(tmp_path).first(RunStarted).config["policy"]["name"]


def test_a_policy_that_fails_never_reaches_the_loop(tmp_path):
    class Failing(FreezeOnceCalm):
        def observe_interval(self, interval):
            raise RuntimeError("injected")

    plain, loop = Loop(RESIDUAL), Loop(RESIDUAL, attaching(tmp_path, Failing))
    for entry in (plain, loop):
        entry.step(20)
    assert differences(plain.everything(), loop.everything()) == []
    assert [fault.count for fault in read_journal(tmp_path).of(FaultCaught)] == [1, 2, 3]


def test_what_makes_no_policy_and_what_is_none_are_refused(tmp_path):
    model = RESIDUAL.build()
    optimizer = Loop(RESIDUAL).make_optimizer(model.parameters())
    with pytest.raises(ConfigError, match=r"makes an egeria\.policy\.Policy, found one that makes dict"):
        egeria.attach(model, optimizer, policy=lambda config, **facts: facts, directory=tmp_path)
    with pytest.raises(ConfigError, match=r"'plan', 'static', 'linear', 'none', 'egeria'.*found 'forecast'"):
        egeria.attach(model, optimizer, policy="forecast", directory=tmp_path)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_one_and_takes_its_own_state_back(name):
    settings = {"plan": "0.5:1"} if name == "static" else {}
    facts = {"trainable": [True] * 4, "rule": find_rule("step"), "total_steps": 100, "deepest_freeze": None}
    policy, other = (find_policy(name)(Config.from_dict({"policy": {"name": name, **settings}}), **facts) for _ in "12")
    assert isinstance(policy, Policy)
    other.load_state_dict(policy.state_dict())
    assert (other.frozen, other.stage, other.state_dict()) == (policy.frozen, policy.stage, policy.state_dict())


def test_attach_has_the_last_word_on_the_policy(tmp_path):
    loop = Loop(RESIDUAL, attaching(tmp_path, "none", config={"policy": {"name": "egeria"}}))
    loop.run.close()
    assert read_journal(tmp_path).first(RunStarted).config["policy"]["name"] == "none"


@pytest.mark.parametrize("policy", ["none", "plan"])
def test_no_controller_is_started_for_who_reads_no_plasticity(policy, tmp_path):
    before = multiprocessing.active_children()
    loop = Loop(RESIDUAL, attaching(tmp_path / "process", policy, controller="process"))
    loop.step(20)
    assert multiprocessing.active_children() == before
    (chosen,) = read_journal(tmp_path / "process").of(ControllerChosen)
    assert chosen.controller == "none" and policy in chosen.reason
    given = ScriptedController()
    loop = Loop(RESIDUAL, attaching(tmp_path / "given", policy, controller=given))
    loop.step(40)
    assert given.requests == [] and not read_journal(tmp_path / "given").of(PlasticityRead)
