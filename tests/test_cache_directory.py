"""The cache directory: runs side by side, what dead ones leave, limits, and what is never touched."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import egeria
from egeria.cache.store import directory as directories
from egeria.cache.store.directory import CacheDirectory, lock_run, sweep
from egeria.cache.store.rows import RowLayout, StoreError

pytestmark = pytest.mark.timeout(200)  # a busy machine takes its time to start a process

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(egeria.__file__).parent.parent)}
LAYOUTS = (RowLayout(shape=(8,), dtype=torch.float32),)
ROW_BYTES = 32 + 16
HEADER_BYTES = 4096
OTHER_RUN = """
import os, sys, torch
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.rows import RowLayout
directory = CacheDirectory(sys.argv[1], token=sys.argv[2] or None)
layouts = [RowLayout(shape=(8,), dtype=torch.float32)]
store = directory.join(0) if sys.argv[2] else directory.create(0, layouts, 10)
print(directory.token, store.write([1, 2], [torch.full((2, 8), 7.0)], [[1, 1], [2, 2]]), flush=True)
if sys.stdin.readline().strip() == "close":
    directory.close()
"""


@contextmanager
def other_run(root, token=""):
    """A run in another process, which has stored two rows and goes on until told."""
    command = [sys.executable, "-c", OTHER_RUN, str(root), token]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            found, num_stored = process.stdout.readline().split()
            assert num_stored == "2"
            yield process, found
        finally:
            process.kill()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def fill(store, value, positions=(0, 1, 2)):
    rows = torch.full((len(positions), 8), float(value))
    return store.write(list(positions), [rows], np.full((len(positions), 2), value))


def read(store, positions=(0, 1, 2)):
    out = torch.full((len(positions), 8), -1.0)
    mask = store.read(list(positions), [out])
    return mask.tolist(), out[:, 0].tolist()


def is_held(run):
    """Return whether a process holds a run."""
    lock = lock_run(run, alone=True)
    if lock is not None:
        os.close(lock)
    return lock is None


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_run_has_a_directory_of_its_own_and_takes_it_along(tmp_path):
    directory = CacheDirectory(tmp_path / "not" / "there" / "yet")
    store = directory.create(3, LAYOUTS, 10, boundary="layer1")
    assert fill(store, 5) == 3 and read(store) == ([True] * 3, [5.0] * 3)
    assert directory.path.name == f"run-{directory.token}" and names(directory.path) == ["generation-0003", "lock"]
    assert directory.path.stat().st_mode & 0o077 == 0
    directory.close()
    directory.close()
    assert names(tmp_path / "not" / "there" / "yet") == []


def test_a_generation_may_end_before_the_run(tmp_path):
    directory = CacheDirectory(tmp_path)
    first = directory.create(0, LAYOUTS, 10)
    fill(first, 1)
    first.close()
    second = directory.create(1, LAYOUTS, 20)
    assert names(directory.path) == ["generation-0001", "lock"] and not second.lookup(np.arange(20)).valid.any()
    with pytest.raises(StoreError, match="File exists"):
        directory.create(1, LAYOUTS, 20)
    directory.close()


def test_a_run_that_nobody_closed_goes_with_its_object(tmp_path):
    directory = CacheDirectory(tmp_path)
    directory.create(0, LAYOUTS, 10)
    del directory
    gc.collect()
    assert names(tmp_path) == []


def test_a_process_that_ends_without_closing_leaves_nothing(tmp_path):
    with other_run(tmp_path) as (process, _):
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    assert names(tmp_path) == []


def test_two_runs_in_one_directory_leave_each_other_alone(tmp_path):
    mine = CacheDirectory(tmp_path)
    store = mine.create(0, LAYOUTS, 10)
    fill(store, 5)
    with other_run(tmp_path) as (process, token):
        assert names(tmp_path) == sorted([mine.path.name, f"run-{token}"])
        third = CacheDirectory(tmp_path)
        assert sweep(tmp_path) == 0
        assert len(names(tmp_path)) == 3 and read(store) == ([True] * 3, [5.0] * 3)
        process.stdin.write("close\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    assert names(tmp_path) == sorted([mine.path.name, third.path.name])
    third.close()
    mine.close()
    assert names(tmp_path) == []


def test_what_a_killed_run_left_is_removed_and_never_used(tmp_path):
    with other_run(tmp_path) as (process, token):
        assert is_held(tmp_path / f"run-{token}")
        kill(process)
    assert names(tmp_path) == [f"run-{token}"] and not is_held(tmp_path / f"run-{token}")
    directory = CacheDirectory(tmp_path)
    store = directory.create(0, LAYOUTS, 10)
    assert names(tmp_path) == [directory.path.name] and not store.lookup(np.arange(10)).valid.any()
    directory.close()


def test_processes_of_a_job_share_a_run_until_the_last_leaves(tmp_path):
    mine = CacheDirectory(tmp_path)
    store = mine.create(0, LAYOUTS, 10)
    fill(store, 5, [0])
    with other_run(tmp_path, mine.token) as (process, _):
        store.advise([0, 1, 2])
        assert read(store) == ([True] * 3, [5.0, 7.0, 7.0])
        mine.close()
        assert mine.path.is_dir(), "the other one is still there"
        assert is_held(mine.path)
        process.stdin.write("close\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    assert names(tmp_path) == []


def test_a_run_outlives_the_process_that_began_it(tmp_path):
    with other_run(tmp_path) as (process, token):
        mine = CacheDirectory(tmp_path, token=token)
        store = mine.join(0)
        kill(process)
        assert sweep(tmp_path) == 0 and read(store, [1, 2]) == ([True] * 2, [7.0] * 2)
    mine.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("token", ["0123456789abcdef", "../../etc", "", "x"])
def test_a_run_that_is_not_there_cannot_be_joined(token, tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "JOIN_TIMEOUT_S", 0.1)
    with pytest.raises(StoreError, match="no run"):
        CacheDirectory(tmp_path, token=token)
    assert names(tmp_path) == []


def test_a_store_that_is_not_there_cannot_be_joined(tmp_path):
    directory = CacheDirectory(tmp_path)
    with pytest.raises(StoreError, match="cannot be joined"):
        directory.join(0)
    directory.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_neither_ends_nor_prolongs_a_run(tmp_path):
    script = f"""
