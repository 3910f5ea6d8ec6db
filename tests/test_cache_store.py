"""The store of activations: what comes back, what does not, and what becomes of it when the disk fails."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import egeria
from egeria.cache.store import file
from egeria.cache.store.codec import RowLayout, StoreError
from egeria.cache.store.disk import DiskStore

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(egeria.__file__).parent.parent)}
CAPACITY = 40
PLAIN = RowLayout(shape=(3, 5), dtype=torch.float32)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.complex64,
]


@pytest.fixture
def make(tmp_path):
    """Make stores."""
    made = []

    def make_store(*layouts, capacity=CAPACITY):
        made.append(DiskStore(tmp_path, layouts, capacity))
        return made[-1]

    yield make_store
    for store in made:
        store.close()


@pytest.fixture
def disk(tmp_path):
    """A store on the disk with a float and a bfloat16 leaf, half full."""
    store = DiskStore(tmp_path, [PLAIN, RowLayout(shape=(7,), dtype=torch.bfloat16)], CAPACITY)
    store.write(np.arange(20), leaves(np.arange(20)), prints(np.arange(20)))
    yield store
    store.close()


def leaves(values):
    """Rows of the two leaves of `disk`, each full of one value."""
    values = torch.as_tensor(np.asarray(values), dtype=torch.float32)
    return [values[:, None, None].repeat(1, 3, 5), values[:, None].repeat(1, 7).bfloat16()]


def prints(values):
    values = np.asarray(values, dtype=np.float32)
    return np.stack([values, -values], axis=1)


def empty(store, count, length=None):
    """Tensors to read into, full of what must not be left there."""
    shapes = (layout.shape if length is None else layout.shape_at(length) for layout in store.layouts)
    return [torch.ones(count, *shape, dtype=layout.dtype) for shape, layout in zip(shapes, store.layouts, strict=True)]


def read(store, positions, **kwargs):
    out = empty(store, len(positions), kwargs.pop("length", None))
    return store.read(positions, out, **kwargs), out


def random_rows(count, layout):
    torch.manual_seed(count)
    rows = torch.randn(count, *layout.shape) * 50
    return (rows > 0) if layout.dtype == torch.bool else rows.abs().to(layout.dtype)


# What comes back


def test_native_rows_come_back_to_the_last_bit(make):
    for dtype in DTYPES:
        for shape in [(4, 3, 2), (6,), ()]:
            layout = RowLayout(shape=shape, dtype=dtype)
            store = make(layout)
            rows = random_rows(8, layout)
            positions = np.array([5, 0, 39, 17, 3, 4, 30, 31])
            assert store.write(positions, [rows], prints(positions)) == 8
            mask, (out,) = read(store, positions)
            assert mask.tolist() == [True] * 8 and torch.equal(out, rows)


def test_special_values_are_kept_natively(make):
    store = make(RowLayout(shape=(5,), dtype=torch.float32))
    row = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45, -float("inf")]])
    assert store.write([1], [row], prints([1])) == 1
    assert read(store, [1])[1][0].view(torch.int32).equal(row.view(torch.int32))


def test_several_leaves_travel_together(make):
    store = make(PLAIN, RowLayout(shape=(7,), dtype=torch.bfloat16))
    store.write([3, 1], leaves([3, 1]), prints([3, 1]))
    mask, out = read(store, [1, 2, 3])
    assert mask.tolist() == [True, False, True]
    assert out[0][[0, 2]].equal(leaves([1, 3])[0]) and out[1][[0, 2]].equal(leaves([1, 3])[1])


def test_rows_go_into_tensors_of_any_order_of_memory(make):
    layout = RowLayout(shape=(4, 6, 5), dtype=torch.float32)
    store = make(layout)
    rows = torch.randn(3, 4, 6, 5).to(memory_format=torch.channels_last)
    store.write([0, 1, 2], [rows], prints([0, 1, 2]))
    _, (plain,) = read(store, [0, 1, 2])
    other = torch.full_like(rows, 9.0)
    assert store.read([0, 1, 2], [other]).all() and other.equal(plain)
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert other.equal(rows)


def test_rows_may_come_from_the_autograd_graph_and_go_into_it(make):
    store = make(PLAIN)
    rows = torch.randn(2, 3, 5, requires_grad=True) * 2
    store.write([0, 1], [rows], prints([0, 1]))
    assert read(store, [0, 1])[1][0].equal(rows)


def test_lookup_tells_what_there_is(make):
    store = make(PLAIN)
    store.write([3, 7], [torch.zeros(2, 3, 5)], prints([3, 7]))
    known = store.lookup(np.array([7, 4, 3, -1, CAPACITY, 10**12]))
    assert known.valid.tolist() == [True, False, True, False, False, False]
    assert known.fingerprints[[0, 2]].tolist() == [[7, -7], [3, -3]]


def test_positions_outside_are_neither_stored_nor_served(make):
    store = make(PLAIN)
    positions = [-1, 0, CAPACITY - 1, CAPACITY, 10**12]
    assert store.write(positions, [torch.ones(5, 3, 5)], prints([0] * 5)) == 2
    mask, _ = read(store, positions)
    assert mask.tolist() == [False, True, True, False, False]
    store.advise(positions)


def test_the_last_of_several_rows_for_one_position_counts(make):
    store = make(PLAIN, RowLayout(shape=(7,), dtype=torch.bfloat16))
    assert store.write([4, 2, 4, 4, 2, 9], leaves([1, 2, 3, 4, 5, 6]), prints([1, 2, 3, 4, 5, 6])) == 3
    mask, (out, _) = read(store, [4, 2, 4, 9])
    assert mask.all() and out[:, 0, 0].tolist() == [4, 5, 4, 6]


def test_a_row_can_be_replaced(make):
    store = make(PLAIN)
    for value in (1.0, 2.0):
        store.write([6], [torch.full((1, 3, 5), value)], prints([value]))
    mask, (out,) = read(store, [6])
    assert mask.all() and out.eq(2).all() and store.lookup([6]).fingerprints.tolist() == [[2, -2]]


def test_a_row_replaced_since_it_was_looked_up_is_not_served(make):
    store = make(PLAIN)
    store.write([1, 2], [torch.ones(2, 3, 5)], prints([1, 2]))
    known = store.lookup([1, 2, 3])
    assert read(store, [1, 2, 3], known=known)[0].tolist() == [True, True, False]
    store.write([2, 3], [torch.zeros(2, 3, 5)], prints([8, 3]))
    assert read(store, [1, 2, 3], known=known)[0].tolist() == [True, False, False]
    assert read(store, [1, 2, 3])[0].all()


def test_an_input_without_a_number_for_a_fingerprint_never_matches(make):
    store = make(PLAIN)
    store.write([1], [torch.ones(1, 3, 5)], [[float("nan"), 0]])
    assert not read(store, [1], known=store.lookup([1]))[0].any()


def test_a_store_counts_what_it_holds(make):
    store = make(PLAIN)
    store.write([1, 2, 2], [torch.ones(3, 3, 5)], prints([1, 2, 2]))
    store.drop_pages()
    assert (store.num_damaged, store.row_bytes) == (0, 60)
    assert store.size_bytes >= 2 * store.row_bytes


def test_an_empty_batch_is_fine(make):
    store = make(PLAIN)
    assert store.write([], [torch.ones(0, 3, 5)], np.zeros((0, 2))) == 0
    assert read(store, [])[0].tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_a_store_agrees_with_a_dictionary(seed, make):
    layouts = [RowLayout(shape=(6, 2), dtype=torch.float32, length_axis=0), RowLayout(shape=(3,), dtype=torch.int32)]
    store = make(*layouts, capacity=12)
    rng, model = np.random.default_rng(seed), {}
    for _ in range(60):
        positions = rng.integers(-2, 14, 5)
        lengths, values = rng.integers(1, 9, 5), rng.integers(0, 1000, 5)
        rows = [torch.tensor(values).float()[:, None, None].repeat(1, 8, 2), torch.tensor(values).int()[:, None]]
        rows[1] = rows[1].repeat(1, 3)
        num = store.write(positions, rows, prints(values), lengths)
        fits = {int(p): (int(v), int(n)) for p, v, n in zip(positions, values, lengths, strict=True)}
        fits = {p: entry for p, entry in fits.items() if 0 <= p < 12 and entry[1] <= 6}
        model.update(fits)
        assert num == len(fits)
        mask, (floats, integers) = read(store, np.arange(12), length=6)
        assert mask.tolist() == [p in model for p in range(12)]
        for position, (value, length) in model.items():
            assert floats[position, :length].eq(value).all() and floats[position, length:].eq(0).all()
            assert integers[position].eq(value).all()


# How it is kept


@pytest.mark.parametrize(
    "arguments",
    [{"length_axis": 2}, {"length_axis": -1}],
    ids=str,
)
def test_a_layout_is_checked(arguments):
    with pytest.raises(StoreError, match="must be one of"):
        RowLayout(shape=(3, 4), dtype=torch.float32, **arguments)


# Rows of different lengths


def test_rows_are_stored_at_their_true_length_and_padded_anew(make):
    for axis in [0, 1, 2]:
        for padded in [8, 10, 16]:
            shape = [4, 6, 3]
            shape[axis] = 12
            layout = RowLayout(shape=tuple(shape), dtype=torch.float32, length_axis=axis)
            store = make(layout)
            lengths = np.array([3, 8, 1, 3])
            rows = torch.randn(4, *layout.shape_at(9))
            rows.transpose(1, axis + 1)[2, 1:] = float("nan")  # what lies in the padding does not matter
            assert store.write(np.arange(4), [rows], prints(np.arange(4)), lengths) == 4
            assert store.lookup(np.arange(4)).lengths.tolist() == lengths.tolist()
            mask, (out,) = read(store, np.arange(4), length=padded)
            assert mask.all() and not out.isnan().any()
            for row, length in enumerate(lengths):
                stored, given = (tensor[row].transpose(0, axis) for tensor in (out, rows))
                assert stored[:length].equal(given[:length])
                assert stored[length:].eq(0).all()


def test_a_row_longer_than_its_slot_is_not_stored(make):
    store = make(RowLayout(shape=(4, 2), dtype=torch.float32, length_axis=0))
    lengths = [4, 5, 6, 0, -3]
    assert store.write(np.arange(5), [torch.ones(5, 5, 2)], prints(np.arange(5)), lengths) == 1
    assert store.lookup(np.arange(5)).valid.tolist() == [True, False, False, False, False]


def test_a_row_longer_than_the_batch_is_not_served(make):
    store = make(RowLayout(shape=(8, 2), dtype=torch.float32, length_axis=0))
    store.write([0, 1], [torch.ones(2, 8, 2)], prints([0, 1]), [8, 3])
    assert read(store, [0, 1], length=4)[0].tolist() == [False, True]
    assert read(store, [0, 1], length=8)[0].all()


def test_without_lengths_rows_are_as_long_as_they_are(make):
    store = make(RowLayout(shape=(8, 2), dtype=torch.float32, length_axis=0))
    store.write([0], [torch.ones(1, 5, 2)], prints([0]))
    assert store.lookup([0]).lengths.tolist() == [5]


def test_a_leaf_without_a_length_is_kept_whole_beside_one_with(make):
    store = make(
        RowLayout(shape=(8, 2), dtype=torch.float32, length_axis=0), RowLayout(shape=(3,), dtype=torch.float32)
    )
    rows = [torch.ones(2, 8, 2), torch.full((2, 3), 7.0)]
    store.write([0, 1], rows, prints([0, 1]), [2, 8])
    mask, (first, second) = read(store, [0, 1], length=8)
    assert mask.all() and first.sum(dim=(1, 2)).tolist() == [4, 16] and second.eq(7).all()


# Contracts


def test_rows_of_another_boundary_are_refused(make):
    for rows in [
        [torch.ones(2, 3, 4)],
        [torch.ones(2, 3)],
        [torch.ones(2, 3, 5).double()],
        [torch.ones(3, 3, 5)],
        [torch.ones(2, 3, 5), torch.ones(2, 3, 5)],
        [],
        [torch.tensor(1.0)],
    ]:
        store = make(PLAIN)
        with pytest.raises(StoreError, match="must"):
            store.write([0, 1], rows, prints([0, 1]))
        with pytest.raises(StoreError, match="must"):
            store.read([0, 1], rows)
        assert not store.lookup([0, 1]).valid.any()


def test_a_closed_store_refuses(make):
    store = make(PLAIN)
    store.write([0], [torch.ones(1, 3, 5)], prints([0]))
    store.close()
    store.close()
    for action in (lambda: store.read([0], empty(store, 1)), lambda: store.write([0], empty(store, 1), prints([0]))):
        with pytest.raises(StoreError, match="closed"):
            action()


# On the disk


def test_the_file_has_all_its_blocks_from_the_start(tmp_path):
    layout = RowLayout(shape=(1024,), dtype=torch.float32)
    store = DiskStore(tmp_path, [layout], 300)
    found = os.fstat(store.descriptor)
    assert found.st_blocks * 512 >= found.st_size == store.size_bytes == 300 * store.row_bytes == 300 * 4096
    assert found.st_mode & 0o077 == 0 and list(tmp_path.iterdir()) == [], "nothing is left, however the process ends"
    store.close()


def test_a_store_that_nobody_closed_closes_its_file(tmp_path):
    held = DiskStore(tmp_path, [PLAIN], 10)
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0
    del held
    gc.collect()
    assert not before or len(list(Path("/proc/self/fd").iterdir())) == before - 1


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs /proc")
def test_no_file_is_mapped_so_that_truncating_one_cannot_kill(disk):
    check_rows(disk, [])
    assert f" {os.fstat(disk.descriptor).st_ino} " not in Path("/proc/self/maps").read_text(encoding="utf-8")


# Faults


def row_offset(position):
    """Where a row of `disk` begins in its file."""
    return position * (3 * 5 * 4 + 7 * 2)


def flip(store, offset):
    (byte,) = os.pread(store.descriptor, 1, offset)
    os.pwrite(store.descriptor, bytes([byte ^ 0x10]), offset)


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """Files of this process cannot grow beyond this: as on a full disk, for real."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_rows(store, missing):
    """Whatever is served is right; nothing but `missing` is not."""
    mask, (first, second) = read(store, np.arange(20))
    assert set(np.flatnonzero(~mask)) == set(missing)
    expected = leaves(np.arange(20))
    assert first[mask].equal(expected[0][mask]) and second[mask].equal(expected[1][mask])


