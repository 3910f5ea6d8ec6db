"""Gradient accumulation: `run.step` called for each micro-batch counts once for each optimizer
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from egeria.session.following import Training
from egeria.session.measuring.interval import IntervalMeter
from egeria.session.measuring.timing import Stopwatch
from egeria.session.ranks import LostError, OutOfStepError, Subject

MOST_MICRO_BATCHES = 1024
"""More calls without an optimizer step in between are no accumulation: the steps are made in some
way unseen."""
WHAT = "counting each call of run.step"
CHECKED_CALLS = 20
"""Calls after which it is looked at whether the optimizers have made more steps."""


class Call(Enum):
    """What a call of `run.step` is."""

    COUNTS = "one optimizer step"
    WAITS = "a micro-batch of a step that is still to come"
    JOINS = (
        "the last micro-batch of a step whose first one was counted, before they were known "
        "for micro-batches"
    )


class Look(NamedTuple):
    """What parameters look like at a call without an optimizer step before it."""

    weight_versions: int
    parameter: Any
    """That with the smallest gradient."""
    gradient: Tensor | None
    """The gradient itself."""


@dataclass(eq=False)
class StepCounter:
    """Decides which calls of `run.step` count, by the optimizer steps in between.

    Every call counts until gradients that one has found are added to before an optimizer steps.
    From then on a call counts where an optimizer has stepped since the last, with the mean loss of
    all calls until then. A step is seen by a hook on each optimizer, or by weights that were
    changed. An ordinary loop in which `GradScaler` skips steps removes or zeroes gradients each
    time, and counts as ever; where micro-batches were recognised, skipped steps do not count. A
    loop that calls `run.step` before the optimizer's step, or between two backward passes of a
    step, counts as ever too. Optimizers without hooks are taken to step at each call.

    All of this is the same in all processes of a job, since those zero their gradients alike, and
    tell each other what they found until micro-batches are recognised. In sharded models it is not
    seen whether gradients were zeroed (`zero_grad(set_to_none=False)`): a step that is skipped
    there is taken for a micro-batch.
    """

    training: Training
    meter: IntervalMeter
    """Keeps the losses."""
    spend: Callable[[float, float], None]
    """Counts seconds in the midst of the user's iteration."""

    def __post_init__(self) -> None:
        self._has_stepped = False
        """Whether an optimizer has, since the last call."""
        self._accumulates = False
        self._is_ahead = False
        """Whether the step that micro-batches wait for was counted at the first of them."""
        self._num_waiting = 0
        self._look: Look | None = None
        self._backward: Any = None
        """The handle of a hook on the parameter looked at, that sees whether its gradient is added
        to."""
        self._has_added: bool | Tensor | None = None
        """Whether the first that arrived after the last call was added to its gradients; None while
        none has."""
        self._is_added_to: bool | Tensor | None = False
        """Whether the last step used gradients that were there at the call before, and added to
        since."""
        self._handles: list[Any] = []
        self.num_unheard_steps = 0
        """Steps of the optimizers before the first call."""
        self._num_calls = 0
        self._num_steps = [0] * len(self.training.optimizers)
        """By optimizer, steps since the first call, up to the last call that is looked at."""
        try:
            for index, optimizer in enumerate(self.training.optimizers):
                self._handles.append(
                    optimizer.register_step_post_hook(partial(self._note_step, index))
                )
        except AttributeError:
            self.close()

    def take(self, loss: Any) -> float | Tensor | None:
        """Return the loss of a call of `run.step` that counts, as a number or a 0-d tensor on its
        device.

        Returns:
            None for a call that does not count; its loss is kept for the mean.

        Raises:
            ConfigError: the loss is neither a number nor a tensor of one element.
        """
        watch, value = Stopwatch(), self.meter.read(loss)
        self._num_calls, self.num_unheard_steps = self._num_calls + 1, 0
        if self._num_calls == CHECKED_CALLS:
            self._check_calls()
        call = self._judge()
        if call is Call.COUNTS:
            self._check_length()
        else:
            self.meter.hold(value)
        if call is Call.JOINS:
            self.meter.join_held()
        self.spend(*watch.read())
        return value if call is Call.COUNTS else None

    def close(self) -> None:
        """Leave the optimizers as they were found; every call counts from here on."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._unwatch()
        self._look = None

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the calls so far."""
        names = ("has_stepped", "accumulates", "is_ahead", "num_waiting")
        return {
            "is_watching": self._backward is not None,
            **{name: getattr(self, f"_{name}") for name in names},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Micro-batches of the step under way are recognised as ever where model and gradients were
        restored before.
        """
        self._unwatch()
        self._has_stepped, self._accumulates = state["has_stepped"], state["accumulates"]
        self._is_ahead, self._num_waiting = state["is_ahead"], state["num_waiting"]
        self._look = self._see() if state["is_watching"] and self._handles else None
        if self._look is not None:
            self._watch(self._look)

    def _note_step(self, index: int, *_: Any) -> None:
        look = self._look
        if not self._has_stepped and look is not None and look.parameter is not None:
            self._is_added_to = self._has_added if look.parameter.grad is look.gradient else False
        self._has_stepped = True
        self.num_unheard_steps += not self._num_calls
        self._num_steps[index] += 0 < self._num_calls < CHECKED_CALLS

    def _note_gradient(self, parameter: Any, *_: Any) -> None:
        """Note a gradient that arrives: whether it is added to one that is there; None where that
        cannot be seen.
        """
        if self._has_stepped:  # the calls lie between two backward passes of a step
            self._is_added_to = False
        elif self._has_added is None:
            try:  # without asking the device
                self._has_added = parameter is None or (
                    parameter.grad is not None and parameter.grad.any()
                )
            except Exception:  # of a kind that has no `any`
                self._has_added = True

    def _watch(self, look: Look) -> None:
        """See whether the gradients of a call are added to before the next step."""
        parameter = look.parameter
        if parameter is None:
            return
        if self.training.is_sharded:  # gradients of shards do not come by way of autograd
            self._backward = parameter.register_post_accumulate_grad_hook(
                partial(self._note_gradient, None)
            )
        else:
            self._backward = parameter.register_hook(partial(self._note_gradient, parameter))

    def _unwatch(self) -> tuple[bool, bool]:
        """Watch no more; return whether gradients were added to, and whether the last step used
        them.
        """
        handle, self._backward = self._backward, None
        if handle is not None:
            handle.remove()
        found = bool(self._has_added), bool(self._is_added_to)
        self._has_added, self._is_added_to = None, False
        return found

    def _judge(self) -> Call:
        if not self._handles:
            return Call.COUNTS
        try:
            return self._judge_by_gradients()
        except Exception as error:
            self.training.recorder.fault("recognising micro-batches", error)
            self.close()
            return Call.COUNTS

    def _judge_by_gradients(self) -> Call:
        has_stepped, self._has_stepped = self._has_stepped, False
        before, self._look = self._look, None
        has_added, is_added_to = self._unwatch()
        now = None if has_stepped else self._see()
        has_added = (
            has_added and before is not None and now is not None and now.gradient is before.gradient
        )
        if (
            before is not None and not self._accumulates
        ):  # a call without a step: rare where there are no micro-batches
            has_added, is_added_to = self._agree(has_added, is_added_to)
        if now is None or (before is not None and before.weight_versions != now.weight_versions):
            if is_added_to and not self._accumulates:
                self._recognise()
            joins, self._is_ahead, self._num_waiting, self._look = self._is_ahead, False, 0, now
            return Call.JOINS if joins else Call.COUNTS
        self._look = now
        if not self._accumulates:
            if not has_added:
                self._watch(now)
                return Call.COUNTS
            self._recognise()
        self._num_waiting += 1
        if self._num_waiting > MOST_MICRO_BATCHES:
            self.close()
            self.training.recorder.decline("recognising micro-batches", _UNSEEN)
            return Call.COUNTS
        return Call.WAITS

    def _agree(self, *found: bool) -> list[bool]:
        """Return what any process of the job has found: one may have parameters that its
        micro-batches do not use.
        """
        try:
            rows = self.training.ranks.gather(Subject.MICRO_BATCHES, found)
        except (
            OutOfStepError,
            LostError,
        ) as error:  # for the session to act on: it is no fault of counting
            self.training.hooks.failure, self.training.hooks.needs_check = (
                error.with_traceback(None),
                True,
            )
            rows = [found]
        return [any(column) for column in zip(*rows, strict=True)]

    def _see(self) -> Look:
        parameters = list(self.training.model.parameters())
        with_gradient = [
            entry for entry in parameters if entry.requires_grad and entry.grad is not None
        ]
        # Of several the last: some in front (LoRA's A) have gradients that are zero at first.
        smallest = min(reversed(with_gradient), key=Tensor.numel, default=None)
        versions = sum(entry._version for entry in parameters)
        return Look(versions, smallest, None if smallest is None else smallest.grad)

    def _recognise(self) -> None:
        """Go by optimizer steps from here on; the step under way was counted at its first
        micro-batch.
        """
        self._accumulates = self._is_ahead = True
        self.training.recorder.decline(WHAT, _RECOGNISED)

    def _check_calls(self) -> None:
        """Say so once where each optimizer makes several steps between two calls."""
        made, between = min(self._num_steps, default=0), CHECKED_CALLS - 1
        if (
            made > 2 * between
        ):  # as many are no proof: hooks of an optimizer made of another may fire twice
            reason = (
                f"it was called {between} times while {made} steps of the optimizer were "
                f"made. {_TOO_RARE}"
            )
            self.training.recorder.decline(WHAT, reason)

    def _check_length(self) -> None:
        """Say so once where there are more steps than the run was to have."""
        total_steps, recorder = self.training.total_steps, self.training.recorder
        if total_steps is not None and recorder.step >= total_steps:
            reason = (
                f"more optimizer steps than total_steps={total_steps} were made, so that what is "
                "still to come is "
                f"unknown from here on. It takes the optimizer steps of the whole run"
            )
            recorder.decline("looking ahead", reason)


_RECOGNISED = (
    "it was called again with no optimizer step in between, while gradients add up: these are "
    "micro-batches. They "
    "count once for each optimizer step, with their mean loss, which is to be the loss before it "
    "is divided by their "
    "number. Better call run.step behind optimizer.step() only"
)
_TOO_RARE = (
    "Each call counts as one step, so the training seems shorter than total_steps, and what is "
    "still to come longer. "
    "Call run.step after each step of the optimizer"
)
_UNSEEN = (
    f"more than {MOST_MICRO_BATCHES} calls of run.step had no optimizer step in between. Each "
    "call counts from here "
    "on; call run.step behind the optimizer's step only, and give attach the optimizer that "
    "makes the steps"
)
