"""Which batch a forward pass is of, where the loader runs ahead of the model."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cached import Pictures
from egeria.cache.loader import SampleFeed
from egeria.cache.pending import PendingBatches
from egeria.events import Declined
from test_cache_loops import Ahead, both

BATCHES = 12
SIZE = 4
NUMBERS = torch.arange(BATCHES * SIZE).float()[:, None].expand(-1, 3).contiguous()


def followed(**options):
    """Return a loader over rows that hold their own numbers, and what follows it."""
    loader = DataLoader(TensorDataset(NUMBERS), batch_size=SIZE, **options)
    return loader, SampleFeed(loader)


def samples(tensor):
    return tensor[:, 0].int().tolist()


def taken(feed, call):
    indices = feed.take(call)
    return None if indices is None else indices.samples.tolist()


def test_what_comes_counts_from_the_batch_of_the_model():
    loader, feed = followed()
    for (rows,) in Ahead().groups_of_three(loader):
        first = samples(rows)[0]
        assert taken(feed, rows) == samples(rows)
        coming = [number for indices in feed.upcoming(5) for number in indices.samples.tolist()]
        assert coming == list(range(first + SIZE, min(first + 6 * SIZE, len(NUMBERS))))


def test_workers_hand_out_ahead_of_the_model():
    loader, feed = followed(num_workers=1, shuffle=True)
    for (rows,) in Ahead().one_ahead(loader):
        assert taken(feed, rows) == samples(rows)


@pytest.mark.parametrize("as_called", [lambda rows: rows.view(-1), lambda rows: rows[:, :2], lambda rows: rows * 1])
def test_a_second_forward_pass_of_the_same_batch(as_called):
    loader, feed = followed()
    found = []
    for (rows,) in Ahead().one_ahead(loader):
        found += [taken(feed, as_called(rows)) == samples(rows) for _ in range(2)]
    assert all(found[4:]), "but for the first, of copies, until it is known that there are copies"


def test_batches_of_another_loader_are_none_of_it():
    loader, feed = followed()
    for (rows,), other in zip(Ahead().one_ahead(loader), torch.rand(BATCHES, SIZE, 3), strict=True):
        assert taken(feed, rows) == samples(rows)
        assert taken(feed, other) is None


def test_batches_that_are_run_a_second_time():
    loader, feed = followed()
    batches = iter(loader)
    while group := list(islice(batches, 3)):
        for (rows,) in group * 2:
            assert taken(feed, rows) == samples(rows)


@pytest.mark.parametrize("as_called", [lambda rows: rows, torch.clone, lambda rows: rows + 1])
def test_an_evaluation_over_the_same_loader_disturbs_nothing(as_called):
    loader, feed = followed(shuffle=True)
    for epoch in range(4):
        found = [taken(feed, as_called(rows)) == samples(rows) for (rows,) in Ahead().one_ahead(loader)]
        assert all(found) or epoch == 0
        for _ in loader:
            pass


def test_a_loader_that_goes_on_into_the_next_epoch():
    loader, feed = followed(shuffle=True)
    endless = (rows for _ in range(3) for (rows,) in loader)
    ready = list(islice(endless, 5))
    found = []
    for rows in endless:
        ready.append(rows)
        found.append(taken(feed, ready[0].clone()) == samples(ready.pop(0)))
    assert all(found[6:]), "but for those handed out before it is known that there are copies"


def test_a_loop_that_makes_its_input_from_the_batch_and_leaves_some_out_by_chance():
    loader, feed = followed()
    random = np.random.default_rng(0)
    for epoch in range(3):
        for (rows,) in loader:
            if random.random() < 0.7:
                found = taken(feed, rows * 2)
                assert found in ([samples(rows)] if epoch else [samples(rows), None])


def test_a_loop_that_changes_to_inputs_made_from_the_batches():
    loader, feed = followed(shuffle=True)
    for as_called in (lambda rows: rows, lambda rows: rows * 2):
        for _ in range(3):
            found = [taken(feed, as_called(rows)) == samples(rows) for (rows,) in Ahead().one_ahead(loader)]
        assert all(found)


@dataclass
class Bag:
    rows: torch.Tensor
    names: list


def test_batches_in_objects_of_the_user():
    loader, feed = followed(collate_fn=lambda rows: Bag(torch.stack([row for (row,) in rows]), ["name"] * 100))
    for bag in Ahead().one_ahead(loader):
        assert taken(feed, bag) == samples(bag.rows)


def test_what_all_batches_share_tells_nothing():
    mask = torch.ones(SIZE)
    loader, feed = followed(collate_fn=lambda rows: (torch.stack([row for (row,) in rows]), mask))
    for number, (rows, same) in enumerate(Ahead().one_ahead(loader)):
        assert number == 0 or taken(feed, (same, rows)) == samples(rows)


def test_one_buffer_for_all_batches():
    buffer = torch.empty(SIZE, 3)
    loader, feed = followed(collate_fn=lambda rows: torch.stack([row for (row,) in rows], out=buffer))
    found = [taken(feed, rows) == samples(rows) for rows in loader]
    assert all(found[9:]), "but for those that pass until this is known"


def test_no_batch_is_kept_alive():
    loader, feed = followed()
    batches = iter(loader)
    storages = [weakref.ref(next(batches)[0]) for _ in range(3)]
    feed.take(storages)
    assert [reference() for reference in storages] == [None] * 3


def test_a_container_of_the_user_that_fails_is_no_fault():
    class Broken(dict):
        def values(self):
            raise RuntimeError("not today")

    loader, feed = followed(collate_fn=lambda rows: Broken(rows=torch.stack([row for (row,) in rows])))
    for batch in loader:
        assert taken(feed, batch["rows"]) == samples(batch["rows"])


@pytest.mark.parametrize("errs", [lambda number: True, lambda number: number % 3 == 0])
def test_a_batch_taken_for_another_costs_rows_and_changes_nothing(errs, tmp_path, monkeypatch):
    take, before = PendingBatches.take, []

    def wrong(pending, call):
        before.append(take(pending, call))
        return before[-2 if errs(len(before)) and len(before) > 1 else -1]

    monkeypatch.setattr(PendingBatches, "take", wrong)

    def loop(training):
        for _ in range(8):
            training.epoch(Ahead().one_ahead(training.loader))

    stored = both(loop, tmp_path, dataset=Pictures(40))
    assert stored.num_mismatches > 0
    assert all("other inputs" in event.reason for event in stored.journal.of(Declined))
