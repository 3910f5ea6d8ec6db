"""Hooks on optimizer steps: owned in one place, timed as overhead, and never a danger to the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from egeria.journal.recorder import Recorder
from egeria.session.timing import Stopwatch

FAULTS_BEFORE_GIVING_UP = 3


class OptimizerHooks:
    """Calls back before and after each optimizer step, until it is closed or has failed too often in a row.

    Args:
        optimizers: whose steps.
        recorder: records faults.
        spend: counts the seconds that the callbacks take, which lie in the midst of the user's iteration.
        what: what is not done where it fails, in the words of a warning.
        before: called with an optimizer before its step.
        after: the same after it; None for nothing.
        takes_closures: whether steps with a closure, which computes gradients within the step, are called back for.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        recorder: Recorder,
        spend: Callable[[float, float], None],
        *,
        what: str,
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer], None] | None = None,
        takes_closures: bool = True,
    ) -> None:
        self._recorder = recorder
        self._spend = spend
        self._what = what
        self._handles: list[Any] = []
        self._has_given_up = False
        self._takes_closures = takes_closures
        try:
            for optimizer in optimizers:
                self._handles.append(optimizer.register_step_pre_hook(self._calling(before)))
                if after is not None:
                    self._handles.append(optimizer.register_step_post_hook(self._calling(after)))
        except AttributeError as error:  # what wraps an optimizer need not have hooks
            self.close()
            recorder.decline(what, f"an optimizer takes no hooks on its steps ({error})")

    @property
    def is_closed(self) -> bool:
        """Return whether no callback is made any more."""
        return self._has_given_up or not self._handles

    def close(self) -> None:
        """Leave the optimizers as they were found."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _calling(self, action: Callable[[Optimizer], None]) -> Callable[..., None]:
        faults_in_a_row = 0

        def call(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal faults_in_a_row
            has_closure = kwargs.get("closure") is not None or any(callable(entry) for entry in args[1:])
            if self._has_given_up or (has_closure and not self._takes_closures):
                return
            watch = Stopwatch()
            try:
                action(optimizer)
                faults_in_a_row = 0
            except Exception as error:
                faults_in_a_row += 1
                self._note(error, faults_in_a_row)
            self._spend(*watch.read())

        return call

    def _note(self, error: Exception, count: int) -> None:
        self._recorder.fault(self._what, error)
        if count >= FAULTS_BEFORE_GIVING_UP:
            self._has_given_up = True  # hooks must not be removed in the midst of a step, which goes through them
            self._recorder.decline(self._what, f"it failed {count} times in a row, last with: {error}")
