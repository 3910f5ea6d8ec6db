"""Reading one batch of rows from the store: what the reader threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from egeria.cache.prefetch.buffers import BufferPool
from egeria.cache.prefetch.upload import Upload
from egeria.cache.store.rows import Floats, Integers, Mask, Rows, Store

LENGTH_STEP = 8
"""Padding to a multiple, where a tokenizer does that, is to a multiple of this."""


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """What the store had of a batch; `rows` is empty where it had nothing."""

    mask: Mask
    rows: Sequence[Tensor]
    fingerprints: Floats
    lengths: Integers


class LengthGuess:
    """How long the tensors of an upcoming batch will be padded, from the ones before; a wrong guess costs a copy."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._is_constant = False
        self._is_rounded = True

    def observe(self, length: int) -> None:
        """Take note of the length a batch turned out to have."""
        self._is_constant = length == self._last
        self._is_rounded = self._is_rounded and length % LENGTH_STEP == 0
        self._last = length

    def length(self, longest: int) -> int:
        """Return the length to expect for a batch whose longest row is `longest`."""
        if self._is_constant and self._last is not None and self._last >= longest:
            return self._last
        if self._is_rounded and self._last is not None:
            return -(-longest // LENGTH_STEP) * LENGTH_STEP
        return longest


class Reading:
    """Reads batches into fresh buffers, and counts what that takes.

    Args:
        store: what to read from.
        buffers: where the memory comes from.
        upload: brings it to the device.
    """

    def __init__(self, store: Store, buffers: BufferPool, upload: Upload) -> None:
        self.store = store
        self.lengths = LengthGuess()
        self.num_rows = 0
        self.num_bytes = 0
        self.wall_s = 0.0
        self._buffers = buffers
        self._upload = upload
        self._counting = threading.Lock()

    def read(self, positions: Integers, *, length: int | None = None, advise: bool = False) -> Read:
        """Return what the store has of the positions [b]. Raises `StoreError` and whatever a device raises.

        Args:
            positions: [b]
            length: of the padded batch; None for a guess.
            advise: whether the store must be told of the positions first.
        """
        started = time.perf_counter()
        if advise:
            self.store.advise(positions)
        known = self.store.lookup(positions)
        if not known.valid.any():
            return Read(np.zeros(len(positions), dtype=np.bool_), (), known.fingerprints, known.lengths)
        rows = self._buffers.make(len(positions), self._length(known, length))
        mask = self.store.read(positions, rows, known)
        num_bytes = sum(tensor.nbytes for tensor in rows)
        sent = self._upload.send(rows)
        with self._counting:
            self.wall_s += time.perf_counter() - started
            self.num_rows += int(mask.sum())
            self.num_bytes += int(num_bytes * mask.mean())
        return Read(mask, sent, known.fingerprints, known.lengths)

    def _length(self, known: Rows, length: int | None) -> int | None:
        if not self._buffers.has_length or length is not None:
            return length
        return self.lengths.length(int(known.lengths[known.valid].max()))
