"""Getting readings: the batch of an evaluation step, the training activation, the controller."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from egeria import dist
from egeria.config import Config
from egeria.controller import Controller, Refreshed, Report, Request, Result, SteppedBack, Ticket
from egeria.events import ReadingDropped
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.shards import is_sharded
from egeria.layers.taps import TrainingTap, capture
from egeria.layers.undisturbed import undisturbed
from egeria.policy import Reading
from egeria.session.handle import ModelHandle
from egeria.session.pace import Stopwatch
from egeria.session.recorder import Recorder
from egeria.session.telling import RefreshCost, tell

FAILURES_BEFORE_GIVING_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A reading, and the seconds it took in the training process and in the controller's."""

    reading: Reading
    wall_s: float
    cpu_s: float
    controller_cpu_s: float


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
        self._costs: dict[int, tuple[float, float]] = {}
        self._ages: dict[int, int] = {}
        self._refresh_cost = RefreshCost()
        self._finished: list[Evaluated] = []

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
        return looked_at / samples * (1 if self._controller.is_apart else 2)

    @property
    def is_waiting(self) -> bool:
        """Tell whether the controller has something under way, or is to be looked after."""
        return (self._controller.is_waiting or self._controller.is_apart) and not self.has_given_up

    @property
    def controller_cpu_s(self) -> float:
        """CPU seconds spent outside the training process so far."""
        return self._controller.cpu_s

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
            self._controller.warm_up()
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
        self._refresh_cost = RefreshCost(*watch.read())
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
        self._costs[evaluation] = watch.read()
        self._ages[evaluation] = evaluation - (self._refreshed_at or 0)
        return True

    def poll(self) -> list[Evaluated]:
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
        can_go_on = is_whole and self._controller.load_state_dict(state["controller"], self._model)  # type: ignore[arg-type]
        age = state["evaluations_since_refresh"] if can_go_on else None
        self._evaluations_since_refresh = age  # type: ignore[assignment]
        self._refreshed_at = state.get("refreshed_at")  # type: ignore[assignment]

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

    def _take_in(self, reports: list[Report]) -> None:
        for report in reports:
            if isinstance(report, Result):
                self._take_in_result(report)
            else:
                tell(self._recorder, report, self._refresh_cost)
                self._draw_conclusions(report)

    def _draw_conclusions(self, report: Report) -> None:
        if isinstance(report, Refreshed) and report.error:
            self._evaluations_since_refresh = None
            self._note_failure(f"the reference cannot be refreshed: {report.error}")
        elif isinstance(report, SteppedBack) and report.final:
            self._num_failures = FAILURES_BEFORE_GIVING_UP
            self._close_controller()

    def _take_in_result(self, result: Result) -> None:
        wall_s, cpu_s = self._costs.pop(result.evaluation, (0.0, 0.0))
        age = self._ages.pop(result.evaluation, None)
        if result.lost or self.has_given_up or result.evaluation < self._voided_before:
            late = "judging has ended" if self.has_given_up else "everything thawed meanwhile"
            reason = result.lost or f"it came late: {late}"
            self._write_dropped(result.evaluation, result.module, reason)
        elif result.value is None or not math.isfinite(result.value):
            reason = result.error or f"the value is {result.value}"
            self._write_dropped(result.evaluation, result.module, reason)
            self._recorder.warn("readings", f"egeria: a reading of plasticity was dropped: {reason}. Training goes on.")
            if result.error:
                self._note_failure(f"the last {FAILURES_BEFORE_GIVING_UP} evaluations failed: {result.error}")
        else:
            self._num_failures = 0
            reading = Reading(
                step=result.step, evaluation=result.evaluation, module=result.module, value=result.value, age=age
            )
            self._finished.append(Evaluated(reading=reading, wall_s=wall_s, cpu_s=cpu_s, controller_cpu_s=result.cpu_s))

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
        for report in self._controller.close():
            if isinstance(report, Result):
                reason = report.lost or report.error or "the run ended before it was judged"
                self._write_dropped(report.evaluation, report.module, reason)
