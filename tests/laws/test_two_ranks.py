"""Law 6: one rank and two ranks decide alike, and two always have the same weights."""

import functools
import hashlib

import pytest
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from laws.models import MODELS, each_model, each_model_in_time
from laws.support import Training, decisions, differences, how
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")]


def train(name, kind, directory, has_own_data=False):
    """Train in one process, of several or alone, and return what came of it; on data of its own, or on the same."""
    wrap, rank = None, 0
    if distributed.is_initialized():
        wrap = functools.partial(DistributedDataParallel, find_unused_parameters=not MODELS[name].uses_all)
        rank = distributed.get_rank()
    training = Training(name, data_seed=rank * has_own_data, wrap=wrap, directory=directory, **how(kind))
    depths, weights = [], []
    for _ in range(training.total_steps):
        training.train(1)
        depths.append(training.run.frozen)
        values = b"".join(entry.detach().numpy().tobytes() for entry in training.trained.values())
        weights.append(hashlib.sha256(values).hexdigest())
    training.close()
    return training.everything(), depths, weights


@each_model_in_time
def test_law_6_two_ranks_decide_and_train_like_one(name, tmp_path):
    end, depths, weights = train(name, "paper", tmp_path / "one")
    for two in run_ranks(train, name, "paper", tmp_path / "two"):
        assert two[1:] == (depths, weights)
        assert differences(two[0], end) == []
    assert decisions(tmp_path / "two") == decisions(tmp_path / "one")
    assert MODELS[name].is_refused or (max(depths) > 0 and 0 in depths[depths.index(1) :]), "nothing froze and thawed"


@each_model
def test_law_6_two_ranks_agree_at_each_step_on_data_of_their_own(name, tmp_path):
    (_, depths, weights), second = run_ranks(train, name, "plan", tmp_path, True)
    assert second[1:] == (depths, weights)
    assert len(set(weights)) == len(weights), "nothing trains"
    assert MODELS[name].is_refused or (max(depths) > 1 and 0 in depths[depths.index(max(depths)) :]), "nothing froze"
