"""Evaluations of plasticity, for a policy that asks for them: no other run imports this."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from egeria.controller import Controller, ProcessController, choose
from egeria.controller.inline import Answer, EvaluationPlan, InlineController, Report, Ticket
from egeria.distributed import fsdp2
from egeria.distributed.ranks import rank, together, world_size
from egeria.events import (
    ControllerChosen,
    Declined,
    IntervalChanged,
    PlasticityRead,
    ReadingDropped,
    ReferenceRefreshed,
)
from egeria.model.batch import Batch
from egeria.model.cut import Cut
from egeria.model.hooks import Hook, sweep
from egeria.model.undisturbed import KEPT, capture, is_own_pass, keeps_outside, living, undisturbed
from egeria.policy import Status, Wants
from egeria.session.budget import Budget, count_iterations
from egeria.session.interval import Clock, seconds_left
from egeria.session.training import FreezingEndedError, Training

FAILURES_BEFORE_GIVING_UP = 3
# How often a controller process is asked for what it reports: a process that trains alone asks at
# each step while a reading is under way, those of a job ask each other and never more often.
POLLS_PER_INTERVAL = 4
SHORT_RUN = (
    "egeria: the run ended before its controller process, which takes seconds to start, had given "
    'a reading, so nothing could freeze. Give attach controller="inline", or train for longer.'
)


class Evaluation:
    """Has the plasticity of layer modules read, and keeps the reference model up to date.

    `prepare` keeps the batch of the last step of an interval, `request` hands it to the controller
    with the model's activation for it, `take_finished` returns what has been read. Of several
    processes only the first has a controller.

    Args:
        training: what is trained.
        cut: of its model.
        clock: of the run.
        controller: reads.
        is_given: whether it is the user's, who has no other for a run that is rolled back.
    """

    def __init__(
        self, training: Training, cut: Cut, clock: Clock, controller: Controller, is_given: bool
    ) -> None:
        self.training, self.cut, self.clock, self.controller = training, cut, clock, controller
        self.recorder, self.is_given, self.leads = training.recorder, is_given, rank() == 0
        # Whether readings come at any time; the same in all processes, and for good.
        self._is_apart = together(lambda: controller.is_apart)[0]
        self.valid_from = 0  # readings of earlier evaluations are dropped
        config = training.config
        self._budget = Budget(config.controller.budget_share, config.plasticity.window)
        # What is read of a batch; None where the model does not run on its first rows alone.
        self._num_samples: int | None = config.plasticity.num_samples
        self._batch: Batch | None = None
        self._is_armed = self._has_read = self._is_behind = False  # behind: no room for a refresh
        self._refreshed_at: int | None = None  # the evaluation; None where there is no reference
        # Samples of the step so far; the most that were read of a step, and that a step had.
        self._samples, self._most_samples = 0, (0, 0)
        self._num_failures, self._cpu_s = 0, 0.0
        self._living: set[int] | None = None
        # Whether the model keeps tensors outside of itself; None before a pass was looked at.
        self._keeps_outside: bool | None = None
        # By evaluation: what it cost in this process, and the age of the reference.
        self._under_way: dict[int, dict[str, Any]] = {}
        self._refresh_cost = {"wall_s": 0.0, "cpu_s": 0.0}
        self._finished: list[PlasticityRead] = []

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
        step, last = self.clock.step, self.clock.ends - 1
        is_needed = module is not None or self._refreshed_at is None
        if step == last and self.leads and is_needed and not self.has_given_up:
            self.disarm()
            self._is_armed, self._samples, model = module is not None, 0, self.training.model
            hook = Hook(self, Evaluation._keep)
            model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            if self._keeps_outside is None:
                model.register_forward_hook(Hook(self, Evaluation._look_at_pass))
        return step + 1 if step >= last else min(last, self._next_poll(step + 1))

    def may_have_readings(self) -> bool:
        """Return whether to ask for readings at this step; the same in all processes."""
        return self._next_poll(self.clock.step) == self.clock.step

    def check(self) -> None:
        """Raise FreezingEndedError if a pass of ours would leave something outside of the model."""
        if self._keeps_outside:
            raise FreezingEndedError(f"{KEPT}. Give a plan instead of the policy 'egeria'")

    def disarm(self) -> None:
        """Release the batch."""
        sweep(self.training.model, self)
        self._batch, self._is_armed = None, False

    def request(self, evaluation: int, index: int) -> None:
        """Request the plasticity of a layer module on the batch kept for it."""
        if not self._is_armed or self._refreshed_at is None or self.has_given_up:
            return
        begin, begin_cpu = time.perf_counter(), time.process_time()
        module, batch = self.cut.modules[index], self._batch
        ticket = Ticket(evaluation, index, module.tap)
        activation = None if batch is None else self._capture(module.tap, batch)
        if batch is None or activation is None:
            nothing = f"layer module {module.name} gives no tensor to judge it by"
            reason = nothing if batch else "the loop does not call the model in training mode"
            self._take_in([Answer(ticket, math.nan, reason)])
            return
        rows = batch.first_rows(self._num_samples)
        looked_at, samples = self._most_samples
        self._most_samples = max(looked_at, rows.num_rows or 1), max(samples, self._samples)
        self.controller.submit(ticket, rows, activation)
        wall_s, age = time.perf_counter() - begin, evaluation - self._refreshed_at
        cost = {"wall_s": wall_s, "cpu_s": time.process_time() - begin_cpu, "age": age}
        self._under_way[evaluation] = cost
        if self.clock.iteration_s > 0:
            self._budget.note_evaluation(wall_s / self.clock.iteration_s)

    def take_finished(self) -> list[PlasticityRead]:
        """Return what has been read since the last call."""
        if self.has_given_up:
            return []
        self._take_in(self.controller.poll())
        own, self._finished = self._finished, []
        return own

    def journal(self, read: PlasticityRead, status: Status) -> None:
        """Journal a reading, with what the policy concluded from it."""
        names = ("smoothed", "slope", "tolerance", "stationary")
        concluded = {name: getattr(status, name) for name in names}
        if status.smoothed is None:
            concluded["smoothed"] = read.value
        self.recorder.write(replace(read, step=self.recorder.step, **concluded))

    def drop(self, evaluation: int, module: int, reason: str) -> None:
        """Journal an evaluation without a usable reading."""
        step = self.recorder.step
        self.recorder.write(
            ReadingDropped(step=step, evaluation=evaluation, module=module, reason=reason)
        )

    def refresh(self, evaluation: int, wants: Wants) -> None:
        """Bring the reference model up to date with the training weights, where that is due."""
        is_first = self._refreshed_at is None
        is_due = wants.refresh or self._is_behind or is_first
        if not is_due or wants.plasticity_of is None or self.has_given_up:
            return
        begin, begin_cpu = time.perf_counter(), time.process_time()
        rows = None if self._batch is None else self._batch.first_rows(self._num_samples)
        self._is_behind = not self.controller.refresh(self.training.model, rows)
        if self._is_behind:
            return
        self._refreshed_at, wall_s = evaluation, time.perf_counter() - begin
        self._refresh_cost = {"wall_s": wall_s, "cpu_s": time.process_time() - begin_cpu}
        self._take_in(self.controller.poll())
        if not is_first and self.clock.iteration_s > 0:
            # After a thaw the window is shorter for a while; what counts is the long run.
            self._budget.note_refresh(wall_s / self.clock.iteration_s, self._budget.window)

    def fit_interval(self, interval_steps: int, index: int | None) -> int:
        """Return the `n` that keeps evaluations of a layer module within their budget."""
        (looked_at, samples), changed = self._most_samples, None
        if index is not None and looked_at and self.training.device_type == "cpu":
            share = looked_at / samples * (1 if self.controller.is_apart else 2)
            front = sum(module.share for module in self.cut.modules[: index + 1])
            changed = self._budget.expect(count_iterations(front, share), interval_steps)
        changed = changed or self._budget.review(interval_steps)
        if changed is None:
            return interval_steps
        after, reason = changed
        step, before = self.recorder.step, interval_steps
        self.recorder.write(IntervalChanged(step=step, before=before, after=after, reason=reason))
        return after

    def close(self, *, for_good: bool = True) -> None:
        """Release everything held; a given controller only where the run ends."""
        self.disarm()
        if for_good or not self.is_given:
            self._close_controller()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {
            "refreshed_at": self._refreshed_at,
            "num_samples": self._num_samples,
            "most_samples": [*self._most_samples, world_size()],
            "num_failures": self._num_failures,
            "budget": self._budget.state_dict(),
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        looked_at, samples, num_processes = state["most_samples"]
        self._most_samples = (looked_at, samples) if num_processes == world_size() else (0, 0)
        self._num_samples = self._num_samples if state["num_samples"] else None
        # One that had given up gets another chance: it may be on another machine now.
        self._num_failures = min(int(state["num_failures"]), FAILURES_BEFORE_GIVING_UP - 1)
        self._budget.load_state_dict(state["budget"])
        goes_on = self.controller.refresh(self.training.model, None, state["controller"])
        self._refreshed_at = state["refreshed_at"] if goes_on else None

    def _next_poll(self, step: int) -> float:
        """Return the first step, from this one on, at which readings are asked for."""
        clock, is_alone = self.clock, world_size() == 1
        if not self._is_apart or (is_alone and self.has_given_up):
            return math.inf
        if is_alone and self._under_way:
            return step
        part = max(1, clock.interval_steps // POLLS_PER_INTERVAL)
        return clock.began - (clock.began - step) // part * part

    def _keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a training call; of several calls in a step the last ones."""
        if not model.training or not torch.is_grad_enabled() or is_own_pass():
            return
        if self._keeps_outside is None:
            self._living = living()
        try:
            self._batch = Batch.of_call(args, kwargs, self.training.device_type)
            self._samples += self._batch.num_rows or 1
        except Exception as error:  # of a mapping of the user's own, for instance
            self._batch = None
            self.recorder.fault("reading the batch", error)

    def _look_at_pass(self, model: nn.Module, _args: Any, output: Any) -> None:
        if self._living is not None:
            self._keeps_outside = keeps_outside(model, output, self._living)
            self._living = None

    def _capture(self, tap: str, batch: Batch) -> Tensor | None:
        model = self.training.model
        with undisturbed(model):
            try:
                return capture(model, tap, batch.first_rows(self._num_samples))
            except Exception:
                if self._num_samples is None:
                    raise
                # Not every first dimension is one of samples: a graph, say, is no graph without
                # half its nodes.
                self._num_samples = None
                return capture(model, tap, batch.first_rows(None))

    def _take_in(self, reports: Sequence[Report]) -> None:
        """Sort what the controller reports into finished readings and events of the journal."""
        spent_s, self._cpu_s = self.controller.cpu_s - self._cpu_s, self.controller.cpu_s
        controller_cpu_s, now = spent_s / max(1, len(reports)), self.recorder.step
        for report in reports:
            if isinstance(report, Answer):
                self._take_in_answer(report, controller_cpu_s)
            elif isinstance(report, Declined):
                self.recorder.decline(report.what, report.reason)
            elif isinstance(report, ReferenceRefreshed):
                which, costs = {"evaluation": self._refreshed_at or 0}, self._refresh_cost
                spent: dict[str, Any] = {**which, **costs, "controller_cpu_s": controller_cpu_s}
                self.recorder.write(replace(report, step=now, **spent))
            else:
                self.recorder.write(replace(report, step=now))

    def _take_in_answer(self, answer: Answer, controller_cpu_s: float) -> None:
        (evaluation, index, _), value, reason = answer
        costs = {"wall_s": 0.0, "cpu_s": 0.0, "controller_cpu_s": controller_cpu_s}
        costs |= self._under_way.pop(evaluation, {})
        if value is None:
            self.drop(evaluation, index, reason)
        elif self.has_given_up or evaluation < self.valid_from:
            what = "judging has ended" if self.has_given_up else "everything thawed meanwhile"
            self.drop(evaluation, index, f"it came late: {what}")
        elif math.isfinite(value):
            self._num_failures, self._has_read = 0, True
            which = {"evaluation": evaluation, "module": index, "value": value}
            concluded = {"smoothed": value, "slope": None, "tolerance": None, "stationary": 0}
            read: dict[str, Any] = {**which, **concluded, **costs}
            self._finished.append(PlasticityRead(step=0, name=self.cut.modules[index].name, **read))
        else:
            reason = reason or f"the value is {value}"
            self.drop(evaluation, index, reason)
            dropped = f"egeria: a reading of plasticity was dropped: {reason}. Training continues."
            self.recorder.warn("readings", dropped)
            self._num_failures += 1
            if self.has_given_up:
                failed = f"the last {FAILURES_BEFORE_GIVING_UP} evaluations failed: {reason}"
                self.recorder.decline("judging plasticity", failed)
                self._close_controller()

    def _close_controller(self) -> None:
        """End the controller; what it had not handed over, or not finished, is dropped."""
        was_apart = self.controller.is_apart
        late = [report for report in self.controller.close() if isinstance(report, Answer)]
        lost = [(read.evaluation, read.module, "") for read in self._finished]
        lost += [(ticket.evaluation, ticket.module, reason) for ticket, _, reason in late]
        self._finished = []
        for evaluation, index, reason in lost:
            self.drop(evaluation, index, reason or "the run ended before it was judged")
        if late and was_apart and not self._has_read and not self.has_given_up:
            self.recorder.warn("a short run", SHORT_RUN)


