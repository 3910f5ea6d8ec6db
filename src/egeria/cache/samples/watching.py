"""Following a `DataLoader` from the inside, so that each batch it hands out is known, and nobody can tell.

The loader gets one attribute of its own in front of a method, `_get_iterator`. While that makes an
iterator, and only then, the recording sampler and the wrapped data set stand in the loader for the
user's. The classes, the user's code and everything that can be read from the loader stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from egeria.cache.samples.drawing import NoSamplesError, Pass, RecordingSampler
from egeria.cache.samples.following import Follower
from egeria.cache.samples.views import ViewedDataset

METHOD, STATE = "_get_iterator", "__getstate__"


class Watch:
    """Stands before a loader's `_get_iterator`, until `close`.

    It holds the loader and its iterators weakly: an iterator that the user drops must end its workers
    at once, not when the garbage collector finds a cycle.

    Args:
        loader: the loader to follow.
        follower: is told what happens.
        dataset: the stand-in for its data set; None leaves that as it is.

    Raises:
        NoSamplesError: somebody else watches it already, or its class does not let itself be watched.
    """

    def __init__(self, loader: DataLoader[Any], follower: Follower, dataset: ViewedDataset | None) -> None:
        if isinstance(vars(loader).get(METHOD), Watch):
            raise NoSamplesError("another run already watches this loader; close that run first")
        self._loader = weakref.ref(loader)
        self._follower = follower
        self._dataset = dataset
        self._before = vars(loader).get(METHOD)
        self._is_open = True
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        vars(loader)[METHOD] = self
        vars(loader)[STATE] = self._state  # copies and pickles of the loader are plain
        if getattr(loader, METHOD) is not self:
            self.close()
            raise NoSamplesError(
                f"{type(loader).__name__} does not let its iterators be watched; pass a plain DataLoader"
            )
        if loader._iterator is not None:  # of persistent workers, started before; they have the user's data set
            self._follow(loader._iterator, has_dataset=False)

    def __call__(self) -> Any:
        """Make an iterator over the loader, and follow it."""
        loader = self._loader()
        assert loader is not None  # it is the caller
        make = self._before or type(loader)._get_iterator.__get__(loader)
        if not self._is_open:
            return make()
        with self._standing_in(loader):
            iterator = make()
        if isinstance(iterator, _BaseDataLoaderIter):
            self._follow(iterator, has_dataset=self._dataset is not None)
        self._follower.begun(iterator)
        return iterator

    def restart_workers(self) -> None:
        """Let the next pass start new workers, if those that persist do not have the wrapped data set."""
        loader: Any = self._loader()
        if loader is not None and loader._iterator is not None and loader._iterator._dataset is not self._dataset:
            loader._iterator = None

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

    @contextmanager
    def _standing_in(self, loader: DataLoader[Any]) -> Iterator[None]:
        attributes = vars(loader)  # the loader itself forbids that these be set
        sampler, dataset = attributes["batch_sampler"], attributes["dataset"]
        try:
            attributes["batch_sampler"] = self._follower.sampler(sampler, self._dataset is not None)
            if self._dataset is not None:
                attributes["dataset"] = self._dataset
            yield
        finally:
            attributes["batch_sampler"], attributes["dataset"] = sampler, dataset

    def _follow(self, iterator: Any, *, has_dataset: bool) -> None:
        if not isinstance(iterator._index_sampler, RecordingSampler):
            iterator._index_sampler = self._follower.sampler(iterator._index_sampler, has_dataset)
        reference = weakref.ref(iterator)

        def next_data() -> Any:
            followed: Any = reference()
            try:
                batch = type(followed)._next_data(followed)
            except BaseException:
                self._follower.stopped(followed)
                raise
            self._follower.handed_out(followed, batch)
            return batch

        def reset(*args: Any, **kwargs: Any) -> None:
            followed: Any = reference()
            type(followed)._reset(followed, *args, **kwargs)
            self._follower.begun(followed)

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
    if isinstance(iterator._index_sampler, RecordingSampler):
        iterator._index_sampler = iterator._index_sampler.sampler
    if isinstance(iterator._sampler_iter, Pass):
        iterator._sampler_iter = iterator._sampler_iter.rest()
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    for holder, name in ((iterator, "_dataset"), (fetcher, "dataset")):
        dataset = getattr(holder, name, None)
        if type(dataset) is ViewedDataset:
            setattr(holder, name, dataset.of_user)
