"""The samples of each batch, handed out and to come, over the ways there are to set up a loader."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from egeria.cache import ShardSampler
from egeria.cache.loader import SampleFeed
from egeria.cache.samples import BatchIndices, NoSamplesError


class Numbers(Dataset):
    """Sample i is i, with noise from every global generator beside it."""

    def __init__(self, count=23):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        noise = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor(int(index)), torch.tensor(noise, dtype=torch.float64)


class Lists(Numbers):
    """As data sets of Hugging Face are asked."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Buckets:
    """A batch sampler of the user's own, with batches of many sizes, drawing from the global generator."""

    def __iter__(self):
        order = torch.randperm(20).tolist()
        begin = 0
        for size in (3, 1, 7, 4, 5):
            yield order[begin : begin + size]
            begin += size

    def __len__(self):
        return 5


class Fails(Numbers):
    def __getitem__(self, index):
        if index == 7:
            raise OSError("cannot be read")
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(8.0)


def distributed():
    return DistributedSampler(Numbers(), num_replicas=2, rank=1, shuffle=True, seed=3)


CONFIGURATIONS = {
    "sequential": lambda: {"batch_size": 4},
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "own generator": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "distributed": lambda: {"batch_size": 4, "sampler": distributed()},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler(torch.rand(23) + 0.1, 30)},
    "batch sampler": lambda: {"batch_sampler": Buckets()},
    "numpy batches": lambda: {"batch_sampler": [np.array([3, 1]), np.array([2, 0])]},
    "tensor batches": lambda: {"batch_sampler": [torch.tensor([3, 1]), torch.tensor([2, 0])]},
    "numpy indices": lambda: {"batch_size": 4, "sampler": [np.int64(4), np.int64(3), torch.tensor(2)]},
    "tuple batches": lambda: {"batch_sampler": [(1, 2), (3,)]},
    "subset": lambda: {"dataset": Subset(Numbers(), range(5, 20)), "batch_size": 4, "shuffle": True},
    "lists": lambda: {"dataset": Lists(), "batch_size": 4, "shuffle": True},
}
WORKERS = {
    "alone": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
}
every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS)


def build(configuration="shuffle", workers="alone", **more):
    return DataLoader(**{"dataset": Numbers(), **CONFIGURATIONS[configuration](), **WORKERS[workers], **more})


def seed():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def random_states():
    return random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist()


def epoch(loader):
    return [(numbers.tolist(), noise.tolist()) for numbers, noise in loader]


def check_epoch(loader, feed, count=None):
    """Check that what is taken is each batch's content, and that what was to come came."""
    seen = []
    announced = None
    offset = loader.dataset.indices[0] if isinstance(loader.dataset, Subset) else 0
    for numbers, noise in loader:
        current = feed.take((numbers, noise))
        assert current is feed.current
        assert (current.samples + offset).tolist() == numbers.tolist()
        if announced is not None:
            assert announced == current.number
        coming = feed.upcoming(3)
        announced = coming[0].number if coming else None
        seen.append(current)
        if len(seen) == count:
            break
    return seen


@every_configuration
@pytest.mark.parametrize("workers", ["alone", pytest.param("persistent", marks=pytest.mark.slow)])
def test_samples_are_those_of_the_batch(configuration, workers):
    loader = build(configuration, workers)
    feed = SampleFeed(loader)
    assert feed.num_samples == len(loader.dataset) and feed.num_batches == len(loader)
    assert feed.current is None and feed.upcoming(3) == []
    seen = check_epoch(loader, feed) + check_epoch(loader, feed)
    numbers = [drawn.number for drawn in seen]
    assert numbers == sorted(set(numbers))
    assert feed.current is None and feed.upcoming(3) == []


@every_configuration
@pytest.mark.parametrize("workers", ["alone", pytest.param("workers", marks=pytest.mark.slow)])
def test_a_watched_loader_draws_as_an_untouched_one(configuration, workers):
    results = []
    for watched in (False, True):
        seed()
        loader = build(configuration, workers)
        feed = SampleFeed(loader) if watched else None
        first = epoch(loader)
        for _ in loader:
            break
        if feed:
            assert feed.current is not None
        second = epoch(loader)
        if feed:
            feed.close()
        results.append((first, second, epoch(loader), random_states()))
    assert results[0] == results[1]


