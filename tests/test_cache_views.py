"""Stateless augmentation: one view of one sample is the same wherever and whenever it is made."""

from __future__ import annotations

import functools
import pickle
import random
import shelve
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

from egeria.cache.augmentation import BatchKind, ViewedDataset, ViewedIndex, seed_of
from egeria.cache.fingerprint import agree, fingerprints
from egeria.cache.loader import SampleFeed
from egeria.random_state import OFTEN, ONCE, held_generators

COUNT = 12
GLOBAL = np.random.default_rng(0)


class TorchTransform(nn.Module):
    """Like those of torchvision: torch's own generator."""

    def forward(self, x):
        return x.roll(int(torch.randint(0, 8, ()))) + torch.randn(8) * torch.rand(8, dtype=torch.float32)


class PythonTransform:
    def __call__(self, x):
        return x * random.uniform(0.5, 1.5) + random.gauss(0, 1)


class NumpyTransform:
    def __call__(self, x):
        return x + torch.from_numpy(np.random.standard_normal(8)).float() * np.random.rand()


class OwnGenerators:
    """Like those of albumentations: generators of their own, several."""

    __slots__ = ("bits", "generators")

    def __init__(self):
        self.generators = {"python": random.Random(3), "legacy": [np.random.RandomState(4)]}
        self.bits = (np.random.default_rng(5), np.random.Generator(np.random.Philox(6)), torch.Generator())

    def __call__(self, x):
        first, second, third = self.bits
        x = x + self.generators["python"].gauss(0, 1) + self.generators["legacy"][0].standard_normal()
        return x * first.random() + second.normal() + torch.rand(8, generator=third)


class GlobalGenerator:
    def __call__(self, x):
        return x + GLOBAL.normal()


class LazyGenerator:
    """Makes its generator when first used, in the worker, seeded by the worker."""

    def __call__(self, x):
        if not hasattr(self, "generator"):
            worker = get_worker_info()
            self.generator = np.random.default_rng(worker.seed if worker else 0)
        return x + self.generator.normal()


def with_argument(x, generator):
    return x + generator.normal()


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


TRANSFORMS = {
    "torch": TorchTransform,
    "python": PythonTransform,
    "numpy": NumpyTransform,
    "own": OwnGenerators,
    "global": GlobalGenerator,
    "lazy": LazyGenerator,
    "partial": lambda: functools.partial(with_argument, generator=np.random.default_rng(1)),
    "composed": lambda: Compose(TorchTransform(), nn.Sequential(TorchTransform()), PythonTransform(), OwnGenerators()),
}


class Images(Dataset):
    def __init__(self, transform):
        self.x = torch.arange(COUNT * 8.0).view(COUNT, 8)
        self.transform = transform

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        assert type(index) is int
        return self.transform(self.x[index]), index


class Listed(Images):
    """Only `__getitems__`, and a list of samples, as Hugging Face has it."""

    def __getitems__(self, indices):
        assert type(indices) is list and all(type(index) is int for index in indices)
        return [{"x": self.transform(self.x[index]), "index": index} for index in indices]


class Collated(Images):
    """As in examples/cifar10.py: one generator, and batches made as a whole."""

    def __init__(self, generator):
        super().__init__(None)
        self.generator = generator

    def __getitems__(self, indices):
        chosen = torch.tensor(indices)
        return {"x": self.x[chosen] + torch.randn(len(chosen), 8, generator=self.generator), "index": chosen}


class Single(Collated):
    """A batch is a list of one tensor."""

    def __getitems__(self, indices):
        batch = super().__getitems__(indices)
        return [torch.cat([batch["x"], batch["index"][:, None]], 1)]


class Ranked(Collated):
    """What comes out for a sample depends on the others."""

    def __getitems__(self, indices):
        batch = super().__getitems__(indices)
        return {"x": batch["x"], "index": batch["index"].tolist()}


class Pairs(Collated):
    def __getitems__(self, indices):
        if len(indices) < 2:
            raise RuntimeError("no batches of one")
        return super().__getitems__(indices)


class Unseeded(Images):
    """Draws from where no seed reaches."""

    def __getitem__(self, index):
        return torch.tensor([random.SystemRandom().random()]), index


def pairs(batch):
    """Return what came for each sample."""
    if isinstance(batch, list) and len(batch) == 1:
        batch = batch[0][:, :8], batch[0][:, 8].long()
    x, index = (batch["x"], batch["index"]) if isinstance(batch, dict) else batch
    return {sample: row.tolist() for sample, row in zip(torch.as_tensor(index).tolist(), x, strict=True)}


