"""What an iteration is measured with: time by laps, memory for the backward pass, and where the frozen front ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.modules import LayerModule


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration took, in wall-laps seconds, CPU seconds and bytes."""

    depth: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    cpu_s: float
    prefix_s: float | None
    stored_bytes: int | None
    peak_bytes: int | None


class Laps:
    """Times the laps of an iteration; waits for the accelerator at the end of each."""

    def __init__(self, model: nn.Module) -> None:
        self._is_cuda = is_cuda(model)
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.seconds: list[float] = []
        self._cpu_s, self._last = time.process_time(), time.perf_counter()

    def lap(self) -> None:
        """End a lap."""
        if self._is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    @property
    def cpu_s(self) -> float:
        """CPU seconds since the beginning."""
        return time.process_time() - self._cpu_s

    @property
    def peak_bytes(self) -> int | None:
        """Most memory in use on the accelerator since the beginning; None on the CPU."""
        return torch.cuda.max_memory_allocated() if self._is_cuda else None


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a forward pass keeps for the backward pass; a storage that several tensors share counts once."""

    def __init__(self, own: set[int]) -> None:
        self._found: dict[int, int] = {}
        self._own = own
        super().__init__(self._note, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes so far, without those of the model's own tensors."""
        return sum(self._found.values())

    def _note(self, tensor: Tensor) -> Tensor:
        key = storage_of(tensor)
        if key not in self._own:
            self._found[key] = tensor.untyped_storage().nbytes()
        return tensor


class Marks:
    """Notes when each layer module has put out its activation in a forward pass, and how large that is."""

    def __init__(self, model: nn.Module, modules: Sequence[LayerModule]) -> None:
        self._is_cuda = is_cuda(model)
        self._stamps: dict[int, Any] = {}
        self._bytes: dict[int, int] = {}
        taps = [model.get_submodule(module.tap) for module in modules]
        self._handles = [tap.register_forward_hook(self._make_note(place)) for place, tap in enumerate(taps)]

    def __enter__(self) -> Marks:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """A forward pass begins."""
        self._stamps = {-1: self._now()}

    def prefix(self, depth: int) -> tuple[float | None, int | None]:
        """Return the seconds to the output of the front `depth` layer modules, and its bytes for one sample."""
        begin, end = self._stamps.get(-1), self._stamps.get(depth - 1)
        if not depth or begin is None or end is None:
            return (None if depth else 0.0), None
        seconds = begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin
        return seconds, self._bytes.get(depth - 1)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _make_note(self, place: int) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            self._stamps[place] = self._now()
            rows = tree.num_rows(output)
            if rows:
                self._bytes[place] = sum(part.numel() * part.element_size() for part in tree.leaves(output)) // rows

        return note


def storage_of(tensor: Tensor) -> int:
    """Return what tells storages apart."""
    return tensor.untyped_storage().data_ptr()


def is_cuda(model: nn.Module) -> bool:
    """Return whether the model is on a CUDA device."""
    return any(parameter.is_cuda for parameter in model.parameters())
