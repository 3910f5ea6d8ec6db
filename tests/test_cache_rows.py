"""Keys, digests, the free memory, the sampler, and the cache in two processes."""

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import egeria
from cached import FILE, MEMORY, OFF, Chain, Vectors
from egeria.cache.rows import digests, free_memory_bytes, row_keys, true_lengths
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught
from egeria.model.passes import Batch
from loops import differences
from ranks import run_ranks


def keys(cut_names=(), **kwargs):
    batch = Batch.of_call((), kwargs, "cpu")
    return row_keys(batch, true_lengths(batch) if cut_names else None, cut_names)


def padded(length, filler=0):
    words = torch.full((2, length), filler)
    words[:, :3] = torch.tensor([[1, 2, 3], [4, 5, filler]])
    return {"input_ids": words, "attention_mask": (torch.arange(length) < torch.tensor([[3], [2]])).long()}


CUT = (".1.input_ids", ".1.attention_mask")


def test_equal_rows_have_equal_keys_whatever_the_padding():
    known = keys(CUT, **padded(7))
    for length in (3, 4, 8, 9, 31):
        for filler in (0, 99):
            assert keys(CUT, **padded(length, filler), num_items_in_batch=torch.tensor(length)) == known
    assert keys(**padded(7)) != keys(**padded(8)) and keys(**padded(7)) != keys(**padded(7, 99)), "unless it counts"


def test_everything_else_makes_another_key():
    changed = padded(7)
    changed["input_ids"][0, 1] = 9
    assert [a == b for a, b in zip(keys(CUT, **changed), keys(CUT, **padded(7)), strict=True)] == [False, True]
    others = [
        {**padded(7), "use_cache": False},
        {**padded(7), "scale": torch.tensor(2.0)},
        {**padded(7), "part": slice(0, 2)},
        {**padded(7), "part": slice(0, 3)},
        {**padded(7), "input_ids": padded(7)["input_ids"].int()},
        {**padded(7), "features": torch.zeros(2, 7)},
        {**padded(7), "features": torch.arange(14.0).view(2, 7)},
        {**padded(7), "features": torch.tensor([[0.0] * 6 + [1.0]] * 2)},
    ]
    found = [keys(CUT, **other) for other in [padded(7), *others]]
    assert len({key for rows in found for key in rows}) == 2 * len(found), "features are as long as words, and no words"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not {*keys(CUT, **padded(7))} & {*found[0]}
    assert row_keys(Batch.of_call((1, "a"), {}, "cpu")) is None


DTYPES = [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.complex64, torch.bool]


@given(st.data())
def test_digests_change_with_every_bit_and_with_nothing_else(data):
    width, dtype = data.draw(st.integers(1, 40)), data.draw(st.sampled_from(DTYPES[:-1]))
    raw = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=width * 8, max_size=width * 8)))
    row = raw.to(torch.uint8).view(dtype)
    twins = torch.stack([row, row, row])
    raw_twins = twins.view(torch.uint8)
    raw_twins[1, data.draw(st.integers(0, width * 8 - 1))] ^= 1 << data.draw(st.integers(0, 7))
    first, other, same = digests(twins).tolist()
    assert first == same and first[0] != other[0] and first[1] != other[1]
    strided = torch.stack([twins, twins], dim=2)[:, :, 0]
    assert digests(strided).tolist() == [first, other, same]


def test_digests_tell_rows_apart_that_sums_do_not():
    rows = torch.tensor(
        [[0, 0], [-1, -1], [-1, 0], [0, -1], [1, -1], [-(2**63), -(2**63)], [-(2**63), 0], [2, 1], [1, 2]]
    )
    assert len({tuple(digest) for digest in digests(rows).tolist()}) == len(rows)
    signs = torch.tensor([[0.0, 0.0], [-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]])
    assert len({tuple(digest) for digest in digests(signs).tolist()}) == 4
    many = torch.randint(0, 4, (20_000, 16), generator=torch.Generator().manual_seed(0))
    assert len({tuple(digest) for digest in digests(many).tolist()}) == len(many.unique(dim=0))
    assert digests(torch.ones(3, 5, dtype=torch.bool)).unique(dim=0).shape == (1, 2)


def test_the_tail_of_a_digest_is_cut_at_the_length():
    rows = torch.arange(1, 25).view(2, 12)
    first = digests(rows, [5, 12]).tolist()
    rows[0, 5:] = 7
    assert digests(rows, [5, 12]).tolist() == first
    assert digests(rows[:, :8], [5, 8]).tolist()[0] == first[0] != digests(rows[:, :5]).tolist()[0]


