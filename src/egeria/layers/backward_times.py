"""What the backward pass of each layer module takes, timed in the user's own training steps."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.copies import PlainCopies
from egeria.layers.modules import LayerModule
from egeria.layers.undisturbed import is_own_pass

Stamp = float | torch.cuda.Event
logger = logging.getLogger("egeria")
MOST_STEPS = 32  # that are timed; of more nothing is learned
OVER = -1
"""Stands in front of the first layer module: when a backward pass was over."""


class BackwardTimes:
    """Times when the gradient reaches the output of each layer module, at one step after each
    `arm`.

    The backward pass of a layer module lies between the gradient of its output and that of the one
    before it; that of the first one ends with the pass, or where that of another forward pass
    begins. What follows until the optimizer's step, such as clipping, or waiting for other
    processes, is timed as well. Time is that of the stream on CUDA, elsewhere that of the clock. A
    fault of ours ends the timing, and so do gradients on several devices, whose streams have no
    time in common.
    """

    def __init__(self) -> None:
        self._has_failed = False
        self._handles: list[Any] = []
        self._passes: list[dict[int, Stamp]] = []
        """For each pass of the step by the place of the layer module, or `OVER`; the last is the
        one under way."""
        self._ended: tuple[int, list[dict[int, Stamp]], Stamp] | None = None
        """Of the step that was timed: how many layer modules there were, its passes, and when the
        optimizer began."""
        self._seen: set[int] = set()
        """Places of the layer modules that the forward pass under way has come through."""
        self._num_modules = 0
        self._device = torch.device("cpu")  # of the newest gradient
        self._shares: list[list[float]] = []
        """Of an iteration, for each step that was timed: what each layer module took, then what the
        loop did."""

    def arm(self, model: nn.Module, modules: Sequence[LayerModule]) -> None:
        """Time the coming step."""
        self.disarm()
        if len(self._shares) >= MOST_STEPS or self._has_failed:
            return
        self._num_modules = len(modules)
        for place, module in enumerate(modules):
            watched = model.get_submodule(module.tap)
            hook = watched.register_forward_hook(_Watch(self, place))
            self._handles += [hook, PlainCopies(watched)]

    def disarm(self) -> None:
        """Take the hooks off the model."""
        handles, self._handles, self._passes = self._handles, [], []
        self._seen.clear()
        for handle in handles:
            handle.remove()

    def end_step(self) -> None:
        """Note that the backward passes of the step are over."""
        passes = [
            stamps for stamps in self._passes if stamps
        ]  # one without is of a loss that nothing was made of
        if self._handles and passes:
            self.guard(lambda: self._end(passes))
            self.disarm()

    def _end(self, passes: list[dict[int, Stamp]]) -> None:
        self._ended = self._num_modules, passes, _now(self._device)

    def begin_pass(self, place: int, output: Any) -> None:
        """Watch for the gradient of an output; the first layer module begins a pass."""
        activation = tree.first_activation(output)
        if not self._passes or place in self._seen:
            self._passes.append({})
            self._seen.clear()
        self._seen.add(place)
        if activation is not None and activation.requires_grad:
            stamps = self._passes[-1]

            def note(gradient: Tensor) -> None:
                self.guard(lambda: self._note(stamps, place, gradient.device))

            activation.register_hook(note)  # type: ignore[no-untyped-call]

    def _note(self, stamps: dict[int, Stamp], place: int, device: torch.device) -> None:
        self._device = device
        if not stamps:
            for earlier in (
                self._passes
            ):  # in one backward pass through several forward passes, the last one is first
                if earlier:
                    earlier.setdefault(OVER, _now(device))
            finish = partial(self.guard, lambda: stamps.setdefault(OVER, _now(device)))
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        stamps.setdefault(place, _now(device))

    def guard(self, action: Callable[[], object]) -> None:
        """Do something of ours, whatever becomes of it; where it fails, nothing
        is timed any more.
        """
        if not self._has_failed:
            try:
                action()
            except Exception:  # such as an event in a graph that is captured
                logger.debug("the backward pass cannot be timed", exc_info=True)
                self._has_failed, self._ended, self._passes, self._shares = True, None, [], []

    def shares(self, num_modules: int, iteration_s: float) -> tuple[list[float], float] | None:
        """Return the shares of an iteration that backward passes and the loop take, the medians of
        those timed.

        Args:
            num_modules: of the present cut; what was timed under another is forgotten.
            iteration_s: seconds of an iteration in the interval of the newest step.

        Returns:
            For each layer module, front to back, and for what the loop does between them and the
            optimizer's step.
        """
        ended, self._ended = self._ended, None
        if ended is not None and ended[0] == num_modules and iteration_s > 0:
            self.guard(lambda: self._take(_by_module(*ended), iteration_s))
        self._shares = [shares for shares in self._shares if len(shares) == num_modules + 1]
        if not self._shares:
            return None
        *medians, loop = (statistics.median(column) for column in zip(*self._shares, strict=True))
        return medians, loop

    def _take(self, seconds: Sequence[float] | None, iteration_s: float) -> None:
        if seconds is not None:
            whole_s = max(
                iteration_s, math.fsum(seconds)
            )  # a step that was held up takes longer than most
            self._shares.append([part / whole_s for part in seconds])

    def state_dict(self) -> dict[str, Any]:
        """Return what was found so far."""
        return {"shares": [list(shares) for shares in self._shares]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._shares = [list(shares) for shares in state.get("shares", ())]


class _Watch:
    """A forward hook; a copy of the model has none of it."""

    def __init__(self, times: BackwardTimes, place: int) -> None:
        self._times, self._place = times, place

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watch:
        return self

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> None:
        is_recomputed = (
            torch._C._current_graph_task_id() != -1
        )  # by activation checkpointing, in a backward pass
        if module.training and torch.is_grad_enabled() and not is_own_pass() and not is_recomputed:
            self._times.guard(lambda: self._times.begin_pass(self._place, output))


def _now(device: torch.device) -> Stamp:
    if device.type != "cuda":
        return time.perf_counter()
    with torch.cuda.device(device):  # the loop may have another one at hand than the model is on
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
    return event


def _by_module(
    num_modules: int, passes: Sequence[Mapping[int, Stamp]], stepped: Stamp
) -> list[float] | None:
    """Return the seconds of all passes for each layer module, and then those from the last one to
    the optimizer's step.

    None where gradients came in another order, or a pass never ended.
    """
    if not all(OVER in stamps for stamps in passes):
        return None
    seconds = [0.0] * num_modules
    for stamps in passes:
        for before, place in itertools.pairwise(sorted(stamps)):
            seconds[place] += _seconds(stamps[place], stamps[before])
    seconds.append(min(_seconds(stamps[OVER], stepped) for stamps in passes))
    return seconds if min(seconds) >= 0 else None


def _seconds(begin: Stamp, end: Stamp) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    return float(begin.elapsed_time(end)) / 1000
