"""Counting optimizer steps by the hooks of the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from egeria.distributed.refuse import has_hooks
from egeria.model.hooks import Hook

CHECKED_CALLS = 100
"""Calls of `run.step` without an optimizer step before a warning, and steps of one optimizer before
the watch for another's first step ends."""
NO_STEP = "one of the optimizers given to attach made no step. Attach those that step"
NO_STEPS = (
    f"no optimizer given to attach made a step before the first {CHECKED_CALLS} calls of "
    "run.step. Give attach the optimizer that steps, and call run.step(loss) behind it"
)


class Steps:
    """Tells which calls of `run.step` follow an optimizer step, and calls back before updates.

    A call without a step in between is a micro-batch, as in gradient accumulation or where
    `GradScaler` skips a step. Of several optimizers any step counts. An optimizer that is given a
    closure computes its gradients within its step: the callback then follows the closure.
    `before` is called with an optimizer's number right before its update, until `stop_calling`.
    Where an optimizer without hooks, which is declined, steps too, each call counts.
    """

    def __init__(self, optimizers: Sequence[Any], before: Callable[[int], None]) -> None:
        self._optimizers = optimizers
        self._before: Callable[[int], None] | None = before
        self._counts_all = not all(map(has_hooks, optimizers))
        self.has_stepped = False  # whether an optimizer has stepped since the last call of `take`
        self.num_calls = 0
        self.num_steps = [0] * len(optimizers)  # steps of each optimizer

    def open(self) -> None:
        """Register the hooks."""
        if self._counts_all:
            return
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(Hook(self, Steps._before_step))
            optimizer.register_step_post_hook(Hook(self, Steps._after_step))

    def stop_calling(self) -> None:
        """Call back no more; steps are still counted."""
        self._before = None
        self._remove("_optimizer_step_pre_hooks")

    def close(self) -> None:
        """Remove the hooks."""
        self.stop_calling()
        self._remove("_optimizer_step_post_hooks")

    def take(self) -> bool:
        """Return whether an optimizer has stepped since the last call."""
        self.num_calls += 1
        counts, self.has_stepped = self.has_stepped or self._counts_all, False
        return counts

    @property
    def is_late(self) -> bool:
        """Whether `run.step` has just been called so often without any optimizer step."""
        return self.num_calls == CHECKED_CALLS and not any(self.num_steps)

    @property
    def calls_missing(self) -> str:
        """What to say at the end where `run.step` was called too rarely; empty where it was not."""
        made, calls = min(self.num_steps, default=0), self.num_calls
        text = f"run.step was called {calls} times, but the optimizer made {made} steps"
        return text if made > 2 * calls else ""  # the hooks of one made of another may fire twice

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, number = self._before, self._optimizers.index(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if before is None:
            return None
        if closure is None:
            before(number)
            return None

        def compute_and_call() -> Any:
            loss = closure()
            before(number)
            return loss

        return args[:1], {**kwargs, "closure": compute_and_call}

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        # A fused optimizer is stepped on overflow too. To ask a GPU would wait for it, so that it
        # is asked only while the scale is being found.
        if isinstance(found_inf, torch.Tensor):
            is_asked = not found_inf.is_cuda or self._before is not None
            if is_asked and bool(found_inf):
                return
        self.has_stepped = True
        self.num_steps[self._optimizers.index(optimizer)] += 1

    def _remove(self, name: str) -> None:
        for optimizer in self._optimizers:
            table = getattr(optimizer, name, {})
            for key in [key for key, hook in table.items() if getattr(hook, "owner", None) is self]:
                table.pop(key, None)