def test_a_flipped_bit_anywhere_in_a_row_is_noticed(disk):
    for position in range(15):
        flip(disk, row_offset(position) + position * 5)
    check_rows(disk, range(15))
    assert disk.num_damaged == 15 and not disk.lookup(np.arange(15)).valid.any()
    disk.write(np.arange(20), leaves(np.arange(20)), prints(np.arange(20)))
    check_rows(disk, [])


def test_a_truncated_file_costs_the_rows_that_are_gone(disk):
    os.truncate(disk.descriptor, row_offset(12) + 3)
    check_rows(disk, range(12, 20))
    assert disk.num_damaged == 8
    disk.write([15], leaves([15]), prints([15]))
    check_rows(disk, {*range(12, 20)} - {15})


def test_where_files_cannot_grow_no_store_is_made_and_nothing_is_left(tmp_path):
    layouts = [RowLayout(shape=(16,), dtype=torch.float32), RowLayout(shape=(4096,), dtype=torch.float32)]
    with file_size_limit(2**20), pytest.raises(StoreError, match="cannot be made"):
        DiskStore(tmp_path, layouts, 100)
    assert list(tmp_path.iterdir()) == []


def test_on_a_full_disk_no_store_is_made_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="No space left"):
        DiskStore(tmp_path, [PLAIN], 100)
    assert list(tmp_path.iterdir()) == []