@pytest.mark.parametrize("workers", WORKERS)
def test_close_in_mid_epoch_gives_all_back(workers):
    results = []
    for watched in (False, True):
        seed()
        loader = build("shuffle", workers)
        before = {name: value for name, value in vars(loader).items() if name != "_iterator"}
        feed = SampleFeed(loader) if watched else None
        iterator = iter(loader)
        got = [next(iterator)[0].tolist() for _ in range(2)]
        if feed:
            feed.close()
            feed.close()
            assert {name: value for name, value in vars(loader).items() if name != "_iterator"} == before
            assert not {"_next_data", "_reset"} & vars(iterator).keys()
            assert type(iterator._index_sampler) is BatchSampler and type(iterator._dataset) is Numbers
            assert feed.current is None and feed.upcoming(2) == []
        got += [numbers.tolist() for numbers, _ in iterator]
        results.append((got, epoch(loader), random_states()))
    assert results[0] == results[1]


def test_nothing_can_be_seen_of_a_watch():
    loader = build()
    dataset, sampler, length = loader.dataset, loader.batch_sampler, len(loader)
    feed = SampleFeed(loader)
    iterator = iter(loader)
    next(iterator)
    assert loader.dataset is dataset and loader.batch_sampler is sampler and len(loader) == length
    assert type(loader) is DataLoader and len(iterator) == length
    feed.close()


def test_batches_drawn_ahead_are_still_handed_out_after_close():
    loader = build("sequential")
    feed = SampleFeed(loader)
    iterator = iter(loader)
    batch = next(iterator)
    got = batch[0].tolist()
    feed.take(batch)
    assert [drawn.samples.tolist() for drawn in feed.upcoming(2)] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    feed.close()
    for numbers, _ in iterator:
        got += numbers.tolist()
    assert got == list(range(23))


def test_drawing_ahead_goes_on_and_ends_with_the_epoch():
    loader = build("sequential")
    feed = SampleFeed(loader)
    for begun in range(2):
        for index, batch in enumerate(loader):
            feed.take(batch)
            expected = min(4, len(loader) - index - 1)
            if begun:
                assert len(feed._passes.latest._ahead) == expected, "drawn by the loader itself from now on"
            assert len(feed.upcoming(4)) == expected
    assert [drawn.samples.tolist() for drawn in feed.upcoming(4)] == []


def test_workers_announce_what_they_work_at():
    loader = build("shuffle", "workers", batch_size=2)
    feed = SampleFeed(loader)
    iterator = iter(loader)
    assert len(feed.upcoming(10)) == 4 and feed.current is None
    feed.take(next(iterator))
    assert len(feed.upcoming(10)) == 4 and len(feed.upcoming(3)) == 3
    del iterator


