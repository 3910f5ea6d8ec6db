"""Which samples a loader draws for each batch: recorded as they are drawn, some of them drawn in advance.

The loader gets one attribute of its own in front of a method, `_get_iterator`. While that makes an
iterator, and only then, the recording sampler and the wrapped data set stand in the loader for the
user's. The classes, the user's code and everything that can be read from the loader stay as they are.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from egeria.cache.augmentation import ViewedDataset, ViewedIndex
from egeria.errors import EgeriaError

METHOD, STATE = "_get_iterator", "__getstate__"


class BatchFollower(Protocol):
    """Is notified by a `LoaderHook` of what the loader does; raises nothing."""

    @property
    def reads_columns(self) -> bool:
        """Return whether samples are identified by a column of the batch that this process numbers by first sight."""

    def sampler(self, sampler: Any, can_view: bool) -> Any:
        """Return what stands in for a batch sampler."""

    def begun(self, iterator: Any) -> None:
        """Record that an iterator of the loader begins an epoch."""

    def handed_out(self, iterator: Any, batch: Any) -> None:
        """Record that it is about to hand out a batch."""

    def stopped(self, iterator: Any) -> None:
        """Record that it raises instead: at the end of the pass, or an error of the user's."""


class LoaderHook:
    """Stands before a loader's `_get_iterator`, until `close`.

    It holds the loader and its iterators weakly: an iterator that the user drops must end its workers
    at once, not when the garbage collector finds a cycle.

    Args:
        loader: the loader to follow.
        follower: is notified of what happens.
        dataset: the stand-in for its data set; None leaves that as it is.

    Raises:
        NoSamplesError: somebody else watches it already, or its class does not let itself be watched.
    """

    def __init__(self, loader: DataLoader[Any], follower: BatchFollower, dataset: ViewedDataset | None) -> None:
        if isinstance(vars(loader).get(METHOD), LoaderHook):
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
        if not isinstance(iterator._index_sampler, RecordingBatchSampler):
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
    if isinstance(iterator._index_sampler, RecordingBatchSampler):
        iterator._index_sampler = iterator._index_sampler.sampler
    if isinstance(iterator._sampler_iter, EpochIterator):
        iterator._sampler_iter = iterator._sampler_iter.rest()
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    for holder, name in ((iterator, "_dataset"), (fetcher, "dataset")):
        dataset = getattr(holder, name, None)
        if type(dataset) is ViewedDataset:
            setattr(holder, name, dataset.of_user)


class NoSamplesError(EgeriaError):
    """The samples of a batch cannot be identified; the message is the reason and the way out, in one sentence."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class BatchIndices:
    """Which samples make up one batch."""

    number: int
    """Counts the batches of all epochs in the order of drawing; one that is drawn but never handed out leaves a gap."""
    epoch: int
    """Counts the passes over the loader since it is watched."""
    samples: np.ndarray
    """Index of each row's sample in the data set, int64 [B]."""
    views: np.ndarray
    """Number of each row's augmentation variant, int64 [B]; zeros unless `viewed`."""
    viewed: bool = False
    """Whether the batch is made with stateless augmentation."""


