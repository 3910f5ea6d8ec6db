"""Law 3: training with outputs of the frozen front from a cache is training with computed ones, bit for bit."""

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from laws.models import BATCH, MODELS, NUM_ROWS, each_model_in_time
from laws.support import CACHES, Training, cached_rows, decisions, differences, outside, settings

pytestmark = pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")  # a law holds whatever is warned of
EPOCHS = 8
PLAN = "0.2:2 0.4:0 0.5:20"


class Shuffled(Sampler):
    """Goes through the rows in order first, and then in another order in each epoch."""

    def __init__(self) -> None:
        self.random, self.epoch = torch.Generator().manual_seed(0), 0

    def __len__(self) -> int:
        return NUM_ROWS

    def __iter__(self):
        self.epoch += 1
        yield from range(NUM_ROWS) if self.epoch == 1 else torch.randperm(NUM_ROWS, generator=self.random).tolist()


def train(name, kind, directory):
    rows = MODELS[name].rows(torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(*rows), batch_size=BATCH, sampler=Shuffled())
    attach = {"plan": PLAN, "loader": loader, "total_steps": EPOCHS * len(loader), "directory": directory}
    training = Training(name, **attach, config=settings(cache=CACHES[kind]))
    for _ in range(EPOCHS):
        training.train(batches=loader)
    training.close()
    assert differences(training.before, outside(training)) == []
    return training.everything()


@each_model_in_time
def test_law_3_cached_is_computed(name, tmp_path):
    computed, decided = train(name, "none", tmp_path / "none"), decisions(tmp_path / "none")
    assert cached_rows(tmp_path / "none") == 0
    for kind in [kind for kind in CACHES if kind != "none"]:
        assert differences(computed, train(name, kind, tmp_path / kind)) == [], kind
        assert decisions(tmp_path / kind) == decided
        if MODELS[name].is_cached:
            assert cached_rows(tmp_path / kind) > NUM_ROWS, f"{kind}: without rows from it nothing was put to the test"