def test_an_error_of_the_sampler_comes_in_its_turn():
    def broken():
        yield [1]
        yield [2]
        raise RuntimeError("sampler")

    class Broken:
        def __iter__(self):
            return broken()

    loader = DataLoader(Numbers(), batch_sampler=Broken())
    feed = SampleFeed(loader)
    iterator = iter(loader)
    assert len(feed.upcoming(5)) == 2
    assert [next(iterator)[0].item() for _ in range(2)] == [1, 2]
    with pytest.raises(RuntimeError, match="sampler"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_that_cannot_be_made_is_passed_over(workers):
    loader = build("sequential", workers, dataset=Fails())
    feed = SampleFeed(loader)
    iterator = iter(loader)
    got = []
    while True:
        try:
            numbers, _ = next(iterator)
        except StopIteration:
            break
        except OSError:
            assert feed.current is None
            continue
        assert feed.current.samples.tolist() == numbers.tolist()
        got.append(numbers[0].item())
    assert got == [0, 8, 12, 16, 20]
    if loader._iterator is not None:  # left to the garbage collector they would take ten seconds, ours or not
        loader._iterator._shutdown_workers()


@pytest.mark.parametrize("workers", WORKERS)
def test_breaking_off_an_epoch(workers):
    loader = build("shuffle", workers)
    feed = SampleFeed(loader)
    check_epoch(loader, feed, count=2)
    assert len(check_epoch(loader, feed)) == len(loader)


@pytest.mark.parametrize("workers", ["alone", "workers"])
def test_several_passes_at_once(workers):
    loader = build("shuffle", workers)
    feed = SampleFeed(loader)
    for pair in zip(*[iter(loader) for _ in range(2)], strict=True):
        assert feed.current.samples.tolist() == pair[1][0].tolist()
    first, second = iter(loader), iter(loader)
    for iterator in (first, second, second, first, second):
        batch = next(iterator)
        assert feed.take(batch).samples.tolist() == batch[0].tolist()
        coming = feed.upcoming(1)[0].samples.tolist()
        assert coming == feed._passes.latest.coming(1)[0].samples.tolist()
        assert iterator._sampler_iter is feed._passes.latest


def test_drawing_from_the_batch_sampler_oneself_changes_nothing():
    loader = build("sequential")
    feed = SampleFeed(loader)
    for numbers, _ in loader:
        list(loader.batch_sampler)
        assert feed.current.samples.tolist() == numbers.tolist()


def test_persistent_workers_started_before():
    loader = build("shuffle", "persistent")
    iterator = iter(loader)
    next(iterator)
    feed = SampleFeed(loader)
    next(iterator)
    assert feed.current is None and feed.upcoming(2) == []
    for batch in iterator:
        assert feed.take(batch) is None
    check_epoch(loader, feed)
    check_epoch(loader, feed)
    before = loader._iterator
    feed.close()
    assert sum(len(numbers) for numbers, _ in loader) == 23
    assert loader._iterator is before


def test_an_iterator_made_before_is_left_alone():
    loader = build("sequential")
    iterator = iter(loader)
    next(iterator)
    feed = SampleFeed(loader)
    next(iterator)
    assert feed.current is None
    check_epoch(loader, feed)


def test_dropped_iterators_end_at_once():
    gc.disable()
    try:
        loader = build("shuffle", "workers")
        feed = SampleFeed(loader)
        iterator = iter(loader)
        next(iterator)
        processes = iterator._workers
        dropped = weakref.ref(iterator)
        del iterator
        assert dropped() is None, "a reference cycle would keep the workers until the garbage is collected"
        assert not any(process.is_alive() for process in processes)
        dropped = weakref.ref(loader)
        del loader
        assert dropped() is None
        feed.close()
    finally:
        gc.enable()


def test_a_dropped_feed_lets_go():
    loader = build()
    before = vars(loader).keys()
    feed = SampleFeed(loader)
    del feed
    gc.collect()
    assert vars(loader).keys() == before
    assert SampleFeed(loader).current is None


def test_one_watch_at_a_time():
    loader = build()
    feed = SampleFeed(loader)
    with pytest.raises(NoSamplesError, match="close"):
        SampleFeed(loader)
    check_epoch(loader, feed)
    feed.close()
    check_epoch(loader, SampleFeed(loader))


def test_attributes_put_before_ours_come_back():
    loader = build()
    made = []

    def mine():
        made.append(1)
        return DataLoader._get_iterator(loader)

    vars(loader)["_get_iterator"] = mine
    feed = SampleFeed(loader)
    check_epoch(loader, feed)
    feed.close()
    assert vars(loader)["_get_iterator"] is mine and made == [1]


def test_copies_of_a_loader_are_plain():
    for copied in [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))]:
        loader = build()
        feed = SampleFeed(loader)
        check_epoch(loader, feed, count=1)
        other = copied(loader)
        assert vars(other).keys() == vars(build()).keys()
        assert type(other.dataset) is Numbers and type(other.batch_sampler) is BatchSampler
        current = feed.current
        assert len(list(other)) == len(loader)
        assert feed.current is current
        check_epoch(loader, feed)