def same(batch):
    return batch


def build(dataset, workers=0, batch_size=4, **more):
    more = {"num_workers": workers, **({"persistent_workers": True} if workers else {}), **more}
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, **more)


def viewed_epochs(dataset, workers=0, num_views=2, epochs=4, **more):
    """Return sample -> row for each epoch after the switch, which takes place before the first."""
    loader = build(dataset, workers, **more)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    assert feed.use_views(num_views)
    results = []
    for number in range(epochs):
        results.append({})
        for batch in loader:
            assert feed.current.viewed and set(feed.current.views) == {number % num_views}
            assert feed.current.samples.tolist() == list(pairs(batch))
            results[-1].update(pairs(batch))
    assert feed.views_refusal is None
    feed.close()
    return results


def collating(kind):
    return {"collate_fn": same} if kind in (Collated, Single) else {}


DATASETS = {
    **{name: functools.partial(lambda make: Images(make()), make) for name, make in TRANSFORMS.items()},
    "listed": lambda: Listed(Compose(TorchTransform(), OwnGenerators())),
    "collated": lambda: Collated(torch.Generator().manual_seed(2)),
    "single": lambda: Single(torch.Generator().manual_seed(2)),
    "subset": lambda: Subset(Images(OwnGenerators()), range(COUNT)),
    "subset of lists": lambda: Subset(Listed(OwnGenerators()), range(COUNT)),
    "joined": lambda: ConcatDataset([Images(TorchTransform())]),
}
every_dataset = pytest.mark.parametrize("name", DATASETS)


def collate_of(name):
    return {"collate_fn": same} if name in ("collated", "single") else {}


def random_states():
    return random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist()


@every_dataset
def test_views_alternate_and_repeat_alone_and_in_workers(name):
    alone = viewed_epochs(DATASETS[name](), **collate_of(name))
    assert alone[0] == alone[2] and alone[1] == alone[3]
    assert all(alone[0][sample] != alone[1][sample] for sample in range(COUNT))
    rows = [np.array(row) for row in alone[0].values()]
    assert len({tuple(row - 8 * sample) for sample, row in enumerate(rows)}) == COUNT
    torch.manual_seed(99)
    in_workers = viewed_epochs(DATASETS[name](), workers=2, batch_size=3, epochs=2, **collate_of(name))
    assert in_workers == alone[:2]


def test_views_in_spawned_workers():
    def make():  # torch cannot send its own generators to a spawned worker
        return Listed(Compose(TorchTransform(), functools.partial(with_argument, generator=np.random.default_rng(1))))

    alone = viewed_epochs(make(), epochs=1)
    assert viewed_epochs(make(), workers=1, epochs=1, multiprocessing_context="spawn") == alone


@pytest.mark.parametrize("workers", [0, 1])
@every_dataset
def test_random_states_stay_as_they_were(name, workers):
    dataset = DATASETS[name]()
    loader = build(dataset, workers, generator=torch.Generator(), **collate_of(name))
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    for _ in loader:
        feed.use_views(2)
    for generator in (random, np.random):
        generator.seed(5)
    torch.manual_seed(5)
    before = random_states()
    own = pickle.dumps([generator_state(generator) for generator in held_generators(dataset).values()])
    for _ in loader:
        assert feed.current.viewed
    assert random_states() == before
    assert own == pickle.dumps([generator_state(generator) for generator in held_generators(dataset).values()])
    feed.close()


