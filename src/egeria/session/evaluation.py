"""Evaluations of plasticity, for a policy that asks for them: no other run imports this."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from egeria.controller import Controller, ProcessController, choose
from egeria.controller.inline import Answer, EvaluationPlan, InlineController, Report, Ticket
from egeria.distributed import fsdp2
from egeria.distributed.ranks import rank, together
from egeria.errors import brief
from egeria.events import (
    ControllerChosen,
    Declined,
    IntervalChanged,
    PlasticityRead,
    ReadingDropped,
    ReferenceRefreshed,
)
from egeria.model.cut import Cut
from egeria.model.hooks import Hook, sweep
from egeria.model.passes import Batch, captures, is_own_pass, undisturbed
from egeria.policy import Interval, Reading, Status, Wants
from egeria.report.wording import plural
from egeria.session.clock import Clock, Seconds
from egeria.session.training import FreezingEndedError, Training

FAILURES_BEFORE_GIVING_UP = 3
POLLS_PER_INTERVAL = 4  # a controller process is asked so often for its readings
FIRST_REVIEW, TOLERATED, LARGEST_GROWTH = 3, 1.25, 8  # of the budget for evaluations
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
        config = training.config
        self._budget = Budget(config.controller.budget_share, config.plasticity.window)
        self._num_samples = config.plasticity.num_samples
        self._batch: Batch | None = None
        self._is_armed = self._has_read = self._is_behind = False  # behind: no room for a refresh
        self._refreshed_at: int | None = None  # the evaluation; None where there is no reference
        self._num_failures, self._cpu_s, self.due = 0, 0.0, 0  # failures: in a row
        self._costs: dict[int, dict[str, Any]] = {}  # by evaluation
        self._refresh_cost = Seconds()
        self._finished: list[Reading] = []

    def prepare(self, module: int | None) -> None:
        """Keep the batch of the coming step where that ends the interval.

        Also where no layer module is monitored yet: the first reference is calibrated on it. `due`
        is the next step at which this is to be called, and readings taken in.

        Args:
            module: the layer module that the policy wants read.
        """
        clock, last = self.clock, self.clock.ends - 1
        is_needed = module is not None or self._refreshed_at is None
        if clock.step == last and self.leads and is_needed:
            self.disarm()
            self._is_armed, model = module is not None, self.training.model
            hook = Hook(self, Evaluation._keep)
            model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        self.due = last if clock.step < last else clock.step + 1
        if self._is_apart:
            part = max(1, clock.interval_steps // POLLS_PER_INTERVAL)
            self.due = min(self.due, clock.step + part - (clock.step - clock.began) % part)

    def disarm(self) -> None:
        """Release the batch."""
        sweep(self.training.model, self)
        self._batch, self._is_armed = None, False

    def request(self, interval: Interval, wants: Wants) -> None:
        """Request the plasticity that the policy wants, on the batch kept for it."""
        index = wants.plasticity_of
        if interval.loss is None:
            steps = plural(interval.num_steps, "step")
            reason = f"the training loss was not finite for {steps}; nothing is judged meanwhile"
            self.recorder.decline("freezing while the loss is not finite", reason)
        elif index is not None and self._is_armed and self._refreshed_at is not None:
            self._request(Ticket(self.clock.evaluation, index, self.cut.modules[index].tap))

    def _request(self, ticket: Ticket) -> None:
        begin, activation = Seconds.now(), None
        rows = None if self._batch is None else self._batch.first_rows(self._num_samples)
        reason = "the loop does not call the model in training mode"
        if rows is not None:
            name = self.cut.modules[ticket.module].name
            reason = f"layer module {name} gives no tensor to judge it by"
            try:
                with undisturbed(self.training.model):
                    own = rows.first_rows(None)
                    found = captures(self.training.model, [ticket.tap], own)
                activation = found.get(ticket.tap)
            except Exception as error:  # not every first dimension is one of samples
                reason = brief(error)
        if rows is None or activation is None:
            self._take_in([Answer(ticket, math.nan, reason)])
            return
        self.controller.submit(ticket, rows, activation)
        spent = Seconds.now().since(begin)
        self._costs[ticket.evaluation] = spent._asdict()
        if self.clock.iteration_s > 0:
            self._budget.note_evaluation(spent.wall_s / self.clock.iteration_s)

    def take_finished(self) -> list[Reading]:
        """Return what has been read since the last call."""
        self._take_in(self.controller.poll())
        own, self._finished = self._finished, []
        return own

    def journal(self, reading: Reading, status: Status) -> None:
        """Journal a reading, with what the policy concluded from it."""
        names = ("slope", "tolerance", "stationary")
        found: dict[str, Any] = {name: getattr(status, name) for name in names}
        found["smoothed"] = reading.value if status.smoothed is None else status.smoothed
        found |= {"wall_s": 0.0, "cpu_s": 0.0, **self._costs.pop(reading.evaluation, {})}
        name, step = self.cut.modules[reading.module].name, self.recorder.step
        self.recorder.write(PlasticityRead(step=step, name=name, **asdict(reading), **found))

    def drop(self, evaluation: int, module: int, reason: str) -> None:
        """Journal an evaluation without a usable reading."""
        self._costs.pop(evaluation, None)
        which = {"step": self.recorder.step, "evaluation": evaluation, "module": module}
        self.recorder.write(ReadingDropped(**which, reason=reason))

    def refresh(self, wants: Wants) -> int:
        """Take over the weights into the reference model, where that is due; release the batch.

        Returns:
            The steps of an interval that keep evaluations within their budget.
        """
        before = self.clock.interval_steps
        is_due = wants.refresh or self._is_behind or self._refreshed_at is None
        if is_due and wants.plasticity_of is not None:
            self._refresh()
        self.disarm()
        after, reason = self._budget.review(before) or (before, "")
        if after != before:
            step = self.recorder.step
            changed = IntervalChanged(step=step, before=before, after=after, reason=reason)
            self.recorder.write(changed)
        return after

    def _refresh(self) -> None:
        begin = Seconds.now()
        rows = None if self._batch is None else self._batch.first_rows(self._num_samples)
        self._is_behind = not self.controller.refresh(self.training.model, rows)
        if self._is_behind:
            return
        is_first, self._refreshed_at = self._refreshed_at is None, self.clock.evaluation
        self._refresh_cost = Seconds.now().since(begin)
        self._take_in(self.controller.poll())
        if not is_first and self.clock.iteration_s > 0:
            self._budget.note_refresh(self._refresh_cost.wall_s / self.clock.iteration_s)

    def close(self, *, for_good: bool = True) -> None:
        """Release everything held; a given controller only where the run ends."""
        self.disarm()
        if for_good or not self.is_given:
            self._close_controller()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {
            "refreshed_at": self._refreshed_at,
            "budget": asdict(self._budget),
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        settings = {"share": self._budget.share, "window": self._budget.window}
        self._budget = Budget(**{**state["budget"], **settings})
        goes_on = self.controller.refresh(self.training.model, None, state["controller"])
        self._refreshed_at = state["refreshed_at"] if goes_on else None

    def _keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a training call; of several calls in a step the last ones."""
        if not model.training or not torch.is_grad_enabled() or is_own_pass():
            return
        try:
            self._batch = Batch.of_call(args, kwargs, self.training.device_type)
        except Exception as error:  # of a mapping of the user's own, for instance
            self._batch = None
            self.recorder.fault("reading the batch", error)

    def _take_in(self, reports: Sequence[Report]) -> None:
        """Sort what the controller reports into finished readings and events of the journal."""
        controller_cpu_s, now = self._spent() / max(1, len(reports)), self.recorder.step
        for report in reports:
            if isinstance(report, Answer):
                costs = self._costs.setdefault(report.ticket.evaluation, {})
                costs["controller_cpu_s"] = controller_cpu_s
                self._take_in_answer(report)
            elif isinstance(report, Declined):
                self.recorder.decline(report.what, report.reason)
            elif isinstance(report, ReferenceRefreshed):
                costs = {**self._refresh_cost._asdict(), "controller_cpu_s": controller_cpu_s}
                which: dict[str, Any] = {"step": now, "evaluation": self._refreshed_at or 0}
                self.recorder.write(replace(report, **which, **costs))
            else:
                self.recorder.write(replace(report, step=now))

    def _take_in_answer(self, answer: Answer) -> None:
        (evaluation, index, _), value, reason = answer
        if value is None:
            self.drop(evaluation, index, reason)
        elif math.isfinite(value):
            self._num_failures, self._has_read = 0, True
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
        """Return the CPU seconds of the controller's process since the last call."""
        spent_s, self._cpu_s = self.controller.cpu_s - self._cpu_s, self.controller.cpu_s
        self.clock.controller_cpu_s += spent_s
        return spent_s

    def _close_controller(self) -> None:
        """End the controller; what it had not handed over, or not finished, is dropped."""
        was_apart = self.controller.is_apart
        late = [report for report in self.controller.close() if isinstance(report, Answer)]
        self._spent()
        lost = [(read.evaluation, read.module, "") for read in self._finished]
        lost += [(ticket.evaluation, ticket.module, reason) for ticket, _, reason in late]
        self._finished = []
        for evaluation, index, reason in lost:
            self.drop(evaluation, index, reason or "the run ended before it was judged")
        if late and was_apart and not self._has_read:
            self.recorder.warn("a short run", SHORT_RUN)