@dataclass(kw_only=True, slots=True)
class SharedDrawState:
    """What all passes over one loader have in common."""

    num_ahead: int = 0
    """Batches to draw in advance."""
    num_views: int | None = None
    views_since_epoch: int = 0
    views_work: Callable[[], bool] = lambda: True
    num_epochs: int = 0
    """Passes begun."""
    refusal: str | None = None
    """Why the samples of a batch cannot be identified from what the sampler draws."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def view_of(self, epoch: int) -> int | None:
        """Return the view to make in an epoch; None for augmentation as the user wrote it."""
        if self.num_views is None or not self.views_work():
            return None
        return (epoch - self.views_since_epoch) % self.num_views


class RecordingBatchSampler:
    """Stands in for a loader's batch sampler, in the loader's iterators only; draws what that draws.

    Args:
        sampler: the loader's own.
        drawing: shared by all passes.
        can_view: whether the data set behind the iterator understands a `ViewedIndex`.
    """

    def __init__(self, sampler: Any, drawing: SharedDrawState, *, can_view: bool) -> None:
        self.sampler = sampler
        self._drawing = drawing
        self._can_view = can_view

    def __iter__(self) -> EpochIterator:
        return EpochIterator(iter(self.sampler), self._drawing, can_view=self._can_view, length=self._length)

    def __len__(self) -> int:
        return len(self.sampler)

    def _length(self) -> float:
        try:
            return len(self.sampler)
        except Exception:  # it may have no length, or one that the user's code fails to tell
            return math.inf


class EpochIterator:
    """One pass over the batch sampler: hands its batches on and knows where each of them is.

    A batch is first `ahead` (drawn in advance), then `taken` (by the loader, perhaps at work in a
    worker), then handed out. None is drawn in advance behind the last: a sampler that is asked for it may
    draw random numbers, which it does not without us where the loop leaves the pass early.

    Args:
        batches: an iterator of the sampler.
        drawing: shared by all passes.
        can_view: whether the data set behind the iterator understands a `ViewedIndex`.
        length: returns the number of batches; asked if some are drawn in advance.
    """

    def __init__(
        self, batches: Iterator[Any], drawing: SharedDrawState, *, can_view: bool, length: Callable[[], float]
    ) -> None:
        self.num_taken = 0
        self._num_handed_out = 0
        self._batches = batches
        self._drawing = drawing
        self._can_view = can_view
        self._length = length
        self._num_batches: float | None = None
        self._epoch: int | None = None
        self._ahead: deque[tuple[Any, BatchIndices | None]] = deque()
        self._taken: deque[BatchIndices | None] = deque()
        self._end: BaseException | None = None
        # A loader may be read by a thread of the user's while the training loop asks what comes.
        self._lock = threading.RLock()

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if not self._ahead:
                self._raise_end()
                self._draw()
            indices, drawn = self._ahead.popleft()
            self._taken.append(drawn)
            self.num_taken += 1
            self.draw_ahead(self._drawing.num_ahead)
        if drawn is not None and drawn.viewed:
            return type(indices)(map(ViewedIndex, indices, drawn.views.tolist()))
        return indices

    def draw_ahead(self, count: int) -> None:
        """Draw until so many batches wait; what the sampler raises is kept for the loader to meet in its turn."""
        with self._lock:
            while len(self._ahead) < count and self._end is None and not self._is_at_end():
                try:
                    self._draw()
                except BaseException as end:
                    self._end = end

    def handed_out(self, total: int) -> BatchIndices | None:
        """Note that the loader has handed out so many batches in all; return the last, None if there is no new one."""
        drawn = None
        with self._lock:
            while self._num_handed_out < total and self._taken:
                drawn = self._taken.popleft()
                self._num_handed_out += 1
        return drawn

    def coming(self, count: int) -> list[BatchIndices]:
        """Return the next batches that are drawn and not handed out, in order."""
        with self._lock:
            waiting = itertools.chain(self._taken, (drawn for _, drawn in self._ahead))
            return [drawn for drawn in itertools.islice(waiting, count) if drawn is not None]

    def rest(self) -> Iterator[Any]:
        """Return an iterator over the batches that the loader has not taken, the sampler's own if possible."""
        with self._lock:
            if not self._ahead and self._end is None:
                return self._batches
            return _rest([indices for indices, _ in self._ahead], self._end, self._batches)

    def _is_at_end(self) -> bool:
        if self._num_batches is None:
            self._num_batches = self._length()
        return self.num_taken + len(self._ahead) >= self._num_batches

    def _raise_end(self) -> None:
        if self._end is not None:
            end, self._end = self._end, None
            raise end

    def _draw(self) -> None:
        indices = next(self._batches)
        if self._epoch is None:
            self._epoch = self._drawing.num_epochs
            self._drawing.num_epochs += 1
        self._ahead.append((indices, self._record(indices, self._epoch)))

    def _record(self, indices: Any, epoch: int) -> BatchIndices | None:
        if self._drawing.refusal is not None:
            return None
        try:
            samples = _sample_numbers(indices)
        except (TypeError, ValueError, OverflowError):
            self._drawing.refusal = (
                "the sampler gives no whole numbers from 0 on as indices; let it give the position of each sample"
            )
            return None
        view = self._drawing.view_of(epoch) if self._can_view and _is_plain(indices) else None
        views = np.full(len(samples), view or 0, dtype=np.int64)
        number = next(self._drawing.numbers)
        return BatchIndices(number=number, epoch=epoch, samples=samples, views=views, viewed=view is not None)


def _sample_numbers(indices: Any) -> np.ndarray:
    """Return the indices of a batch as int64 [B].

    Raises:
        TypeError: they are no integers.
        ValueError: they are negative.
    """
    if isinstance(indices, (Tensor, np.ndarray)):
        if indices.ndim != 1:
            raise TypeError("one index for each sample")
        indices = indices.tolist()
    if not isinstance(indices, (list, tuple)):
        raise TypeError("a batch is a list of indices")
    samples = np.fromiter(map(operator.index, indices), dtype=np.int64, count=len(indices))
    if len(samples) and samples.min() < 0:
        raise ValueError("indices count from 0")
    return samples


def _is_plain(indices: Any) -> bool:
    return type(indices) in (list, tuple) and all(type(index) is int for index in indices)


def _rest(ahead: list[Any], end: BaseException | None, batches: Iterator[Any]) -> Iterator[Any]:
    yield from ahead
    if end is None:
        yield from batches
    elif not isinstance(end, StopIteration):
        raise end
