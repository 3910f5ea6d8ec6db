"""The course of a landing: what happens to layer modules between the decision to freeze them and
the freeze.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.events import FreezeWaits, LandingBegan, LandingEnded
from egeria.layers.landing import FEWEST_PAIRS, AveragedWeights, Comparison, compare
from egeria.layers.modules import LayerModule
from egeria.session.following import Training
from egeria.session.measuring.interval import to_floats
from egeria.session.measuring.optimizer_steps import ScaledSteps
from egeria.session.measuring.timing import Stopwatch
from egeria.session.ranks import Subject

WHAT = "landing"
INTERVALS = 10
"""That a landing takes where the length of the training is unknown."""
MOST_PAIRS, STEPS_PER_PAIR = 16, 4
"""Pairs of steps on which the average is checked: one for so many steps of the landing, at most 16.
16 batches give about 2,000 samples to normalisation, which is what its statistics need (Wu and
Johnson 2021: 1,000 to 10,000)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """A decision to freeze a layer module, and the step at which it was made."""

    module: int
    reason: str
    step: int
    is_journaled: bool = False
    """Whether an event tells of it already."""


@dataclass(kw_only=True, slots=True)
class _Course:
    """One landing under way; `finish` and `cancel` end it."""

    mode: str
    num_steps: int
    """Over which weights are averaged, or the rate falls."""
    num_pairs: int
    """Of steps that are compared then; 0 where nothing is averaged."""
    began_at: int
    done: int = 0
    """Steps so far."""
    has_failed: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_failed or self.done >= self.num_steps + 2 * self.num_pairs

    @property
    def rate_share(self) -> float:
        """What is made of the coming step: 1 leaves it as it is, 0 takes it back."""
        if self.done >= self.num_steps:
            return 0.0
        return 1.0 if self.mode == "average" else 1 - self.done / self.num_steps

    @property
    def is_turn_of_average(self) -> bool:
        """Whether the coming step is made with the average: raw, average,
        average, raw, and so on.
        """
        return self.done >= self.num_steps and (self.done - self.num_steps) % 4 in (1, 2)


