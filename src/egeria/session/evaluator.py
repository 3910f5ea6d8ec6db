"""Getting readings: the batch of an evaluation step, the training activation, the controller."""

from __future__ import annotations

import math

from torch import Tensor, nn

from egeria.config import Config
from egeria.controller import Controller, Request, Result
from egeria.events import ReadingDropped, ReferenceRefreshed
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
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
        self._model = model
        self._handle = handle
        self._controller = controller
        self._num_samples = config.plasticity.num_samples
        self._reads_training = config.plasticity.mode == "train"
        self._needs_whole_batch = False
        self._recorder = recorder
        self._armed: int | None = None
        self._tap: TrainingTap | None = None
        self._num_failures = 0
        self._evaluations_since_refresh: int | None = None

    @property
    def has_given_up(self) -> bool:
        """Tell whether evaluations failed so often in a row that no more are made."""
        return self._num_failures >= FAILURES_BEFORE_GIVING_UP

    def arm(self, index: int, module: LayerModule) -> None:
        """Keep the batch of the next training forward (the last one before the step, if there are several)."""
        self.disarm()
        self._armed = index
        self._handle.keep_next(self._keep)
        if self._reads_training:
            self._tap = TrainingTap(self._model, module.tap, self._num_samples)

    def disarm(self) -> None:
        """Let go of the batch and of the hook on the training forward."""
        self._handle.keep_next(None)
        self.batch = None
        self._armed = None
        if self._tap is not None:
            self._tap.close()
            self._tap = None

    def refresh(self, step: int, evaluation: int) -> None:
        """Bring the reference up to date with the training weights."""
        watch = Stopwatch()
        self._controller.refresh(self._model)
        self._evaluations_since_refresh = 0
        wall_s, cpu_s = watch.read()
        self._recorder.write(
            ReferenceRefreshed(
                step=step, evaluation=evaluation, builder=self._controller.builder, wall_s=wall_s, cpu_s=cpu_s
            )
        )

    def refresh_if_due(self, step: int, evaluation: int, period: int) -> None:
        """Refresh after `period` evaluations; a reference that was never made is due at once."""
        age = self._evaluations_since_refresh
        if age is None or age >= period:
            self.refresh(step, evaluation)

    def evaluate(self, step: int, evaluation: int, index: int, module: LayerModule) -> None:
        """Ask the controller for the plasticity of one layer module on the batch kept for it."""
        if self._evaluations_since_refresh is None:
            self._drop(step, evaluation, index, "there is no reference yet")
            return
        if self._armed is None or (self._tap is not None and self._armed != index):
            return  # it became the monitored one at this very step: nothing was kept for it
        self._evaluations_since_refresh += 1
        if self.batch is None:
            self._drop(step, evaluation, index, "run.model was not called in training mode before this step")
            self._note_failure("the loop does not call run.model in training mode; call it in place of the model")
            return
        activation = self._activation(module)
        if activation is None:
            self._drop(step, evaluation, index, f"{module.tap} gave no floating-point tensor of two dimensions")
            self._note_failure(f"layer module {module.name} gives no tensor to judge it by")
            return
        self._controller.submit(
            Request(
                evaluation=evaluation,
                step=step,
                module=index,
                tap=module.tap,
                batch=self._batch(self.batch),
                activation=activation,
            )
        )

    def poll(self) -> list[Reading]:
        """Return the finished readings; what cannot be used is journaled and left out."""
        return [reading for result in self._controller.poll() if (reading := self._reading(result)) is not None]

    def close(self) -> None:
        """Let go of everything held."""
        self.disarm()
        self._controller.close()

    def state_dict(self) -> dict[str, object]:
        """Return what a resumed run needs to read the same values."""
        return {
            "evaluations_since_refresh": self._evaluations_since_refresh,
            "needs_whole_batch": self._needs_whole_batch,
            "num_failures": self._num_failures,
            "controller": self._controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a saved state."""
        self._evaluations_since_refresh = state["evaluations_since_refresh"]  # type: ignore[assignment]
        self._needs_whole_batch = bool(state["needs_whole_batch"])
        self._num_failures = int(state["num_failures"])  # type: ignore[call-overload]
        self._controller.load_state_dict(state["controller"], self._model)  # type: ignore[arg-type]

    def _keep(self, batch: Batch) -> None:
        self.batch = batch

    def _batch(self, batch: Batch) -> Batch:
        """Return what the reference reads: all of it where the training activation comes from the whole batch."""
        whole = self._tap is not None or self._needs_whole_batch
        return batch.first_rows(None if whole else self._num_samples)

    def _activation(self, module: LayerModule) -> Tensor | None:
        assert self.batch is not None
        if self._tap is not None:
            return self._tap.activation
        with undisturbed(self._model):
            try:
                return capture(self._model, module.tap, self._batch(self.batch))
            except Exception:
                if self._needs_whole_batch:
                    raise
                # Not every first dimension is one of samples: a graph, say, is no graph without half its nodes.
                self._needs_whole_batch = True
                return capture(self._model, module.tap, self._batch(self.batch))

    def _reading(self, result: Result) -> Reading | None:
        if result.value is None or not math.isfinite(result.value):
            reason = result.error or f"the value is {result.value}"
            self._drop(result.step, result.evaluation, result.module, reason)
            self._recorder.warn("readings", f"egeria: a reading of plasticity was dropped: {reason}. Training goes on.")
            if result.error:
                self._note_failure(f"the last {FAILURES_BEFORE_GIVING_UP} evaluations failed: {result.error}")
            return None
        self._num_failures = 0
        return Reading(step=result.step, evaluation=result.evaluation, module=result.module, value=result.value)

    def _drop(self, step: int, evaluation: int, module: int, reason: str) -> None:
        self._recorder.write(ReadingDropped(step=step, evaluation=evaluation, module=module, reason=reason))

    def _note_failure(self, reason: str) -> None:
        self._num_failures += 1
        if self._num_failures == FAILURES_BEFORE_GIVING_UP:
            self._recorder.decline("judging plasticity", reason)
