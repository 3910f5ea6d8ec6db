"""The laws again, with a plan that begins with the last layer module alone, then trains all, then freezes the front."""

import functools

import pytest
import torch

from laws.models import MODELS, each_that_freezes
from laws.support import NUM_STEPS, ByHand, Training, decisions, differences, outside

pytestmark = pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")
PLAN = "0:20 0.25:0 0.6:2"


@each_that_freezes
def test_nothing_that_is_frozen_before_the_first_step_gets_a_state_of_the_optimizer(name, tmp_path):
    training = Training(name, directory=tmp_path, plan=PLAN)
    training.train(1)
    front = {entry for module in training.run.modules[:-1] for entry in module.parameters} - set(MODELS[name].tied)
    trained = {key for key, entry in training.trained.items() if training.optimizer.state.get(entry)}
    assert training.run.frozen == len(training.run.modules) - 1 and front
    assert not front & trained
    training.close()
    assert differences(training.before["needs gradients"], outside(training)["needs gradients"]) == []


def test_a_fused_sgd_that_could_not_thaw_is_not_begun_frozen(tmp_path):
    training = Training("residual", directory=tmp_path, plan=PLAN)
    training.optimizer.param_groups[0].update(fused=True, momentum=0.9)
    training.train()
    assert [step for step, _ in decisions(tmp_path)] == [10]
    training.close()


@pytest.mark.parametrize(("kind", "step"), [("thawed", 4), ("frozen", 10)])
def test_a_state_that_is_taken_while_a_decision_is_made_loses_nothing_of_it(kind, step, tmp_path):
    whole = Training("residual", directory=tmp_path / "whole", plan=PLAN).train()
    first, saved = Training("residual", directory=tmp_path / "first", plan=PLAN), []
    first.run.on_event(lambda event: saved.append(first.save()) if (event.kind, event.step) == (kind, step) else None)
    first.train(step - 1)
    inputs, targets = first.batch(step - 1)
    loss = first.backward(inputs, targets)
    first.optimizer.step()
    first.losses.append(loss.item())
    first.random = torch.get_rng_state(), first.random[1]
    first.run.step(loss)
    first.close()
    second = Training("residual", seed=1, directory=tmp_path / "second", plan=PLAN)
    second.load(saved[0])
    second.train()
    assert second.run.frozen == whole.run.frozen
    assert differences(whole.everything(), second.everything()) == []


@pytest.mark.parametrize("name", ["residual", "transformer", "lora", "branching"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_is_frozen_as_by_hand(name, tmp_path):
    compiled = functools.partial(torch.compile, backend="eager")
    attach = {"plan": "step 0:20 step 4:0 step 10:2", "total_steps": 10**6}  # so that each depth repays its compilation
    ours = Training(name, directory=tmp_path, wrap=compiled, **attach).train(NUM_STEPS)
    by_hand, found = ByHand(name, ours.fronts).train(NUM_STEPS).everything()["model"], ours.everything()["model"]
    ours.close()
    after = outside(ours)
    assert [key for key in ("needs gradients", "modes", "hooks") if after[key] != ours.before[key]] == []
    assert len({front for _, front in ours.fronts}) == 3, "it was frozen, thawed, and frozen again"
    assert [key for key in found if not torch.allclose(by_hand[key], found[key], atol=1e-5)] == []
