"""Stored activations shared by the processes of a host: trained to the bit as without, whoever finds what."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import egeria
from cached import Pictures, freezes_up_to, small_resnet
from egeria.cache import CacheDirectory, Outlook, ShardSampler, StoreError, decision
from egeria.cache.store.disk import DiskStore
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught
from egeria.layers.shards import is_sharded
from egeria.session import skipping
from egeria.testing import ScriptedController
from loops import FAST, differences
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
NUM_SAMPLES = 128
BATCH_SIZE = 8
EPOCHS = 5


class OwnSampler(RandomSampler):
    """Draws from what is a data set of this process alone, as far as anybody can tell."""

    def __init__(self, dataset, shuffle, seed):
        super().__init__(dataset, generator=torch.Generator().manual_seed(seed + distributed.get_rank()))

    def set_epoch(self, epoch):
        """Go on drawing."""


SAMPLERS = {"dealt anew": DistributedSampler, "dealt once": ShardSampler, "its own": OwnSampler}
CASES = {
    "without": {"cached": False},
    "one host": {},
    "in memory": {"cached": "auto"},
    "two hosts": {"num_hosts": 2},
    "two hosts, dealt once": {"num_hosts": 2, "sampler": "dealt once"},
    "without, dealt once": {"cached": False, "sampler": "dealt once"},
    "prepared by Accelerate": {"sampler": "prepared"},
    "without, prepared by Accelerate": {"cached": False, "sampler": "prepared"},
    "cannot join": {"fault": "join"},
    "cannot enter": {"fault": "enter"},
    "cannot write": {"fault": "write"},
    "the first does not store": {"settings": {"gate": "auto", "minimum_epochs": 1e6}},
    "the first fails": {"fault": "open"},
    "not in all": {"settings_of_second": {"enabled": False}},
}
if not find_spec("accelerate"):
    CASES = {name: case for name, case in CASES.items() if "Accelerate" not in name}
OTHERS = {
    "a sampler of its own": {"sampler": "its own"},
    "statistics of its own": {"equal_buffers": False},
}
"""Cases that train otherwise."""


def without_equal_buffers():
    """Return the option of this torch by which ranks keep statistics of their own."""
    known = DistributedDataParallel.__init__.__code__.co_varnames
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def faulty(fault):
    """Let something fail, in the second process but for what only the first does."""
    if fault == "open" and distributed.get_rank() == 0:
        return mock.patch.object(decision.GenerationOpener, "open", mock.Mock(side_effect=RuntimeError("injected")))
    if fault in (None, "open") or distributed.get_rank() == 0:
        return nullcontext()
    raising = mock.Mock(side_effect=StoreError("injected"))
    if fault == "enter":
        return mock.patch.object(skipping, "CacheDirectory", raising)
    target = {"join": (CacheDirectory, "join"), "write": (DiskStore, "write")}[fault]
    return mock.patch.object(*target, raising)


def loader_of(sampling, dataset):
    """Return the loader of this process."""
    if sampling != "prepared":
        return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=SAMPLERS[sampling](dataset, shuffle=True, seed=0))
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(0))
    return prepare(loader, num_processes=2, process_index=distributed.get_rank(), use_seedable_sampler=True)


def train(name, folder):
    case = {**CASES, **OTHERS}[name]
    rank = distributed.get_rank()
    machine = f"host {rank % case.get('num_hosts', 1)}"
    torch.manual_seed(0)
    model = small_resnet()
    called = DistributedDataParallel(model, **({} if case.get("equal_buffers", True) else without_equal_buffers()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dataset = Pictures(NUM_SAMPLES)
    loader = loader_of(case.get("sampler", "dealt anew"), dataset)
    settings = {"enabled": case.get("cached", True), "gate": "open", **case.get("settings", {})}
    settings |= case.get("settings_of_second", {}) if rank == 1 else {}
    losses, begin = [], time.monotonic()
    with mock.patch.object(skipping, "_machine", lambda: machine), faulty(case.get("fault")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = egeria.attach(
            called,
            optimizer,
            loader,
            total_steps=len(loader) * EPOCHS,
            controller=ScriptedController(freezes_up_to(1)),
            directory=Path(folder, name),
            config={**FAST, "cache": settings},
        )
        for epoch in range(EPOCHS):
            getattr(loader, "set_epoch", getattr(loader.sampler, "set_epoch", None))(epoch)
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
        "seconds": time.monotonic() - begin,
        "hits": used[-1].hits if used else 0,
        "misses": used[-1].misses if used else 0,
        "mismatches": used[-1].mismatches if used else 0,
        "modes": [event.mode for event in events if isinstance(event, CacheDecided)],
        "num_hosts": [event.numbers.get("num_hosts") for event in events if isinstance(event, CacheDecided)],
        "reasons": [event.reason for event in events if isinstance(event, (Declined, CacheDecided))],
        "faults": [event.error for event in events if isinstance(event, FaultCaught)],
    }


def train_all(folder):
    return {name: train(name, folder) for name in (*CASES, *OTHERS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(train_all, str(folder))


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_to_the_bit_whatever_a_process_finds(name, ranks, folder):
    without = next((f"without, {how}" for how in ("dealt once", "prepared by Accelerate") if how in name), "without")
    for found in ranks:
        assert differences(found[name]["weights"], found[without]["weights"]) == []
        assert torch.equal(found[name]["losses"], found[without]["losses"])
        assert found[name]["mismatches"] == 0
    apart = differences(ranks[0][name]["weights"], ranks[1][name]["weights"])
    assert [key for key in apart if "running_" not in key] == []  # statistics of the last batch are each one's own
    left = [entry.name for entry in (folder / name).rglob("*") if entry.is_file()]
    assert left == ["journal.jsonl"]


def served(found):
    """Return the share of samples that came from the store, once all of them could have been in it."""
    first_pass = NUM_SAMPLES / 2
    return found["hits"] / (found["hits"] + found["misses"] - first_pass)


def test_a_host_finds_from_the_second_epoch_on_what_any_of_its_processes_stored(ranks):
    for found in ranks:
        assert found["one host"]["modes"][0] == "stored"
        assert served(found["one host"]) > 0.95


@pytest.mark.skipif("prepared by Accelerate" not in CASES, reason="Accelerate is not installed")
def test_batches_that_accelerate_deals_out_are_served(ranks):
    for found in ranks:
        assert served(found["prepared by Accelerate"]) > 0.95


def test_on_several_hosts_it_takes_a_sampler_that_deals_once(ranks):
    for found in ranks:
        assert served(found["two hosts"]) < 0.9 and found["two hosts"]["num_hosts"][0] == 2.0
        assert set(found["two hosts, dealt once"]["num_hosts"]) == set(found["one host"]["num_hosts"]) == {None}
        assert served(found["two hosts, dealt once"]) > 0.95


@pytest.mark.parametrize("name", ["cannot join", "cannot enter", "cannot write"])
def test_a_process_that_cannot_share_goes_on_by_itself(name, ranks):
    first, second = (found[name] for found in ranks)
    assert (first["hits"] > 0 and second["hits"] == 0) or name == "cannot write"
    assert any("injected" in reason for reason in second["reasons"]), second["reasons"]
    assert first["faults"] == second["faults"] == []


def test_nobody_waits_for_a_first_process_that_stores_nothing(ranks):
    for found in ranks:
        assert set(found["the first does not store"]["modes"]) == {"computed"}
        assert found["the first does not store"]["seconds"] < found["without"]["seconds"] + 8


def test_where_the_first_process_fails_all_compute(ranks):
    first, second = (found["the first fails"] for found in ranks)
    assert any("injected" in error for error in first["faults"]) and second["faults"] == []
    assert first["hits"] == second["hits"] == 0
    assert any("stores nothing" in reason for reason in second["reasons"])


def test_samples_that_may_be_others_in_each_process_are_not_shared(ranks):
    for found in ranks:
        assert found["a sampler of its own"]["hits"] == 0
        assert any("same number in all processes" in entry for entry in found["a sampler of its own"]["reasons"])


def test_a_process_whose_frozen_layers_put_out_something_else_does_not_join(ranks):
    first, second = (found["statistics of its own"] for found in ranks)
    assert first["hits"] > 0 and second["hits"] == 0
    assert any("other values" in reason for reason in second["reasons"])


def test_a_cache_that_is_not_on_in_all_processes_is_declined(ranks):
    assert ranks[0]["not in all"]["modes"] == []
    assert any("not set in all processes" in entry for entry in ranks[0]["not in all"]["reasons"])


class FSDPModule(nn.Linear):
    """Named like the class that `fully_shard` gives to modules."""


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.SyncBatchNorm.convert_sync_batchnorm(small_resnet()), "SyncBatchNorm"),  # trains on accelerators only
        (nn.Sequential(FSDPModule(2, 2)), "fully_shard"),
    ],
)
def test_a_model_that_all_processes_must_run_together_is_declined(model, reason):
    hooks = SimpleNamespace(is_compiled=False)
    ranks = SimpleNamespace(is_alone=False)
    training = SimpleNamespace(model=model, hooks=hooks, is_sharded=is_sharded(model), ranks=ranks)
    assert reason in skipping._refusal(training)


# --- the sampler and the outlook, in one process --------------------------------------------------


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


def test_epochs_in_which_samples_come_to_another_host_do_not_count():
    """As measured with `DistributedSampler`: of the second epoch 1 / hosts is found, then a share of the rest."""
    for num_hosts in [1, 2, 4]:
        outlook = Outlook(steps_ahead=40.0, num_hosts=num_hosts)
        found = sum(1 - (1 - 1 / num_hosts) ** (epoch - 1) for epoch in range(1, 5))
        assert outlook.epochs(10) == pytest.approx(1 + found)