def test_where_the_system_cannot_preallocate_zeros_are_written(tmp_path, monkeypatch):
    def unknown(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    store = DiskStore(tmp_path, [RowLayout(shape=(1 << 16,), dtype=torch.float32)], 9)
    assert os.fstat(store.descriptor).st_size == store.size_bytes == 9 * 2**18
    store.write([8], [torch.ones(1, 1 << 16)], prints([8]))
    assert read(store, [8])[0].all()
    store.close()


@pytest.mark.parametrize("name", ["posix_fallocate", "pwritev"])
def test_a_file_system_that_allocates_too_slowly_gets_no_store_and_nothing_is_left(name, tmp_path, monkeypatch):
    def unknown(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    does = getattr(os, name) if name == "pwritev" else lambda *_: None
    monkeypatch.setattr(os, name, lambda *call: time.sleep(0.02) or does(*call))
    monkeypatch.setattr(file, "PART_BYTES", 2**12)
    monkeypatch.setattr(file, "ALLOCATION_S", 0.1)
    begin = time.monotonic()
    with pytest.raises(StoreError, match="the file system allocates too slowly"):
        DiskStore(tmp_path, [PLAIN], 50_000)
    assert time.monotonic() - begin < 2 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(file, "ALLOCATION_S", 60)
    store = DiskStore(tmp_path, [PLAIN], 500)
    store.close()


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be made"):
        DiskStore(tmp_path / "file", [PLAIN], 10)


def refuse(*_, **__):
    """What a directory without rights answers; to root it would not."""
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_without_rights_no_store_is_made_and_nothing_is_left(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="Permission denied"):
            DiskStore(tmp_path, [PLAIN], 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("calls", [0, 7, 18])
def test_a_disk_that_fails_while_writing_leaves_no_torn_row(calls, disk, monkeypatch):
    real, count = os.pwritev, [0]

    def failing(descriptor, blocks, offset):
        count[0] += 1
        if count[0] > calls:
            real(descriptor, [bytes(blocks[0])[: len(blocks[0]) // 2]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, blocks, offset)

    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(StoreError, match="No space left"):
        disk.write(np.arange(0, 40, 2), leaves(np.arange(100, 120)), prints(np.arange(100, 120)))
    monkeypatch.undo()
    check_rows(disk, range(0, 20, 2))
    assert read(disk, np.arange(1, 20, 2))[0].all() and not read(disk, np.arange(20, 40))[0].any()


def test_a_disk_that_fails_while_reading_is_a_store_error(disk, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StoreError, match="cannot be read"):
        read(disk, [1])
    assert disk.lookup([1]).valid.all()
    monkeypatch.undo()
    check_rows(disk, [])


def test_short_reads_and_writes_are_taken_up_again(disk, monkeypatch):
    read_really, write_really = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, blocks, offset: read_really(fd, [blocks[0][:5]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, blocks, offset: write_really(fd, [blocks[0][:7]], offset))
    disk.write([2, 30], leaves([2, 30]), prints([2, 30]))
    check_rows(disk, [])
    assert read(disk, [30])[0].all()


@pytest.mark.parametrize("name", ["posix_fadvise", "posix_fallocate"])
def test_it_works_where_the_system_takes_no_advice(name, tmp_path, monkeypatch):
    monkeypatch.delattr(os, name, raising=False)
    store = DiskStore(tmp_path, [PLAIN], 10)
    store.write([1], [torch.ones(1, 3, 5)], prints([1]))
    store.advise([1])
    assert read(store, [1])[0].all()
    store.close()


# Threads and processes


def test_a_writer_and_readers_share_a_store(tmp_path):
    layouts = [RowLayout(shape=(2048,), dtype=torch.float32), RowLayout(shape=(64,), dtype=torch.float32)]
    store = DiskStore(tmp_path, layouts, 64)
    stop, served, wrong = threading.Event(), [0, 0], []

    def overwrite():
        rng = np.random.default_rng(0)
        while not stop.is_set():
            positions, values = rng.permutation(64)[:16], rng.integers(1, 2**20, 16)
            column = torch.from_numpy(values).float()[:, None]
            store.write(positions, [column.repeat(1, 2048), column.repeat(1, 64)], np.stack([values, positions], 1))

    def check(which):
        rng = np.random.default_rng(which)
        while not stop.is_set():
            num, bad = inspect_rows(store, rng.permutation(64)[:16])
            served[which] += num
            wrong.extend(bad)

    threads = [threading.Thread(target=overwrite), *(threading.Thread(target=check, args=(k,)) for k in range(2))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while min(served) < 1500 and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert min(served) >= 1500 and not wrong and store.num_damaged == 0
    store.close()


def test_closing_waits_for_those_who_read(tmp_path):
    for _ in range(5):
        store = DiskStore(tmp_path, [RowLayout(shape=(4096,), dtype=torch.float32)], 64)
        store.write(np.arange(64), [torch.ones(64, 4096)], prints(np.arange(64)))
        ends = []

        def reading(store=store, ends=ends):
            try:
                while True:
                    mask, (out,) = read(store, np.arange(64))
                    assert mask.all() and out.eq(1).all()
            except Exception as error:
                ends.append(error)

        threads = [threading.Thread(target=reading) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        store.close()
        for thread in threads:
            thread.join(30)
        assert [type(end) for end in ends] == [StoreError] * 3


@pytest.mark.parametrize("patience_s", [60, 0.2])
def test_files_stay_open_under_a_slow_reader(patience_s, disk, monkeypatch):
    real, started, released, masks = os.preadv, threading.Event(), threading.Event(), []

    def slow(*arguments):
        started.set()
        assert released.wait(60)
        return real(*arguments)

    monkeypatch.setattr("egeria.cache.store.disk.CLOSE_TIMEOUT_S", patience_s)
    monkeypatch.setattr(os, "preadv", slow)
    reader = threading.Thread(target=lambda: masks.append(read(disk, [1])[0]))
    reader.start()
    assert started.wait(60)
    closer = threading.Thread(target=disk.close)
    closer.start()
    closer.join(1)
    assert closer.is_alive() == (patience_s > 1), "it waits, but not for ever"
    released.set()
    closer.join(60)
    reader.join(60)
    assert masks[0].all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_file_alone(tmp_path):
    script = f"""
import os
from pathlib import Path
from egeria.cache.store.disk import DiskStore
from egeria.cache.store.codec import RowLayout
import torch
store = DiskStore(Path({str(tmp_path)!r}), [RowLayout(shape=(4,), dtype=torch.float32)], 8)
child = os.fork()
if not child:
    store.close()
    os._exit(0)
os.waitpid(child, 0)
store.write([0], [torch.ones(1, 4)], [[0, 0]])
assert store.read([0], [torch.zeros(1, 4)]).all()
store.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100, env=ENVIRONMENT)


def inspect_rows(store, positions):
    """Read rows of one value each; return how many were served, and those that were not whole."""
    store.advise(positions)
    known = store.lookup(positions)
    mask, out = read(store, positions, known=known)
    wrong = []
    for row in np.flatnonzero(mask):
        value, position = known.fingerprints[row]
        if position != positions[row] or any((leaf[row] != value).any() for leaf in out):
            wrong.append(int(positions[row]))
    return int(mask.sum()), wrong
