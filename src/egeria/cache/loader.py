"""`SampleFeed`: the samples of the batches that a loader hands out, and of those to come.

The loader gets one attribute of its own in front of a method, `_get_iterator`. While that makes an
iterator, and only then, the recording sampler stands in the loader for the user's. The classes, the
user's code and everything that can be read from the loader stay as they are.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from egeria.cache.samples import (
    BatchIndices,
    EpochIterator,
    IdColumn,
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

    Until `upcoming` is called, the loader draws bit for bit as without it. Where the sampler cannot
    tell the samples, they are read from a column of the batch; then nothing is known of the batches
    to come.

    Args:
        loader: the training `DataLoader`, or one of Accelerate's or Lightning Fabric's around it.
        id_column: key of a batch that holds one integer for each row; None looks for one where that
            is needed.

    Raises:
        NoSamplesError: the samples cannot be identified. Where the first batch decides, `current`
            raises it.
    """

    def __init__(self, loader: Any, *, id_column: str | None) -> None:
        loader = _innermost(loader)
        if not isinstance(loader, DataLoader):
            raise NoSamplesError(
                "samples are identified by the sampler of a torch DataLoader, but the loader is a "
                f"{type(loader).__name__}; pass the DataLoader that the batches come from"
            )
        self.num_samples = length_of(loader.dataset)
        self.num_batches = (
            None if isinstance(loader.dataset, IterableDataset) else length_of(loader)
        )
        self._draws_ahead = loader.num_workers == 0
        reason = (
            f"the samples are to be identified by the column '{id_column}'"
            if id_column
            else _refusal(loader)
        )
        self._passes = Passes(column=IdColumn(id_column), refusal=reason)
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

    @property
    def numbers_by_sight(self) -> bool:
        """Return whether samples are numbered in the order in which this process sees them."""
        return self._passes.refusal is not None

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


def _refusal(loader: DataLoader[Any]) -> str | None:
    """Return why the sampler of a loader does not tell the samples of a batch, or None."""
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no sample numbers"
    if loader.batch_size is None and loader.batch_sampler is None:
        return "with batch_size=None the loader draws no batches of samples"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "with in_order=False the batches come in another order than they are drawn"
    return None


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
        if self._passes.refusal is not None or isinstance(sampler, RecordingBatchSampler):
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
