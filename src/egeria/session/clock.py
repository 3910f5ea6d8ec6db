"""Steps, intervals, losses and the time of an iteration."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from egeria.errors import ConfigError
from egeria.events import IntervalMeasured
from egeria.model.hooks import Hook, remove

# Calls of `run.step` without an optimizer step before a warning, and steps of one optimizer before
# the watch for another's first step ends.
CHECKED_CALLS = 100
NO_STEP = "one of the optimizers given to attach made no step. Attach those that step"
NO_STEPS = (
    f"no optimizer given to attach made a step in {CHECKED_CALLS} calls of run.step, which count "
    "as one. Give attach the optimizer that steps, and call run.step(loss) after it"
)
FEWEST = 7  # iterations that a median is taken of, where there are so many at a depth
# Of a run under a policy that asks for no intervals: their number, or their length.
INTERVALS, INTERVAL_STEPS = 100, 100
_SAVED = ("step", "evaluation", "began", "interval_steps", "iteration_s")
Loss: TypeAlias = float | Tensor


class Steps:
    """Tells which calls of `run.step` follow an optimizer step, and calls back before updates.

    A call without a step since the last one is a micro-batch. With several optimizers, a step of
    any of them counts. Up to `stop_calling`, `before` is called with an optimizer's index right
    before its update: after its closure, if it has one, which computes the gradients. With an
    optimizer without hooks, under which nothing is frozen, every call counts.
    """

    def __init__(self, optimizers: Sequence[Any], before: Callable[[int], None]) -> None:
        self._optimizers = optimizers
        self._before: Callable[[int], None] | None = before
        self._counts_all = not all(map(has_hooks, optimizers))
        self.has_stepped = False  # whether an optimizer has stepped since the last call of `take`
        self.num_calls, self.num_steps = 0, [0] * len(optimizers)  # the steps of each optimizer

    def open(self) -> None:
        """Register the hooks."""
        for optimizer in filter(has_hooks, self._optimizers):
            optimizer.register_step_pre_hook(Hook(self, Steps._before_step))
            optimizer.register_step_post_hook(Hook(self, Steps._after_step))

    def stop_calling(self) -> None:
        """End the calls back; steps are still counted."""
        self._before = None
        self._remove_hooks("_optimizer_step_pre_hooks")

    def close(self) -> None:
        """Remove the hooks."""
        self.stop_calling()
        self._remove_hooks("_optimizer_step_post_hooks")

    def take(self) -> bool:
        """Return whether an optimizer has stepped since the last call."""
        self.num_calls += 1
        counts, self.has_stepped = self.has_stepped or self._counts_all, False
        return counts

    @property
    def calls_missing(self) -> str:
        """What to say at the end if `run.step` was called too rarely, or an empty string."""
        made, calls = min(self.num_steps), self.num_calls
        if made <= 2 * calls:  # hooks may fire twice for an optimizer around another
            return ""
        return (
            f"run.step was called {calls} times, but the optimizer made {made} steps. Call "
            "run.step(loss) after each optimizer step"
        )

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
        # A fused optimizer steps on overflow too. Asking a GPU means waiting for it, so this asks
        # only in the beginning, while GradScaler looks for its scale.
        is_asked = isinstance(found_inf, Tensor) and (self._before or not found_inf.is_cuda)
        if is_asked and bool(found_inf):
            return
        self.has_stepped = True
        self.num_steps[self._optimizers.index(optimizer)] += 1

    def _remove_hooks(self, name: str) -> None:
        for optimizer in self._optimizers:
            remove(getattr(optimizer, name, {}), self)


def has_hooks(optimizer: Any) -> bool:
    """Return whether an optimizer tells when it steps, as those of torch do."""
    return hasattr(optimizer, "register_step_post_hook")


class Seconds(NamedTuple):
    """A moment or a duration: wall-clock seconds, and CPU seconds of this process."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @classmethod
    def now(cls) -> "Seconds":
        """Return the moment of the call."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, begin: "Seconds") -> "Seconds":
        """Return how long ago another moment was."""
        return Seconds(self.wall_s - begin.wall_s, self.cpu_s - begin.cpu_s)

    def plus(self, more: "Seconds") -> "Seconds":
        """Return this moment or duration plus another duration."""
        return Seconds(self.wall_s + more.wall_s, self.cpu_s + more.cpu_s)


class Clock:
    """Counts steps and intervals, and measures iterations without waiting for the device.

    An iteration lasts from the end of one `run.step` to the beginning of the next, so that our own
    work does not count as the user's. Medians leave out the long iterations with a validation or a
    checkpoint. Losses stay on their device until an interval ends.
    """

    def __init__(self, total_steps: int | None, interval_steps: int | None = None) -> None:
        usual = max(1, (total_steps or INTERVALS * INTERVAL_STEPS) // INTERVALS)
        self.total_steps, self.interval_steps = total_steps, interval_steps or usual
        # Steps so far, the number of intervals so far, and the step at which this one began.
        self.step = self.evaluation = self.began = 0
        # Median seconds of an iteration in the newest interval with nothing frozen, 0 if unknown;
        # and CPU seconds spent by a controller process.
        self.iteration_s = self.controller_cpu_s = 0.0
        self._losses: list[Loss] = []
        # Of the micro-batches since the last step: the sum of their losses, and their number.
        self._held_sum, self.num_held = cast(Loss, 0.0), 0
        self.overhead = self._entered = Seconds()  # so far; and when this `run.step` began
        self._left: Seconds | None = None  # when the newest call of `run.step` returned
        self._iterations: list[Seconds] = []
        # The newest iterations of earlier intervals, by frozen depth.
        self._earlier: dict[int, list[Seconds]] = {}

    @property
    def ends(self) -> int:
        """The step with which this interval ends."""
        return self.began + self.interval_steps

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of the training with nothing frozen; None if unknown."""
        if self.total_steps is None or self.iteration_s <= 0:
            return None
        return self.iteration_s * max(0, self.total_steps - self.step)

    def hold(self, loss: Loss) -> None:
        """Keep the loss of a micro-batch for the step that it belongs to."""
        self._held_sum, self.num_held = self._held_sum + loss, self.num_held + 1

    def enter(self, loss: Loss) -> None:
        """Count a step: `run.step` has begun, with this loss."""
        self._entered = Seconds.now()
        if self._left is not None:
            self._iterations.append(self._entered.since(self._left))
        if self.num_held:
            loss = (self._held_sum + loss) / (self.num_held + 1)
            self._held_sum, self.num_held = 0.0, 0
        self._losses.append(loss)
        self.step += 1

    def leave(self) -> None:
        """Note that `run.step` is about to return."""
        self._left = Seconds.now()
        self.overhead = self.overhead.plus(self._left.since(self._entered))

    def spend(self, wall_s: float, cpu_s: float) -> None:
        """Count seconds of the user's iteration as overhead instead."""
        spent = Seconds(wall_s, cpu_s)
        self.overhead = self.overhead.plus(spent)
        if self._left is not None:
            self._left = self._left.plus(spent)

    def end_interval(
        self, frozen: int, learning_rate: float, together: Callable[..., list[Any]]
    ) -> IntervalMeasured:
        """Begin the next interval; return what this one showed, with the mean loss of all ranks."""
        losses, self._losses = to_floats(self._losses), []
        wall_s, cpu_s = self._median(frozen)
        if not frozen:
            self.iteration_s = wall_s
        num_steps, self.began = self.step - self.began, self.step
        self.evaluation += 1
        finite = [value for value in losses if math.isfinite(value)]
        own = statistics.fmean(finite) if finite else None, len(losses) - len(finite), learning_rate
        found = together(lambda: own)
        means = [mean for mean, _, _ in found if mean is not None]
        spent = self.overhead.plus(Seconds.now().since(self._entered))
        return IntervalMeasured(
            step=self.step,
            evaluation=self.evaluation,
            loss=statistics.fmean(means) if means else None,
            num_steps=num_steps,
            num_bad_losses=sum(num_bad for _, num_bad, _ in found),
            learning_rate=found[0][2],
            frozen=frozen,
            iteration_wall_s=wall_s,
            iteration_cpu_s=cpu_s,
            overhead_wall_s=spent.wall_s,
            overhead_cpu_s=spent.cpu_s,
        )

    def _median(self, frozen: int) -> Seconds:
        """Return the median of this interval's iterations; if they are few, with earlier ones."""
        own, self._iterations = self._iterations, []
        if not own:
            return Seconds()
        newest = (self._earlier.get(frozen, []) + own)[-max(len(own), FEWEST) :]
        self._earlier[frozen] = newest[-FEWEST:]
        return Seconds(*map(statistics.median, zip(*newest, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _SAVED}
        held = [*to_floats([self._held_sum]), self.num_held]
        return {**state, "losses": to_floats(self._losses), "held": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name in _SAVED:
            setattr(self, name, type(getattr(self, name))(state[name]))
        self._losses = [float(loss) for loss in state["losses"]]
        self._held_sum, self.num_held = state["held"]


def read_loss(loss: Any, what: str = "run.step takes a loss") -> Loss:
    """Return a loss as a number or a 0-d tensor on its device; ConfigError if it is neither."""
    found, next_step = type(loss).__name__, "Reduce it, as by loss.mean()"
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if type(loss) is Tensor and loss.is_cpu and loss.numel() == 1 and not loss.is_complex():
            return float(loss.detach())
        if isinstance(loss, Tensor):
            if loss.numel() == 1 and not (loss.is_meta or loss.is_complex()):
                # In single precision: not every device has doubles, and micro-batches are summed.
                return loss.detach().reshape(()).to(torch.float32, copy=True)
            found = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype} on {loss.device}"
        elif not isinstance(loss, (str, bytes)):
            return float(loss)
    if hasattr(loss, "loss"):
        next_step = "Pass its `loss`"
    elif isinstance(loss, (str, type(None))):
        found = repr(loss)[:100]
    raise ConfigError(f"{what} as a number or a 0-d tensor, found {found}. {next_step}.")


def to_floats(losses: Sequence[Loss]) -> list[float]:
    """Return losses as numbers, with one copy from the device for all."""
    tensors = [loss for loss in losses if isinstance(loss, Tensor)]
    on_device = [loss.to(tensors[0].device) for loss in tensors]
    read = iter(torch.stack(on_device).tolist() if tensors else [])
    return [next(read) if isinstance(loss, Tensor) else loss for loss in losses]
