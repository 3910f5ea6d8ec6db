"""Law 3 through the whole library: training with stored activations is training with computed ones, bit for bit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader

import egeria
from egeria import read_journal, tree
from egeria.events import CacheDecided, CacheUsed, ModuleFrozen
from egeria.session import EgeriaWarning
from egeria.testing import ScriptedController
from loops import differences
from menagerie import each_supported

pytestmark = pytest.mark.slow  # tests/laws has the law over eight models
REFUSED = {
    "Noisy": "random",
    "Replacing": "",
    "CarryingState": "",
    "stochastic_depth": "",
    "one_dropout": "in training mode",
    "Tied": "untie it",
}
NEEDS_WHOLE_BATCHES = {"CarryingState", "Translator", "Recurrent", "front_frozen_before"}
ROWS, BATCHES, EPOCHS = 6, 4, 20
CONFIG = {
    "policy": {"name": "egeria"},
    "plasticity": {"interval_steps": 5, "window": 2},
    "bootstrapping": {"change_threshold": 1.0},
    "controller": {"budget_share": 1000.0},
}


@dataclass
class Pool:
    """A data set of the rows of some example batches, and the batches that its samples are collated to."""

    specimen: object

    def __post_init__(self):
        generator = torch.Generator().manual_seed(7)
        self.examples = [self.specimen.example(generator) for _ in range(BATCHES)]
        self.sizes = [leaf.shape[0] if leaf.dim() else -1 for leaf in tree.leaves(self.examples[0])]

    def __len__(self):
        whole = ROWS * BATCHES
        return whole if self.specimen.name in NEEDS_WHOLE_BATCHES else whole - 2  # so that the last batch is smaller

    def __getitem__(self, index):
        return index

    def collate(self, indices):
        columns = [list(tree.leaves(example)) for example in self.examples]
        index = iter(range(len(self.sizes)))

        def gather(_):
            place = next(index)
            if self.sizes[place] != ROWS:
                return columns[0][place].clone()
            return torch.stack([columns[i // ROWS][place][i % ROWS] for i in indices])

        return tree.map_tensors(gather, self.examples[0])


def train(specimen, directory, **cache):
    """Train with modules freezing one after the other, each for some epochs; return all that changed."""
    torch.manual_seed(0)
    model, pool = specimen.build(), Pool(specimen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    loader = DataLoader(
        pool, batch_size=ROWS, shuffle=True, collate_fn=pool.collate, generator=torch.Generator().manual_seed(3)
    )
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EgeriaWarning)
        run = egeria.attach(
            model,
            optimizer,
            loader,
            config={**CONFIG, "cache": cache},
            controller=ScriptedController(),
            directory=directory,
        )
        for _ in range(EPOCHS):
            model.train()
            for args, kwargs in loader:
                loss = specimen.loss(model(*args, **kwargs))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
                losses.append(loss.item())
        run.close()
    state = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": value for name, value in entry.items() if value is not None}
    return {**state, "losses": torch.tensor(losses, dtype=torch.float64), "random": torch.get_rng_state()}


@pytest.mark.parametrize("enabled", [True, "auto"], ids=["on the disk", "in memory"])
@each_supported
def test_law_3_stored_is_computed(specimen, enabled, tmp_path):
    plain = train(specimen, tmp_path / "plain", enabled=False)
    cached = train(specimen, tmp_path / "cached", enabled=enabled, gate="open", verify_batches=3)
    assert differences(plain, cached) == []
    journal = read_journal(tmp_path / "cached")
    decided, used = journal.of(CacheDecided), journal.of(CacheUsed)
    assert len(journal.of(ModuleFrozen)) >= 2 and decided
    if specimen.name in REFUSED:
        assert {event.mode for event in decided} == {"computed"}
        assert all(REFUSED[specimen.name] in event.reason for event in decided[:1])
    else:
        assert sum(event.hits for event in used) > 4 * ROWS, "the law is empty without rows from the store"
        assert sum(event.checks for event in used) > 1
        assert max(event.largest_error for event in used) == 0
    assert not list((tmp_path / "cached" / "cache").glob("*")), "nothing stays on the disk"
