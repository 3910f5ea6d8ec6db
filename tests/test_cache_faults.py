"""Disks, files and threads that fail under the activation cache: training continues, and comes out the same."""

from __future__ import annotations

import errno
import os
import threading
import time
from unittest import mock

import pytest

from cached import (
    EPOCH,
    FILLING,
    NUM_SAMPLES,
    SERVING,
    Training,
    assert_equal,
    assert_turned_off,
    nothing_but_journals,
    open_files,
    plain,
)
from egeria.cache import decision, fetcher, generation, layout, writer
from egeria.cache.store import disk as store
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught


def raising(error):
    """Return a function that fails."""

    def fail(*args, **kwargs):
        raise error

    return fail


def full_disk():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken_disk():
    return OSError(errno.EIO, os.strerror(errno.EIO))


def test_without_a_fault_rows_are_served_and_training_is_the_same(tmp_path):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert training.warnings == [] and training.complaints == []
    assert training.modes[0] == "stored"
    assert training.num_hits > 3 * NUM_SAMPLES


def test_a_store_outlives_two_boundaries(tmp_path):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run", depth=2)
        training.finish()
        assert_equal(training, plain(tmp_path, depth=2))
    stored = [event.boundary for event in training.journal(CacheDecided) if event.mode == "stored"]
    assert stored == ["layer1.0", "layer2.0"]


# The disk


def test_the_disk_is_full_when_the_store_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", raising(full_disk()))
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "No space left on device")


def test_a_store_is_deleted_at_once_where_what_uses_it_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(decision, "Generation", mock.Mock(side_effect=RuntimeError("injected")))
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance(FILLING)
        assert [name for name in open_files(tmp_path) if "(deleted)" in name] == []
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "injected")


def test_the_disk_is_full_when_the_first_batch_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", raising(full_disk()))
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "No space left on device")


def test_the_disk_fills_up_while_rows_are_written(tmp_path, monkeypatch):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(FILLING)
        monkeypatch.setattr(os, "pwritev", raising(full_disk()))
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "No space left on device")


def test_a_disk_without_room_for_a_tenth_is_used_as_far_as_it_goes(tmp_path):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run", settings={"limit_bytes": 100_000})
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert training.warnings == []
    assert 0 < training.num_hits < 3 * NUM_SAMPLES


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "journal.jsonl").touch()
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run", settings={"directory": str(tmp_path / "journal.jsonl" / "cache")})
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "cannot be used")


def test_the_disk_cannot_be_read_when_it_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", raising(broken_disk()))
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "Input/output error")


def test_the_disk_cannot_be_read_any_more(tmp_path, monkeypatch):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(SERVING)
        monkeypatch.setattr(os, "preadv", raising(broken_disk()))
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "Input/output error")


def test_after_a_fault_the_next_boundary_is_left_alone_too(tmp_path, monkeypatch):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run", depth=2)
        training.advance_to(18)
        assert training.run.frozen == 1
        monkeypatch.setattr(os, "pwritev", raising(full_disk()))
        training.finish()
        assert_equal(training, plain(tmp_path, depth=2))
    assert len(training.warnings) == 1
    second = [event for event in training.journal(CacheDecided) if event.boundary == "layer2.0"]
    assert [event.mode for event in second] == ["computed"]
    assert "it was turned off" in second[0].reason


def hang(monkeypatch):
    """Let no read of a store return before the event that is given back."""
    is_over, read = threading.Event(), store.DiskStore.read

    def wait_and_read(*call):
        is_over.wait(30)
        return read(*call)

    monkeypatch.setattr(store.DiskStore, "read", wait_and_read)
    return is_over


def test_a_disk_slower_than_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setitem(fetcher.Fetcher.__init__.__kwdefaults__, "timeout_s", 0.3)
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(SERVING)
        is_over = hang(monkeypatch)
        training.advance(EPOCH)
        is_over.set()
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "must come within 0.3 s")


def test_a_disk_that_hangs_beyond_the_end_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(fetcher.Fetcher.__init__.__kwdefaults__, "timeout_s", 0.3)
    monkeypatch.setattr(store, "CLOSE_TIMEOUT_S", 0.2)
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(SERVING)
        is_over = hang(monkeypatch)
        training.finish()
        is_over.set()
        assert_equal(training, plain(tmp_path))
        wait_until(lambda: not any("egeria-cache" in thread.name for thread in threading.enumerate()))
    assert_turned_off(training, "must come within 0.3 s")


def wait_until(condition):
    """Wait until something has happened."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The files


def flip(path):
    path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))


def cut(path):
    os.truncate(path, 100)


@pytest.mark.parametrize("harm", [flip, cut])
def test_the_rows_are_damaged(tmp_path, harm):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(SERVING)
        wait_until(lambda: not training.generation.writer.pending())
        harm(training.store_path)
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert training.warnings == []
    used = training.journal(CacheUsed)[-1]
    assert used.damaged > NUM_SAMPLES / 2
    assert used.hits > NUM_SAMPLES, "rows that were damaged are stored anew"


# The threads


def test_a_reader_thread_dies(tmp_path, monkeypatch):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(SERVING)
        monkeypatch.setattr(fetcher.Reader, "read", raising(MemoryError("no memory for a batch")))
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "no memory for a batch")


def test_a_reader_thread_ends_without_a_word(tmp_path, monkeypatch):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(SERVING)
        monkeypatch.setattr(fetcher.Reader, "read", raising(SystemExit()))
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "SystemExit")


def test_a_writer_thread_dies(tmp_path, monkeypatch):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(FILLING)
        monkeypatch.setattr(writer, "_write", raising(RuntimeError("no way to write")))
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "no way to write")


@pytest.mark.parametrize(("where", "name"), [(layout, "fingerprints"), (generation, "agree")])
def test_a_bug_of_ours_in_a_forward(tmp_path, monkeypatch, where, name):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(SERVING)
        monkeypatch.setattr(where, name, raising(IndexError("a bug")))
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "a bug")
    assert training.journal(FaultCaught)[0].where == "skipping the frozen forward pass"


def test_a_bug_of_ours_after_a_recorded_forward(tmp_path, monkeypatch):
    with nothing_but_journals(tmp_path):
        training = Training(tmp_path / "run")
        training.advance_to(FILLING)
        monkeypatch.setattr(generation.Generation, "_store_rows", raising(IndexError("a bug")))
        training.finish()
        assert_equal(training, plain(tmp_path))
    assert_turned_off(training, "a bug")
    assert training.journal(Declined) or training.journal(FaultCaught)
