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

Stamp = Any
"""Of a `DeviceClock`."""


class DeviceClock:
    """Tells when a model had done what it was asked for until then.

    On one CUDA device a stamp is an event in its queue, and nothing waits for it before it is read:
    work is queued ahead there, and to wait at each stamp would make every iteration longer than it
    is in the loop, the short ones most. On several the clock waits for all of them.

    Args:
        devices: the CUDA devices that the model is on; none for the CPU.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = devices

    def now(self) -> Stamp:
        """Return a stamp."""
        if len(self._devices) == 1:
            with torch.cuda.device(self._devices[0]):
                event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record()
            return event
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Return the seconds between two stamps; waits until the device has come to the second."""
        if len(self._devices) != 1:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end) / 1000)


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration took: stamps, CPU seconds and bytes."""

    depth: int
    stamps: tuple[Stamp, Stamp, Stamp, Stamp]
    """When it began, and the ends of its forward pass, its backward pass, and the optimizer's
    step."""
    cpu_s: float
    prefix: Sequence[tuple[Stamp, Stamp]] | None
    """Begin and end of what lies in the frozen front, for each call of the model; None where it was
    not seen."""
    stored_bytes: int | None
    peak_bytes: int | None


class Laps:
    """Stamps the laps of an iteration. Sets the peak of `torch.cuda.max_memory_allocated` back.

    Args:
        clock: of the model.
        devices: the CUDA devices that the model is on.
    """

    def __init__(self, clock: DeviceClock, devices: Sequence[int]) -> None:
        self._clock, self._devices = clock, devices
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        self.stamps = [clock.now()]
        self._cpu_began = time.process_time()

    def lap(self) -> None:
        """End a lap."""
        self.stamps.append(self._clock.now())

    @property
    def cpu_s(self) -> float:
        """CPU seconds since the beginning."""
        return time.process_time() - self._cpu_began

    @property
    def peak_bytes(self) -> int | None:
        """Most memory in use on the accelerators since the beginning; None on the CPU."""
        return sum(map(torch.cuda.max_memory_allocated, self._devices)) if self._devices else None


class Marks:
    """Notes when each layer module has put out its activation in a forward pass, and how large that
    is.

    A model that is called several times in an iteration is timed in all of these calls; what a
    checkpoint computes again in the backward pass is not.

    Args:
        model: that is called.
        modules: its layer modules, front to back.
        clock: of the model; None where its parts cannot be timed, as on several devices.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[LayerModule], clock: DeviceClock | None
    ) -> None:
        self._clock = clock
        self._began: Stamp | None = None
        """When the call under way began; None outside of one."""
        self._ends: dict[int, Stamp] = {}
        """In this call, by place."""
        self._spans: dict[int, list[tuple[Stamp, Stamp]]] = {}
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

    def prefix(self, depth: int) -> tuple[list[tuple[Stamp, Stamp]] | None, int | None]:
        """Return when the front `depth` layer modules began and ended in each call, and what they
        put out.

        The latter are bytes for one sample. None stands for what was not seen.
        """
        if not depth:
            return [], None
        return self._spans.get(depth - 1), self._bytes.get(depth - 1)

    def _enter(self, _model: nn.Module, _args: Any) -> None:
        self._began, self._ends = self._clock.now() if self._clock else None, {}

    def _leave(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        for place, end in self._ends.items():
            self._spans.setdefault(place, []).append((self._began, end))
        self._began = None

    def _make_note(self, place: int) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._began is None:
                return
            assert self._clock is not None
            self._ends[place] = self._clock.now()
            rows = tree.num_rows(output)
            if rows:
                self._bytes[place] = (
                    sum(part.numel() * part.element_size() for part in tree.leaves(output)) // rows
                )

        return note


def devices_of(model: nn.Module) -> list[int]:
    """Return the CUDA devices that a model is on."""
    return sorted(
        {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}
    )
