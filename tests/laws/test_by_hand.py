"""Laws 4 and 7: freezing and thawing do what a loop would do by hand, and leave nothing behind."""

from __future__ import annotations

import pytest

from laws.models import each_that_freezes
from laws.support import NUM_STEPS, PLANS, ByHand, Training, differences, outside

FREEZES_AND_THAWS = "0.25:20 0.6:0"


@each_that_freezes
@pytest.mark.parametrize("plan", PLANS)
def test_law_7_frozen_is_still_and_the_rest_trains_as_in_a_loop_that_freezes_by_hand(name, plan, tmp_path):
    ours, depths, moved = Training(name, directory=tmp_path, plan=plan), [], []
    for _ in range(NUM_STEPS):
        still = ours.still_values()
        ours.train(1)
        kept = still.keys() & ours.still_values().keys()
        moved += [entry for entry in kept if not still[entry].equal(ours.still_values()[entry])]
        depths.append(ours.run.frozen)
    num_modules = len(ours.run.modules)
    assert moved == []
    assert max(depths) == num_modules - 1 and set(depths) > {0, max(depths)}, "too little froze for the law to say much"
    by_hand = ByHand(name, ours.fronts).train()
    assert differences(by_hand.everything(), ours.everything()) == []
    ours.close()


@each_that_freezes
@pytest.mark.parametrize("end", ["thawed", "closed", "closed in inference mode"])
def test_law_4_freeze_then_thaw_leaves_all_as_before(name, end, tmp_path):
    ours = Training(name, directory=tmp_path, plan=FREEZES_AND_THAWS)
    ours.train(NUM_STEPS // 2)
    assert ours.run.frozen > 1
    if end == "thawed":
        ours.train(NUM_STEPS // 4)
        assert ours.run.frozen == 0
        now = outside(ours)
        assert all(now[key] == ours.before[key] for key in ("needs gradients", "modes", "groups", "members"))
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