@dataclass(eq=False)
class Budget:
    """Makes `n` longer where evaluations take more than their share of the training time.

    The first review comes after three evaluations, before any slope is known, and acts at once;
    later ones come after a window of evaluations each, and two in a row must agree: a slope is a
    movement per evaluation, so that a change of `n` within a history bends it. `n` doubles, so that
    how busy the machine is rarely makes a difference, up to eight times its first value.

    Costs are in iterations measured at the same time: a busy machine slows down both.

    Args:
        share: of the training time.
        window: evaluations between reviews, and between refreshes.
    """

    share: float
    window: int
    evaluations: tuple[float, ...] = ()
    refreshes: tuple[float, ...] = ()
    next_review: int = FIRST_REVIEW
    first_interval_steps: int = 0
    was_over: bool = True

    def note_evaluation(self, iterations: float) -> None:
        """Record the cost of one evaluation."""
        self.evaluations = (*self.evaluations, iterations)

    def note_refresh(self, iterations: float) -> None:
        """Record the cost of a refresh of the reference, which a window of evaluations shares."""
        self.refreshes = (*self.refreshes, iterations / self.window)[-self.window :]

    def review(self, interval_steps: int) -> tuple[int, str] | None:
        """Return a longer `n` and the reason; None where this one will do, or it is too early."""
        if len(self.evaluations) < self.next_review:
            return None
        self.first_interval_steps = self.first_interval_steps or interval_steps
        cost = statistics.median(self.evaluations) + statistics.median(self.refreshes or (0.0,))
        self.evaluations, self.next_review, longer = (), self.window, interval_steps
        was_over, self.was_over = self.was_over, cost > TOLERATED * self.share * interval_steps
        longest = LARGEST_GROWTH * self.first_interval_steps
        while cost > self.share * longer and 2 * longer <= longest:
            longer *= 2
        if longer == interval_steps or not (was_over and self.was_over):
            return None
        takes = f"an evaluation takes as long as {cost:.2g} iterations"
        return longer, f"{takes}; the budget is {self.share:.1%} of the training time"


def make_evaluation(training: Training, cut: Cut, clock: Clock) -> Evaluation:
    """Return what reads plasticity in a run; all processes of a job call it.

    Raises:
        FreezingEndedError: the plasticity of this model cannot be read.
    """
    config, given = training.config, training.controller
    is_given = not isinstance(given, str | None)
    if reason := plasticity_refusal(training.model):
        raise FreezingEndedError(reason)
    if rank() > 0:
        return Evaluation(training, cut, clock, Controller(), is_given)
    if is_given:
        controller, kind, reason = given, type(given).__name__, "given to attach"
    else:
        wanted, device = config.controller.kind, config.reference.device
        kind, device, reason = choose(wanted, device, training.model, training.loader)
        plan = EvaluationPlan(
            taps=tuple(module.tap for module in cut.modules[:-1]),
            largest_map=config.plasticity.largest_map,
            precision=config.reference.precision,
            device=device,
        )
        controller = InlineController(plan)
        if kind == "process":
            own = config.controller
            controller = ProcessController(plan, own.timeout_s, own.load_limit)
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
