"""`Run`: what the user holds while training."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from egeria.errors import StateError
from egeria.events import MetricLogged, Resumed, RunClosed
from egeria.journal.recorder import Recorder
from egeria.layers.modules import LayerModule
from egeria.session.following import ModelHandle
from egeria.session.loop import Session
from egeria.session.packed import Packed

STATE_SCHEMA = 1


class Run:
    """One training run that egeria watches. Made by `egeria.attach`; also a context manager.

    Attributes:
        model: call it in the loop in place of the model.
        directory: where the journal and the report live; None if nothing is written.
    """

    def __init__(self, handle: ModelHandle, session: Session, recorder: Recorder) -> None:
        self.model = handle
        self.directory: Path | None = recorder.journal.directory
        self._session = session
        self._recorder = recorder
        self._closed = False
        # A run that is dropped without `close` must not leave a frozen model or an open file behind.
        self._finalizer = weakref.finalize(self, _release, session, recorder)

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen now."""
        return self._session.frozen

    @property
    def modules(self) -> tuple[LayerModule, ...]:
        """The layer modules, front to back; empty where the model could not be cut."""
        return self._session.modules

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return self._session.stage

    def step(self, loss: Any) -> None:
        """Count one optimizer step; call it after the optimizer's.

        Args:
            loss: training loss of the step, a number or a 0-d tensor. The device is asked for its
                value once every `n` steps, not now.

        Raises:
            ConfigError: the loss is neither a number nor a tensor of one element.
        """
        if self._closed:
            return
        self._session.timer.enter()
        try:
            self._session.step(loss)
        finally:
            self._session.timer.leave()

    def log(self, **metrics: float) -> None:
        """Put numbers into the journal, such as `run.log(accuracy=0.93)`; the report draws them."""
        values = {name: float(value) for name, value in metrics.items()}
        self._recorder.write(MetricLogged(step=self._session.num_steps, values=values))

    @property
    def packed(self) -> Packed:
        """The state for `torch.distributed.checkpoint`: `dcp.save({"run": run.packed, ...})`, and `dcp.load` alike."""
        return Packed(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue as if the run had never stopped.

        Plain values and tensors; save it beside the states of the model and the optimizer.
        """
        return {"schema": STATE_SCHEMA, **self._session.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; load the model and the optimizer first.

        Raises:
            StateError: the state is of a newer egeria, or of another model. Nothing has changed then.
        """
        schema = state.get("schema")
        if not isinstance(schema, int) or schema > STATE_SCHEMA:
            raise StateError(
                f"This egeria reads run states up to schema {STATE_SCHEMA}, found {schema!r}. "
                f"Load it with the egeria that wrote it, or a newer one."
            )
        try:
            self._session.load_state_dict(state)
        except StateError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise StateError(
                f"A run's state is what run.state_dict() returned; this one is damaged "
                f"({type(error).__name__}: {error}). Take an earlier checkpoint, or go on without loading it."
            ) from error
        self._recorder.write(Resumed(step=self._session.num_steps, frozen=self.frozen, stage=self.stage))

    def close(self) -> None:
        """End the run and leave the model as it was found: thawed, without hooks. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        frozen = self.frozen
        self._session.close()
        self._recorder.write(
            RunClosed(
                step=self._session.num_steps,
                frozen=frozen,
                overhead_wall_s=self._session.timer.overhead_wall_s,
                overhead_cpu_s=self._session.timer.overhead_cpu_s,
                controller_cpu_s=self._session.controller_cpu_s,
            )
        )
        self._finalizer()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _release(session: Session, recorder: Recorder) -> None:
    session.close()
    recorder.journal.close()
