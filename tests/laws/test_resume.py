"""Law 5: a run that is stopped and resumed is one that was never stopped."""

import pytest
import torch

from laws.models import each_model_in_time
from laws.support import Training, decisions, differences, how

pytestmark = pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")  # a law holds whatever is warned of
STOPS = {"plan": (2, 7), "paper": (15, 27, 33)}
"""Frozen from the beginning, thawed; amid the first slopes, while frozen, thawed with a smaller window."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """For each model and kind, made once: a training without a stop, what was decided, and checkpoints of its equal."""
    made = {}

    def make(name, kind):
        if (name, kind) not in made:
            directory = tmp_path_factory.mktemp("whole")
            training = Training(name, directory=directory, **how(kind)).train()
            training.close()
            made[name, kind] = training.everything(), training.fronts, decisions(directory), stopped(name, kind)
        return made[name, kind]

    def stopped(name, kind):
        first, checkpoints = Training(name, directory=tmp_path_factory.mktemp("first"), **how(kind)), {}
        for stop in STOPS[kind]:
            checkpoints[stop] = first.train(stop - len(first.losses)).save()
        first.close()
        return checkpoints

    return make


@each_model_in_time
@pytest.mark.parametrize("stop", STOPS["plan"])
def test_law_5_a_plan_goes_on(name, stop, whole, tmp_path):
    go_on(name, "plan", stop, whole, tmp_path)


@each_model_in_time
@pytest.mark.parametrize("stop", STOPS["paper"])
def test_law_5_the_rule_of_the_paper_goes_on(name, stop, whole, tmp_path):
    go_on(name, "paper", stop, whole, tmp_path)


def go_on(name, kind, stop, whole, tmp_path):
    end, fronts, decided, checkpoints = whole(name, kind)
    resumed = Training(name, seed=9, directory=tmp_path, **how(kind))
    resumed.load(checkpoints[stop])
    resumed.train()
    assert differences(end, resumed.everything()) == []
    assert resumed.fronts == fronts[stop:]
    assert decisions(tmp_path) == [move for move in decided if move[0] > stop]
    resumed.close()
    if not resumed.spec.is_refused:
        assert max(depth for _, depth in decided) > 0 and decided[-1][0] > stop, "nothing was decided"


@pytest.mark.parametrize(("kind", "step"), [("thawed", 4), ("frozen", 10)])
def test_law_5_a_state_that_is_taken_while_a_decision_is_made_loses_nothing_of_it(kind, step, tmp_path):
    whole = Training("residual", directory=tmp_path / "whole", **how("plan")).train()
    first, saved = Training("residual", directory=tmp_path / "first", **how("plan")), []
    first.run.on_event(lambda event: saved.append(first.save()) if (event.kind, event.step) == (kind, step) else None)
    first.train(step - 1)
    inputs, targets = first.batch(step - 1)
    loss = first.backward(inputs, targets)
    first.optimizer.step()
    first.losses.append(loss.item())
    first.random = torch.get_rng_state(), first.random[1]
    first.run.step(loss)
    first.close()
    second = Training("residual", seed=1, directory=tmp_path / "second", **how("plan"))
    second.load(saved[0])
    second.train()
    assert second.run.frozen == whole.run.frozen
    assert differences(whole.everything(), second.everything()) == []


def test_law_5_what_the_loop_made_to_train_in_the_frozen_front_trains_on(tmp_path):
    given = {"plan": "step 2:2", "total_steps": 1600}
    whole, resumed = (Training("residual", seed=n, directory=tmp_path / str(n), **given) for n in range(2))
    next(whole.train(3).model.parameters()).requires_grad_(True)
    resumed.load(whole.train(2).save())
    assert whole.run.frozen == 2
    assert differences(whole.train(20).everything(), resumed.train(20).everything()) == []
    assert not whole.run.frozen
