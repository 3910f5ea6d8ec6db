"""Stored activations in several processes: each has its own, of the samples that are dealt out to it once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import egeria
from cached import Pictures, freezes_up_to, small_resnet
from egeria.cache import ShardSampler
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught
from egeria.testing import ScriptedController
from loops import FAST, differences
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
NUM_SAMPLES = 128
EPOCHS = 5
CASES = {
    "without": (ShardSampler, {"enabled": False}),
    "on the disk": (ShardSampler, {"enabled": True}),
    "in memory": (ShardSampler, {"enabled": "auto"}),
    "on the disk, dealt anew": (DistributedSampler, {"enabled": True}),
    "in memory, dealt anew": (DistributedSampler, {"enabled": "auto"}),
}


def train(name, folder):
    sampler, settings = CASES[name]
    torch.manual_seed(0)
    model = small_resnet()
    called = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dataset = Pictures(NUM_SAMPLES)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler(dataset, shuffle=True, seed=0))
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = egeria.attach(
            called,
            optimizer,
            loader,
            total_steps=len(loader) * EPOCHS,
            controller=ScriptedController(freezes_up_to(1)),
            directory=Path(folder, name),
            config={**FAST, "cache": {"gate": "open", **settings}},
        )
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for images, labels in loader:
                called.train()
                loss = nn.functional.cross_entropy(called(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
                losses.append(loss.item())
        run.close()
    events = list(run._recorder.recent)
    used = [event for event in events if isinstance(event, CacheUsed)]
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "losses": torch.tensor(losses, dtype=torch.float64),
        "hits": used[-1].hits if used else 0,
        "misses": used[-1].misses if used else 0,
        "size": used[-1].size_bytes if used else 0,
        "reasons": [event.reason for event in events if isinstance(event, CacheDecided)],
        "declined": [event.reason for event in events if isinstance(event, Declined)],
        "warned": [str(entry.message) for entry in caught if issubclass(entry.category, egeria.EgeriaWarning)],
        "faults": [event.error for event in events if isinstance(event, FaultCaught)],
    }


def train_all(folder):
    return {name: train(name, folder) for name in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(train_all, str(folder))


@pytest.mark.parametrize("name", ["on the disk", "in memory"])
def test_each_process_finds_what_it_has_stored_and_training_is_the_same_to_the_bit(name, ranks, folder):
    for found in ranks:
        assert differences(found[name]["weights"], found["without"]["weights"]) == []
        assert torch.equal(found[name]["losses"], found["without"]["losses"])
        first_pass = NUM_SAMPLES / 2
        assert found[name]["hits"] / (found[name]["hits"] + found[name]["misses"] - first_pass) > 0.95
        assert NUM_SAMPLES / 2 * 2**12 <= found[name]["size"] < 1.2 * NUM_SAMPLES / 2 * 2**12, "of its own samples"
        assert found[name]["declined"] == found[name]["warned"] == found[name]["faults"] == []
    assert [entry.name for entry in (folder / name).rglob("*") if entry.is_file()] == ["journal.jsonl"]


@pytest.mark.parametrize("name", ["on the disk, dealt anew", "in memory, dealt anew"])
def test_where_samples_come_to_other_processes_nothing_is_stored_and_the_journal_says_why(name, ranks):
    for found in ranks:
        told = found[name]["declined" if "disk" in name else "reasons"]
        assert found[name]["hits"] == 0 and any("`egeria.ShardSampler`" in reason for reason in told)
    assert [len(found[name]["warned"]) for found in ranks] == [int("disk" in name), 0], "only what was asked for"


# --- the sampler, in one process ------------------------------------------------------------------


def test_each_rank_keeps_its_samples_and_all_are_dealt_out():
    for drop_last in [True, False]:
        for size in [2, 7, 12, 100]:
            num_replicas = 2 if size == 2 else 3
            samplers = [
                ShardSampler(range(size), num_replicas, rank, drop_last=drop_last) for rank in range(num_replicas)
            ]
            epochs = []
            for epoch in range(3):
                for sampler in samplers:
                    sampler.set_epoch(epoch)
                epochs.append([list(sampler) for sampler in samplers])
            assert all(
                sorted(first) == sorted(later)
                for later in epochs[1:]
                for first, later in zip(epochs[0], later, strict=True)
            )
            assert {len(part) for epoch in epochs for part in epoch} == {len(samplers[0])}
            seen = [sample for part in epochs[0] for sample in part]
            assert len(set(seen)) == (size - size % num_replicas if drop_last else size)
            if size == 100:
                assert epochs[0] != epochs[1] and [list(sampler) for sampler in samplers] == epochs[2]
                assert list(ShardSampler(range(100), 3, 0, seed=1)) != list(ShardSampler(range(100), 3, 0, seed=2))


def test_without_shuffling_the_order_is_that_of_the_data():
    sampler = ShardSampler(range(10), 2, 1, shuffle=False)
    assert list(sampler) == [1, 3, 5, 7, 9] and len(sampler) == 5


def test_the_sampler_refuses_what_cannot_be_dealt_out():
    for size, replicas, rank in [(10, 2, 2), (10, 2, -1), (1, 2, 0), (0, 1, 0)]:
        with pytest.raises(ValueError, match=r"Invalid rank|dealt out"):
            ShardSampler(range(size), replicas, rank, drop_last=True)
