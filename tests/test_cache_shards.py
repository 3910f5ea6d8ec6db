"""Stored activations of a model in parts: a batch is replayed in all processes or computed in all, to the same bit."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler

import egeria
from cached import Pictures, assert_no_stubs, freezes_up_to
from egeria.cache import CacheDirectory, InStep, ShardSampler, StoreError, cache
from egeria.cache.generation import Generation
from egeria.cache.peers import OthersStopError
from egeria.cache.prefetch.fetcher import Fetcher
from egeria.cache.store.disk import DiskStore
from egeria.errors import UncacheableError
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught, ModuleFrozen, Thawed
from egeria.layers.plain import run_alone
from egeria.layers.shards import why_not_alone
from egeria.layers.skipping.prefix import Prefix
from egeria.layers.skipping.replay import Replay
from egeria.session import hosts
from egeria.testing import ScriptedController
from loops import FAST, differences
from ranks import run_cases, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
NUM_SAMPLES = 176
BATCH_SIZE = 24
"""The last batch of an epoch has 16 samples in each process, and is of another kind."""
EPOCHS = 10
WIDTH = 32

CASES = {
    "without": {"cached": False},
    "one host": {},
    "checked often": {"settings": {"verify_batches": 2}},
    "two hosts": {"num_hosts": 2},
    "two hosts, dealt once": {"num_hosts": 2, "sampler": ShardSampler},
    "without, dealt once": {"cached": False, "sampler": ShardSampler},
    "bfloat16": {"dtype": torch.bfloat16},
    "without, bfloat16": {"cached": False, "dtype": torch.bfloat16},
    "a boundary that moves": {"depth": 2},
    "without, a boundary that moves": {"cached": False, "depth": 2},
    "the second finds less": {"fault": "judge"},
    "the second cannot join": {"fault": "join"},
    "the second cannot enter": {"fault": "enter"},
    "the second cannot write": {"fault": "write"},
    "the second cannot learn": {"fault": "learn"},
    "a replay fails in the second": {"fault": "replay"},
    "the first fails": {"fault": "open"},
    "not in all": {"settings_of_second": {"enabled": False}},
    "a check fails in the second": {"fault": "check", "settings": {"verify_batches": 2}},
    "the second cannot keep": {"fault": "keep"},
    "no room for all": {"settings": {"limit_bytes": 20_000}},
    "units of two": {"units_of": 2},
    "whole between passes": {"reshard_after_forward": False},
    "in two passes": {"passes": 2},
    "without, in two passes": {"cached": False, "passes": 2},
    "a thaw": {"thaws": True},
    "without, a thaw": {"cached": False, "thaws": True},
}
CACHED = tuple(name for name in CASES if not name.startswith("without"))
SERVED = (
    "one host",
    "checked often",
    "two hosts, dealt once",
    "bfloat16",
    "a boundary that moves",
    "units of two",
    "whole between passes",
    "in two passes",
)


def network():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH)), *blocks, nn.Linear(WIDTH, 10))


def shard(model, dtype=None, units_of=1, **options):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    parts = list(model)[:-1]
    for begin in range(0, len(parts), units_of):
        together = parts[begin : begin + units_of]
        fully_shard(together[0] if len(together) == 1 else together, **options)
    return fully_shard(model, **options)


def always(error):
    return lambda plain: mock.Mock(side_effect=error("injected"))


def at(count, error):
    """Return what lets the call of this number raise, once it is done."""

    def wrap(plain):
        calls = iter(range(1, 10**6))

        def call(*args):
            found = plain(*args)
            if next(calls) == count:
                raise error("injected")
            return found

        return call

    return wrap


def now_and_then(plain):
    """Let every third batch not be there."""
    calls = iter(range(10**6))
    return lambda *args: plain(*args) & (next(calls) % 3 > 0)


FAULTS = {
    "open": (cache, "open_generation", always(RuntimeError)),
    "enter": (hosts, "CacheDirectory", always(StoreError)),
    "join": (CacheDirectory, "join", always(StoreError)),
    "write": (DiskStore, "write", always(StoreError)),
    "learn": (Prefix, "learn", always(UncacheableError)),
    "check": (Prefix, "error", lambda plain: lambda *_: 1.0),
    "judge": (Generation, "_judge", now_and_then),
    "replay": (Replay, "check", at(8, UncacheableError)),
    "keep": (Fetcher, "keep", at(20, StoreError)),
}


def faulty(fault):
    """Let something fail, in the second process but for what only the first does."""
    if fault is None or distributed.get_rank() != (0 if fault == "open" else 1):
        return nullcontext()
    target, name, wrap = FAULTS[fault]
    return mock.patch.object(target, name, wrap(getattr(target, name)))


def train(name, folder):
    case, rank = CASES[name], distributed.get_rank()
    options = {key: case[key] for key in ("dtype", "units_of", "reshard_after_forward") if key in case}
    model = shard(network(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = Pictures(NUM_SAMPLES)
    sampler = case.get("sampler", DistributedSampler)(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    settings = {"enabled": case.get("cached", True), "gate": "open", **case.get("settings", {})}
    settings |= case.get("settings_of_second", {}) if rank == 1 else {}
    machine = f"host {rank % case.get('num_hosts', 1)}"
    losses, gathered, begin = [], [], time.monotonic()
    with mock.patch.object(hosts, "_machine", lambda: machine), faulty(case.get("fault")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = egeria.attach(
            model,
            optimizer,
            loader,
            total_steps=len(loader) * EPOCHS,
            controller=ScriptedController(freezes_up_to(case.get("depth", 1))),
            directory=Path(folder, name),
            config={**FAST, "modules": {"pattern": r"\d"}, "cache": settings},
        )
        torch.manual_seed(rank)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            if case.get("thaws") and epoch == EPOCHS - 2:
                optimizer.param_groups[0]["lr"] /= 20
            for images, labels in loader:
                run.model.train()
                with counted_gathers() as put_together:
                    outputs = [run.model(images) for _ in range(case.get("passes", 1))]
                    loss = sum(nn.functional.cross_entropy(output.float(), labels) for output in outputs)
                gathered.append(put_together.call_count)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                model(dataset.images[:BATCH_SIZE])  # leaves parameters of the outermost unit whole
        run.close()
    assert_no_stubs(model)
    events = list(run._recorder.journal.recent)
    used = [event for event in events if isinstance(event, CacheUsed)]
    return {
        "weights": {key: value.full_tensor() for key, value in model.state_dict().items()},
        "losses": torch.tensor(losses, dtype=torch.float64),
        "random": torch.get_rng_state(),
        "seconds": time.monotonic() - begin,
        "gathered": gathered,
        "used": [(event.hits, event.misses, event.mismatches, event.checks) for event in used],
        "modes": [event.mode for event in events if isinstance(event, CacheDecided)],
        "reasons": [event.reason for event in events if isinstance(event, (Declined, CacheDecided))],
        "faults": [event.error for event in events if isinstance(event, FaultCaught)],
        "frozen": [event.step for event in events if isinstance(event, ModuleFrozen)],
        "thawed": [event.step for event in events if isinstance(event, Thawed)],
    }


def counted_gathers():
    """Count how often the parameters of a unit are put together in the block."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups  # noqa: PLC0415

    return mock.patch.object(groups, "foreach_all_gather", mock.Mock(side_effect=groups.foreach_all_gather))


