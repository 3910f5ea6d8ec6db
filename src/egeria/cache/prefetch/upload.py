"""Bringing what was read to the device of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Upload:
    """Copies rows to a CUDA device on a stream of its own, beside the computing; on the CPU it does nothing.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream = torch.cuda.Stream(self._device) if self._device is not None else None  # type: ignore[no-untyped-call]

    def send(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return rows on the device, there already: the memory they came from is free for the next batch.

        Called by the reader thread, which has nothing better to do than to wait for the copy.
        """
        if self._stream is None:
            return list(rows)
        with torch.cuda.stream(self._stream):
            sent = [tensor.to(self._device, non_blocking=True) for tensor in rows]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()
        return sent

    def receive(self, rows: Sequence[Tensor]) -> None:
        """Tell the allocator that rows sent are used by the stream of the caller from here on."""
        if self._stream is not None:
            for tensor in rows:
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def empty(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors on the device like these, with undefined contents."""
        return (
            list(rows) if self._device is None else [torch.empty_like(tensor, device=self._device) for tensor in rows]
        )