import os, sys, time, torch
from pathlib import Path
from egeria.cache.store.directory import CacheDirectory, sweep
from egeria.cache.store.rows import RowLayout
root = Path({str(tmp_path)!r})
directory = CacheDirectory(root)
store = directory.create(0, [RowLayout(shape=(8,), dtype=torch.float32)], 10)
child = os.fork()
if not child:
    directory.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (directory.path / "generation-0000").exists()
assert sweep(root) == 0, "still held"
lingering = os.fork()
if not lingering:
    time.sleep(100)
directory.close()
assert list(root.iterdir()) == [], "a worker that lives a little longer does not keep it"
os.kill(lingering, 9)
os.waitpid(lingering, 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100, env=ENVIRONMENT)


# What is never touched


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-0123456789abcdef.txt").touch()
    (tmp_path / "data").mkdir()
    elsewhere = tmp_path / "data" / "run-0123456789abcdef" / "generation-0000"
    elsewhere.parent.mkdir()
    elsewhere.touch()
    (tmp_path / "run-0123456789abcdef").symlink_to(elsewhere.parent)
    (tmp_path / "run-00000000000000aa").touch()
    dead = tmp_path / "run-00000000000000bb"
    dead.mkdir()
    (dead / "generation-0000").touch()
    (dead / "thesis.tex").touch()
    (dead / "generation-0001").symlink_to(elsewhere)
    before = names(tmp_path)
    CacheDirectory(tmp_path).close()
    assert names(tmp_path) == before and elsewhere.exists()
    assert names(dead) == ["thesis.tex"]


def test_a_run_whose_making_was_interrupted_is_removed(tmp_path):
    (tmp_path / "run-00000000000000aa").mkdir()
    half = tmp_path / "run-00000000000000bb"
    half.mkdir()
    for name in (".generation-0000", "generation-0001.opened", "generation-0002.refused"):
        (half / name).touch()
    assert sweep(tmp_path) == 2 and names(tmp_path) == []


def test_a_run_is_not_begun_where_another_process_is_just_removing(tmp_path):
    path = tmp_path / "run-00000000000000aa"
    path.mkdir()
    remover = lock_run(path, alone=True)
    assert lock_run(path, alone=False) is None and lock_run(path, alone=True) is None
    directories._remove_run(path, remover)
    assert lock_run(path, alone=False) is None and names(tmp_path) == []


