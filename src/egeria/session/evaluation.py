"""Evaluations of plasticity: the batch kept for one, the request to the controller, what the policy
decides on it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from egeria.controller import (
    AbsentController,
    Controller,
    ControllerChoice,
    ControllerStatus,
    EvaluationFailed,
    EvaluationResult,
    Request,
    Ticket,
)
from egeria.distributed import fsdp2
from egeria.distributed.ranks import rank, together, world_size
from egeria.events import (
    ControllerChosen,
    Declined,
    Event,
    IntervalChanged,
    PlasticityRead,
    ReadingDropped,
    ReferenceRefreshed,
    RungTaken,
)
from egeria.model.batch import Batch
from egeria.model.cut import Cut, LayerModule
from egeria.model.hooks import Hook, sweep
from egeria.model.undisturbed import (
    KEPT,
    capture,
    is_own_pass,
    keeps_outside,
    living,
    undisturbed,
)
from egeria.policy import Status, Wants
from egeria.session.budget import Budget, count_iterations
from egeria.session.interval import Clock, seconds_left
from egeria.session.training import FreezingEndedError, Training

FAILURES_BEFORE_GIVING_UP = 3
POLLS_PER_INTERVAL = 4
"""How often a controller process is asked for what it reports: a process that trains alone asks at
each step while a reading is under way, those of a job ask each other and never more often."""

logger = logging.getLogger("egeria")


@dataclass(eq=False)
class Evaluation:
    """Reads the plasticity of layer modules for the policy, and keeps the reference up to date.

    `prepare` keeps the batch of the last step of an interval, `request` hands it to the controller
    with the model's activation for it, `take_finished` returns what has been read. Of several
    processes only the first has a controller.
    """

    training: Training
    cut: Cut
    controller: Controller
    budget: Budget
    clock: Clock
    is_asynchronous: bool
    """Whether the controller of the first process is a process of its own."""
    is_given: bool = False
    """Whether it is the user's, who has no other for a run that is rolled back."""

    def __post_init__(self) -> None:
        self.recorder, self.leads = self.training.recorder, rank() == 0
        self.batch: Batch | None = None
        self.evaluated: Batch | None = None
        """A copy of the batch of the newest evaluation: the rows that were read."""
        self._num_samples = self.training.config.plasticity.num_samples
        self._needs_whole_batch = self._has_read = self._is_armed = False
        self._is_behind = False
        """Whether the last refresh found no room."""
        self._samples, self._most_samples, self._num_failures = 0, [0, 0], 0
        self._has_reference = False
        self._living: set[int] | None = None
        self._keeps_outside: bool | None = None
        """Whether the model keeps tensors outside of itself; None before a pass was looked at."""
        self._refreshed_at: int | None = None
        self.valid_from = 0
        """Readings of earlier evaluations are dropped."""
        self._under_way: dict[int, dict[str, Any]] = {}
        """By evaluation: what it cost in this process, and the age of the reference."""
        self._refresh_cost = (0.0, 0.0)
        self.status = ControllerStatus()
        self._finished: list[EvaluationResult] = []

    @property
    def has_given_up(self) -> bool:
        """Whether evaluations failed so often in a row that no more are made."""
        return self._num_failures >= FAILURES_BEFORE_GIVING_UP

    def prepare(self, module: int | None) -> float:
        """Keep the batch of the coming step where that ends the interval.

        Also where no layer module is monitored yet: the first reference is calibrated on it.

        Args:
            module: the layer module that the policy wants read.

        Returns:
            The next step at which this is to be called.
        """
        clock, last = self.clock, self.clock.ends - 1
        is_needed = module is not None or not self._has_reference
        if clock.step == last and self.leads and is_needed and not self.has_given_up:
            self._arm(module)
        polls = self._is_polled(clock.step + 1)
        return clock.step + 1 if polls or clock.step >= last else min(last, self._next_poll())

    @property
    def _is_apart(self) -> bool:
        return self.is_asynchronous or self.status.is_asynchronous

    def may_have_readings(self) -> bool:
        """Return whether to ask for readings at this step; the same in all processes."""
        return self._is_polled(self.clock.step)

    def _is_polled(self, step: int) -> bool:
        if not self._is_apart or (world_size() == 1 and self.has_given_up):
            return False
        if world_size() == 1 and self._under_way:
            return True
        part = max(1, self.clock.interval_steps // POLLS_PER_INTERVAL)
        return (step - self.clock.began) % part == 0

    def _next_poll(self) -> float:
        clock = self.clock
        if not self._is_apart or (world_size() == 1 and self.has_given_up):
            return math.inf
        part = max(1, clock.interval_steps // POLLS_PER_INTERVAL)
        return clock.began + ((clock.step - clock.began) // part + 1) * part

    def _arm(self, module: int | None) -> None:
        self.disarm()
        self._is_armed, self._samples = module is not None, 0
        hook = Hook(self, Evaluation._keep)
        self.training.model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        if self._keeps_outside is None:
            self.training.model.register_forward_hook(Hook(self, Evaluation._look_at_pass))
        if module is None:
            self._take_in(self.controller.poll())

    def check(self) -> None:
        """Raise FreezingEndedError if a pass of ours would leave something outside of the model."""
        if self._keeps_outside:
            raise FreezingEndedError(f"{KEPT}. Give a plan instead of the policy 'egeria'")

    def disarm(self) -> None:
        """Release the batch."""
        sweep(self.training.model, self)
        self.batch, self._is_armed = None, False

    def request(self, evaluation: int, index: int) -> None:
        """Request the plasticity of a layer module on the batch kept for it."""
        if not (self.leads and self._has_reference and self._is_armed) or self.has_given_up:
            return
        watch = time.perf_counter(), time.process_time()
        activation = self._read_activation(evaluation, index)
        if activation is None or self.batch is None:
            return
        self._note_rows(self.batch)
        assert self.evaluated is not None
        tap = self.cut.modules[index].tap
        ticket = Ticket(evaluation=evaluation, step=self.recorder.step, module=index, tap=tap)
        self.controller.submit(Request(ticket=ticket, batch=self.evaluated, activation=activation))
        wall_s, cpu_s = time.perf_counter() - watch[0], time.process_time() - watch[1]
        age = evaluation - (self._refreshed_at or 0)
        self._under_way[evaluation] = {"wall_s": wall_s, "cpu_s": cpu_s, "age": age}
        if self.clock.iteration_s > 0:
            self.budget.note_evaluation(wall_s / self.clock.iteration_s)

    def take_finished(self) -> list[EvaluationResult]:
        """Return what has been read since the last call."""
        if not self.leads or self.has_given_up:
            return []
        self._take_in(self.controller.poll())
        own, self._finished = self._finished, []
        return own

    def journal(self, result: EvaluationResult, status: Status) -> None:
        """Journal a reading, with what the policy concluded from it."""
        shown = asdict(result) | {"step": self.recorder.step}
        concluded = {name: getattr(status, name) for name in ("slope", "tolerance", "stationary")}
        smoothed = result.value if status.smoothed is None else status.smoothed
        name = self.cut.modules[result.module].name
        self.recorder.write(PlasticityRead(name=name, smoothed=smoothed, **shown, **concluded))

    def drop_late(self, result: EvaluationResult) -> None:
        """Journal a reading that the policy does not want any more."""
        reason = "it came late: the layer module is no longer monitored, or not now"
        self._drop(result.evaluation, result.module, reason)

    def refresh(self, evaluation: int, wants: Wants) -> None:
        """Bring the reference model up to date with the training weights, where that is due."""
        is_due = wants.refresh or self._is_behind or not self._has_reference
        if not is_due or wants.plasticity_of is None or not self.leads or self.has_given_up:
            return
        begin, begin_cpu = time.perf_counter(), time.process_time()
        calibration = None if self.batch is None else self._rows(self.batch)
        is_first = not self._has_reference
        made = self.controller.refresh(evaluation, self.training.model, calibration)
        self._is_behind = not made
        if not made:
            return
        self._has_reference, self._refreshed_at = True, evaluation
        wall_s = time.perf_counter() - begin
        self._refresh_cost = wall_s, time.process_time() - begin_cpu
        self._take_in(self.controller.poll())
        if not is_first and self.clock.iteration_s > 0:
            # After a thaw the window is shorter for a while; what counts is the long run.
            config = self.training.config
            period = config.reference.refresh_evaluations or config.plasticity.window
            self.budget.note_refresh(wall_s / self.clock.iteration_s, period)

    def fit_interval(self, interval_steps: int, index: int | None) -> int:
        """Return the `n` that keeps evaluations of a layer module within their budget, and journal
        a change.
        """
        evaluated, changed = self.evaluated, None
        is_on_cpu = evaluated is not None and evaluated.autocast.device_type == "cpu"
        if index is not None and is_on_cpu:
            looked_at, samples = self._most_samples
            share = looked_at / samples * (1 if self.status.is_asynchronous else 2)
            front = sum(module.share for module in self.cut.modules[: index + 1])
            changed = self.budget.expect(count_iterations(front, share), interval_steps)
        changed = changed or self.budget.review(interval_steps)
        if changed is None:
            return interval_steps
        after, reason = changed
        step, before = self.recorder.step, interval_steps
        self.recorder.write(IntervalChanged(step=step, before=before, after=after, reason=reason))
        return after

    def close(self, *, for_good: bool = True) -> None:
        """Release everything held; a given controller only where the run ends."""
        self.disarm()
        self.evaluated = None
        if for_good or not self.is_given:
            self._close_controller()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {
            "has_reference": self._has_reference,
            "refreshed_at": self._refreshed_at,
            "needs_whole_batch": self._needs_whole_batch,
            "most_samples": [*self._most_samples, world_size()],
            "num_failures": self._num_failures,
            "budget": self.budget.state_dict(),
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._needs_whole_batch = bool(state["needs_whole_batch"])
        known = state["most_samples"]
        self._most_samples = known[:2] if known[2] == world_size() else [0, 0]
        # One that had given up gets another chance: it may be on another machine now.
        self._num_failures = min(int(state["num_failures"]), FAILURES_BEFORE_GIVING_UP - 1)
        self._refreshed_at = state["refreshed_at"]
        self.budget.load_state_dict(state["budget"])
        goes_on = self.controller.refresh(
            self._refreshed_at or 0, self.training.model, None, state["controller"]
        )
        self._has_reference = bool(state["has_reference"]) and goes_on

    def _keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a training call; of several calls in a step the last ones."""
        if not model.training or not torch.is_grad_enabled() or is_own_pass():
            return
        if self._keeps_outside is None:
            self._living = living()
        try:
            self.batch = Batch.of_call(args, kwargs, self.training.device_type)
            self._samples += self.batch.num_rows or 1
        except Exception as error:  # of a mapping of the user's own, for instance
            self.batch = None
            self.recorder.fault("reading the batch", error)

    def _look_at_pass(self, model: nn.Module, _args: Any, output: Any) -> None:
        if self._living is not None:
            self._keeps_outside = keeps_outside(model, output, self._living)
            self._living = None

    def _rows(self, batch: Batch) -> Batch:
        """Return what is read: the first rows, or all where the model does not run on those."""
        return batch.first_rows(None if self._needs_whole_batch else self._num_samples)

    def _note_rows(self, batch: Batch) -> None:
        self.evaluated = self._rows(batch)
        self._most_samples = [
            *map(max, self._most_samples, (self.evaluated.num_rows or 1, self._samples))
        ]

    def _read_activation(self, evaluation: int, index: int) -> Tensor | None:
        """Return the activation of a layer module [B, ...]; None where there is none, which is
        journaled.
        """
        module = self.cut.modules[index]
        if self.batch is None:
            self._drop(
                evaluation, index, "the model was not called in training mode before this step"
            )
            self._count_failure("the loop does not call the model in training mode")
            return None
        activation = self._capture(module, self.batch)
        if activation is None:
            self._drop(
                evaluation, index, f"{module.tap} gave no floating-point tensor of two dimensions"
            )
            self._count_failure(f"layer module {module.name} gives no tensor to judge it by")
        return activation

    def _capture(self, module: LayerModule, batch: Batch) -> Tensor | None:
        with undisturbed(self.training.model):
            try:
                return capture(self.training.model, module.tap, self._rows(batch))
            except Exception:
                if self._needs_whole_batch:
                    raise
                # Not every first dimension is one of samples: a graph, say, is no graph without
                # half its nodes.
                self._needs_whole_batch = True
                return capture(self.training.model, module.tap, self._rows(batch))

    def _take_in(self, status: ControllerStatus) -> None:
        """Sort what the controller reports into finished readings and journal events."""
        self.status = status
        for report in status.reports:
            if isinstance(report, (EvaluationResult, ReadingDropped)):
                self._take_in_result(report)
            else:
                self._record(replace(report, step=self.recorder.step))

    def _take_in_result(self, result: EvaluationResult | ReadingDropped) -> None:
        costs = self._under_way.pop(result.evaluation, {})
        is_lost = isinstance(result, ReadingDropped) and not isinstance(result, EvaluationFailed)
        late = "it came late: judging has ended" if self.has_given_up else ""
        if not late and result.evaluation < self.valid_from:
            late = "it came late: everything thawed meanwhile"
        if isinstance(result, EvaluationResult) and not late and math.isfinite(result.value):
            self._num_failures, self._has_read = 0, True
            self._finished.append(replace(result, **costs))
            return
        reason = f"the value is {getattr(result, 'value', None)}"
        if isinstance(result, ReadingDropped):
            reason = result.reason
        self._drop(result.evaluation, result.module, late if late and not is_lost else reason)
        if late or is_lost:
            return
        self.recorder.warn(
            "readings",
            f"egeria: a reading of plasticity was dropped: {reason}. Training continues.",
        )
        if isinstance(result, EvaluationFailed):
            self._count_failure(
                f"the last {FAILURES_BEFORE_GIVING_UP} evaluations failed: {reason}"
            )

    def _record(self, event: Event) -> None:
        """Write an event of the controller to the journal, with a warning where something fell
        short.
        """
        if isinstance(event, Declined):
            self.recorder.decline(event.what, event.reason)
        elif isinstance(event, ReferenceRefreshed):
            self.recorder.write(
                replace(event, wall_s=self._refresh_cost[0], cpu_s=self._refresh_cost[1])
            )
        else:
            self.recorder.write(event)
        if isinstance(event, RungTaken) and event.before:
            logger.info(
                "the reference model changes from %s to %s: %s",
                event.before,
                event.after,
                event.reason,
            )

    def _drop(self, evaluation: int, index: int, reason: str) -> None:
        """Journal an evaluation without a usable reading."""
        self.recorder.write(
            ReadingDropped(
                step=self.recorder.step, evaluation=evaluation, module=index, reason=reason
            )
        )

    def _count_failure(self, reason: str) -> None:
        self._num_failures += 1
        if self._num_failures == FAILURES_BEFORE_GIVING_UP:
            self.recorder.decline("judging plasticity", reason)
            self._close_controller()

    def _close_controller(self) -> None:
        """End the controller; what it had not handed over, or not finished, is journaled as
        dropped.
        """
        was_apart, self.status = self.status.is_asynchronous, self.controller.close()
        late = [
            report
            for report in self.status.reports
            if isinstance(report, (EvaluationResult, ReadingDropped))
        ]
        for report in late:
            reason = (
                "the run ended before it was judged"
                if isinstance(report, EvaluationResult)
                else report.reason
            )
            self._drop(report.evaluation, report.module, reason)
        if late and was_apart and not self._has_read and not self.has_given_up:
            message = (
                "egeria: the run ended before its controller process, which takes seconds "
                "to start, had given a "
            )
            message += (
                'reading, so nothing could freeze. Give attach controller="inline", or '
                "train for longer."
            )
            self.recorder.warn("a short run", message)


SecondsLeft = Callable[[], float | None]
MakeController = Callable[[Sequence[LayerModule], SecondsLeft], Controller]


def make_evaluation(
    training: Training, cut: Cut, clock: Clock, choice: ControllerChoice, make: MakeController
) -> Evaluation:
    """Return what reads plasticity in a run; all processes of a job call it.

    Args:
        training: what is trained.
        cut: of its model.
        clock: of the run.
        choice: which controller it is, and why.
        make: makes it.

    Raises:
        FreezingEndedError: the plasticity of this model cannot be read.
    """
    if reason := plasticity_refusal(training.model):
        raise FreezingEndedError(reason)

    def left_s() -> float | None:
        return seconds_left(training.total_steps, clock.step, clock.iteration_s)

    leads, config = rank() == 0, training.config
    controller = make(cut.modules, left_s) if leads else cast(Controller, AbsentController())
    kind, reason = choice.kind, choice.reason
    training.recorder.write(ControllerChosen(step=clock.step, controller=kind, reason=reason))
    logger.info("the controller is %s: %s", kind, reason)
    return Evaluation(
        training=training,
        cut=cut,
        controller=controller,
        budget=Budget(config.controller.budget_share, config.plasticity.window),
        clock=clock,
        is_asynchronous=together(lambda: kind == "process")[0],
        is_given=not choice.device,
    )


def plasticity_refusal(model: nn.Module) -> str:
    """Return why the plasticity of a model is not read: a pass of ours would leave traces in it."""
    if fsdp2.is_sharded(model):
        return fsdp2.NO_PLASTICITY
    for name, entry in model.named_parameters():
        if type(entry) is not nn.Parameter:
            return (
                f"{name} has weights of a class of their own ({type(entry).__name__}), which a "
                "pass in inference mode may repack for good. Give a plan instead of the policy "
                "'egeria'"
            )
    return ""