def make_evaluation(
    training: Training, cut: Cut, clock: Clock, given: Any, loader: Any
) -> Evaluation:
    """Return what reads plasticity in a run; all processes of a job call it.

    Args:
        training: what is trained.
        cut: of its model.
        clock: of the run.
        given: a controller of the user's; else one is chosen by the settings.
        loader: of the user, whose workers need cores too.

    Raises:
        FreezingEndedError: the plasticity of this model cannot be read.
    """
    model, config, is_given = training.model, training.config, not isinstance(given, str | None)
    if reason := plasticity_refusal(model):
        raise FreezingEndedError(reason)
    controller: Controller = Controller()
    if rank() > 0:
        return Evaluation(training, cut, clock, controller, is_given)
    if is_given:
        controller, kind, reason = given, type(given).__name__, "given to attach"
    else:
        choice = choose(config.controller.kind, config.reference.device, model, loader)
        kind, reason = choice.kind, choice.reason
        plan = EvaluationPlan(
            taps=tuple(module.tap for module in cut.modules[:-1]),
            largest_map=config.plasticity.largest_map,
            precision=config.reference.precision,
            device=choice.device,
        )
        total = training.total_steps if choice.must_repay else None  # unknown: long enough
        controller = InlineController(plan)
        if kind == "process":
            controller = ProcessController(
                plan,
                config.controller.timeout_s,
                config.controller.load_limit,
                lambda: seconds_left(total, clock.step, clock.iteration_s),
            )
    training.recorder.write(ControllerChosen(step=clock.step, controller=kind, reason=reason))
    return Evaluation(training, cut, clock, controller, is_given)


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
