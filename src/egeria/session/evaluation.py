"""Evaluations of plasticity: the batch kept for one, the request to the controller, what the policy
decides on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from egeria import dist
from egeria.controller import Controller, ControllerStatus, EvaluationFailed, Request, Ticket
from egeria.events import (
    ComputeProfiled,
    ControllerRestarted,
    Declined,
    Event,
    FaultCaught,
    IntervalChanged,
    PlasticityRead,
    ReadingDropped,
    ReferenceRefreshed,
    RungTaken,
)
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.shards import outline
from egeria.layers.taps import capture, forward_shares
from egeria.layers.undisturbed import CommunicationError, undisturbed
from egeria.policy import BOOTSTRAPPING, PLASTICITY, Decision, Policy, Reading
from egeria.session.following import Training
from egeria.session.timing import Budget, IterationTimer, Stopwatch, count_iterations

FAILURES_BEFORE_GIVING_UP = 3
BACKWARD_SHARE = 2 / 3
"""Of an iteration: the backward pass has two multiplications where the forward pass has one."""

logger = logging.getLogger("egeria")


@dataclass(eq=False)
class Evaluation:
    """Reads the plasticity of the monitored layer module for the policy, and keeps the reference
    model up to date.

    `arm` keeps the batch of the coming forward pass, `request` hands it to the controller with the
    model's activation for it, `judge` gives finished readings to the policy, the same in all
    processes. Only the first one has a controller.
    """

    training: Training
    modules: Sequence[LayerModule]
    policy: Policy
    controller: Controller
    budget: Budget
    timer: IterationTimer

    def __post_init__(self) -> None:
        self.ranks, self.recorder = self.training.ranks, self.training.recorder
        self.batch: Batch | None = None
        self.evaluated: Batch | None = None
        """A copy of the batch of the newest evaluation: the rows that were read."""
        self._work_shares: list[float] | None = None
        """Share of the forward pass' operations that each layer module takes; None where they
        cannot be counted."""
        self._num_samples = self.training.config.plasticity.num_samples
        self._is_profiled = self._needs_whole_batch = self._has_read = False
        self._samples, self._most_samples, self._num_failures = 0, [0, 0], 0
        self._is_armed = False
        """Whether the batch is kept for an evaluation."""
        self._evaluations_since_refresh: int | None = None
        """Requested ones: intervals without a loss do not count."""
        self._refreshed_at: int | None = None
        self.valid_from = 0
        """Readings of earlier evaluations are dropped."""
        self._under_way: dict[int, dict[str, Any]] = {}
        """By evaluation: what it cost in this process, and the age of the reference."""
        self._refresh_cost = (0.0, 0.0)
        self.status = ControllerStatus()
        self._finished: list[Reading] = []

    @property
    def has_given_up(self) -> bool:
        """Whether evaluations failed so often in a row that no more are made."""
        return self._num_failures >= FAILURES_BEFORE_GIVING_UP

    def arm(self) -> None:
        """Keep the batch of the next training forward (the last one before the step, if there are
        several).

        Also without a monitored module: to calibrate the first reference on, or to rehearse a
        freeze on.
        """
        index = self.policy.monitored
        is_first = self.policy.stage == BOOTSTRAPPING or self._evaluations_since_refresh is None
        if index is None and not is_first and PLASTICITY in self.policy.needs:
            return
        self.disarm()
        self._is_armed, self._samples = index is not None, 0
        self.training.hooks.keep_next(self._keep)
        if index is None:
            self._take_in(self.controller.poll())

    def disarm(self) -> None:
        """Release the batch."""
        self.training.hooks.keep_next(None)
        self.batch, self._is_armed = None, False

    def begin(self, evaluation: int, interval_steps: int) -> int:
        """Make the first reference, or where there are no evaluations for a while foresee their
        cost; return `n`.
        """
        if self.policy.monitored is not None:
            self.refresh(evaluation, is_forced=True)
        elif self.ranks.leads and self.batch is not None and PLASTICITY in self.policy.needs:
            self.profile()
            self._note_rows(self.batch)
            return self.fit_interval(interval_steps, self.policy.frozen)
        return interval_steps

    def request(self, evaluation: int, index: int) -> None:
        """Request the plasticity of a layer module on the batch kept for it; what prevents that is
        journaled.
        """
        if self._evaluations_since_refresh is None:  # no reference to read by
            return
        self.profile()
        if not self._is_armed:  # it is monitored since this very step: nothing was kept for it
            return
        watch = Stopwatch()
        activation = self._read_activation(evaluation, index)
        if activation is None or self.batch is None:
            return
        self._note_rows(self.batch)
        tap = self.modules[index].tap
        ticket = Ticket(evaluation=evaluation, step=self.recorder.step, module=index, tap=tap)
        assert self.evaluated is not None
        self.controller.submit(Request(ticket=ticket, batch=self.evaluated, activation=activation))
        wall_s, cpu_s = watch.read()
        self._under_way[evaluation] = {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "age": evaluation - (self._refreshed_at or 0),
        }
        if self.timer.iteration_s > 0:
            self.budget.note_evaluation(wall_s / self.timer.iteration_s)

    def judge(self) -> Iterator[tuple[Decision, ...]]:
        """Give finished readings to the policy, and yield what it decides on each; all processes
        have the same.
        """
        own: list[Reading] = []
        if not self.has_given_up:
            self._take_in(self.controller.poll())
            own, self._finished = self._finished, []
        shared = own if self.ranks.is_alone else self.ranks.readings(own)
        for reading in own or shared:
            if reading.module != self.policy.monitored:
                reason = "it came late: the layer module is no longer monitored, or not now"
                self._drop(reading.evaluation, reading.module, reason)
                continue
            judgement = self.policy.observe_reading(reading)
            shown = asdict(reading) | asdict(judgement) | {"step": self.recorder.step}
            del shown["decisions"]
            self.recorder.write(PlasticityRead(name=self.modules[reading.module].name, **shown))
            yield judgement.decisions

    def refresh(self, evaluation: int, *, is_forced: bool = False) -> None:
        """Bring the reference model up to date with the training weights, if that
        is due or forced.
        """
        config, watch = self.training.config, Stopwatch()
        period = 0 if is_forced else config.reference.refresh_evaluations or self.policy.window
        since = self._evaluations_since_refresh
        is_due = since is None or since >= period
        if not (self.ranks.leads and is_due) or self.has_given_up:
            return
        calibration = None if self.batch is None else self._rows(self.batch)
        if not self.controller.refresh(evaluation, self.training.model, calibration):
            return
        self._evaluations_since_refresh, self._refreshed_at = 0, evaluation
        self._refresh_cost = watch.read()
        self._take_in(self.controller.poll())
        if period and self.timer.iteration_s > 0:
            # After a thaw the window is shorter for a while; what counts is the long run.
            usual = config.reference.refresh_evaluations or config.plasticity.window
            self.budget.note_refresh(watch.read()[0] / self.timer.iteration_s, usual)

    def fit_interval(self, interval_steps: int, index: int | None) -> int:
        """Return the `n` that keeps evaluations of a layer module within their budget, and journal
        a change.
        """
        evaluated, changed = self.evaluated, None
        is_on_cpu = evaluated is not None and evaluated.autocast.device_type == "cpu"
        if index is not None and self._work_shares is not None and is_on_cpu:
            looked_at, samples = self._most_samples
            share = looked_at / samples * (1 if self.status.is_asynchronous else 2)
            changed = self.budget.expect(
                count_iterations(sum(self._work_shares[: index + 1]), share), interval_steps
            )
        changed = changed or self.budget.review(interval_steps)
        return (
            interval_steps if changed is None else self._change_interval(interval_steps, *changed)
        )

    def _change_interval(self, before: int, after: int, reason: str) -> int:
        self.recorder.write(
            IntervalChanged(step=self.recorder.step, before=before, after=after, reason=reason)
        )
        return after

    def saved_s(self, modules: Sequence[int]) -> float | None:
        """Return the seconds that freezing these layer modules saves; None where unknown."""
        total_steps = self.training.total_steps
        if self._work_shares is None or total_steps is None or self.timer.iteration_s <= 0:
            return None
        share = BACKWARD_SHARE * sum(self._work_shares[index] for index in modules)
        return share * self.timer.iteration_s * max(0, total_steps - self.recorder.step)

    def profile(self) -> list[float] | None:
        """Count the operations of the forward pass, once, and return the share of each layer
        module; None: unknown.
        """
        if self._is_profiled or self.batch is None:
            return self._work_shares
        self._is_profiled = True
        try:
            if (
                self._work_shares is None
            ):  # else they were counted before the run was stopped, of another batch
                model, batch = outline(self.training.model, self.batch)
                self._work_shares = forward_shares(model, self.modules, batch)
        except CommunicationError:
            raise
        except Exception as error:
            self.recorder.fault("counting operations", error)
        if self._work_shares is not None:
            self.recorder.write(
                ComputeProfiled(step=self.recorder.step, forward_shares=list(self._work_shares))
            )
        return self._work_shares

    def close(self, *, keeps_controller: bool = False) -> None:
        """Release everything held, but for a controller that is used on."""
        self.disarm()
        self.evaluated = None
        if not keeps_controller:
            self._close_controller()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        return {
            "evaluations_since_refresh": self._evaluations_since_refresh,
            "refreshed_at": self._refreshed_at,
            "needs_whole_batch": self._needs_whole_batch,
            "most_samples": [*self._most_samples, dist.world_size()],
            "num_failures": self._num_failures,
            "work_shares": self._work_shares,
            "controller": self.controller.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._needs_whole_batch = bool(state["needs_whole_batch"])
        known = state["most_samples"]
        self._most_samples = known[:2] if known[2] == dist.world_size() else [0, 0]
        # One that had given up gets another chance: it may be on another machine now.
        self._num_failures = min(int(state["num_failures"]), FAILURES_BEFORE_GIVING_UP - 1)
        self._refreshed_at = state["refreshed_at"]
        self._work_shares = state["work_shares"] or self._work_shares
        can_go_on = self.controller.refresh(
            self._refreshed_at or 0, self.training.model, None, state["controller"]
        )
        self._evaluations_since_refresh = state["evaluations_since_refresh"] if can_go_on else None

    def _keep(self, batch: Batch) -> None:
        self.batch = batch
        self._samples += batch.num_rows or 1

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
        module = self.modules[index]
        self._evaluations_since_refresh = (self._evaluations_since_refresh or 0) + 1
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
            if isinstance(report, (Reading, ReadingDropped)):
                self._take_in_result(report)
            else:
                self._record(replace(report, step=self.recorder.step))
        if status.lacks_reference:
            self._evaluations_since_refresh = None
        if status.has_ended:
            self._num_failures = FAILURES_BEFORE_GIVING_UP
            self._close_controller()

    def _take_in_result(self, result: Reading | ReadingDropped) -> None:
        costs = self._under_way.pop(result.evaluation, {})
        is_lost = isinstance(result, ReadingDropped) and not isinstance(result, EvaluationFailed)
        late = "it came late: judging has ended" if self.has_given_up else ""
        if not late and result.evaluation < self.valid_from:
            late = "it came late: everything thawed meanwhile"
        if isinstance(result, Reading) and not late and math.isfinite(result.value):
            self._num_failures, self._has_read = 0, True
            self._finished.append(replace(result, **costs))
            return
        reason = f"the value is {result.value}" if isinstance(result, Reading) else result.reason
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
        elif isinstance(event, FaultCaught):
            self.recorder.fault(event.where, RuntimeError(event.error))
            self._evaluations_since_refresh = None
            self._count_failure(f"the reference cannot be refreshed: {event.error}")
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
        elif isinstance(event, ControllerRestarted):
            message = (
                f"egeria: the controller process was replaced: {event.reason}. Training continues."
            )
            self.recorder.warn("restarts of the controller", message)

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
            if isinstance(report, (Reading, ReadingDropped))
        ]
        for report in late:
            reason = (
                "the run ended before it was judged"
                if isinstance(report, Reading)
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