def test_a_lock_on_a_file_that_was_removed_in_between_does_not_count(tmp_path, monkeypatch):
    real = os.open

    def removed_at_once(path, *args, **kwargs):
        descriptor = real(path, *args, **kwargs)
        Path(path).unlink()
        return descriptor

    monkeypatch.setattr(os, "open", removed_at_once)
    assert lock_run(tmp_path, alone=False) is None and lock_run(tmp_path, alone=True) is None


def test_beginning_is_tried_again_when_the_new_directory_is_swept_away(tmp_path, monkeypatch):
    real, calls = directories.lock_run, []

    def first_too_late(path, *, alone):
        if not alone:
            calls.append(path)
            if len(calls) == 1:
                assert sweep(tmp_path) == 1
        return real(path, alone=alone)

    monkeypatch.setattr(directories, "lock_run", first_too_late)
    directory = CacheDirectory(tmp_path)
    assert len(calls) == 2 and names(tmp_path) == [calls[1].name]
    directory.close()


# Limits


def test_the_limit_bounds_what_a_run_stores(tmp_path):
    directory = CacheDirectory(tmp_path, limit_bytes=HEADER_BYTES + 100 * ROW_BYTES)
    assert 90 <= directory.capacity(LAYOUTS, 10**9) <= 100 and directory.capacity(LAYOUTS, 5) == 5
    with pytest.raises(StoreError, match=r"may take \d+ bytes now, \d+ are needed"):
        directory.create(0, LAYOUTS, 101)
    store = directory.create(0, LAYOUTS, directory.capacity(LAYOUTS, 10**9))
    assert directory.capacity(LAYOUTS, 10**9) < 10
    store.close()
    assert directory.capacity(LAYOUTS, 10**9) >= 90
    directory.close()


def test_the_share_bounds_what_is_taken_of_the_free_space(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(directories.shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 30_000, 30_000))
    directory = CacheDirectory(tmp_path, limit_share=0.25)
    assert directory.room_bytes() == 7500
    tight = CacheDirectory(tmp_path, limit_share=0.25, limit_bytes=1000)
    assert 0 < tight.room_bytes() <= 1000
    with pytest.raises(StoreError, match="7500 bytes now"):
        directory.create(0, LAYOUTS, 80)
    monkeypatch.setattr(directories.shutil, "disk_usage", lambda _: usage(10**6, 10**6, 0))
    assert directory.capacity(LAYOUTS, 10) == 0
    for each in (directory, tight):
        each.close()


# Faults


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="cannot be used"):
            CacheDirectory(path)


@pytest.mark.parametrize("call", ["mkdir", "open", "listdir", "scandir"])
def test_a_directory_without_rights_is_refused_or_does_no_harm(call, tmp_path, monkeypatch):
    (tmp_path / "run-00000000000000aa").mkdir()

    def refuse(*_, **__):  # root has all rights
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        try:
            CacheDirectory(tmp_path).close()
        except StoreError as error:
            assert "Permission denied" in str(error)
        else:
            assert call not in ("mkdir", "open")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EROFS])
def test_where_files_cannot_be_locked_there_is_no_cache_and_nothing_is_removed(number, tmp_path, monkeypatch):
    (tmp_path / "run-00000000000000aa").mkdir()

    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("egeria.cache.store.directory.fcntl.flock", refused)
    with pytest.raises(StoreError, match="cannot be used"):
        CacheDirectory(tmp_path)
    assert "run-00000000000000aa" in names(tmp_path)


def test_a_system_without_locks_has_no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("egeria.cache.store.directory.fcntl", None)
    with pytest.raises(StoreError, match="cannot be locked"):
        CacheDirectory(tmp_path)


def test_a_full_disk_is_a_store_error_and_leaves_the_run_usable(tmp_path, monkeypatch):
    directory = CacheDirectory(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError, match="No space left"):
            directory.create(0, LAYOUTS, 10)
    assert names(directory.path) == ["lock"]
    fill(directory.create(0, LAYOUTS, 10), 3)
    directory.close()


def test_a_directory_deleted_under_the_run_is_a_store_error(tmp_path):
    directory = CacheDirectory(tmp_path / "cache")
    store = directory.create(0, LAYOUTS, 10)
    fill(store, 4)
    subprocess.run(["rm", "-r", str(tmp_path / "cache")], check=True, timeout=60)
    assert read(store) == ([True] * 3, [4.0] * 3)
    with pytest.raises(StoreError):
        directory.create(1, LAYOUTS, 10)
    directory.close()
