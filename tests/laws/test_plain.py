"""Law 1: attached but never freezing is the plain loop, bit for bit; so is the loop of a model that is refused."""

import pytest

from egeria import EgeriaWarning
from laws.models import MODELS, each_model
from laws.support import NUM_STEPS, Training, decisions, differences, how, outside, paper, readings, refusals

pytestmark = pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")  # a law holds whatever is warned of
NEVER = {
    "no policy": lambda: {"policy": "none"},
    "a plan for later": lambda: {"plan": "0.9:1", "total_steps": 10 * NUM_STEPS},
    "the paper's rule": lambda: paper(window=10),  # which takes 20 evaluations at least
}
REFUSED = [name for name, model in MODELS.items() if model.is_refused]


@each_model
@pytest.mark.parametrize("kind", NEVER)
def test_law_1_attached_but_never_freezing_is_the_plain_loop(name, kind, tmp_path):
    plain = Training(name).train(NUM_STEPS)
    attached = Training(name, directory=tmp_path, **NEVER[kind]()).train(NUM_STEPS)
    attached.close()
    assert differences(plain.everything(), attached.everything()) == []
    assert differences(attached.before, outside(attached)) == []
    assert decisions(tmp_path) == []
    if kind == "the paper's rule" and name not in REFUSED:
        assert len(readings(tmp_path)) > NUM_STEPS // 4, "without evaluations nothing was put to the test"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["plan", "paper"])
def test_law_1_a_refused_model_trains_as_in_the_plain_loop_and_is_told_why(name, kind, tmp_path):
    plain = Training(name).train(NUM_STEPS)
    with pytest.warns(EgeriaWarning):
        refused = Training(name, directory=tmp_path, **{**how(kind), "rates": None}).train(NUM_STEPS)
    assert {frozen for pair in refused.fronts for frozen in pair} == {frozenset()}
    refused.close()
    assert differences(plain.everything(), refused.everything()) == []
    assert differences(refused.before, outside(refused)) == []
    assert refusals(tmp_path) and all(refusals(tmp_path)), "the journal has the reason"