def test_a_loader_read_by_a_thread():
    loader = build("shuffle", batch_size=1, dataset=Numbers(150))
    feed = SampleFeed(loader)
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(numbers.item() for numbers, _ in loader))
    thread.start()
    while thread.is_alive():
        for drawn in feed.upcoming(3):
            assert isinstance(drawn, BatchIndices)
    thread.join(timeout=60)
    assert sorted(seen) == list(range(150))


def test_only_loaders_of_torch():
    for loader in [[1, 2], DataLoader, iter([])]:
        with pytest.raises(NoSamplesError, match="pass the DataLoader"):
            SampleFeed(loader)


UNKNOWN = {
    "no length": lambda: DataLoader(Stream(), batch_size=2),
    "batch_size=None": lambda: DataLoader(Numbers(), batch_size=None),
    "in_order=False": lambda: build("shuffle", "workers", in_order=False),
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_loaders_whose_samples_have_no_numbers_are_refused(reason):
    loader = UNKNOWN[reason]()
    before = vars(loader).copy()
    with pytest.raises(NoSamplesError, match=reason):
        SampleFeed(loader)
    assert vars(loader) == before


def test_refused_once_the_first_batch_has_no_numbers(monkeypatch):
    monkeypatch.setattr(Numbers, "__getitem__", lambda self, index: index)
    loader = DataLoader(Numbers(), batch_sampler=[[-1, -2]], collate_fn=lambda rows: rows)
    before = vars(loader).copy()
    feed = SampleFeed(loader)
    assert feed.current is None
    batches = iter(loader)
    next(batches)
    with pytest.raises(NoSamplesError, match="whole numbers"):
        _ = feed.current
    assert feed.upcoming(2) == []
    next(batches, None)
    feed.close()
    assert feed.current is None and vars(loader) == before


def test_of_what_is_dealt_out_once_the_samples_of_this_process_are_counted():
    sampler = ShardSampler(Numbers(), 2, 1)
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler)
    feed = SampleFeed(loader)
    assert feed.num_samples == len(sampler) == 12
    seen = {}
    for _ in range(2):
        for numbers, _ in loader:
            for own, number in zip(feed.current.samples.tolist(), numbers.tolist(), strict=True):
                assert seen.setdefault(own, number) == number
    assert sorted(seen) == list(range(12))


def test_a_loader_that_moves_its_batches():
    class Moving(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield [tensor.clone() for tensor in batch]

    loader = Moving(Numbers(), batch_size=4, shuffle=True)
    check_epoch(loader, SampleFeed(loader))


def test_an_iterator_of_another_kind_is_refused():
    class Own(DataLoader):
        def _get_iterator(self):
            return DataLoader(self.dataset, batch_size=2)._get_iterator()

    loader = Own(Numbers(), batch_size=4)
    feed = SampleFeed(loader)
    assert len(list(loader)) == 12
    with pytest.raises(NoSamplesError, match="plain torch DataLoader"):
        _ = feed.current


def test_a_generator_as_iterator_is_refused():
    class Own(DataLoader):
        def _get_iterator(self):
            return (batch for batch in [1, 2])

    loader = Own(Numbers(), batch_size=4)
    feed = SampleFeed(loader)
    assert list(loader) == [1, 2]
    with pytest.raises(NoSamplesError, match="plain torch DataLoader"):
        _ = feed.current
    feed.close()
    assert list(loader) == [1, 2]


def test_set_epoch_reaches_the_users_sampler():
    sampler = distributed()
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler)
    feed = SampleFeed(loader)
    orders = []
    for number in range(2):
        sampler.set_epoch(number)
        orders.append([drawn.samples.tolist() for drawn in check_epoch(loader, feed)])
    assert orders[0] != orders[1]


def test_samplers_over_the_data_set_see_the_users():
    class Asking(SequentialSampler):
        def __iter__(self):
            assert type(self.data_source) is Numbers
            return super().__iter__()

    loader = DataLoader(dataset := Numbers(), batch_size=4, sampler=Asking(dataset))
    check_epoch(loader, SampleFeed(loader))
    assert isinstance(build().sampler, RandomSampler)
