"""Disks that are full, files that are damaged, killed processes, and rows that are read ahead."""

import os
import resource
from itertools import islice

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from cached import (
    BATCH,
    EPOCH,
    FILE,
    MEMORY,
    SERVING,
    Training,
    assert_refused,
    assert_served,
    compared,
    files_in,
)
from egeria.events import CacheUsed

FILLING = EPOCH + 5
"""Steps after which some samples came from the store, and others are still to be written."""


def at(step, harm):
    """Return a loop in which the file of the store is harmed after a step."""

    def loop(training):
        training.advance_to(step)
        for path in training.files:
            harm(path)
        training.finish()

    return loop


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, 100)


@pytest.mark.parametrize("harm", [flip_a_bit, truncate])
def test_damaged_rows_are_computed_and_stored_again(harm, tmp_path):
    trained = compared(tmp_path, FILE, at(SERVING, harm))
    (used,) = trained.journal(CacheUsed)
    assert used.damaged == (1 if harm is flip_a_bit else used.damaged) > 0 and used.hits > 250
    assert len(trained.warnings) == 1 and "stored rows that are damaged" in trained.warnings[0]
    assert trained.complaints == ["they are computed again"]


@pytest.mark.parametrize("limit", [0, 2**13])
def test_a_full_disk_costs_the_rows_that_do_not_fit(limit, tmp_path):
    """Files may be no larger, which is what a quota looks like."""
    before, events = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def loop(training):
        training.run.on_event(events.append)  # the journal cannot be written either
        training.advance_to(FILLING if limit else 3)
        size = max((path.stat().st_size for path in training.files), default=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100 if limit else 64, before[1]))
        try:
            training.advance_to(SERVING)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        training.finish()

    trained = compared(tmp_path, FILE, loop)
    (warning,) = (message for message in trained.warnings if "The journal" not in message)
    assert "File too large" in warning
    (used,) = (event for event in events if isinstance(event, CacheUsed))
    assert (used.hits > 0) == bool(limit)


def test_a_limit_holds_and_says_nothing_unless_nothing_fits(tmp_path):
    small = compared(tmp_path / "small", {**FILE, "limit_bytes": 2000, "verify_batches": 5})
    assert_refused(small, "what may be used holds too few samples")
    (used,) = small.journal(CacheUsed)
    assert 0 < used.size_bytes <= 2000
    assert_refused(compared(tmp_path / "none", {**FILE, "limit_bytes": 10}), "not one batch fits")
    quiet = compared(tmp_path / "memory", {**MEMORY, "memory_share": 1e-12})
    assert "not one batch fits" in quiet.reasons[0] and quiet.warnings == []


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    trained = compared(tmp_path, {**FILE, "directory": str(tmp_path / "file" / "below")})
    assert_refused(trained, "Not a directory")


def test_the_file_is_in_the_directory_that_was_named_and_has_no_name(tmp_path):
    training = Training(tmp_path / "run", {**MEMORY, "directory": str(tmp_path / "fast")})
    training.advance_to(SERVING)
    (path,) = files_in(tmp_path / "fast")
    assert path.stat().st_size > 0 and path.stat().st_nlink == 0 and training.files == []
    assert [*(tmp_path / "fast").iterdir()] == []
    assert_served(training.finish())
    assert files_in(tmp_path / "fast") == []


# Reading ahead


def drawn_first(dataset):
    """Return a loader whose sampler draws with the global random numbers, when an epoch begins."""
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=1)


def drawn_one_by_one(dataset):
    sampler = WeightedRandomSampler(torch.ones(len(dataset)), len(dataset))
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=False), num_workers=1)


def drawn_at_the_end(dataset):
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    return DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=1)


class Ahead:
    """Notes how many rows the system was asked to read."""

    def __init__(self, monkeypatch):
        self.rows, self._advise = 0, os.posix_fadvise
        monkeypatch.setattr(os, "posix_fadvise", self)

    def __call__(self, *arguments):
        self.rows += 1
        return self._advise(*arguments)


@pytest.mark.parametrize(
    ("loader", "is_ahead"),
    [(drawn_first, True), (drawn_one_by_one, False), (drawn_at_the_end, False)],
)
@pytest.mark.parametrize("ends_early", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_order_of_batches_stays_also_where_an_epoch_is_left_early(
    loader, is_ahead, ends_early, tmp_path, monkeypatch
):
    def loop(training):
        with training.noting():
            for epoch in range(5):
                for batch in islice(training.loader, 6 + epoch % 2 if ends_early else None):
                    training.step(*batch)

    ahead = Ahead(monkeypatch)
    trained = compared(tmp_path, FILE, loop, loader=loader)
    assert trained.hits > 40 and trained.warnings == []
    assert (ahead.rows > 1.5 * trained.hits) == is_ahead, (ahead.rows, trained.hits)


def test_where_the_loop_changes_batches_nothing_is_read_ahead_and_it_says_so(tmp_path):
    trained = compared(tmp_path, FILE, loader=drawn_first, call=lambda model, x: model(2 * x), plan="0.02:2")
    assert trained.hits > 250 and len(trained.warnings) == 1
    assert "reading rows ahead: the model is not called with what the loader gives" in trained.warnings[0]