def test_free_memory_is_what_the_container_leaves(tmp_path):
    free = free_memory_bytes(tmp_path)
    assert free > 1_000_000, "what the machine has, where there is no container"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 50000\nfile 3\n")
    assert free_memory_bytes(tmp_path) > 1_000_000, "without a limit"
    (tmp_path / "memory.max").write_text("700000\n")
    assert free_memory_bytes(tmp_path) == 650_000


# The sampler


def test_each_rank_keeps_its_samples_and_all_are_dealt_out():
    for drop_last in (True, False):
        for size in (2, 7, 12, 100):
            count = 2 if size == 2 else 3
            samplers = [egeria.ShardSampler(range(size), count, rank, drop_last=drop_last) for rank in range(count)]
            epochs = []
            for epoch in range(3):
                for sampler in samplers:
                    sampler.set_epoch(epoch)
                epochs.append([list(sampler) for sampler in samplers])
            assert all([sorted(part) for part in later] == [sorted(part) for part in epochs[0]] for later in epochs)
            assert {len(part) for epoch in epochs for part in epoch} == {len(samplers[0])}
            assert len({sample for part in epochs[0] for sample in part}) == size - (size % count if drop_last else 0)
            if size == 100:
                assert epochs[0] != epochs[1] and [list(sampler) for sampler in samplers] == epochs[2]
    assert list(egeria.ShardSampler(range(10), 2, 1, shuffle=False)) == [1, 3, 5, 7, 9]
    for size, count, rank in [(10, 2, 2), (10, 2, -1), (1, 2, 0), (0, 1, 0)]:
        with pytest.raises(ValueError, match=r"Invalid rank|dealt out"):
            egeria.ShardSampler(range(size), count, rank, drop_last=True)


# Two processes

CASES = {
    "computed": (egeria.ShardSampler, OFF),
    "in a file": (egeria.ShardSampler, FILE),
    "in memory": (egeria.ShardSampler, MEMORY),
    "in a file, dealt anew": (DistributedSampler, FILE),
    "in memory, dealt anew": (DistributedSampler, MEMORY),
}
NUM_SAMPLES, EPOCHS = 128, 5


def train(name, folder):
    sampler, settings = CASES[name]
    torch.manual_seed(0)
    model, dataset = Chain(), Vectors(NUM_SAMPLES)
    called, losses, events = DistributedDataParallel(model), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler(dataset, shuffle=True, seed=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = egeria.attach(
            called,
            optimizer,
            loader,
            total_steps=len(loader) * EPOCHS,
            plan="0.05:2",
            directory=Path(folder, name),
            config={"cache": settings},
        )
        run.on_event(events.append)
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for inputs, labels in loader:
                called.train()
                loss = nn.functional.cross_entropy(called(inputs), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
                losses.append(loss.item())
        run.close()
    return {
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "losses": losses,
        "used": [(event.hits, event.misses) for event in events if isinstance(event, CacheUsed)],
        "reasons": [event.reason for event in events if isinstance(event, CacheDecided) and event.mode == "computed"],
        "complaints": [str(event) for event in events if isinstance(event, (Declined, FaultCaught))],
        "warned": [str(entry.message) for entry in caught if issubclass(entry.category, egeria.EgeriaWarning)],
    }


def train_all(folder):
    return {name: train(name, folder) for name in CASES}


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_two_processes_serve_their_own_samples_where_these_are_dealt_out_once(tmp_path):
    ranks = run_ranks(train_all, str(tmp_path))
    for rank, found in enumerate(ranks):
        for name in ("in a file", "in memory"):
            assert differences(found[name]["weights"], found["computed"]["weights"]) == []
            assert found[name]["losses"] == found["computed"]["losses"]
            ((hits, misses),) = found[name]["used"]
            assert hits > 150 and misses < 140, (hits, misses)
            assert found[name]["reasons"] == found[name]["complaints"] == found[name]["warned"] == []
        for name in ("in a file, dealt anew", "in memory, dealt anew"):
            assert found[name]["used"] == [] and "`egeria.ShardSampler`" in found[name]["reasons"][0]
            assert len(found[name]["warned"]) == ("file" in name and rank == 0), "only what was asked for"
    assert [*tmp_path.rglob("egeria-activations-*")] == []
