"""Reading ahead and writing behind: what the training loop gets, and what it never notices."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from egeria.cache.fetcher import DEPTH, Fetcher, FetchError, Reader
from egeria.cache.store.codec import RowLayout, Rows, StoreError
from egeria.cache.writer import RowsInMemory, ThreadError, Writer
from strays import nothing_left_behind

pytestmark = pytest.mark.timeout(60)
WIDTH = 3
PLAIN = (RowLayout(shape=(WIDTH,), dtype=torch.float32),)
SEQUENCE = (
    RowLayout(shape=(16, WIDTH), dtype=torch.float32, length_axis=0),
    RowLayout(shape=(2,), dtype=torch.int64),
)
SOON_S = 10.0


class FakeStore:
    """A store in memory that can be slow, fail, or stop in the middle of anything until it is let go."""

    def __init__(self, layouts=PLAIN, capacity=1000):
        self.layouts, self.capacity = layouts, capacity
        self.kept = {}
        self.reads, self.advised = [], []
        self.go = threading.Event()
        self.go.set()
        self.inside = threading.Event()
        self.error = None

    def lookup(self, positions):
        kept = [self.kept.get(position) for position in np.asarray(positions).tolist()]
        return Rows(
            np.array([row is not None for row in kept], dtype=np.bool_),
            np.array([(0, 0) if row is None else row[1] for row in kept], dtype=np.float32).reshape(-1, 2),
            np.array([0 if row is None else row[2] for row in kept], dtype=np.int64),
        )

    def advise(self, positions):
        self.advised.append(positions.tolist())

    def read(self, positions, out, known=None):
        self.reads.append(positions.tolist())
        self.stop_here()
        found = self.lookup(positions)
        mask = found.valid if known is None else found.valid & (found.fingerprints == known.fingerprints).all(axis=1)
        if self.layouts[0].length_axis is not None:
            mask &= found.lengths <= out[0].shape[1]
        for index, position in enumerate(positions.tolist()):
            for leaf, tensor in enumerate(out):
                tensor[index] = 0 if mask[index] else float("nan") if tensor.is_floating_point() else -1
                if mask[index]:
                    row = self.kept[position][0][leaf]
                    tensor[index][tuple(slice(size) for size in row.shape)] = row
        return mask

    def write(self, positions, rows, fingerprints, lengths=None):
        self.stop_here()
        for index, position in enumerate(positions.tolist()):
            length = (
                rows[0].shape[1] if lengths is None and rows[0].dim() > 2 else 0 if lengths is None else lengths[index]
            )
            row = [tensor[index].clone() for tensor in rows]
            if rows[0].dim() > 2:
                row[0] = row[0][:length]
            self.kept[position] = (row, tuple(fingerprints[index]), int(length))
        return len(positions)

    def close(self, *, remove=True):
        self.go.set()

    def stop_here(self):
        self.inside.set()
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error


def value(positions):
    """What is computed for a position."""
    return [(torch.as_tensor(positions, dtype=torch.float32)[:, None] + torch.arange(WIDTH) / 10).clone()]


def prints(positions):
    return np.stack([np.asarray(positions), np.asarray(positions) + 1], axis=1).astype(np.float32)


def full_store(count=200):
    store = FakeStore()
    store.write(np.arange(count), value(np.arange(count)), prints(np.arange(count)))
    store.inside.clear()
    return store


def batch(number, size=4):
    return number, np.arange(number * size, (number + 1) * size)


@pytest.fixture
def made():
    """Makes fetchers and writers that are closed after the test, with whatever they hang in let go."""
    things = []

    def make(kind, store, *args, **kwargs):
        thing = kind(store, *args, **kwargs)
        things.append((thing, store))
        return thing

    yield make
    for thing, store in things:
        store.close()
        assert thing.close(SOON_S)


@pytest.fixture
def fetcher_of(made):
    return lambda store, **kwargs: made(Fetcher, store, **kwargs)


def eventually(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def flush(writer):
    """Wait until everything is written; return whether it was."""
    eventually(lambda: not writer.pending())
    return writer.worker.failure is None


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("egeria-cache")]


# --- what is read -----------------------------------------------------------------------------------------------


def test_batches_told_ahead_are_read_ahead_and_come_out_right(fetcher_of):
    store = full_store()
    fetcher = fetcher_of(store)
    for number in range(10):
        fetcher.ahead([batch(later) for later in range(number, number + 6)])
        held = fetcher.take(*batch(number))
        assert held.mask.all()
        assert torch.equal(held.rows[0], value(batch(number)[1])[0])
        assert (held.fingerprints == prints(batch(number)[1])).all()
    assert fetcher.worker.failure is None
    assert len(store.reads) == len({tuple(read) for read in store.reads})


def test_what_has_been_read_was_not_waited_for(fetcher_of):
    fetcher = fetcher_of(full_store())
    fetcher.ahead([batch(0)])
    eventually(lambda: all(read.done() for read in fetcher._reads.values()))
    assert fetcher.take(*batch(0)).waited_s == 0
    assert fetcher.waited_s == 0


def test_costs_are_counted(fetcher_of):
    fetcher = fetcher_of(full_store())
    for number in range(10):
        fetcher.take(*batch(number))
    assert fetcher.reader.num_bytes == 40 * WIDTH * 4
    assert fetcher.worker.cpu_s > 0


def test_reads_no_further_than_the_ring_and_tells_the_system_of_two_more(fetcher_of):
    store = full_store()
    fetcher = fetcher_of(store)
    fetcher.ahead([batch(number) for number in range(10)])
    eventually(lambda: len(store.advised) == 5)
    time.sleep(0.02)
    assert store.reads == [batch(number)[1].tolist() for number in range(3)]
    assert store.advised == [batch(number)[1].tolist() for number in range(5)]
    fetcher.take(*batch(0))
    fetcher.ahead([batch(number) for number in range(1, 11)])
    eventually(lambda: len(store.reads) == 4 and len(store.advised) == 6)
    assert store.advised[-1] == batch(5)[1].tolist(), "once for each batch"


def test_a_batch_that_was_not_told_ahead_is_read_when_it_is_taken(fetcher_of):
    fetcher = fetcher_of(full_store())
    fetcher.ahead([batch(5)])
    held = fetcher.take(*batch(2))
    assert torch.equal(held.rows[0], value(batch(2)[1])[0])
    assert held.waited_s > 0
    assert fetcher.take(*batch(5)).mask.all()


def test_other_rows_than_told_ahead_are_read_anew(fetcher_of):
    fetcher = fetcher_of(full_store())
    fetcher.ahead([batch(0)])
    held = fetcher.take(0, np.array([9, 7, 7]))
    assert torch.equal(held.rows[0], value([9, 7, 7])[0])


def test_hits_and_misses_mix_and_the_gaps_can_be_filled(fetcher_of):
    store = full_store()
    for position in (1, 3):
        del store.kept[position]
    fetcher = fetcher_of(store)
    fetcher.ahead([batch(0)])
    held = fetcher.take(*batch(0))
    assert held.mask.tolist() == [True, False, True, False]
    missing = np.flatnonzero(~held.mask)
    held.fill(missing, value(batch(0)[1][missing]))
    assert torch.equal(held.rows[0], value(batch(0)[1])[0])


def test_an_empty_store_costs_neither_reads_nor_buffers(fetcher_of):
    store = FakeStore()
    fetcher = fetcher_of(store)
    fetcher.ahead([batch(0), batch(1)])
    for number in (0, 1, 8):
        held = fetcher.take(*batch(number))
        assert not held.mask.any()
        assert len(held.rows) == 0
    assert store.reads == []
    assert fetcher.worker.failure is None


def test_a_row_that_changed_between_looking_and_reading_is_not_served(fetcher_of):
    store = full_store()
    fetcher = fetcher_of(store)
    store.go.clear()
    fetcher.ahead([batch(0)])
    assert store.inside.wait(SOON_S)
    store.kept[2] = (value([77])[0], (77.0, 78.0), 0)
    store.go.set()
    assert fetcher.take(*batch(0)).mask.tolist() == [True, True, False, True]


def test_a_batch_passed_over_or_with_other_rows_is_dropped(fetcher_of):
    store = full_store()
    fetcher = fetcher_of(store)
    store.go.clear()
    fetcher.ahead([batch(number) for number in range(3)])
    assert store.inside.wait(SOON_S)
    fetcher.ahead([(0, batch(20)[1]), batch(2)])
    assert [key[0] for key in fetcher._reads] == [2, 0]
    store.go.set()
    assert torch.equal(fetcher.take(*batch(2)).rows[0], value(batch(2)[1])[0])
    assert fetcher._reads == {}
    fetcher.ahead([batch(2), batch(3)])
    assert [key[0] for key in fetcher._reads] == [3], "the batch taken last is not read again"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 6)), max_size=40))
@settings(max_examples=30, deadline=None)
def test_whatever_happens_no_more_than_depth_wait_and_what_comes_is_right(calls):
    fetcher = Fetcher(full_store())
    for is_take, first, count in calls:
        if is_take:
            assert torch.equal(fetcher.take(*batch(first)).rows[0], value(batch(first)[1])[0])
        else:
            fetcher.ahead([batch(number) for number in range(first, first + count)])
        assert len(fetcher._reads) <= DEPTH
    assert fetcher.close(SOON_S)


def test_batches_of_no_more_use_free_the_ring(fetcher_of):
    store = full_store()
    fetcher = fetcher_of(store)
    fetcher.ahead([batch(number) for number in range(3)])
    eventually(lambda: len(store.reads) == 3)
    fetcher.ahead([batch(number) for number in range(10, 13)])
    eventually(lambda: len(store.reads) == 6)
    assert fetcher.take(*batch(11)).mask.all()


# --- sequences --------------------------------------------------------------------------------------------------


def sequences(positions, length):
    """Rows of different lengths in tensors of one length, and those lengths."""
    lengths = np.array([3 + position % 5 for position in positions])
    rows = torch.zeros(len(positions), length, WIDTH)
    for index, (position, own) in enumerate(zip(positions, lengths, strict=True)):
        rows[index, :own] = position + 1
    return [rows, torch.tensor([[position, -position] for position in positions])], lengths


@pytest.mark.parametrize("length", [7, 8, 16])
@pytest.mark.parametrize("told", [True, False])
def test_sequences_come_out_as_long_as_their_batch(fetcher_of, length, told):
    store = FakeStore(SEQUENCE)
    rows, lengths = sequences(range(20), 8)
    store.write(np.arange(20), rows, prints(range(20)), lengths)
    fetcher = fetcher_of(store)
    for number in range(4):
        fetcher.ahead([batch(number)] if told else [])
        held = fetcher.take(*batch(number), length=length)
        expected, own = sequences(batch(number)[1], length)
        assert held.mask.all()
        assert all(torch.equal(*pair) for pair in zip(held.rows, expected, strict=True))
        assert all(tensor.is_contiguous() for tensor in held.rows)
        assert (held.lengths == own).all()


def test_a_row_longer_than_its_batch_is_no_hit(fetcher_of):
    store = FakeStore(SEQUENCE)
    rows, lengths = sequences(range(4), 8)
    store.write(np.arange(4), rows, prints(range(4)), lengths)
    fetcher = fetcher_of(store)
    fetcher.ahead([batch(0)])
    held = fetcher.take(*batch(0), length=4)
    assert held.mask.tolist() == [True, True, False, False]
    assert held.rows[0].shape == (4, 4, WIDTH)


@pytest.mark.parametrize(("length", "there"), [(8, 4), (12, 4), (5, 3)])
def test_sequences_in_memory_are_padded_and_cut_too(fetcher_of, length, there):
    fetcher = fetcher_of(FakeStore(SEQUENCE))
    rows, lengths = sequences(range(4), 8)
    rows[0] += 100 * (rows[0] == 0)  # a computed row has something in its padding
    fetcher.keep(0, RowsInMemory(np.arange(4), rows, prints(range(4)), lengths))
    held = fetcher.take(1, np.arange(4), length=length)
    assert held.mask.sum() == there
    for index in np.flatnonzero(held.mask):
        assert torch.equal(held.rows[0][index, : lengths[index]], rows[0][index, : lengths[index]])
        if length != 8:
            assert not held.rows[0][index, lengths[index] :].any()


def test_rows_in_memory_without_lengths_are_as_long_as_their_tensor(fetcher_of):
    fetcher = fetcher_of(FakeStore(SEQUENCE))
    rows, _ = sequences(range(4), 8)
    fetcher.keep(0, RowsInMemory(np.arange(4), rows, prints(range(4))))
    assert not fetcher.take(1, np.arange(4), length=7).mask.any()
    assert fetcher.take(2, np.arange(4), length=9).lengths.tolist() == [8] * 4


def test_the_length_of_the_next_batch_is_guessed_from_the_last_ones():
    reader = Reader(FakeStore(SEQUENCE), None)
    assert reader.guess_length(11) == 11
    reader.note_length(24)
    assert reader.guess_length(11) == 16
    reader.note_length(24)
    assert [reader.guess_length(11), reader.guess_length(25)] == [24, 32]
    reader.note_length(13)
    assert reader.guess_length(11) == 11


# --- the memory of the last five --------------------------------------------------------------------------------


def test_rows_of_the_last_five_batches_are_served_without_the_store(fetcher_of):
    store = FakeStore()
    fetcher = fetcher_of(store)
    for number in range(7):
        fetcher.keep(number, RowsInMemory(batch(number)[1], value(batch(number)[1]), prints(batch(number)[1])))
    held = fetcher.take(7, np.array([4, 8, 27, 9]))  # of batches 1, 2, 6 and 2
    assert held.mask.tolist() == [False, True, True, True]
    assert torch.equal(held.rows[0][1:], value([8, 27, 9])[0])
    assert (held.fingerprints[1:] == prints([8, 27, 9])).all()
    assert store.reads == []


def test_the_same_batch_twice_in_an_iteration_is_not_read_twice(fetcher_of):
    store = full_store()
    fetcher = fetcher_of(store)
    held = fetcher.take(*batch(0))
    fetcher.keep(0, RowsInMemory(batch(0)[1], held.rows, held.fingerprints))
    again = fetcher.take(*batch(0))
    assert again.mask.all()
    assert again.waited_s == 0
    again.rows[0].zero_()
    assert torch.equal(held.rows[0], value(batch(0)[1])[0]), "it is a copy"
    assert len(store.reads) == 1


def test_gaps_of_a_batch_from_the_store_are_filled_from_memory(fetcher_of):
    store = full_store()
    del store.kept[2]
    fetcher = fetcher_of(store)
    fetcher.ahead([batch(0)])
    fetcher.keep(-1, RowsInMemory(np.array([50, 2]), value([50, 2]), prints([50, 2])))
    held = fetcher.take(*batch(0))
    assert held.mask.all()
    assert torch.equal(held.rows[0], value(batch(0)[1])[0])


def test_rows_that_the_model_changed_in_place_or_that_are_stale_are_not_served_again(fetcher_of):
    store = full_store()
    fetcher = fetcher_of(store)
    for number in (0, 1):
        held = fetcher.take(*batch(number))
        fetcher.keep(number, RowsInMemory(batch(number)[1], held.rows, held.fingerprints))
        if number == 0:
            nn.ReLU(inplace=True)(held.rows[0].sub_(2))
    store.kept.clear()
    assert not fetcher.take(2, batch(0)[1]).mask.any()
    assert fetcher.take(3, batch(1)[1]).mask.all()
    fetcher.invalidate(batch(1)[1][:2])
    assert fetcher.take(4, batch(1)[1]).mask.tolist() == [False, False, True, True]


def test_the_memory_does_not_keep_the_graph_of_an_iteration_alive(fetcher_of):
    fetcher = fetcher_of(full_store())
    held = fetcher.take(*batch(0))
    fetcher.keep(0, RowsInMemory(batch(0)[1], held.rows, held.fingerprints))
    scale = nn.Parameter(torch.ones(WIDTH))
    activation = scale * 2
    watched = FakeStore()
    activation.grad_fn.register_hook(lambda *_, watched=watched: None)
    gone = weakref.ref(watched)
    held.rows[0].add_(activation)
    assert held.rows[0].requires_grad
    del held, activation, watched
    gc.collect()
    assert gone() is None


def test_rows_that_wait_to_be_written_are_served(made):
    store = FakeStore()
    store.go.clear()
    writer = made(Writer, store)
    fetcher = made(Fetcher, store, pending=writer.pending)
    for number in range(3):
        assert writer.put(RowsInMemory(batch(number)[1], value(batch(number)[1]), prints(batch(number)[1])))
    assert store.inside.wait(SOON_S)
    held = fetcher.take(3, np.array([1, 9, 50]))
    assert held.mask.tolist() == [True, True, False]
    assert torch.equal(held.rows[0][:2], value([1, 9])[0])
    store.go.set()
    assert flush(writer)
    assert writer.pending() == []
    assert fetcher.take(4, np.array([1, 9, 50])).mask.tolist() == [True, True, False]


# --- the memory handed out --------------------------------------------------------------------------------------


def test_what_autograd_saved_is_intact_after_the_ring_went_round(fetcher_of):
    """Gradient accumulation: twenty forwards, then one backward pass."""
    store = full_store()
    fetcher = fetcher_of(store)
    cached, computed = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
    losses = []
    for number in range(20):
        fetcher.ahead([batch(later) for later in range(number, number + 6)])
        held = fetcher.take(*batch(number))
        fetcher.keep(number, RowsInMemory(batch(number)[1], held.rows, held.fingerprints))
        losses.append(((held.rows[0] * cached) ** 2).sum())
        del held
    torch.stack(losses).sum().backward()
    torch.stack([((value(batch(number)[1])[0] * computed) ** 2).sum() for number in range(20)]).sum().backward()
    assert torch.equal(cached.grad, computed.grad)


def test_an_in_place_model_corrupts_neither_its_own_nor_later_batches(fetcher_of):
    fetcher = fetcher_of(full_store())
    weight = nn.Parameter(torch.ones(WIDTH))
    for number in range(12):
        fetcher.ahead([batch(later) for later in range(number, number + 4)])
        held = fetcher.take(*batch(number))
        assert torch.equal(held.rows[0], value(batch(number)[1])[0])
        fetcher.keep(number, RowsInMemory(batch(number)[1], held.rows, held.fingerprints))
        held.rows[0].sub_(weight).relu_().sum().backward()


# --- faults -----------------------------------------------------------------------------------------------------


def test_a_slow_store_is_waited_for_and_counted(fetcher_of):
    store = full_store()
    fetcher = fetcher_of(store)
    store.go.clear()
    threading.Timer(0.15, store.go.set).start()
    fetcher.ahead([batch(0)])
    held = fetcher.take(*batch(0))
    assert held.mask.all()
    assert 0.05 < held.waited_s < SOON_S
    assert fetcher.waited_s == pytest.approx(held.waited_s)


@pytest.mark.parametrize("told", [True, False])
def test_a_store_that_hangs_is_given_up_after_the_timeout_once(fetcher_of, told):
    store = full_store()
    fetcher = fetcher_of(store, timeout_s=0.2)
    store.go.clear()
    fetcher.ahead([batch(0), batch(1)] if told else [])
    assert not told or store.inside.wait(SOON_S)
    started = time.monotonic()
    held = fetcher.take(*batch(0))
    assert 0.15 < time.monotonic() - started < SOON_S
    assert not held.mask.any()
    failure = fetcher.worker.failure
    assert isinstance(failure, FetchError)
    started = time.monotonic()
    assert not fetcher.take(*batch(1)).mask.any() and fetcher.worker.failure is failure
    assert time.monotonic() - started < 0.15, "no second wait"


@pytest.mark.parametrize("error", [StoreError("the disk is gone"), OSError(5, "I/O error"), MemoryError()])
@pytest.mark.parametrize("told", [True, False])
def test_an_error_of_the_store_is_a_miss_and_a_failure(fetcher_of, error, told):
    store = full_store()
    fetcher = fetcher_of(store)
    assert fetcher.take(*batch(9)).mask.all()
    store.error = error
    fetcher.ahead([batch(0)] if told else [])
    held = fetcher.take(*batch(0))
    assert not held.mask.any()
    assert len(held.rows) == 0
    assert fetcher.worker.failure is error
    assert not fetcher.take(*batch(1)).mask.any()
    fetcher.keep(1, RowsInMemory(batch(1)[1], value(batch(1)[1]), prints(batch(1)[1])))
    fetcher.ahead([batch(2)])


def test_an_error_in_the_caller_is_a_failure_not_an_exception(fetcher_of):
    fetcher = fetcher_of(full_store())
    fetcher.keep(0, RowsInMemory(np.arange(2), [torch.zeros(2, 99)], prints(range(2))))  # not rows of this store
    held = fetcher.take(1, np.arange(2))
    assert not held.mask.any()
    assert isinstance(fetcher.worker.failure, RuntimeError)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", ["exits", "is killed"])
def test_a_reader_that_dies_is_a_failure_and_soon(fetcher_of, way):
    store = full_store()
    fetcher = fetcher_of(store)
    if way == "exits":
        store.error = SystemExit()
    else:
        eventually(threads)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threads()[0].ident), ctypes.py_object(SystemExit)
        )
    fetcher.ahead([batch(0)])
    started = time.monotonic()
    held = fetcher.take(*batch(0))
    assert time.monotonic() - started < 3
    assert not held.mask.any()
    assert isinstance(fetcher.worker.failure, ThreadError)
    fetcher.close()
    fetcher.close()
    eventually(lambda: not threads())


def test_a_system_without_threads_left_is_a_failure(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = full_store()
    fetcher, writer = Fetcher(store), Writer(store)
    fetcher.ahead([batch(0)])
    assert not fetcher.take(*batch(0)).mask.any() and isinstance(fetcher.worker.failure, RuntimeError)
    assert not writer.put(RowsInMemory(*batch(0)[1:], value(batch(0)[1]), prints(batch(0)[1])))
    assert isinstance(writer.worker.failure, RuntimeError)
    assert fetcher.close()
    assert writer.close()


# --- the end ----------------------------------------------------------------------------------------------------


def test_closing_ends_the_threads_and_everything_after_it_is_harmless():
    store = full_store()
    with nothing_left_behind():
        fetcher, writer = Fetcher(store), Writer(store)
        fetcher.ahead([batch(number) for number in range(5)])
        assert all(thing.close() for thing in (fetcher, writer, fetcher, writer))
    fetcher.ahead([batch(7)])
    held = fetcher.take(*batch(7))
    assert not held.mask.any()
    assert fetcher.worker.failure is None
    assert not writer.put(RowsInMemory(batch(7)[1], value(batch(7)[1]), prints(batch(7)[1])))
    assert writer.pending() == []


def test_closing_while_a_read_hangs_waits_no_longer_than_told():
    store = full_store()
    fetcher = Fetcher(store)
    store.go.clear()
    fetcher.ahead([batch(0)])
    assert store.inside.wait(SOON_S)
    started = time.monotonic()
    assert not fetcher.close(0.1), "the caller is told that a thread is still in the store"
    assert time.monotonic() - started < 2
    store.go.set()
    assert fetcher.close(SOON_S)
    assert fetcher._reads == {}


def test_closing_from_elsewhere_lets_a_waiting_caller_go():
    store = full_store()
    fetcher = Fetcher(store, timeout_s=30)
    store.go.clear()
    threading.Timer(0.1, fetcher.close, [0.0]).start()
    held = fetcher.take(*batch(0))
    assert not held.mask.any()
    store.go.set()
    assert fetcher.close(SOON_S)


@pytest.mark.parametrize("busy", [True, False])
def test_threads_end_with_their_owner(busy):
    with nothing_left_behind():
        store = full_store()
        writer = Writer(store)
        fetcher = Fetcher(store, pending=writer.pending)
        if busy:
            fetcher.ahead([batch(number) for number in range(5)])
            writer.put(RowsInMemory(batch(60)[1], value(batch(60)[1]), prints(batch(60)[1])))
        fetcher.cycle = fetcher  # only the collector finds it
        del fetcher, writer
        gc.collect()
        eventually(lambda: not threads())


def test_rows_outlive_the_fetcher_that_gave_them():
    store = full_store()
    fetcher = Fetcher(store)
    held = fetcher.take(*batch(0))
    fetcher.close()
    del fetcher
    gc.collect()
    junk = [torch.full((4, WIDTH), 7.0) for _ in range(50)]
    assert torch.equal(held.rows[0], value(batch(0)[1])[0]), len(junk)


@pytest.mark.parametrize("way", ["reading", "hanging", "idle"])
def test_the_interpreter_ends_though_nobody_closed_anything(way):
    code = f"""
        import sys, torch
        sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
        from test_cache_fetcher import *
        store = full_store()
        writer = Writer(store)
        fetcher = Fetcher(store, pending=writer.pending)
        fetcher.ahead([batch(0), batch(1), batch(2)])
        if {way!r} == "hanging":
            store.go.clear()
            writer.put(RowsInMemory(batch(60)[1], value(batch(60)[1]), prints(batch(60)[1])))
            fetcher.ahead([batch(9)])
        if {way!r} == "idle":
            fetcher.take(*batch(0))
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr
    assert done.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked children here")
