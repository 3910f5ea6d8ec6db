"""Laws 4 and 7: freezing and thawing do what a loop would do by hand, and leave nothing behind."""

import functools

import pytest
import torch

from laws.models import each_that_freezes
from laws.support import NUM_STEPS, PLANS, ByHand, Training, decisions, depths_of, differences, outside

pytestmark = pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")  # a law holds whatever is warned of
FREEZES_AND_THAWS = "0.25:20 0.6:0"


@each_that_freezes
@pytest.mark.parametrize("plan", PLANS)
def test_law_7_frozen_is_still_and_the_rest_trains_as_in_a_loop_that_freezes_by_hand(name, plan, tmp_path):
    ours, depths = Training(name, directory=tmp_path, plan=plan), [0]
    for _ in range(NUM_STEPS):
        before = ours.still_values()
        ours.train(1)
        behind = ours.still_values()
        assert [entry for entry in before.keys() & behind.keys() if not before[entry].equal(behind[entry])] == []
        depths.append(ours.run.frozen)
    moves = [depth for depth, earlier in zip(depths[1:], depths, strict=False) if depth != earlier]
    assert moves == depths_of(plan, len(ours.run.modules)), "the law says little where less froze"
    assert differences(ByHand(name, ours.fronts).train().everything(), ours.everything()) == []
    ours.close()


@each_that_freezes
@pytest.mark.parametrize("end", ["thawed", "closed in inference mode"])
def test_law_4_freeze_then_thaw_leaves_all_as_before(name, end, tmp_path):
    ours = Training(name, directory=tmp_path, plan=FREEZES_AND_THAWS)
    ours.train(NUM_STEPS // 2)
    assert ours.run.frozen > 1
    if end == "thawed":
        ours.train(NUM_STEPS // 4)
        assert ours.run.frozen == 0
        now = outside(ours)
        assert all(now[key] == ours.before[key] for key in ("needs gradients", "modes", "groups"))
    elif end == "closed in inference mode":
        ours.model.eval()
    ours.close()
    if end == "closed in inference mode":
        assert not any(part.training for part in ours.model.modules())
        ours.model.train()
    assert differences(ours.before, outside(ours)) == []
    ours.train()
    by_hand = ByHand(name, [*ours.fronts[:-1], (ours.fronts[-1][0], frozenset())]).train()
    assert differences(by_hand.everything(), ours.everything()) == []


@pytest.mark.parametrize("name", ["residual", "transformer", "lora", "branching"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_law_7_a_compiled_model_is_frozen_as_by_hand(name, tmp_path):
    compiled = functools.partial(torch.compile, backend="eager")
    attach = {"plan": "step 0:20 step 4:0 step 10:2", "total_steps": 10**6}  # so that each depth repays its compilation
    ours = Training(name, directory=tmp_path, wrap=compiled, **attach).train(NUM_STEPS)
    by_hand, found = ByHand(name, ours.fronts).train(NUM_STEPS).everything()["model"], ours.everything()["model"]
    ours.close()
    after = outside(ours)
    assert [key for key in ("needs gradients", "modes", "hooks") if after[key] != ours.before[key]] == []
    assert len({front for _, front in ours.fronts}) == 3, "it was frozen, thawed, and frozen again"
    assert [key for key in found if not torch.allclose(by_hand[key], found[key], atol=1e-5)] == []


def test_a_fused_sgd_that_could_not_thaw_is_not_begun_frozen(tmp_path):
    training = Training("residual", directory=tmp_path, plan=PLANS[1])
    training.optimizer.param_groups[0].update(fused=True, momentum=0.9)
    training.train()
    assert [step for step, _ in decisions(tmp_path)] == [10]
    training.close()
