"""What an iteration is measured with: time by laps, and where the frozen front ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from egeria import tree
from egeria.layers.modules import LayerModule


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration took, in wall-clock seconds, CPU seconds and bytes."""

    depth: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    cpu_s: float
    prefix_s: float | None
    stored_bytes: int | None
    peak_bytes: int | None


class Laps:
    """Times the laps of an iteration; waits for the accelerators at the end of each.

    Sets the peak of `torch.cuda.max_memory_allocated` back.

    Args:
        devices: the CUDA devices that the model is on.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = devices
        self._wait()
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        self.seconds: list[float] = []
        self.cpu_s = 0.0
        """CPU seconds to the end of the last lap."""
        self._cpu_began, self._last = time.process_time(), time.perf_counter()

    def lap(self) -> None:
        """End a lap."""
        self._wait()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last, self.cpu_s = now, time.process_time() - self._cpu_began

    @property
    def peak_bytes(self) -> int | None:
        """Most memory in use on the accelerators since the beginning; None on the CPU."""
        return sum(map(torch.cuda.max_memory_allocated, self._devices)) if self._devices else None

    def _wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


class Marks:
    """Notes when each layer module has put out its activation in a forward pass, and how large that is.

    A model that is called several times in an iteration is timed in all of these calls; what a checkpoint computes
    again in the backward pass is not.

    Args:
        model: that is called.
        modules: its layer modules, front to back.
        devices: the CUDA devices that it is on; of several nothing is timed.
    """

    def __init__(self, model: nn.Module, modules: Sequence[LayerModule], devices: Sequence[int]) -> None:
        self._devices = devices
        self._began: Any = None
        """When the call under way began; None outside of one."""
        self._ends: dict[int, Any] = {}
        """In this call, by place."""
        self._spans: dict[int, list[tuple[Any, Any]]] = {}
        self._bytes: dict[int, int] = {}
        taps = [model.get_submodule(module.tap) for module in modules]
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            *(tap.register_forward_hook(self._make_note(place)) for place, tap in enumerate(taps)),
            model.register_forward_hook(self._leave),
        ]

    def __enter__(self) -> Marks:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """An iteration begins."""
        self._spans, self._began = {}, None

    def prefix(self, depth: int) -> tuple[float | None, int | None]:
        """Return the seconds that the front `depth` layer modules took, and the bytes they put out for one sample."""
        spans = self._spans.get(depth - 1)
        if not depth or not spans or len(self._devices) > 1:
            return (None if depth else 0.0), None
        return sum(self._seconds(begin, end) for begin, end in spans), self._bytes.get(depth - 1)

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1000 if self._devices else end - begin)

    def _now(self) -> Any:
        if not self._devices:
            return time.perf_counter()
        with torch.cuda.device(self._devices[0]):
            event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return event

    def _enter(self, _model: nn.Module, _args: Any) -> None:
        self._began, self._ends = self._now(), {}

    def _leave(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        for place, end in self._ends.items():
            self._spans.setdefault(place, []).append((self._began, end))
        self._began = None

    def _make_note(self, place: int) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._began is None:
                return
            self._ends[place] = self._now()
            rows = tree.num_rows(output)
            if rows:
                self._bytes[place] = sum(part.numel() * part.element_size() for part in tree.leaves(output)) // rows

        return note


def devices_of(model: nn.Module) -> list[int]:
    """Return the CUDA devices that a model is on."""
    return sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
