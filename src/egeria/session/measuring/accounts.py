"""What a run measures beside time: memory at its fullest, and energy. Both are asked for, and
neither is needed.
"""

from __future__ import annotations

import importlib
import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from egeria.events import MemoryProfiled
from egeria.layers.batch import Batch
from egeria.layers.memory import kept_bytes
from egeria.layers.modules import LayerModule
from egeria.report.accounts import ENERGY, PEAK
from egeria.session.following import Training

WINDOW = "egeria interval"
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What sets `VmHWM` back to what is resident now. Source: proc(5)."""


class Counter(Protocol):
    """Measures something from one call to the next."""

    def begin(self) -> None:
        """An interval begins."""

    def end(self) -> float | None:
        """Return what was found in the interval; None where nothing could be."""


class Accounts:
    """Measures the peak memory and the energy of each interval, as `accounts` asks for; a failure
    ends the measuring.

    Args:
        training: what is trained.
    """

    def __init__(self, training: Training) -> None:
        self._recorder = training.recorder
        self._counters: dict[str, Counter] = {}
        self._is_partial, self._began = False, 0.0
        settings, devices = training.config.accounts, _accelerators(training)
        if not training.ranks.leads:  # only the first process keeps a journal
            return
        if settings.peak_memory:
            self._open("peak_bytes", partial(_AllocatorPeak, devices) if devices else _ResidentPeak)
        if settings.energy:
            self._open("energy_j", partial(_Energy, devices))
        self._began = time.perf_counter()  # Zeus takes seconds to begin

    def take(self) -> dict[str, Any]:
        """Return what the interval took, by the names of its journal fields, and begin the next."""
        found: dict[str, Any] = {}
        is_partial, self._is_partial = self._is_partial, False
        for name, counter in list(self._counters.items()):
            found[name] = self._try(name, counter.end)
            if name in self._counters:
                self._try(name, counter.begin)
        began, self._began = self._began, time.perf_counter()
        if found.get("energy_j"):
            found["energy_window_s"] = self._began - began
        return {} if is_partial else found

    def begin_anew(self) -> None:
        """Leave the interval under way out: a resumed run measures a part of it only."""
        self._is_partial = True

    def close(self) -> None:
        """Measure nothing more."""
        self._counters.clear()

    def _open(self, name: str, make: Callable[[], Counter]) -> None:
        counter = self._try(name, make)
        if counter is not None:
            self._counters[name] = counter
            self._try(name, counter.begin)

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._counters.pop(name, None)
            self._recorder.decline(
                {"peak_bytes": PEAK, "energy_j": ENERGY}[name], str(error) or type(error).__name__
            )
            return None


def count_memory(
    training: Training, modules: Sequence[LayerModule], batch: Batch, scale: float
) -> None:
    """Journal what an iteration keeps for each layer module while all train; not in compiled code
    or among several.

    Args:
        training: what is trained.
        modules: front to back.
        batch: a training batch, or a part of one.
        scale: how many times as many samples an iteration has.
    """
    # Of several processes only one has a batch, and a pass of it alone would wait for the others in
    # a collective.
    if not training.ranks.is_alone or training.hooks.is_compiled:
        return
    try:
        found = kept_bytes(training.model, modules, training.optimizers, batch)
        found["activations"] = [round(scale * size) for size in found["activations"]]
        training.recorder.write(MemoryProfiled(step=training.recorder.step, **found))
    except Exception as error:
        training.recorder.fault("counting memory", error)


class _AllocatorPeak:
    """The most memory that PyTorch has allocated on the accelerators, in bytes."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = devices

    def begin(self) -> None:
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def end(self) -> int:
        return sum(torch.cuda.max_memory_allocated(device) for device in self._devices)


class _ResidentPeak:
    """The most main memory that was resident for this process, in bytes."""

    def __init__(self) -> None:
        if not STATUS.exists() or not RESET.exists():
            raise OSError("only Linux tells the peak of memory of an interval")

    def begin(self) -> None:
        RESET.write_text(RESET_PEAK)

    def end(self) -> int | None:
        found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
        return int(found[1]) * 1024 if found else None


class _Energy:
    """The energy that Zeus reads from counters of the GPUs and of the CPU, in joules."""

    def __init__(self, devices: Sequence[int]) -> None:
        try:
            zeus = importlib.import_module("zeus.monitor")
        except ImportError as error:
            raise ImportError(
                f'{error}: Zeus reads energy, pip install "egeria[energy]"'
            ) from error
        self._monitor = zeus.ZeusMonitor(gpu_indices=list(devices))
        if not (self._monitor.gpu_indices or self._monitor.cpu_indices):
            raise OSError(
                "no counter can be read: the model is on no GPU, and RAPL is not there or needs "
                "rights that this "
                "process has not"
            )

    def begin(self) -> None:
        self._monitor.begin_window(WINDOW, sync_execution=False)

    def end(self) -> float | None:
        with (
            warnings.catch_warnings()
        ):  # of a counter that did not move yet: that is told by 0 below
            warnings.simplefilter("ignore")
            found = self._monitor.end_window(WINDOW, sync_execution=False)
        parts = [found.gpu_energy, found.cpu_energy or {}, found.dram_energy or {}]
        return sum(sum(part.values()) for part in parts) or None


def _accelerators(training: Training) -> list[int]:
    return sorted(
        {
            parameter.device.index or 0
            for parameter in training.model.parameters()
            if parameter.is_cuda
        }
    )
