"""Memory for the rows of a batch, used again only when no tensor refers to it any more."""

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

_Block = NDArray[np.uint8]


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
        self.layouts = tuple(layouts)
        self._pinned = pinned and torch.cuda.is_available()
        self._num_free = num_free * len(self.layouts)
        self._free: list[_Block] = []
        self._lock = threading.Lock()
        # Filled by finalizers, which may run anywhere, also inside the lock: appending needs none.
        self._returned: deque[_Block] = deque(maxlen=max(1, self._num_free))

    @property
    def has_length(self) -> bool:
        """Tell whether rows can be of different lengths."""
        return any(layout.length_axis is not None for layout in self.layouts)

    def make(self, num_rows: int, length: int | None = None) -> list[Tensor]:
        """Return one tensor [num_rows, ...] for each layout; what they hold is undefined.

        Args:
            num_rows: rows of the batch.
            length: of the length axes; None for that of the layout.
        """
        shapes = [layout.shape if length is None else layout.shape_at(length) for layout in self.layouts]
        return [self._make(layout, (num_rows, *shape)) for layout, shape in zip(self.layouts, shapes, strict=True)]

    def _make(self, layout: RowLayout, shape: tuple[int, ...]) -> Tensor:
        needed_bytes = int(np.prod(shape, dtype=np.int64)) * layout.dtype.itemsize
        block = self._take_block(needed_bytes)
        lease = block[:]  # numpy's own object, which torch holds as long as the storage lives
        weakref.finalize(lease, self._returned.append, block).atexit = False
        storage = torch.from_numpy(lease).untyped_storage()
        strides = torch.empty(shape, device="meta").stride()
        # Not a view: the model may change it in place, with gradients.
        tensor = torch.empty(0, dtype=layout.dtype, device="cpu")
        return tensor.set_(storage, 0, shape, strides)

    def _take_block(self, needed_bytes: int) -> _Block:
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            fitting = [i for i, block in enumerate(self._free) if needed_bytes <= block.nbytes <= 2 * needed_bytes]
            best = min(fitting, key=lambda index: self._free[index].nbytes, default=None)
            found = None if best is None else self._free.pop(best)
            del self._free[: max(0, len(self._free) - self._num_free)]  # the oldest: of lengths not seen of late
        if found is not None:
            return found
        block: Any = torch.empty(max(1, needed_bytes), dtype=torch.uint8, device="cpu", pin_memory=self._pinned).numpy()
        return block  # type: ignore[no-any-return]


def fitted(rows: Sequence[Tensor], layouts: Sequence[RowLayout], length: int) -> list[Tensor]:
    """Return rows [b, ...] cut or padded with zeros to a length.

    Contiguous whatever the length was: models view what they get in other shapes.
    """
    return [_fit(tensor, layout.length_axis, length) for tensor, layout in zip(rows, layouts, strict=True)]


def _fit(tensor: Tensor, row_axis: int | None, length: int) -> Tensor:
    if row_axis is None or tensor.shape[row_axis + 1] == length:
        return tensor
    axis = row_axis + 1
    common = min(tensor.shape[axis], length)
    shape = (*tensor.shape[:axis], length, *tensor.shape[axis + 1 :])
    result = tensor.new_zeros(shape)
    result.narrow(axis, 0, common).copy_(tensor.narrow(axis, 0, common))
    return result