def train_all(folder):
    return {name: train(name, folder) for name in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(train_all, str(folder), timeout_s=30)


@pytest.mark.parametrize("name", CACHED)
def test_training_is_the_same_to_the_bit_whoever_finds_what(name, ranks, folder):
    without = next((key for key in ("dealt once", "bfloat16", "boundary", "two passes", "thaw") if key in name), "")
    without = next(key for key in CASES if key.startswith("without") and without in key)
    for found in ranks:
        assert found[name]["frozen"] and found[name]["frozen"] == found[without]["frozen"]
        assert torch.equal(found[name]["losses"], found[without]["losses"])
        assert differences(found[name]["weights"], found[without]["weights"]) == []
        assert torch.equal(found[name]["random"], found[without]["random"])
        assert all(mismatches == 0 for _, _, mismatches, _ in found[name]["used"])
    left = [entry.name for entry in (folder / name).rglob("*") if entry.is_file()]
    assert left == ["journal.jsonl"]


@pytest.mark.parametrize("name", SERVED)
def test_once_all_is_stored_batches_are_replayed_in_all_processes(name, ranks):
    first, second = (found[name] for found in ranks)
    assert first["modes"][0] == second["modes"][0] == "stored"
    assert first["faults"] == second["faults"] == []
    assert first["used"][-1][0] == second["used"][-1][0]
    hits, misses = first["used"][-1][:2]
    assert hits > 0.3 * (hits + misses)
    if name == "one host":
        assert hits > 0.95 * (hits + misses - NUM_SAMPLES)  # the first pass, and what is opened in its midst


def test_a_replayed_batch_puts_no_frozen_parameters_together(ranks):
    for found in ranks:
        plain, served = found["without"]["gathered"], found["one host"]["gathered"]
        assert plain[-2] == 6 and served[-2] == 5


def test_stored_rows_are_compared_with_computed_ones_now_and_then(ranks):
    for found in ranks:
        assert found["checked often"]["used"][-1][3] > 3
        assert found["one host"]["used"][-1][3] == 1


def test_a_batch_that_one_process_must_compute_is_computed_by_all(ranks):
    less, all_there = (
        [found[name]["used"][-1][0] for found in ranks] for name in ("the second finds less", "one host")
    )
    assert less[0] == less[1] and 0 < less[0] < 0.8 * all_there[0]


STOPPING = {
    "the second cannot join": "injected",
    "the second cannot write": "injected",
    "the second cannot learn": "injected",
    "a replay fails in the second": "injected",
    "a check fails in the second": "differ from computed ones",
    "the second cannot keep": "injected",
}


@pytest.mark.parametrize("name", STOPPING)
def test_where_one_process_gives_up_all_compute(name, ranks):
    first, second = (found[name] for found in ranks)
    assert any(STOPPING[name] in reason for reason in second["reasons"]), second["reasons"]
    assert any("another process" in reason for reason in first["reasons"]), first["reasons"]
    assert first["modes"][-1] == second["modes"][-1] == "computed"
    assert first["faults"] == second["faults"] == []
    assert first["seconds"] < 20  # nobody waits


def test_where_the_first_process_fails_all_compute(ranks):
    first, second = (found["the first fails"] for found in ranks)
    assert any("injected" in error for error in first["faults"]) and second["faults"] == []
    assert first["used"] == second["used"] == []


def test_a_thaw_ends_what_is_stored(ranks):
    for found in ranks:
        assert found["a thaw"]["modes"][0] == "stored" and found["a thaw"]["used"][-1][0] > 0
        assert "nothing is frozen any more" in found["a thaw"]["reasons"]
        assert found["a thaw"]["thawed"] == found["without, a thaw"]["thawed"] != []


def test_nothing_is_stored_where_some_samples_have_no_room(ranks):
    for found in ranks:
        assert "stored" not in found["no room for all"]["modes"]
    assert any("of the samples fit" in reason for reason in ranks[0]["no room for all"]["reasons"])


@pytest.mark.parametrize("name", ["the second cannot enter", "not in all", "two hosts"])
def test_what_cannot_be_skipped_in_all_is_skipped_in_none(name, ranks):
    for found in ranks:
        assert found[name]["modes"] == [] and found[name]["faults"] == []
    assert ranks[0][name]["reasons"], "it says why"
    if name == "two hosts":
        assert "egeria.ShardSampler" in ranks[0][name]["reasons"][0]


# --- the copy that one process runs, and the vote -------------------------------------------------


def copies(dtype):
    model = shard(network(), dtype)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    copied = run_alone(model.eval(), keeps=distributed.get_rank() == 1)
    with torch.no_grad():
        expected = model(x)
        same = distributed.get_rank() == 0 or torch.equal(copied(x), expected)
    return same, str(expected.dtype)


def test_a_copy_computes_in_the_number_formats_of_the_parts():
    found = run_cases(copies, [None, torch.bfloat16])
    assert found[None] == [(True, "torch.float32")] * 2
    assert found[torch.bfloat16] == [(True, "torch.bfloat16")] * 2


def freed(dtype):
    """Tell whether a copy is freed with its last name, without a search for cycles."""
    model = shard(network(), dtype)
    gc.disable()
    try:
        copied = run_alone(model, keeps=True)
        copied(torch.ones(2, 3, 8, 8))
        weight = weakref.ref(copied[1][0].weight)
        del copied
        return weight() is None
    finally:
        gc.enable()


def test_a_copy_is_freed_at_once():
    found = run_cases(freed, [None, torch.bfloat16])
    assert found == {None: [True, True], torch.bfloat16: [True, True]}


def refused(_case):
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: PLC0415

    plain, ignoring = network(), network()
    ignored = {ignoring[1][0].weight}
    return [
        why_not_alone(shard(plain)),
        why_not_alone(shard(network(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard")))),
        why_not_alone(shard(network(), offload_policy=CPUOffloadPolicy(pin_memory=False))),
        why_not_alone(shard(ignoring, torch.bfloat16, ignored_params=ignored)),
    ]


def test_what_a_copy_would_compute_otherwise_is_refused():
    for plain, hybrid, offloaded, ignoring in run_cases(refused, ["once"])["once"]:
        assert plain == ""
        assert "several processes" in hybrid
        assert "offloaded" in offloaded
        assert "another number format" in ignoring


def test_without_memory_for_a_copy_nothing_is_tried_out():
    vote = mock.Mock(side_effect=lambda own: [own, own])
    peers = InStep(nn.Linear(2, 2), vote)
    peers.restart(is_frozen=True)
    peers.begin()
    with (
        mock.patch("psutil.virtual_memory", return_value=mock.Mock(available=10)),
        pytest.raises(UncacheableError, match="are free"),
    ):
        peers.whole()
    assert vote.call_count == 0


def raise_in_one(folder):
    """Train until batches are replayed; then a layer of the second process raises."""
    distributed.barrier()
    begin = time.monotonic()

    def broken(_module, _args):
        if distributed.get_rank() == 1 and serving.call_count > 3:
            raise ValueError("out of memory")

    plain = network
    with (
        mock.patch.object(Generation, "_prepare", autospec=True, side_effect=Generation._prepare) as serving,
        mock.patch(f"{__name__}.network", lambda: hooked(plain(), broken)),
    ):
        try:
            train("one host", folder)
        except Exception as error:
            return str(error), time.monotonic() - begin
    return "", 0.0


def hooked(model, hook):
    model[3].register_forward_pre_hook(hook)
    return model


def test_an_error_of_the_model_itself_in_one_process_is_told_at_once(tmp_path):
    first, second = run_ranks(raise_in_one, str(tmp_path), timeout_s=60)
    assert second[0] == "out of memory" and first[0]
    assert first[1] < 40 and second[1] < 40


def test_a_process_that_cannot_be_reached_ends_the_votes():
    vote = mock.Mock(side_effect=RuntimeError("timed out"))
    peers = InStep(nn.Linear(2, 2), vote)
    peers.restart(is_frozen=True)
    peers.begin()
    with pytest.raises(OthersStopError, match="timed out"):
        peers.agree(is_ready=True)
    peers.begin()
    peers.settle(is_final=False)
    assert vote.call_count == 1, "nothing is owed any more"
    with pytest.raises(OthersStopError):
        peers.whole()
    peers.restart(is_frozen=True)
    peers.begin()
    peers.settle(is_final=True)
    peers.settle(is_final=True)
    assert vote.call_count == 2
