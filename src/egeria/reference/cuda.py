"""Running a reference on a GPU beside the training, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from egeria import tree
from egeria.layers.batch import Batch
from egeria.reference.machine import RungName
from egeria.reference.rungs import Rung

_Result = TypeVar("_Result")


class SideStreamRung:
    """Lets the kernels of a rung wait for what was queued before, and what comes behind wait for them."""

    def __init__(self, rung: Rung, device: torch.device) -> None:
        self.name: RungName = rung.name
        self._rung = rung
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)

    @property
    def detail(self) -> str:
        """How it is made."""
        return f"{self._rung.detail}, own CUDA stream"

    def update(self) -> None:
        """Take over the weights of the snapshot as they are now."""
        self._beside(self._rung.update, ())

    def readings(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the activations at all taps."""
        return self._beside(lambda: self._rung.readings(batch), (batch.args, dict(batch.kwargs)))

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the activation at one tap in float32, running the model no further."""
        return self._beside(lambda: self._rung.activation(tap, batch), (batch.args, dict(batch.kwargs)))

    def found(self) -> dict[str, Any]:
        """Return what the build has found out."""
        return self._rung.found()

    def _beside(self, action: Callable[[], _Result], inputs: Any) -> _Result:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = action()
        # The allocator must not hand out memory that the other stream still reads.
        for tensor in tree.leaves(inputs):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        for tensor in tree.leaves(result):
            if tensor.is_cuda:
                tensor.record_stream(current)
        current.wait_stream(self._stream)
        return result
