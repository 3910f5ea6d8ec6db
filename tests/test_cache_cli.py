"""`egeria cache`: listing, checking and pruning a cache directory."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.rows import RowLayout
from egeria.cli import main


@pytest.fixture
def command(capsys, monkeypatch):
    """Run `egeria cache` and return its exit status, output and errors."""
    monkeypatch.setenv("COLUMNS", "240")

    def call(*arguments):
        capsys.readouterr()
        status = main(["cache", *map(str, arguments)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def live(tmp_path):
    """A run of this process, with a store of 12 rows of which 5 are there."""
    directory = CacheDirectory(tmp_path)
    store = directory.create(2, [RowLayout(shape=(16,), dtype=torch.float32)], 12, boundary="layer[1]")
    store.write(np.arange(5), [torch.ones(5, 16)], np.zeros((5, 2)))
    yield directory
    directory.close()


@pytest.fixture
def left_over(live):
    """What the run would leave behind if it died now."""
    path = live.path.parent / "run-00000000000000aa"
    path.mkdir()
    (path / "generation-0002").write_bytes((live.path / "generation-0002").read_bytes())
    return path


def rows(output):
    """The cells of the printed table, row by row."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_it_lists_runs_with_what_they_hold(command, live, left_over, tmp_path):
    status, output, errors = command(tmp_path)
    assert (status, errors) == (0, "")
    cells = {row[0]: row[1:] for row in rows(output)}
    mine, dead = cells[live.token], cells["00000000000000aa"]
    assert mine[0] == f"live, begun by process {os.getpid()}" and mine[1].startswith("20")
    assert mine[2:] == ["0002", "layer[1]", "5 of 12", dead[-1]] and dead[-1].endswith("KiB")
    assert dead == ["left over", "unknown", "0002", "layer[1]", "5 of 12", dead[-1]]
    assert left_over.is_dir() and live.path.is_dir()


def test_an_empty_directory_and_one_that_is_not_there(command, tmp_path):
    status, output, _ = command(tmp_path, "--verify", "--prune")
    assert status == 0 and "No run keeps anything" in output and "Removed 0 left over runs, 0 bytes." in output
    (tmp_path / "file").touch()
    assert "cannot be read" in command(tmp_path / "file")[2]
    status, output, errors = command(tmp_path / "nowhere[/x]")
    assert (status, output) == (2, "")
    assert errors.startswith("egeria cache: ") and "nowhere[/x]" in errors and "cannot be read" in errors


def test_a_run_without_a_store_is_listed(command, tmp_path):
    directory = CacheDirectory(tmp_path)
    status, output, _ = command(tmp_path, "--verify")
    assert status == 0 and rows(output)[0][3:6] == ["none", "", ""]
    directory.close()


def test_verify_finds_nothing_wrong_where_nothing_is(command, live, left_over, tmp_path):
    status, output, _ = command(tmp_path, "--verify")
    assert status == 0 and "Damaged" not in output and [row[-1] for row in rows(output)] == ["0", "0"]


def test_verify_counts_damaged_rows_and_changes_nothing(command, live, left_over, tmp_path):
    store = left_over / "generation-0002"
    content = bytearray(store.read_bytes())
    content[-9 * 64 + 5] ^= 1  # the fourth of twelve rows
    store.write_bytes(content)
    for _ in range(2):
        status, output, _ = command(tmp_path, "--verify")
        assert status == 1 and "1 of 5 rows" in output and "wrong checksum" in output
    assert command(tmp_path)[0] == 0


@pytest.mark.parametrize("size", [20, 4500])
def test_a_truncated_file_is_damage_and_does_not_hide_the_rest(size, command, live, left_over, tmp_path):
    os.truncate(left_over / "generation-0002", size)
    status, output, _ = command(tmp_path, "--verify")
    assert status == 1 and "Damaged" in output and "generation-0002" in output
    assert {row[0]: row[5] for row in rows(output)} == {live.token: "5 of 12", "00000000000000aa": "cannot be read"}


def test_a_store_that_was_never_finished_is_no_damage(command, left_over, tmp_path):
    (left_over / "generation-0002").rename(left_over / ".generation-0002")
    assert command(tmp_path, "--verify")[0] == 0


def test_prune_removes_what_no_process_holds(command, live, left_over, tmp_path):
    status, output, _ = command(tmp_path, "--prune")
    assert status == 0 and "Removed 1 left over run, " in output
    assert not left_over.exists() and (live.path / "generation-0002").exists()
    assert [row[0] for row in rows(command(tmp_path)[1])] == [live.token]


def test_prune_removes_damaged_left_overs_too(command, left_over, tmp_path):
    os.truncate(left_over / "generation-0002", 3)
    assert command(tmp_path, "--verify", "--prune")[0] == 1
    assert not left_over.exists() and command(tmp_path, "--verify")[0] == 0


def test_a_broken_note_in_a_lock_is_no_trouble(command, left_over, tmp_path):
    for note in (b"\xff\xfe", b"[]", b'{"pid": "x", "created": 1e300}', b'{"created": NaN}', b'{"created": null}'):
        (left_over / "lock").write_bytes(note)
        status, output, _ = command(tmp_path)
        assert status == 0 and "unknown" in output


def test_the_directory_of_a_run_stands_for_the_cache_in_it(command, tmp_path):
    (tmp_path / "journal.jsonl").touch()
    directory = CacheDirectory(tmp_path / "cache")
    directory.create(1, [RowLayout(shape=(16,), dtype=torch.float32)], 4, boundary="front")
    status, output, _ = command(tmp_path)
    directory.close()
    assert status == 0
    assert [row[4] for row in rows(output)] == ["front"]
