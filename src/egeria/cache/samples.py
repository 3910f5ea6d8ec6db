"""Which samples make up each batch: recorded as the sampler draws them."""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from egeria.cache.pending import PendingBatches
from egeria.errors import EgeriaError


class NoSamplesError(EgeriaError):
    """The samples of a batch cannot be identified; the message is the reason and the way out, in
    one sentence.
    """


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class BatchIndices:
    """Which samples make up one batch."""

    number: int
    """Counts the batches of all epochs in the order of drawing; one that is drawn but never handed
    out leaves a gap."""
    samples: np.ndarray
    """Number of each row's sample, int64 [B]: its index in the data set, or in this process's part
    of it."""


@dataclass(kw_only=True)
class Passes:
    """What all passes over one loader have in common, and what came last in them."""

    own: np.ndarray | None = None
    """The samples that a `ShardSampler` deals out to this process, rising; then numbers count
    these. None where they are indices in the data set."""
    current: BatchIndices | None = None
    pending: PendingBatches = field(default_factory=PendingBatches)
    latest: EpochIterator | None = None
    failure: str | None = None
    """Why the samples cannot be identified after all."""
    num_ahead: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def begun(self, iterator: Any) -> None:
        """Record that an iterator of the loader begins a pass."""
        self.pending.begin()
        source = getattr(iterator, "_sampler_iter", None)
        if isinstance(source, EpochIterator):
            self.latest = source
        else:
            self.failure = (
                f"the iterators of this loader ({type(iterator).__name__}) do not draw from its "
                "batch sampler as "
                "those of torch do; pass a plain torch DataLoader"
            )

    def handed_out(self, iterator: Any, batch: Any) -> None:
        """Record that an iterator is about to hand out a batch: the oldest that it has taken."""
        self.current = self._advanced(iterator)
        self.pending.add(self.current, batch)

    def stopped(self, iterator: Any) -> None:
        """Record that it raises instead, at the end or as a batch could not be made: that one is
        gone too.
        """
        self._advanced(iterator)
        self.current = None
        self.pending.end()

    def _advanced(self, iterator: Any) -> BatchIndices | None:
        source = iterator._sampler_iter
        if not isinstance(
            source, EpochIterator
        ):  # persistent workers in the middle of a pass when the watch began
            return None
        self.latest = source
        # With workers, batches come in the order of drawing; this counts those that came, failed
        # ones too.
        return source.handed_out(getattr(iterator, "_rcvd_idx", source.num_taken))


@dataclass(eq=False)
class RecordingBatchSampler:
    """Draws what a loader's batch sampler draws."""

    sampler: Any
    passes: Passes

    def __iter__(self) -> EpochIterator:
        return EpochIterator(self.sampler, self.passes)

    def __len__(self) -> int:
        return len(self.sampler)


class EpochIterator:
    """One pass over the batch sampler: hands its batches on and knows where each of them is.

    A batch is first `ahead`, then `taken` (by the loader, perhaps at work in a worker), then handed
    out. None is drawn in advance behind the last: a sampler that is asked for it may draw random
    numbers, which it does not without us where the loop leaves the pass early.
    """

    def __init__(self, sampler: Any, passes: Passes) -> None:
        self.num_taken = 0
        self._sampler = sampler
        self._batches: Iterator[Any] = iter(sampler)
        self._passes = passes
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
                if self._end is not None:
                    end, self._end = self._end, None
                    raise end
                self._draw()
            indices, drawn = self._ahead.popleft()
            self._taken.append(drawn)
            self.num_taken += 1
            self.draw_ahead(self._passes.num_ahead)
        return indices

    def draw_ahead(self, count: int) -> None:
        """Draw until so many batches wait; what the sampler raises is kept for the loader to meet
        in its turn.
        """
        with self._lock:
            while len(self._ahead) < count and self._end is None:
                if self.num_taken + len(self._ahead) >= self._num_batches:
                    return
                try:
                    self._draw()
                except BaseException as end:
                    self._end = end

    def handed_out(self, total: int) -> BatchIndices | None:
        """Note that the loader has handed out so many batches in all; return the last, None if
        there is no new one.
        """
        drawn = None
        with self._lock:
            while self._taken and self.num_taken - len(self._taken) < total:
                drawn = self._taken.popleft()
        return drawn

    def coming(self, count: int) -> list[BatchIndices]:
        """Return the next batches that are drawn and not handed out, in order."""
        with self._lock:
            waiting = itertools.chain(self._taken, (drawn for _, drawn in self._ahead))
            return [drawn for drawn in itertools.islice(waiting, count) if drawn is not None]

    def rest(self) -> Iterator[Any]:
        """Return an iterator over the batches that the loader has not taken, the sampler's own if
        possible.
        """
        with self._lock:
            if not self._ahead and self._end is None:
                return self._batches
            return _rest([indices for indices, _ in self._ahead], self._end, self._batches)

    @cached_property
    def _num_batches(self) -> float:
        try:
            return len(self._sampler)
        except Exception:  # it may have no length, or one that the user's code fails to tell
            return math.inf

    def _draw(self) -> None:
        indices = next(self._batches)
        self._ahead.append((indices, self._record(indices)))

    def _record(self, indices: Any) -> BatchIndices | None:
        try:
            samples = _sample_numbers(indices)
        except (TypeError, ValueError, OverflowError):
            self._passes.failure = (
                "the sampler gives no whole numbers from 0 on as indices; let "
                "it give the position of each sample"
            )
            return None
        if self._passes.own is not None:
            samples = np.searchsorted(self._passes.own, samples)
        return BatchIndices(number=next(self._passes.numbers), samples=samples)


def _sample_numbers(indices: Any) -> np.ndarray:
    """Return the indices of a batch as int64 [B]; TypeError or ValueError where they do not count
    samples.
    """
    if isinstance(indices, (Tensor, np.ndarray)):
        indices = indices.tolist()
    if not isinstance(indices, (list, tuple)):
        raise TypeError("a batch is a list of indices")
    samples = np.fromiter(map(operator.index, indices), dtype=np.int64, count=len(indices))
    if len(samples) and samples.min() < 0:
        raise ValueError("indices count from 0")
    return samples


def _rest(ahead: list[Any], end: BaseException | None, batches: Iterator[Any]) -> Iterator[Any]:
    yield from ahead
    if end is None:
        yield from batches
    elif not isinstance(end, StopIteration):
        raise end