def test_a_forked_child_neither_uses_nor_ends_the_threads(made, fetcher_of):
    store = full_store()
    fetcher, writer = fetcher_of(store), made(Writer, store)
    fetcher.take(*batch(0))
    locks = [fetcher.worker._changed, writer.worker._changed]
    free = threading.Event()

    def hold():
        with locks[0], locks[1]:
            held.set()
            free.wait(SOON_S)

    held = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(SOON_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about forking with threads
        child = os.fork()
    if child == 0:
        os._exit(_everything_in_a_child(fetcher, writer))
    free.set()
    holder.join()
    deadline = time.monotonic() + SOON_S
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if status[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status == (child, 0), "the child hangs or failed"
    assert fetcher.take(*batch(1)).mask.all()
    assert writer.put(RowsInMemory(batch(1)[1], value(batch(1)[1]), prints(batch(1)[1])))


def _everything_in_a_child(fetcher, writer):
    try:
        fetcher.ahead([batch(3)])
        assert not fetcher.take(*batch(3)).mask.any()
        fetcher.keep(3, RowsInMemory(batch(3)[1], value(batch(3)[1]), prints(batch(3)[1])))
        fetcher.invalidate(batch(3)[1])
        assert not writer.put(RowsInMemory(batch(3)[1], value(batch(3)[1]), prints(batch(3)[1])))
        assert writer.pending() == []
        assert fetcher.worker.failure is writer.worker.failure is None
        fetcher.close()
        writer.close()
    except BaseException:
        return 1
    return 0


# --- writing ----------------------------------------------------------------------------------------------------


def put(writer, number):
    return writer.put(RowsInMemory(batch(number)[1], value(batch(number)[1]), prints(batch(number)[1])))


def test_rows_are_written_in_the_background(made):
    store = FakeStore()
    writer = made(Writer, store)
    assert put(writer, 0)
    assert put(writer, 1)
    assert flush(writer)
    assert sorted(store.kept) == list(range(8))
    assert writer.num_bytes_written == 8 * WIDTH * 4
    assert writer.worker.failure is None
    eventually(lambda: writer.worker.cpu_s > 0)


def test_a_full_queue_drops_and_never_waits(made):
    store = FakeStore()
    store.go.clear()
    writer = made(Writer, store)
    put(writer, 0)
    assert store.inside.wait(SOON_S)
    started = time.monotonic()
    assert [put(writer, number) for number in range(1, 7)] == [True] * 4 + [False] * 2
    assert time.monotonic() - started < 1
    assert [chunk.positions[0] for chunk in writer.pending()] == [16, 12, 8, 4, 0], "newest first"
    assert writer.pending()
    store.go.set()
    assert flush(writer)
    assert sorted(store.kept) == list(range(20))


@pytest.mark.parametrize("error", [StoreError("the disk is full"), OSError(28, "No space left"), SystemExit()])
def test_a_store_that_fails_ends_the_writing(made, error):
    store = FakeStore()
    writer = made(Writer, store)
    store.error = error
    put(writer, 0)
    assert not flush(writer)
    assert writer.worker.failure is error or isinstance(writer.worker.failure, ThreadError)
    assert not put(writer, 1)
    assert writer.pending() == []
    assert writer.close()


def test_rows_that_are_changed_while_they_are_written_end_the_writing(made):
    """What was stored then may be wrong, and the failure turns the cache off."""
    store = FakeStore()
    store.go.clear()
    writer = made(Writer, store)
    rows = value(batch(0)[1])
    writer.put(RowsInMemory(batch(0)[1], rows, prints(batch(0)[1])))
    assert store.inside.wait(SOON_S)
    rows[0].zero_()
    store.go.set()
    assert not flush(writer)
    assert isinstance(writer.worker.failure, StoreError)


def test_rows_that_do_not_belong_together_are_refused_at_once():
    with pytest.raises(StoreError, match="of one batch"):
        RowsInMemory(np.arange(3), value(range(2)), prints(range(3)))


def test_closing_gives_up_what_waits():
    store = FakeStore()
    store.go.clear()
    writer = Writer(store)
    for number in range(3):
        put(writer, number)
    assert store.inside.wait(SOON_S)
    assert not writer.close(0.05)
    store.go.set()
    assert writer.close(SOON_S)
    assert sorted(store.kept) == [0, 1, 2, 3]
    assert writer.pending() == []
