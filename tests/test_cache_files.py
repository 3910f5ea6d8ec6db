"""Disks that are full, files that are damaged, and killed processes."""

import os
import resource

import pytest

from cached import (
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