def generator_state(generator):
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    return str(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def test_going_back_to_free_augmentation():
    loader = build(Images(TorchTransform()))
    feed = SampleFeed(loader, id_column=None, base_seed=7)

    def one_epoch():
        return {sample: row for batch in loader for sample, row in pairs(batch).items()}

    free = one_epoch()
    assert feed.use_views(1)
    fixed = one_epoch()
    assert fixed == one_epoch() != free
    assert feed.use_views(None)
    again = one_epoch()
    assert again != fixed and again != one_epoch()
    feed.close()


def test_a_switch_in_mid_epoch_counts_from_that_epoch():
    loader = build(Images(TorchTransform()))
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    for _ in loader:
        pass
    views = []
    for number, _ in enumerate(loader):
        views.append((feed.current.viewed, feed.current.views[0]))
        if number == 0:
            assert feed.use_views(3)
    assert views == [(False, 0), (True, 0), (True, 0)]
    for expected in (1, 2, 0):
        assert {int(feed.current.views[0]) for _ in loader} == {expected}
    feed.use_views(3)
    assert {int(feed.current.views[0]) for _ in loader} == {1}
    feed.close()


def test_persistent_workers_started_before_are_replaced_at_the_next_epoch():
    loader = build(Images(TorchTransform()), workers=1)
    for _ in loader:
        pass
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    for _ in loader:
        assert feed.use_views(1)
        assert not feed.current.viewed
    rows = {sample: row for batch in loader for sample, row in pairs(batch).items() if feed.current.viewed}
    assert rows == viewed_epochs(Images(TorchTransform()), epochs=1)[0]
    feed.close()


def test_workers_started_before_the_switch():
    loader = build(Images(TorchTransform()), workers=1)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    for _ in loader:
        pass
    before = loader._iterator
    assert feed.use_views(1)
    rows = {sample: row for batch in loader for sample, row in pairs(batch).items()}
    assert rows == viewed_epochs(Images(TorchTransform()), epochs=1)[0] and loader._iterator is before
    feed.close()
    for _ in loader:
        pass


IMPOSSIBLE = {
    "ranked": (lambda: Ranked(torch.Generator()), "put together"),
    "pairs": (lambda: Pairs(torch.Generator()), "put together"),
    "unseeded": (lambda: Unseeded(None), "twice"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("workers", [0, 1])
def test_impossible_views_are_refused_and_nothing_breaks(name, workers):
    make, reason = IMPOSSIBLE[name]
    loader = build(make(), workers, collate_fn=list if name == "unseeded" else same)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    seen = []
    for _ in range(2):
        for _ in loader:
            seen.append(feed.use_views(2))
    assert seen[-1] is False and (workers or not any(seen))
    assert reason in feed.views_refusal
    for batch in loader:
        assert not feed.current.viewed and len(batch) > 0
    feed.close()


def test_an_error_of_the_data_set_is_raised_as_without_views():
    class Broken(Images):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError("broken")
            return super().__getitem__(index)

    loader = DataLoader(Broken(TorchTransform()), batch_size=3)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    assert feed.use_views(1)
    iterator = iter(loader)
    before = random_states()
    next(iterator)
    with pytest.raises(KeyError, match="broken"):
        next(iterator)
    assert random_states() == before
    assert len(next(iterator)[0]) == 3
    feed.close()


def test_a_batch_that_fails_for_once_ends_no_views():
    class Flaky(Collated):
        fails = False

        def __getitems__(self, indices):
            if self.fails:
                raise OSError("for once")
            return super().__getitems__(indices)

    dataset = Flaky(torch.Generator())
    loader = build(dataset, collate_fn=same)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    assert feed.use_views(1)
    iterator = iter(loader)
    next(iterator)
    dataset.fails = True
    with pytest.raises(OSError, match="for once"):
        next(iterator)
    dataset.fails = False
    next(iterator)
    assert feed.current.viewed and feed.views_refusal is None
    feed.close()


def test_ragged_batches_fall_back():
    class Ragged(Collated):
        def __getitems__(self, indices):
            longest = max(indices) + 1
            return {"x": torch.ones(len(indices), longest), "index": torch.tensor(indices)}

    loader = build(Ragged(None), collate_fn=same)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    assert feed.use_views(1)
    for batch in loader:
        assert batch["x"].shape == (4, int(batch["index"].max()) + 1)
    assert "put together" in feed.views_refusal
    feed.close()


def test_a_plain_data_set_is_not_touched_by_views():
    Pair = namedtuple("Pair", "x index")

    class Plain(Images):
        def __getitems__(self, indices):
            chosen = torch.tensor(indices)
            return Pair(self.x[chosen], chosen)

    loader = DataLoader(Plain(None), batch_size=5, collate_fn=same)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    expected = list(loader)
    assert feed.use_views(1)
    for batch, before in zip(loader, expected, strict=True):
        assert type(batch) is Pair and torch.equal(batch.x, before.x) and torch.equal(batch.index, before.index)
    feed.close()


def test_channels_last_survives_joining():
    class Pictures(Collated):
        def __getitems__(self, indices):
            return torch.randn(len(indices), 3, 4, 4).to(memory_format=torch.channels_last)

    loader = build(Pictures(None), collate_fn=same)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    assert feed.use_views(1)
    assert all(batch.is_contiguous(memory_format=torch.channels_last) for batch in loader)
    assert feed.views_refusal is None
    feed.close()


def test_at_least_one_view():
    feed = SampleFeed(build(Images(None)), id_column=None, base_seed=7)
    with pytest.raises(ValueError, match="at least 1"):
        feed.use_views(0)
    feed.close()


def test_a_reshuffled_data_set_gives_other_fingerprints():
    """Wrong hits: the same numbers, other samples behind them."""
    dataset = Images(TorchTransform())
    loader = build(dataset)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    assert feed.use_views(1)

    def stored():
        prints = {}
        for x, _ in loader:
            prints.update(zip(feed.current.samples.tolist(), fingerprints((x,), {}, len(x)), strict=True))
        return np.stack([prints[sample] for sample in range(COUNT)])

    first, second = stored(), stored()
    assert agree(first, second).all()
    dataset.x = dataset.x.roll(1, 0)
    assert not agree(stored(), first).any()
    feed.close()


def test_a_transform_changed_between_epochs_gives_other_fingerprints():
    dataset = Images(TorchTransform())
    found = []
    for transform in (dataset.transform, dataset.transform, Compose(dataset.transform, lambda x: x + 1)):
        dataset.transform = transform
        x = torch.tensor([row for _, row in sorted(viewed_epochs(dataset, epochs=1)[0].items())])
        found.append(fingerprints((x,), {}, COUNT))
    assert agree(found[0], found[1]).all() and not agree(found[0], found[2]).any()


def test_a_viewed_index_is_an_integer_that_travels():
    index = ViewedIndex(5, 3)
    assert index == 5 and [0, 1, 2, 3, 4, "five"][index] == "five" and type(int(index)) is int
    again = pickle.loads(pickle.dumps(index))
    assert type(again) is ViewedIndex and again == 5 and again.view == 3


def test_the_wrapper_passes_for_the_data_set():
    class Rich(Images):
        kind = "rich"

        def __contains__(self, thing):
            return thing == 1

        def label(self):
            return self.transform

    dataset = Rich("nothing")
    wrapped = ViewedDataset(dataset, 0, BatchKind())
    assert isinstance(wrapped, Rich) and isinstance(wrapped, Dataset)
    assert len(wrapped) == COUNT and wrapped.kind == "rich" and wrapped.label() == "nothing"
    assert not hasattr(wrapped, "__getitems__") and not hasattr(wrapped, "absent")
    wrapped.added = 3
    assert dataset.added == 3
    del wrapped.added
    assert not hasattr(dataset, "added")
    assert repr(wrapped) == repr(dataset)
    assert hasattr(ViewedDataset(Listed(None), 0, BatchKind()), "__getitems__")
    outside = pickle.loads(pickle.dumps(ViewedDataset(Images("t"), 0, BatchKind())))
    assert type(outside) is Images and outside.transform == "t"


@pytest.mark.parametrize("reach", [OFTEN, ONCE])
def test_what_cannot_be_looked_at_is_passed_over(tmp_path, reach):
    class Unbound:
        def __getattribute__(self, name):
            raise RuntimeError("no object is bound to this proxy")

    dataset = Images(torch.sin)
    dataset.proxy, dataset.generator = Unbound(), random.Random(0)
    with shelve.open(tmp_path / "samples") as dataset.closed:
        pass
    assert list(held_generators(dataset, reach)) == [".generator"]
    (batch,) = viewed_epochs(dataset, epochs=1)
    assert len(batch) == COUNT


def test_workers_find_the_users_data_set():
    loader = build(Images(torch.sin), workers=1, worker_init_fn=shift)
    feed = SampleFeed(loader, id_column=None, base_seed=7)
    x, index = next(iter(loader))
    assert torch.equal(x, torch.sin(torch.arange(COUNT * 8.0).view(COUNT, 8)[index] + 1))
    feed.close()


def shift(worker):
    dataset = get_worker_info().dataset
    assert isinstance(dataset, Images)
    dataset.x = dataset.x + 1


def test_seeds_differ_between_sources_samples_and_views():
    seeds = {seed_of(0, sample, view, name) for sample in range(20) for view in range(4) for name in ("torch", "numpy")}
    assert len(seeds) == 160 and all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of(0, 1, 2, "torch") == seed_of(0, 1, 2, "torch") != seed_of(1, 1, 2, "torch")


def test_generators_are_looked_for_within_bounds():
    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.data, holder.generator = holder, [random.Random()] * 100_000, random.Random()
    holder.secret = random.SystemRandom()
    assert list(held_generators(holder)) == [".generator"]
    deep = nested = Holder()
    for _ in range(100):
        nested.inner = Holder()
        nested = nested.inner
    nested.generator = random.Random()
    assert held_generators(deep) == {}
    closing = np.random.default_rng()
    holder.transform = lambda x: x + closing.normal()
    holder.method = OwnGenerators().__call__
    assert len(held_generators(holder)) == 2 + 5
