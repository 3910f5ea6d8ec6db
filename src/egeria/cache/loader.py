"""`SampleFeed`: the samples of the batches that a loader hands out, and of those to come.

The loader gets one attribute of its own in front of a method, `_get_iterator`. While that makes an
iterator, and only then, the recording sampler stands in the loader for the user's. The classes, the
user's code and everything that can be read from the loader stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from egeria import dist
from egeria.cache.samples import (
    BatchIndices,
    EpochIterator,
    NoSamplesError,
    Passes,
    RecordingBatchSampler,
)

METHOD, STATE = "_get_iterator", "__getstate__"
INNER = ("base_dataloader", "_dataloader")
"""Where the loaders of Accelerate and of Lightning Fabric have the one of torch that they iterate
over."""


class SampleFeed:
    """Follows a loader: knows each batch by the numbers of its samples, and the batches to come.

    Until `upcoming` is called, the loader draws bit for bit as without it.

    Args:
        loader: the training `DataLoader`, or one of Accelerate's or Lightning Fabric's around it.

    Raises:
        NoSamplesError: the samples cannot be identified. Where the first batch decides, `current`
            raises it.
    """

    def __init__(self, loader: Any) -> None:
        loader = _innermost(loader)
        if not isinstance(loader, DataLoader):
            raise NoSamplesError(
                "samples are identified by the sampler of a torch DataLoader, but the loader is a "
                f"{type(loader).__name__}; pass the DataLoader that the batches come from"
            )
        if reason := _refusal(loader):
            raise NoSamplesError(reason)
        sampler, size = loader.sampler, length_of(loader.dataset) or 0
        own = np.unique(sampler.own.numpy()) if isinstance(sampler, ShardSampler) else None
        self.num_samples = size if own is None else len(own)
        self.num_batches = length_of(loader)
        self._draws_ahead = loader.num_workers == 0
        self._passes = Passes(own=own)
        self._hook = LoaderHook(loader, self._passes)
        self._finalizer = weakref.finalize(self, self._hook.close)
        self._finalizer.atexit = False

    @property
    def current(self) -> BatchIndices | None:
        """Return what the loader handed out last; None before the first batch, after the last and
        after `close`.

        Raises NoSamplesError where the samples cannot be identified after all.
        """
        return self._passes.current if self._is_followed() else None

    def take(self, call: Any) -> BatchIndices | None:
        """Return the samples of the batch that a training forward is made of; None where that
        cannot be told.

        It may be any that was handed out: loaders and loops run ahead of the model.

        Args:
            call: the arguments of the model.

        Raises:
            NoSamplesError: the samples cannot be identified after all.
        """
        return self._passes.pending.take(call) if self._is_followed() else None

    def _is_followed(self) -> bool:
        if self._finalizer.alive and self._passes.failure is not None:
            raise NoSamplesError(self._passes.failure)
        return self._finalizer.alive

    def upcoming(self, count: int) -> list[BatchIndices]:
        """Return at most `count` batches that come after the one taken last.

        They are handed out already, or are drawn in advance from now on, or workers have them or
        work at them.
        """
        latest = self._passes.latest
        if not self._finalizer.alive or latest is None:
            return []
        if self._draws_ahead:
            self._passes.num_ahead = max(self._passes.num_ahead, count)
            latest.draw_ahead(count)
        return [*self._passes.pending.waiting(), *latest.coming(count)][:count]

    def close(self) -> None:
        """Give the loader back exactly as it was, also in the middle of an epoch; what is drawn is
        still handed out.
        """
        self._finalizer()


def _innermost(loader: Any) -> Any:
    """Return the loader of torch that one of a framework's iterates over."""
    attributes = getattr(loader, "__dict__", {})
    inner = next(
        (attributes[name] for name in INNER if isinstance(attributes.get(name), DataLoader)), None
    )
    return loader if inner is None else _innermost(inner)


def _refusal(loader: DataLoader[Any]) -> str:
    """Return why the sampler of a loader does not tell the samples of a batch, or nothing."""
    if isinstance(loader.dataset, IterableDataset) or length_of(loader.dataset) is None:
        return "the data set is iterated over or has no length, so that samples have no numbers"
    if loader.batch_size is None and loader.batch_sampler is None:
        return "with batch_size=None the loader draws no batches of samples"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "with in_order=False the batches come in another order than they are drawn"
    return ""


def length_of(thing: Any) -> int | None:
    """Return the length of a loader or a data set; None where it has none, for which they raise
    various things.
    """
    try:
        return len(thing)
    except Exception:
        return None


