"""Which calls of `run.step` count: those behind a step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from egeria.report.wording import plural
from egeria.session.following import Training
from egeria.session.interval import IntervalMeter
from egeria.session.timing import Stopwatch

CHECKED_CALLS = 100
"""Calls without any step of an optimizer after which that is told."""


@dataclass(eq=False)
class StepCounter:
    """Counts a call of `run.step` if an optimizer has stepped since the last one, as its post-step
    hook tells.

    Calls in between are micro-batches: the step gets the mean of their losses. A step that
    `GradScaler` skips is one of them, unless the optimizer is fused, which skips on the device. Of
    several optimizers any will do. An optimizer without hooks is taken to step at each call.
    """

    training: Training
    meter: IntervalMeter
    """Keeps the losses."""
    spend: Callable[[float, float], None]
    """Counts seconds in the midst of the user's iteration."""

    def __post_init__(self) -> None:
        self._has_stepped = self._counts_all = False
        self._num_calls, self._num_steps = 0, [0] * len(self.training.optimizers)
        self._handles: list[Any] = []
        try:
            for index, optimizer in enumerate(self.training.optimizers):
                note = partial(self._note_step, index)
                self._handles.append(optimizer.register_step_post_hook(note))
        except Exception:  # a class of the user's own need not have them
            self._counts_all = True

    def take(self, loss: Any) -> float | Tensor | None:
        """Return the loss of a call that counts, as a number or a 0-d tensor on its device; None
        for a micro-batch.

        Raises:
            ConfigError: the loss is neither a number nor a tensor of one element.
        """
        watch, value = Stopwatch(), self.meter.read(loss)
        counts, self._has_stepped = self._has_stepped or self._counts_all, False
        self._num_calls += 1
        if counts:
            self._check_length()
        else:
            self.meter.hold(value)
            if self._num_calls == CHECKED_CALLS and not any(self._num_steps):
                self.training.recorder.decline("counting calls of run.step", _NO_STEPS)
        self.spend(*watch.read())
        return value if counts else None

    def why_too_few(self) -> str:
        """Return what to say at the end if `run.step` was called too rarely; else nothing."""
        made, calls = min(self._num_steps, default=0), self._num_calls
        if made <= 2 * calls:  # hooks of an optimizer that is made of another may fire twice
            return ""
        called = f"called {plural(calls, 'time')}" if calls else "never called"
        were = "was" if made == 1 else "were"
        return f"run.step was {called}, but {plural(made, 'step')} of the optimizer {were} made"

    def close(self) -> None:
        """Leave the optimizers as they were found."""
        while self._handles:
            self._handles.pop().remove()

    def state_dict(self) -> dict[str, Any]:
        """Return whether an optimizer has stepped since the last call."""
        return {"has_stepped": self._has_stepped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._has_stepped = bool(state["has_stepped"])

    def _note_step(self, index: int, *_: Any) -> None:
        self._has_stepped = True
        self._num_steps[index] += 1

    def _check_length(self) -> None:
        """Say so once where there are more steps than the run was to have."""
        total_steps, recorder = self.training.total_steps, self.training.recorder
        if total_steps is not None and recorder.step >= total_steps:
            reason = (
                f"more optimizer steps than total_steps={total_steps} were made, so that what is "
                "still to come is unknown from here on. It takes the optimizer steps of the whole "
                "run"
            )
            recorder.decline("looking ahead", reason)


_NO_STEPS = (
    f"none of {CHECKED_CALLS} calls of run.step came behind a step of an optimizer that attach was "
    "given, so that nothing can be measured or frozen. Give attach the optimizer that makes the "
    "steps, and call run.step(loss) once after each of them"
)
