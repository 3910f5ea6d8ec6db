"""Rows that are in memory anyway: of the last mini-batches, or waiting to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, from_numpy

from egeria.cache.prefetch.plan import PrefetchPlan, RowIndex
from egeria.cache.store.rows import Floats, Integers, Mask, RowLayout, StoreError


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """Rows of some positions, and what they were like when they were handed in."""

    positions: Integers
    rows: tuple[Tensor, ...]
    """One [b, ...] for each leaf; shared with whoever handed them in, not copied."""
    fingerprints: Floats
    lengths: Integers | None
    versions: tuple[int, ...]

    @classmethod
    def of(cls, positions: Integers, rows: Sequence[Tensor], fingerprints: Floats, lengths: Integers | None) -> Chunk:
        """Note rows as they are now. Raises `StoreError` if they are not of one batch."""
        counts = {len(positions), len(fingerprints), *(len(tensor) for tensor in rows)}
        if lengths is not None:
            counts.add(len(lengths))
        if len(counts) != 1:
            raise StoreError(f"positions, rows, fingerprints and lengths must be of one batch, found {counts} rows")
        # Detached tensors share memory and version, but not the graph that an in-place operation would bring.
        kept = tuple(tensor.detach() for tensor in rows)
        return cls(positions, kept, fingerprints, lengths, tuple(tensor._version for tensor in kept))

    @property
    def is_intact(self) -> bool:
        """Tell whether nobody changed the rows in place, as models may; they are good for nothing then."""
        return all(tensor._version == version for tensor, version in zip(self.rows, self.versions, strict=True))


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """Rows `there` of a chunk that are rows `here` of the batch asked for."""

    chunk: Chunk
    here: Integers
    there: Integers


class Recent:
    """The last mini-batches, and what waits to be written; asked by the training thread alone.

    That thread changes rows in place if anyone does, so what it finds intact stays so while it copies.

    Args:
        plan: says what to keep.
        pending: returns chunks that wait to be written, newest first.
    """

    def __init__(self, plan: PrefetchPlan, pending: Callable[[], Sequence[Chunk]] | None) -> None:
        self._plan = plan
        self._pending = pending
        self._chunks: dict[int, Chunk] = {}

    def keep(self, number: int, chunk: Chunk) -> None:
        """Keep the rows of a mini-batch as the newest."""
        self._chunks[number] = chunk
        for displaced in self._plan.remember(number, chunk.positions):
            del self._chunks[displaced]

    def invalidate(self, positions: Integers) -> None:
        """Find these positions no more."""
        self._plan.invalidate(positions)

    def clear(self) -> None:
        """Keep nothing."""
        for number in self._plan.remembered:
            self._plan.forget(number)
        self._chunks.clear()

    def find(self, positions: Integers) -> list[Source]:
        """Return where rows of these positions [b] are, each at most once."""
        for number in [number for number, chunk in self._chunks.items() if not chunk.is_intact]:
            self._plan.forget(number)
            del self._chunks[number]
        recalled = self._plan.recall(positions)
        sources = []
        for number in np.unique(recalled.numbers[recalled.found]).tolist():
            here = np.flatnonzero(recalled.found & (recalled.numbers == number))
            sources.append(Source(self._chunks[number], here, recalled.rows[here]))
        return sources + self._find_pending(positions, np.flatnonzero(~recalled.found))

    def _find_pending(self, positions: Integers, missing: Integers) -> list[Source]:
        sources = []
        for chunk in self._pending() if self._pending is not None and len(missing) else ():
            places, found = RowIndex.of(chunk.positions).find(positions[missing])
            if chunk.is_intact and found.any():
                sources.append(Source(chunk, missing[found], places[found]))
                missing = missing[~found]
        return sources


@dataclass(eq=False, slots=True)
class Filling:
    """The rows of one batch while they are put together; what is filled in changes."""

    layouts: Sequence[RowLayout]
    mask: Mask
    rows: Sequence[Tensor]
    fingerprints: Floats
    lengths: Integers
    from_memory: Mask

    @classmethod
    def nothing(cls, layouts: Sequence[RowLayout], num_rows: int) -> Filling:
        """Return a batch of which nothing is there."""
        fingerprints = np.zeros((num_rows, 2), dtype=np.float32)
        masks = np.zeros((2, num_rows), dtype=np.bool_)
        return cls(layouts, masks[0], (), fingerprints, np.zeros(num_rows, dtype=np.int64), masks[1])

    def fill(self, source: Source) -> None:
        """Copy rows from memory; those that are too long for this batch are left out."""
        chunk, here, there = source.chunk, source.here, source.there
        lengths = self._lengths(chunk)
        if lengths is not None:
            fits = self._fits(lengths[there])
            here, there = here[fits], there[fits]
            self.lengths[here] = lengths[there]
        for layout, target, kept in zip(self.layouts, self.rows, chunk.rows, strict=True):
            if layout.length_axis is None or lengths is None:
                _copy_rows(target, kept, here, there)
            else:
                _copy_lengths(layout.length_axis, target, kept, (here, there), lengths)
        self.mask[here] = self.from_memory[here] = True
        self.fingerprints[here] = chunk.fingerprints[there]

    def _lengths(self, chunk: Chunk) -> Integers | None:
        """Return how long the rows of a chunk are; as long as its tensors, if it does not say."""
        for layout, source in zip(self.layouts, chunk.rows, strict=True):
            if layout.length_axis is not None:
                whole = np.full(len(chunk.positions), source.shape[layout.length_axis + 1], dtype=np.int64)
                return whole if chunk.lengths is None else np.minimum(chunk.lengths, whole)
        return None

    def _fits(self, lengths: Integers) -> Mask:
        result = np.ones(len(lengths), dtype=np.bool_)
        for layout, target in zip(self.layouts, self.rows, strict=True):
            if layout.length_axis is not None:
                result &= lengths <= target.shape[layout.length_axis + 1]
        return result


def _copy_rows(target: Tensor, source: Tensor, here: Integers, there: Integers) -> None:
    places, rows = from_numpy(here).to(target.device), from_numpy(there).to(source.device)
    target.index_copy_(0, places, source.index_select(0, rows).to(target.device))


def _copy_lengths(
    row_axis: int, target: Tensor, source: Tensor, places: tuple[Integers, Integers], lengths: Integers
) -> None:
    """Copy rows to their true lengths, with zeros behind, as a store gives them."""
    for here, there in zip(*(index.tolist() for index in places), strict=True):
        length = int(lengths[there])
        target[here].zero_().narrow(row_axis, 0, length).copy_(source[there].narrow(row_axis, 0, length))
