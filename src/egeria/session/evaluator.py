"""Getting readings: the batch of an evaluation step, the training activation, the controller."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from egeria import dist
from egeria.config import Config
from egeria.controller import Controller, ControllerStatus, EvaluationFailed, Request, Ticket
from egeria.events import (
    ControllerRestarted,
    Declined,
    Event,
    FaultCaught,
    ReadingDropped,
    ReferenceRefreshed,
    RungTaken,
)
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.shards import is_sharded
from egeria.layers.taps import TrainingTap, capture
from egeria.layers.undisturbed import undisturbed
from egeria.policy import Reading
from egeria.session.handle import ModelHandle
from egeria.session.pace import Stopwatch
from egeria.session.recorder import Recorder

FAILURES_BEFORE_GIVING_UP = 3


class Evaluator:
    """Makes plasticity readings of one layer module at a time.

    Args:
        model: the model in training.
        handle: what the loop calls; it hands over the batch of an evaluation step.
        controller: who compares.
        config: the settings of the run.
        recorder: where dropped readings are told.
    """

    def __init__(
        self, model: nn.Module, handle: ModelHandle, controller: Controller, config: Config, recorder: Recorder
    ) -> None:
        self.batch: Batch | None = None
        self.evaluated: Batch | None = None
        """A copy of the batch of the newest evaluation: its rows that were looked at."""
        self._model = model
        self._handle = handle
        self._controller = controller
        self._num_samples = config.plasticity.num_samples
        self._reads_training = config.plasticity.mode == "train"
        self._needs_whole_batch = False
        self._samples, self._most_samples = 0, [0, 0]
        self._recorder = recorder
        self._is_armed = False
        self._armed: int | None = None
        self._tap: TrainingTap | None = None
        self._num_failures = 0
        self._evaluations_since_refresh: int | None = None
        """Asked for: intervals without a loss are none."""
        self._refreshed_at: int | None = None
        self._voided_before = 0
        self._asked: dict[int, dict[str, Any]] = {}
        """Of evaluations under way: what they cost here, and the age of the reference."""
        self._refresh_cost = (0.0, 0.0)
        self._status = ControllerStatus()
        self._finished: list[Reading] = []

    @property
    def has_given_up(self) -> bool:
        """Tell whether evaluations failed so often in a row that no more are made."""
        return self._num_failures >= FAILURES_BEFORE_GIVING_UP

    @property
    def share_of_samples(self) -> float | None:
        """Samples that evaluations pass through here, as a share of the largest iteration's; None off the CPU."""
        looked_at, samples = self._most_samples
        if self.evaluated is None or self._reads_training or self.evaluated.autocast.device_type != "cpu":
            return None
        return looked_at / samples * (1 if self._status.is_asynchronous else 2)

    @property
    def is_waiting(self) -> bool:
        """Tell whether the controller has something under way, or is to be looked after."""
        return self._status.is_asynchronous and not self.has_given_up

    @property
    def controller_cpu_s(self) -> float:
        """CPU seconds spent outside the training process so far."""
        return self._status.cpu_s

    def arm(self, index: int | None, module: LayerModule | None) -> None:
        """Keep the batch of the next training forward (the last one before the step, if there are several).

        Args:
            index: which layer module will be evaluated; None for none yet, while the model bootstraps.
            module: the layer module.
        """
        self.disarm()
        self._armed, self._is_armed, self._samples = index, True, 0
        self._handle.keep_next(self._keep)
        if module is None:
            self._take_in(self._controller.poll())
        elif self._reads_training and self._handle.is_compiled:
            reason = "the model is compiled, where nothing can be read; readings are made in inference mode"
            self._recorder.decline("reading the training pass itself", reason)
        elif self._reads_training:
            self._tap = TrainingTap(self._model, module.tap, self._num_samples)

    def disarm(self) -> None:
        """Let go of the batch and of the hook on the training forward."""
        self._handle.keep_next(None)
        self.batch = None
        self._armed, self._is_armed = None, False
        if self._tap is not None:
            self._tap.close()
            self._tap = None

    def refresh(self, evaluation: int, model: nn.Module) -> bool:
        """Bring the reference up to date with the training weights; return False where it could not take them yet.

        Args:
            evaluation: which one it comes after.
            model: the model in training, with all of its weights.
        """
        watch = Stopwatch()
        calibration = None if self.batch is None else self._batch(self.batch)
        if not self._controller.refresh(evaluation, model, calibration):
            return False
        self._evaluations_since_refresh, self._refreshed_at = 0, evaluation
        self._refresh_cost = watch.read()
        self._take_in(self._controller.poll())
        return True

    def is_due(self, period: int) -> bool:
        """Tell whether to refresh: after `period` evaluations, or at once what was never made."""
        age = self._evaluations_since_refresh
        return (age is None or age >= period) and not self.has_given_up

    def evaluate(self, step: int, evaluation: int, index: int, module: LayerModule) -> bool:
        """Ask the controller for the plasticity of a layer module on the batch kept for it; whether that went."""
        ticket = Ticket(evaluation=evaluation, step=step, module=index, tap=module.tap)
        if self._evaluations_since_refresh is None:
            self._write_dropped(evaluation, index, "there is no reference yet")
            return False
        if self._armed is None or (self._tap is not None and self._armed != index):
            return False  # it became the monitored one at this very step: nothing was kept for it
        self._evaluations_since_refresh += 1
        if self.batch is None:
            self._write_dropped(evaluation, index, "run.model was not called in training mode before this step")
            self._note_failure("the loop does not call run.model in training mode; call it in place of the model")
            return False
        watch = Stopwatch()
        activation = self._activation(module)
        if activation is None:
            self._write_dropped(evaluation, index, f"{module.tap} gave no floating-point tensor of two dimensions")
            self._note_failure(f"layer module {module.name} gives no tensor to judge it by")
            return False
        self.evaluated = self._batch(self.batch)
        self._most_samples = [*map(max, self._most_samples, (self.evaluated.num_rows or 1, self._samples))]
        self._controller.submit(Request(ticket=ticket, batch=self.evaluated, activation=activation))
        wall_s, cpu_s = watch.read()
        self._asked[evaluation] = {"wall_s": wall_s, "cpu_s": cpu_s, "age": evaluation - (self._refreshed_at or 0)}
        return True

    def poll(self) -> list[Reading]:
        """Return the finished readings; what cannot be used is journaled and left out."""
        self._take_in(self._controller.poll())
        finished, self._finished = self._finished, []
        return finished

    def void_before(self, evaluation: int) -> None:
        """Drop what was asked for earlier than this evaluation: it is of the time before a thaw."""
        self._voided_before = evaluation

    def drop_late(self, reading: Reading) -> None:
        """Journal a reading of a layer module that is not monitored any more."""
        self._write_dropped(
            reading.evaluation, reading.module, "it came late: the layer module is no longer monitored, or not now"
        )

    def close(self, successor: Evaluator | None = None) -> None:
        """Let go of everything held, but for a controller that the successor goes on with."""
        self.disarm()
        self.evaluated = None
        if successor is None or successor._controller is not self._controller:
            self._close_controller()

    def state_dict(self) -> dict[str, object]:
        """Return what a resumed run needs to read the same values."""
        return {
            "evaluations_since_refresh": self._evaluations_since_refresh,
            "refreshed_at": self._refreshed_at,
            "needs_whole_batch": self._needs_whole_batch,
            "most_samples": [*self._most_samples, dist.world_size()],
            "num_failures": self._num_failures,
            "controller": {} if is_sharded(self._model) else self._controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a saved state."""
        self._needs_whole_batch = bool(state["needs_whole_batch"])
        known: Any = state.get("most_samples", (0, 0, 0))
        self._most_samples = known[:2] if known[2] == dist.world_size() else [0, 0]
        # One that had given up gets another chance: it may be on another machine now.
        self._num_failures = min(int(state["num_failures"]), FAILURES_BEFORE_GIVING_UP - 1)  # type: ignore[call-overload]
        # A model in parts cannot be put together by one process: its reference is made anew.
        is_whole = not is_sharded(self._model)
        self._refreshed_at = state.get("refreshed_at")  # type: ignore[assignment]
        saved: Any = state["controller"]
        can_go_on = is_whole and self._controller.refresh(self._refreshed_at or 0, self._model, None, saved)
        age = state["evaluations_since_refresh"] if can_go_on else None
        self._evaluations_since_refresh = age  # type: ignore[assignment]

    def _keep(self, batch: Batch) -> None:
        self.batch = batch
        self._samples += batch.num_rows or 1

    def _batch(self, batch: Batch) -> Batch:
        """Return what the reference reads: all of it where the training activation comes from the whole batch."""
        whole = self._tap is not None or self._needs_whole_batch
        return batch.first_rows(None if whole else self._num_samples)

    def _activation(self, module: LayerModule) -> Tensor | None:
        assert self.batch is not None
        if self._tap is not None:
            return self._tap.activation
        if is_sharded(self._model):
            return None
        with undisturbed(self._model):
            try:
                return capture(self._model, module.tap, self._batch(self.batch))
            except Exception:
                if self._needs_whole_batch:
                    raise
                # Not every first dimension is one of samples: a graph, say, is no graph without half its nodes.
                self._needs_whole_batch = True
                return capture(self._model, module.tap, self._batch(self.batch))

    def _take_in(self, status: ControllerStatus) -> None:
        self._status = status
        for report in status.reports:
            if isinstance(report, Reading):
                self._take_in_reading(report)
            elif isinstance(report, ReadingDropped):
                self._take_in_dropped(report)
            else:
                self._take_in_event(replace(report, step=self._recorder.step))
        if status.has_ended:
            self._num_failures = FAILURES_BEFORE_GIVING_UP
            self._close_controller()

    def _take_in_reading(self, reading: Reading) -> None:
        reading = replace(reading, **self._asked.pop(reading.evaluation, {}))
        late = self._why_late(reading.evaluation)
        if late:
            self._write_dropped(reading.evaluation, reading.module, late)
        elif math.isfinite(reading.value):
            self._num_failures = 0
            self._finished.append(reading)
        else:
            reason = f"the value is {reading.value}"
            self._write_dropped(reading.evaluation, reading.module, reason)
            self._warn_dropped(reason)

    def _take_in_dropped(self, dropped: ReadingDropped) -> None:
        self._asked.pop(dropped.evaluation, None)
        late = self._why_late(dropped.evaluation)
        if not isinstance(dropped, EvaluationFailed):
            self._write_dropped(dropped.evaluation, dropped.module, dropped.reason)
        elif late:
            self._write_dropped(dropped.evaluation, dropped.module, late)
        else:
            self._write_dropped(dropped.evaluation, dropped.module, dropped.reason)
            self._warn_dropped(dropped.reason)
            self._note_failure(f"the last {FAILURES_BEFORE_GIVING_UP} evaluations failed: {dropped.reason}")

    def _why_late(self, evaluation: int) -> str:
        if self.has_given_up:
            return "it came late: judging has ended"
        return "it came late: everything thawed meanwhile" if evaluation < self._voided_before else ""

    def _warn_dropped(self, reason: str) -> None:
        self._recorder.warn("readings", f"egeria: a reading of plasticity was dropped: {reason}. Training goes on.")

    def _take_in_event(self, event: Event) -> None:
        """Write an event of the controller to the journal, with a warning where something fell short."""
        if isinstance(event, Declined):
            self._recorder.decline(event.what, event.reason)
        elif isinstance(event, FaultCaught):
            self._recorder.fault(event.where, RuntimeError(event.error))
            self._evaluations_since_refresh = None
            self._note_failure(f"the reference cannot be refreshed: {event.error}")
        elif isinstance(event, ReferenceRefreshed):
            wall_s, cpu_s = self._refresh_cost
            self._recorder.write(replace(event, wall_s=wall_s, cpu_s=cpu_s))
        else:
            self._recorder.write(event)
        if isinstance(event, RungTaken) and event.before:
            change = f"the reference model goes from {event.before} to {event.after}"
            self._recorder.warn(f"rung {event.after}", f"egeria: {change}: {event.reason}. Training goes on.")
        elif isinstance(event, ControllerRestarted):
            message = f"egeria: the controller process was replaced: {event.reason}. Training goes on."
            self._recorder.warn("restarts of the controller", message)

    def _write_dropped(self, evaluation: int, module: int, reason: str) -> None:
        event = ReadingDropped(step=self._recorder.step, evaluation=evaluation, module=module, reason=reason)
        self._recorder.write(event)

    def _note_failure(self, reason: str) -> None:
        self._num_failures += 1
        if self._num_failures == FAILURES_BEFORE_GIVING_UP:
            self._recorder.decline("judging plasticity", reason)
            self._close_controller()

    def _close_controller(self) -> None:
        """End the controller; what it had not handed over, or not finished, is journaled as dropped."""
        self._status = self._controller.close()
        for report in self._status.reports:
            if isinstance(report, Reading):
                self._write_dropped(report.evaluation, report.module, "the run ended before it was judged")
            elif isinstance(report, ReadingDropped):
                self._write_dropped(report.evaluation, report.module, report.reason)