class Landing:
    """Takes the noise of their last steps out of layer modules before they freeze
    (`freezing.landing`).

    For `num_steps` optimizer steps the weights are averaged, or the rate of the modules goes
    linearly to zero: at step `k`, counted from 0, it is `1 - k / num_steps` of what it would be.
    Then they are held, and the loop's own steps are made in turns with the weights as trained and
    with the average; that is taken unless the loss was worse with it by more than its noise. Batch
    normalisation gets the mean statistics of the batches that the average saw in training mode. At
    the end of an interval the modules then freeze. What is decided meanwhile lands after that.

    The average is in the model from a training call to the `run.step` behind it only. A fault of
    ours ends a landing, and the modules freeze as trained. In models in parts a state continues in
    the process that saved it; in others the average begins anew.

    Args:
        training: what is trained.
        modules: its layer modules, front to back.
        interval_steps: returns `n` as it stands.
        spend: counts seconds in the midst of the user's iteration.
    """

    def __init__(
        self,
        training: Training,
        modules: Sequence[LayerModule],
        interval_steps: Callable[[], int],
        spend: Callable[[float, float], None],
    ) -> None:
        self._training, self._modules = training, modules
        self._interval_steps, self._spend = interval_steps, spend
        self._recorder, self._settings = training.recorder, training.config.freezing
        self._course: _Course | None = None
        self._under_way: list[Decided] = []
        self._queue: list[Decided] = []
        self._names: tuple[str, ...] = ()
        """The parameters that land."""
        self._steps: ScaledSteps | None = None
        self._average: AveragedWeights | None = None
        self._losses: list[tuple[bool, float | Tensor]] = []
        """Of each step that was compared: whether it was made with the average, and its loss."""

    @property
    def is_under_way(self) -> bool:
        """Whether layer modules land now."""
        return self._course is not None

    @property
    def depth(self) -> int:
        """How many front layer modules land, or are frozen in front of those; 0 while none land."""
        return self._under_way[-1].module + 1 if self._under_way else 0

    @property
    def decided(self) -> list[int]:
        """Layer modules that were decided to freeze and land, or wait for those."""
        return [entry.module for entry in (*self._under_way, *self._queue)]

    def takes(self, decided: Decided, depth: int) -> bool:
        """Begin to land the front up to a layer module, or have it wait; return False where it is
        to freeze at once.

        Args:
            decided: which was decided to freeze.
            depth: how many front layer modules are frozen.
        """
        step, name = self._recorder.step, self._modules[decided.module].name
        if self._course is not None and self._course.began_at != step:
            self._queue.append(replace(decided, is_journaled=True))
            reason = "the layer modules in front of it land first"
            self._recorder.write(
                FreezeWaits(step=step, module=decided.module, name=name, reason=reason)
            )
            return True
        course = self._plan(decided, depth)
        if course is None:
            return False
        self._course = course
        self._names = tuple(self._trained(depth, decided.module + 1))
        self._under_way.append(replace(decided, is_journaled=True))
        self._recorder.write(
            LandingBegan(
                step=step,
                module=decided.module,
                name=name,
                mode=course.mode,
                num_steps=course.num_steps,
                reason=decided.reason,
                decided_at=decided.step if decided.is_journaled else None,
            )
        )
        self._guard(self._open)
        return True

    def before_forward(self) -> None:
        """Put the average in place for a training call, where it is its turn."""
        course, average = self._course, self._average
        if (
            course is None
            or average is None
            or average.is_in_place
            or not course.is_turn_of_average
        ):
            return
        if not course.has_failed:
            watch = Stopwatch()
            self._guard(self._put_in)
            self._spend(*watch.read())

    def end_step(self, loss: float | Tensor) -> None:
        """Take in an optimizer step; the model has its weights as trained from here on."""
        course = self._course
        if course is None or course.has_failed:
            return
        if self._training.ranks.is_lost:
            self.cancel("the processes cannot reach each other any more")
            return
        if self._steps is None or self._steps.hooks.has_failed:  # which has journaled it
            self._fail()
            return
        course.done += 1
        if self._average is not None:
            self._guard(lambda: self._follow(loss))

    def finish(self) -> list[Decided]:
        """At the end of an interval, end what is over; return what is to freeze now. All processes
        call this.
        """
        course = self._course
        if course is None:
            return []
        pairs: list[tuple[float, float]] = []
        if course.is_over and self._average is not None and not course.has_failed:
            pairs = self._pairs()
            self._guard(self._prepare)
        rows = self._training.ranks.gather(
            Subject.LANDING, (course.has_failed, course.is_over, pairs)
        )
        has_failed = any(row[0] for row in rows)
        if not has_failed and not course.is_over:
            return []
        found = None if has_failed or self._average is None else compare([row[2] for row in rows])
        if self._average is not None:
            if found is None or found.reason:
                self._average.take_out()
            else:
                self._average.keep()
        if has_failed:
            self._training.parallel.equalise(self._names)
        return self._end(*_outcome(found, has_failed, course.mode), found)

    def take_queue(self) -> list[Decided]:
        """Return what waited for others to land, unless those still do."""
        if self.is_under_way:
            return []
        queue, self._queue = self._queue, []
        return queue

    def cancel(self, reason: str | None) -> None:
        """End everything with the weights as trained; without a reason it is not journaled."""
        self._queue = []
        if self._course is None:
            return
        average = self._average
        if average is not None:
            self._guard(average.take_out)
        if reason is None:
            self._clear()
        else:
            self._end("cancelled", reason)

    def let_go(self) -> None:
        """Leave the weights as they are, those of a state that was loaded into the model maybe, and
        forget others.
        """
        if self._average is not None:
            self._average.keep()

    def describe(self) -> str:
        """Return what lands and for how long, as text that is the same in all processes."""
        course = self._course
        return (
            ""
            if course is None
            else f"{self.decided} {course.mode} {course.began_at} {course.num_steps}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to land as if it had not stopped; empty where nothing
        lands.
        """
        if self._course is None:
            return {}
        ranks, losses = self._training.ranks, to_floats([loss for _, loss in self._losses])
        return {
            "course": asdict(self._course),
            "decided": [
                [asdict(entry) for entry in part] for part in (self._under_way, self._queue)
            ],
            "names": list(self._names),
            "losses": [[turn, loss] for (turn, _), loss in zip(self._losses, losses, strict=True)],
            "average": None if self._average is None else self._average.state_dict(),
            "part": ranks.rank if self._training.is_sharded else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        if not state:
            return
        self._under_way, self._queue = (
            [Decided(**entry) for entry in part] for part in state["decided"]
        )
        self._course, self._names = _Course(**state["course"]), tuple(state["names"])
        self._open()
        self._losses = [(bool(turn), float(loss)) for turn, loss in state["losses"]]
        part = self._training.ranks.rank if self._training.is_sharded else None
        if self._average is not None and part == state["part"]:
            self._average.load_state_dict(state["average"])

    def _plan(self, decided: Decided, depth: int) -> _Course | None:
        """Return how the front up to a layer module is to land; None where it is to freeze as it
        is.
        """
        step, settings, total_steps = (
            self._recorder.step,
            self._settings,
            self._training.total_steps,
        )
        if settings.landing == "none" or not self._trained(depth, decided.module + 1):
            return None
        num_steps = INTERVALS * self._interval_steps()
        if total_steps is not None:
            num_steps = max(1, round(settings.landing_share * total_steps))
        pairs = min(MOST_PAIRS, max(FEWEST_PAIRS, num_steps // STEPS_PER_PAIR))
        num_pairs = 0 if settings.landing == "anneal" else pairs
        takes = num_steps + 2 * num_pairs
        if total_steps is not None and step + takes >= total_steps:
            reason = (
                f"it takes {takes} steps, and {total_steps - step} are left from step {step} on"
            )
            self._recorder.decline(WHAT, f"{reason}; layer modules freeze as they are")
            return None
        return _Course(
            mode=settings.landing, num_steps=num_steps, num_pairs=num_pairs, began_at=step
        )

    def _open(self) -> None:
        """Watch the steps of a landing; it ends where an optimizer takes no hooks, which was
        declined then.
        """
        course, training = self._course, self._training
        assert course is not None
        if self._steps is None:
            self._steps = ScaledSteps(training, self._factors, self._spend, WHAT)
        course.has_failed = course.has_failed or self._steps.hooks.is_closed
        if course.mode != "anneal":
            landing = [
                module
                for module in self._modules
                if not set(module.parameters).isdisjoint(self._names)
            ]
            submodules = [name for module in landing for name in module.submodules]
            self._average = AveragedWeights(training.model, self._names, submodules)

    def _trained(self, first: int, last: int) -> list[str]:
        """Return the names of the parameters that a freeze of some layer modules would freeze."""
        front = self._modules[first:last]
        kept = {
            name
            for module in front
            for name in module.shared_parameters
            if self._settings.tied == "keep"
        }
        own = [name for module in front for name in module.parameters if name not in kept]
        return [name for name in own if self._training.model.get_parameter(name).requires_grad]

    def _factors(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, float]]:
        course = self._course
        if course is None or course.has_failed or course.rate_share == 1:
            return
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name in self._names:
            parameter = self._training.model.get_parameter(name)
            if id(parameter) in own:
                yield parameter, course.rate_share

    def _put_in(self) -> None:
        assert self._average is not None
        self._training.parallel.settle()
        self._average.put_in()

    def _follow(self, loss: float | Tensor) -> None:
        """Average the weights after a step, or record the loss of one that is compared."""
        course, average = self._course, self._average
        assert course is not None and average is not None
        self._training.parallel.settle()
        if course.done <= course.num_steps:
            average.take_in()
            return
        self._losses.append((average.is_in_place, loss))
        if average.is_in_place:
            average.take_out()

    def _prepare(self) -> None:
        """Put the average in place with its statistics; what can fail has failed before the
        processes agree on it.
        """
        assert self._average is not None
        self._put_in()
        self._average.use_statistics()

    def _pairs(self) -> list[tuple[float, float]]:
        """Return the losses of each pair of steps, raw first."""
        losses = to_floats([loss for _, loss in self._losses])
        turns = list(zip((turn for turn, _ in self._losses), losses, strict=True))
        pairs = [sorted(pair) for pair in zip(turns[::2], turns[1::2], strict=False)]
        return [(raw[1], landed[1]) for raw, landed in pairs if landed[0] and not raw[0]]

    def _end(self, outcome: str, reason: str, found: Comparison | None = None) -> list[Decided]:
        decided, module = self._under_way, self._under_way[-1].module
        numbers = (
            {}
            if found is None
            else {name: getattr(found, name) for name in Comparison._fields[:-1]}
        )
        step, name = self._recorder.step, self._modules[module].name
        self._clear()
        event = LandingEnded(
            step=step, module=module, name=name, outcome=outcome, reason=reason, **numbers
        )
        self._recorder.write(event)
        return decided

    def _clear(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()
        self._course, self._average, self._under_way, self._names, self._losses = (
            None,
            None,
            [],
            (),
            [],
        )

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._recorder.fault(WHAT, error)
            self._fail()

    def _fail(self) -> None:
        """Train on as without a landing; the modules freeze at the end of the interval."""
        if self._course is not None:
            self._course.has_failed = True
        if self._average is not None:
            try:
                self._average.take_out()
            except Exception as error:
                self._recorder.fault(WHAT, error)


def _outcome(found: Comparison | None, has_failed: bool, mode: str) -> tuple[str, str]:
    """Return the outcome of a landing that is over, and why."""
    if has_failed:
        return (
            "failed",
            "it could not be carried out, for a fault or a reason that was declined with: frozen "
            "as trained",
        )
    if found is not None and found.reason:
        return "undone", found.reason
    reasons = {
        "anneal": "its learning rate has come down to 0",
        "average": "frozen at the average of its weights",
    }
    return "landed", reasons.get(
        mode, "frozen at the average of its weights, its learning rate come down to 0"
    )
