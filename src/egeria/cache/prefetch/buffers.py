"""Memory for the rows of a batch: used again when nothing refers to it, and of the length that a batch may have."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from egeria.cache.store.rows import RowLayout

LENGTH_STEP = 8
"""Padding to a multiple, where a tokenizer does that, is to a multiple of this."""


class BufferPool:
    """Gives tensors for the rows of a batch and takes their memory back by itself.

    What a model is given may be saved by autograd until a backward pass that comes much later (gradient
    accumulation), or be changed in place. So memory has one user at a time: it returns here when
    the last tensor on it is gone, views and tensors saved for backward included, and until then
    other batches get other memory.

    Args:
        layouts: of the tensors of a row, in the order of the store.
        pinned: page-locked memory, for copies to a CUDA device that overlap with computing.
        num_free: blocks for a tensor of a row that are kept for later batches.
    """

    def __init__(self, layouts: Sequence[RowLayout], *, pinned: bool = False, num_free: int = 4) -> None:
        self._layouts = tuple(layouts)
        self._pinned = pinned and torch.cuda.is_available()
        self._num_free = num_free * len(self._layouts)
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        # Filled by finalizers, which may run anywhere, also inside the lock: appending needs none.
        self._returned: deque[NDArray[np.uint8]] = deque(maxlen=max(1, self._num_free))

    def make(self, num_rows: int, length: int | None = None) -> list[Tensor]:
        """Return one tensor [num_rows, ...] for each layout, of this or the greatest length, uninitialized."""
        return [self._make(layout, (num_rows, *layout.shape_at(length))) for layout in self._layouts]

    def _make(self, layout: RowLayout, shape: tuple[int, ...]) -> Tensor:
        block = self._take_block(int(np.prod(shape, dtype=np.int64)) * layout.dtype.itemsize)
        lease = block[:]  # numpy's own object, which torch holds as long as the storage lives
        weakref.finalize(lease, self._returned.append, block).atexit = False
        storage = torch.from_numpy(lease).untyped_storage()
        strides = torch.empty(shape, device="meta").stride()
        # Not a view: the model may change it in place, with gradients.
        return torch.empty(0, dtype=layout.dtype, device="cpu").set_(storage, 0, shape, strides)

    def _take_block(self, needed_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            free = self._free
            while self._returned:
                free.append(self._returned.popleft())
            fitting = [index for index, block in enumerate(free) if needed_bytes <= block.nbytes <= 2 * needed_bytes]
            best = min(fitting, key=lambda index: free[index].nbytes, default=None)
            found = None if best is None else free.pop(best)
            del free[: max(0, len(free) - self._num_free)]  # the oldest: of lengths not seen of late
        if found is not None:
            return found
        block: Any = torch.empty(max(1, needed_bytes), dtype=torch.uint8, device="cpu", pin_memory=self._pinned).numpy()
        return block  # type: ignore[no-any-return]


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
