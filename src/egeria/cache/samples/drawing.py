"""What a loader draws from its batch sampler, written down; some of it drawn in advance."""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from egeria.cache.samples.views import ViewedIndex
from egeria.errors import EgeriaError


class NoSamplesError(EgeriaError):
    """The samples of a batch cannot be told; the message is the reason and the way out, in one sentence."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Drawn:
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
class Drawing:
    """What all passes over one loader have in common."""

    num_ahead: int = 0
    """Batches to draw in advance."""
    num_views: int | None = None
    views_since_epoch: int = 0
    views_work: Callable[[], bool] = lambda: True
    num_epochs: int = 0
    """Passes begun."""
    refusal: str | None = None
    """Why the samples of a batch cannot be told from what the sampler draws."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def view_of(self, epoch: int) -> int | None:
        """Return the view to make in an epoch; None for augmentation as the user wrote it."""
        if self.num_views is None or not self.views_work():
            return None
        return (epoch - self.views_since_epoch) % self.num_views


class RecordingSampler:
    """Stands in for a loader's batch sampler, in the loader's iterators only; draws what that draws.

    Args:
        sampler: the loader's own.
        drawing: shared by all passes.
        can_view: whether the data set behind the iterator understands a `ViewedIndex`.
    """

    def __init__(self, sampler: Any, drawing: Drawing, *, can_view: bool) -> None:
        self.sampler = sampler
        self._drawing = drawing
        self._can_view = can_view

    def __iter__(self) -> Pass:
        return Pass(iter(self.sampler), self._drawing, can_view=self._can_view, length=self._length)

    def __len__(self) -> int:
        return len(self.sampler)

    def _length(self) -> float:
        try:
            return len(self.sampler)
        except Exception:  # it may have no length, or one that the user's code fails to tell
            return math.inf


class Pass:
    """One pass over the batch sampler: hands its batches on and knows where each of them is.

    A batch is first `ahead` (drawn in advance), then `taken` (by the loader, perhaps at work in a
    worker), then handed out. None is drawn in advance behind the last: a sampler that is asked for it may
    draw random numbers, which it does not without us where the loop leaves the pass early.

    Args:
        batches: an iterator of the sampler.
        drawing: shared by all passes.
        can_view: whether the data set behind the iterator understands a `ViewedIndex`.
        length: tells the number of batches; asked if some are drawn in advance.
    """

    def __init__(
        self, batches: Iterator[Any], drawing: Drawing, *, can_view: bool, length: Callable[[], float]
    ) -> None:
        self.num_taken = 0
        self._num_handed_out = 0
        self._batches = batches
        self._drawing = drawing
        self._can_view = can_view
        self._length = length
        self._num_batches: float | None = None
        self._epoch: int | None = None
        self._ahead: deque[tuple[Any, Drawn | None]] = deque()
        self._taken: deque[Drawn | None] = deque()
        self._end: BaseException | None = None
        # A loader may be read by a thread of the user's while the training loop asks what comes.
        self._lock = threading.RLock()

    def __iter__(self) -> Pass:
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

    def handed_out(self, total: int) -> Drawn | None:
        """Note that the loader has handed out so many batches in all; return the last, None if there is no new one."""
        drawn = None
        with self._lock:
            while self._num_handed_out < total and self._taken:
                drawn = self._taken.popleft()
                self._num_handed_out += 1
        return drawn

    def coming(self, count: int) -> list[Drawn]:
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

    def _record(self, indices: Any, epoch: int) -> Drawn | None:
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
        return Drawn(number=number, epoch=epoch, samples=samples, views=views, viewed=view is not None)


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
