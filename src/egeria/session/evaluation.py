"""Evaluations of plasticity; imported only in runs whose policy asks for them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from egeria import events
from egeria.controller.inline import Answer, Controller, InlineController, Ticket
from egeria.controller.process import ProcessController, choose
from egeria.distributed import fsdp2
from egeria.distributed.ranks import rank
from egeria.errors import brief
from egeria.model import passes
from egeria.model.cut import Cut
from egeria.model.hooks import Hook, sweep
from egeria.model.passes import Batch, captures, undisturbed
from egeria.plasticity import gram, pool_map
from egeria.policy import Interval, Reading, Status, Wants
from egeria.report.text import plural
from egeria.session.clock import Clock, Seconds
from egeria.session.training import FreezingEndedError, Training

FAILURES_BEFORE_GIVING_UP = 3
POLLS_PER_INTERVAL = 4  # a process may have readings at any time
NUM_REVIEWED, LARGEST_GROWTH = 3, 8  # evaluations after which `n` may grow, and how far


class Evaluation:
    """Evaluates the plasticity of layer modules and keeps the reference model up to date.

    `prepare` keeps the batch of the last step of an interval, `request` gives it to the controller
    with the model's activation, `take_finished` returns the readings. Only the first rank has a
    controller that evaluates.
    """

    def __init__(self, training: Training, cut: Cut, clock: Clock, controller: Controller) -> None:
        self.training, self.cut, self.clock, self.controller = training, cut, clock, controller
        self.recorder, self.leads = training.recorder, rank() == 0
        self._settings = training.config.plasticity
        self._batch: Batch | None = None
        self._is_armed = False
        self._refreshed_at: int | None = None  # the evaluation; None if there is no reference
        self._num_failures, self._cpu_s, self.due = 0, 0.0, 0  # failures: in a row
        self._living: set[int] | None = None
        # Whether a pass leaves tensors outside of the model; None before one was checked.
        self._keeps_outside: bool | None = None
        self._costs: dict[int, Seconds] = {}  # by evaluation
        self._refresh_cost = Seconds()
        # Cost of the evaluations since the last review, and of a refresh, in iterations.
        self._iterations, self._refresh_iterations = list[float](), 0.0
        self._finished: list[Reading] = []

    def prepare(self, module: int | None) -> None:
        """Keep the batch of the coming step if that ends the interval.

        `module` is the layer module to read. If it is None, the batch is kept all the same for the
        first reference. `due` is the next step at which to call this and to take readings.
        """
        clock, last = self.clock, self.clock.ends - 1
        is_needed = module is not None or self._refreshed_at is None
        if clock.step == last and self.leads and is_needed:
            self.disarm()
            self._is_armed, model = module is not None, self.training.model
            hook = Hook(self, Evaluation._keep)
            model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            if self._keeps_outside is None:
                model.register_forward_hook(Hook(self, Evaluation._look_at_pass))
        part = max(1, clock.interval_steps // POLLS_PER_INTERVAL)
        poll = clock.step + part - (clock.step - clock.began) % part
        self.due = min(poll, last if clock.step < last else clock.step + 1)

    def disarm(self) -> None:
        """Release the batch."""
        sweep(self.training.model, self)
        self._batch, self._is_armed = None, False

    def request(self, interval: Interval, wants: Wants) -> None:
        """Request the plasticity that the policy wants, on the batch that was kept.

        Raises:
            FreezingEndedError: our pass would leave tensors outside of the model.
        """
        if self._keeps_outside:
            raise FreezingEndedError(f"{passes.KEPT}. Give a plan instead of the policy 'egeria'")
        index = wants.plasticity_of
        if interval.loss is None:
            steps = plural(interval.num_steps, "step")
            reason = f"the training loss was not finite for {steps}; nothing is judged meanwhile"
            self.recorder.decline("freezing while the loss is not finite", reason)
        elif index is not None and self._is_armed:
            ticket = Ticket(self.clock.evaluation, index, self.cut.modules[index].tap)
            if self._batch is None:
                reason = "the loop does not call the model in training mode"
                self._take_in_answer(Answer(ticket, math.nan, reason))
            elif self._refreshed_at is None:
                self.drop(ticket.evaluation, index, "there is no reference model yet")
            else:
                self._request(ticket, self._batch.first_rows(self._settings.num_samples))

    def _request(self, ticket: Ticket, rows: Batch) -> None:
        begin, model, training_BB = Seconds.now(), self.training.model, None
        name = self.cut.modules[ticket.module].name
        reason = f"layer module {name} gives no tensor to judge it by"
        try:
            with undisturbed(model):
                activation = captures(model, [ticket.tap], rows.first_rows(None)).get(ticket.tap)
            if activation is not None:
                training_BB = gram(pool_map(activation, self._settings.largest_map))
        except Exception as error:  # a first dimension may be something else than samples
            reason = brief(error)
        if training_BB is None:
            self._take_in_answer(Answer(ticket, math.nan, reason))
            return
        self.controller.submit(ticket, rows, training_BB)
        spent = self._costs[ticket.evaluation] = Seconds.now().since(begin)
        if self.clock.iteration_s > 0:
            self._iterations.append(spent.wall_s / self.clock.iteration_s)

    def take_finished(self) -> list[Reading]:
        """Return the readings since the last call."""
        self._take_in_reports()
        own, self._finished = self._finished, []
        return own

    def journal(self, reading: Reading, status: Status) -> None:
        """Journal a reading, and what the policy concluded from it."""
        names = ("slope", "tolerance", "stationary")
        found: dict[str, Any] = {name: getattr(status, name) for name in names}
        found["smoothed"] = reading.value if status.smoothed is None else status.smoothed
        found |= self._costs.pop(reading.evaluation, Seconds())._asdict()
        found |= {"step": self.recorder.step, "controller_cpu_s": self._spent()}
        name = self.cut.modules[reading.module].name
        self.recorder.write(events.PlasticityRead(name=name, **asdict(reading), **found))

    def drop(self, evaluation: int, module: int, reason: str) -> None:
        """Journal an evaluation without a usable reading."""
        self._costs.pop(evaluation, None)
        which = {"step": self.recorder.step, "evaluation": evaluation, "module": module}
        self.recorder.write(events.ReadingDropped(**which, reason=reason))

    def refresh(self, wants: Wants) -> int:
        """Refresh the reference model if that is due; return the steps of an interval."""
        is_first, batch = self._refreshed_at is None, self._batch
        is_due = (wants.refresh or is_first) and wants.plasticity_of is not None
        if is_due and batch is not None:
            rows, begin = batch.first_rows(self._settings.num_samples), Seconds.now()
            if self.controller.refresh(self.training.model, rows):
                self._refreshed_at = self.clock.evaluation
                self._refresh_cost = Seconds.now().since(begin)
                self._take_in_reports()
                if not is_first and self.clock.iteration_s > 0:
                    self._refresh_iterations = self._refresh_cost.wall_s / self.clock.iteration_s
        self.disarm()
        return self._fitting_steps(wants.interval_steps or self.clock.interval_steps)

    def _fitting_steps(self, wanted: int) -> int:
        """Return the length of the coming intervals, which may change after every third evaluation.

        `n` grows until evaluations, with their share of a refresh, are within their budget.
        Costs are in iterations measured at the same time: a busy machine slows down both.
        """
        before, share = self.clock.interval_steps, self.training.config.controller.budget_share
        if len(self._iterations) < NUM_REVIEWED:
            return before
        cost = median(self._iterations) + self._refresh_iterations / self._settings.window
        self._iterations.clear()
        after = max(before, min(math.ceil(cost / share), LARGEST_GROWTH * wanted))
        if after > before:
            takes = f"an evaluation takes as long as {cost:.2g} iterations"
            reason = f"{takes}; the budget is {share:.1%} of the training time"
            step = self.recorder.step
            changed = events.IntervalChanged(step=step, before=before, after=after, reason=reason)
            self.recorder.write(changed)
        return after

    def close(self, *, for_good: bool = True) -> None:
        """Release everything, a user's own controller only `for_good`; drop late readings."""
        self.disarm()
        if self.controller is self.training.controller and not for_good:
            return
        too_late = "the run ended before it was judged"
        for reading in self._finished:
            self.drop(reading.evaluation, reading.module, too_late)
        self._finished = []
        for report in self.controller.close():
            if isinstance(report, Answer):
                self.drop(report.ticket.evaluation, report.ticket.module, report.reason or too_late)
        self._spent()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {"refreshed_at": self._refreshed_at, "controller": self.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        goes_on = self.controller.refresh(self.training.model, None, state["controller"])
        self._refreshed_at = state["refreshed_at"] if goes_on else None

    def _keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a training call; the last one if a step has several."""
        if not model.training or not torch.is_grad_enabled() or passes.is_own_pass():
            return
        if self._keeps_outside is None:
            self._living = passes.living()
        try:
            self._batch = Batch.of_call(args, kwargs, self.training.device_type)
        except Exception as error:  # from a mapping of the user's own, for instance
            self._batch = None
            self.recorder.fault("reading the batch", error)

    def _look_at_pass(self, model: nn.Module, _args: Any, output: Any) -> None:
        if self._living is not None:
            self._keeps_outside = passes.keeps_outside(model, output, self._living)
            self._living = None

    def _take_in_reports(self) -> None:
        """Take the controller's reports: finished readings, and events for the journal."""
        for report in self.controller.poll():
            if isinstance(report, Answer):
                self._take_in_answer(report)
            elif isinstance(report, events.Declined):
                self.recorder.decline(report.what, report.reason)
                self._refreshed_at = None  # the process is gone, and the reference with it
            elif isinstance(report, events.ReferenceRefreshed):
                found: dict[str, Any] = self._refresh_cost._asdict()
                found |= {"step": self.recorder.step, "evaluation": self._refreshed_at or 0}
                self.recorder.write(replace(report, controller_cpu_s=self._spent(), **found))
            else:
                self.recorder.write(replace(report, step=self.recorder.step))

    def _take_in_answer(self, answer: Answer) -> None:
        (evaluation, index, _), value, reason = answer
        if value is None:
            self.drop(evaluation, index, reason)
        elif math.isfinite(value):
            self._num_failures = 0
            self._finished.append(Reading(evaluation=evaluation, module=index, value=value))
        else:
            reason = reason or f"the value is {value}"
            self.drop(evaluation, index, reason)
            dropped = f"egeria: a reading of plasticity was dropped: {reason}. Training continues."
            self.recorder.warn("readings", dropped)
            self._num_failures += 1
            if self._num_failures == FAILURES_BEFORE_GIVING_UP:
                failed = f"the last {FAILURES_BEFORE_GIVING_UP} evaluations of plasticity failed"
                raise FreezingEndedError(f"{failed}: {reason}")

    def _spent(self) -> float:
        """Return the CPU seconds of the controller process since the last call."""
        spent_s, self._cpu_s = self.controller.cpu_s - self._cpu_s, self.controller.cpu_s
        self.clock.controller_cpu_s += spent_s
        return spent_s


def make_evaluation(training: Training, cut: Cut, clock: Clock) -> Evaluation:
    """Return what evaluates plasticity in a run; all ranks call this together.

    Raises:
        FreezingEndedError: our passes would leave traces in this model.
    """
    if fsdp2.is_sharded(training.model):
        raise FreezingEndedError(fsdp2.NO_PLASTICITY)
    for name, entry in training.model.named_parameters():
        if type(entry) is not nn.Parameter:
            what = f"{name} has weights of a class of their own ({type(entry).__name__})"
            why = "which a pass in inference mode may repack for good"
            raise FreezingEndedError(f"{what}, {why}. Give a plan instead of the policy 'egeria'")
    controller = _make_controller(training, cut) if rank() == 0 else Controller()
    return Evaluation(training, cut, clock, controller)


def _make_controller(training: Training, cut: Cut) -> Controller:
    """Return the user's controller or one of the fitting kind, and journal the choice."""
    config, given = training.config, training.controller
    kind, reason, controller = type(given).__name__, "given to attach", cast(Controller, given)
    if isinstance(given, str | None):
        own, device = config.controller, config.reference.device
        kind, device, reason = choose(own.kind, device, training.model, training.loader)
        taps = tuple(module.tap for module in cut.modules[:-1])
        settings = taps, config.plasticity.largest_map, config.reference.precision, device
        controller = InlineController(*settings)
        if kind == "process":
            controller = ProcessController(settings, own.timeout_s, own.load_limit)
    step = training.recorder.step
    training.recorder.write(events.ControllerChosen(step=step, controller=kind, reason=reason))
    return controller