class LoaderHook:
    """Stands before a loader's `_get_iterator`, until `close`; tells `passes` what its iterators
    do.

    It refers to them weakly: an iterator that the user drops must end its workers at once, not at a
    collection.
    """

    def __init__(self, loader: DataLoader[Any], passes: Passes) -> None:
        if isinstance(vars(loader).get(METHOD), LoaderHook):
            raise NoSamplesError("another run already watches this loader; close that run first")
        self._loader = weakref.ref(loader)
        self._passes = passes
        self._before = vars(loader).get(METHOD)
        self._is_open = True
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        vars(loader)[METHOD] = self
        vars(loader)[STATE] = self._state  # copies and pickles of the loader are plain
        if getattr(loader, METHOD) is not self:
            self.close()
            raise NoSamplesError(
                f"{type(loader).__name__} does not let its iterators be watched; pass a plain "
                "DataLoader"
            )
        if loader._iterator is not None:  # of persistent workers, started before
            self._follow(loader._iterator)

    def __call__(self) -> Any:
        """Make an iterator over the loader, and follow it."""
        loader = self._loader()
        assert loader is not None  # it is the caller
        make = self._before or type(loader)._get_iterator.__get__(loader)
        if not self._is_open:
            return make()
        attributes = vars(loader)  # the loader itself forbids that these be set
        sampler = attributes["batch_sampler"]
        try:
            attributes["batch_sampler"] = self._recording(sampler)
            iterator = make()
        finally:
            attributes["batch_sampler"] = sampler
        if isinstance(iterator, _BaseDataLoaderIter):
            self._follow(iterator)
        self._passes.begun(iterator)
        return iterator

    def close(self) -> None:
        """Give the loader, and what iterates over it now, back as they were."""
        self._is_open = False
        loader = self._loader()
        if loader is not None and vars(loader).get(METHOD) is self:
            del vars(loader)[METHOD]
            if self._before is not None:
                vars(loader)[METHOD] = self._before
        if loader is not None and vars(loader).get(STATE) == self._state:
            del vars(loader)[STATE]
        for iterator in list(self._iterators):
            _release(iterator)
        self._iterators.clear()

    def _recording(self, sampler: Any) -> Any:
        if isinstance(sampler, RecordingBatchSampler):
            return sampler
        return RecordingBatchSampler(sampler, self._passes)

    def _follow(self, iterator: Any) -> None:
        iterator._index_sampler = self._recording(iterator._index_sampler)
        reference = weakref.ref(iterator)

        def next_data() -> Any:
            followed: Any = reference()
            try:
                batch = type(followed)._next_data(followed)
            except BaseException:
                self._passes.stopped(followed)
                raise
            self._passes.handed_out(followed, batch)
            return batch

        def reset(*args: Any, **kwargs: Any) -> None:
            followed: Any = reference()
            type(followed)._reset(followed, *args, **kwargs)
            self._passes.begun(followed)

        vars(iterator).update(_next_data=next_data, _reset=reset)
        self._iterators.add(iterator)

    def _state(self) -> Any:
        loader = self._loader()
        own = getattr(type(loader), STATE, None)
        state = vars(loader) if own is None or own is getattr(object, STATE, None) else own(loader)
        if not isinstance(state, dict):
            return state
        return {name: value for name, value in state.items() if name not in (METHOD, STATE)}


def _release(iterator: Any) -> None:
    for name in ("_next_data", "_reset"):
        vars(iterator).pop(name, None)
    if isinstance(iterator._index_sampler, RecordingBatchSampler):
        iterator._index_sampler = iterator._index_sampler.sampler
    if isinstance(iterator._sampler_iter, EpochIterator):
        iterator._sampler_iter = iterator._sampler_iter.rest()


class ShardSampler(DistributedSampler[int]):
    """Deals the samples out to the processes once, and shuffles each one's part anew in every
    epoch.

    `DistributedSampler`, which it stands in for, deals anew in every epoch, so that a sample comes
    to another process than the one that has stored its activations. In return the batches of a
    process are drawn from its own part alone.

    Attributes:
        own: the samples of this process.

    Args:
        dataset: what is dealt out.
        num_replicas: processes; None for those of the job.
        rank: of this process; None for the job's.
        options: `shuffle`, `seed` and `drop_last`, as for `DistributedSampler`.

    Raises:
        ValueError: there is no such rank, or a process would get no sample.
    """

    def __init__(
        self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, **options: Any
    ) -> None:
        num_replicas = dist.world_size() if num_replicas is None else num_replicas
        rank = dist.rank() if rank is None else rank
        super().__init__(dataset, num_replicas, rank, **options)
        size = len(dataset)
        if self.num_samples <= 0:
            raise ValueError(
                f"{size} samples cannot be dealt out to {num_replicas} processes without "
                "drop_last=False"
            )
        dealt = torch.arange(size)
        if self.shuffle:
            dealt = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed))
        self.own: Tensor = dealt.repeat(-(-self.total_size // size))[: self.total_size][
            rank::num_replicas
        ]

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of this process, in the order of the epoch."""
        if not self.shuffle:
            return iter(self.own.tolist())
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, self.rank)) % 2**63)
        return iter(self.own[torch.randperm(len(self.own), generator=generator)].tolist())
