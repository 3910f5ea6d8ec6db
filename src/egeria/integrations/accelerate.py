"""egeria in a training loop of Hugging Face Accelerate: `attach`, called after
`accelerator.prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from egeria import session
from egeria.config import Config
from egeria.controller import Controller
from egeria.errors import ConfigError
from egeria.integrations.wrapped import WrappedRun
from egeria.policy import PolicyMaker
from egeria.report.trackers import Tracker
from egeria.session import Run

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loader: Any = None,
    scheduler: Any = None,
    *,
    total_steps: int | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    policy: str | PolicyMaker | None = None,
    directory: str | Path | None = None,
    controller: str | Controller | None = None,
    log: bool = True,
) -> AcceleratedRun:
    """Watch a training run of Accelerate and freeze its front layers as they converge.

    The loop goes on calling `model(...)`, and calls `run.step(loss)` once in every iteration:
    iterations that only accumulate gradients, and steps that were skipped because gradients
    overflowed, are not counted. The run is registered for checkpointing: `accelerator.save_state`
    saves it, and `accelerator.load_state` restores it.

    Args:
        accelerator: of the loop.
        model: as `accelerator.prepare` returned it.
        optimizer: as `accelerator.prepare` returned it, or a list of them.
        loader: the training loader, as `accelerator.prepare` returned it.
        scheduler: as `accelerator.prepare` returned it.
        total_steps: optimizer steps of the whole run, of one process: with accumulation these are
            fewer than batches.
        config: as of `egeria.attach`, as are the next three.
        policy: the name of a policy, or what makes one.
        directory: where the journal and the report go.
        controller: 'auto', 'process' or 'inline', or a controller of your own.
        log: whether the trackers of the accelerator get the scalars of the run.

    Returns:
        The run: all that `egeria.Run` has.

    Raises:
        ConfigError: an argument is outside its contract; among several processes also a model that
            was not prepared.
    """
    _check(accelerator, model)
    run = session.attach(
        model,
        optimizer,
        loader,
        scheduler=scheduler,
        total_steps=total_steps,
        config=config,
        directory=directory,
        controller=controller,
        policy=policy,
        log_to=_trackers(accelerator) if log else None,
    )
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    accelerated = AcceleratedRun(run, accelerator, several)
    registered = getattr(accelerator, "_custom_objects", [])
    closed = [
        at
        for at, entry in enumerate(registered)
        if isinstance(entry, AcceleratedRun) and entry.closed
    ]
    # checkpoints have as many states as the accelerator knows objects: a second run takes the
    # first's place
    if closed:
        registered[closed[0]] = accelerated
    else:
        accelerator.register_for_checkpointing(accelerated)
    return accelerated


class AcceleratedRun(WrappedRun):
    """An `egeria.Run` that knows from the accelerator which iterations end with
    an optimizer step.
    """

    def __init__(self, run: Run, accelerator: Accelerator, optimizers: Sequence[Any]) -> None:
        super().__init__(run)
        self._accelerator = accelerator
        self._optimizers = [
            optimizer for optimizer in optimizers if hasattr(optimizer, "step_was_skipped")
        ]
        self._losses: list[Any] = []
        """Those of the iterations since the last optimizer step."""
        self._last_state: dict[str, Any] | None = None
        """The state when the run was closed."""

    def step(self, loss: Any) -> None:
        """Take in one iteration; it counts where the optimizer stepped, with the mean loss of the
        accumulated batches.

        Args:
            loss: training loss of the batch, a number or a 0-d tensor; not divided by the
                accumulation steps.

        Raises:
            ConfigError: the loss is neither a number nor a tensor of one element.
        """
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        if not self._accelerator.sync_gradients:
            return
        losses, self._losses = self._losses, []
        if self._was_skipped:
            return
        self._run.step(_mean(losses))

    @property
    def _was_skipped(self) -> bool:
        """Whether no optimizer of this run stepped; another's of the accelerator may still tell of
        an earlier step.
        """
        if not self._optimizers:  # given as they were before `prepare`
            return bool(self._accelerator.optimizer_step_was_skipped)
        return all(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def closed(self) -> bool:
        """Whether the run has ended."""
        return self._last_state is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run; of a closed one that before it was closed."""
        return self._run.state_dict() if self._last_state is None else self._last_state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; `accelerator.load_state` does that after the model and the
        optimizer.

        A run that is closed decides nothing any more: it keeps the state for
        `accelerator.save_state`.

        Raises:
            StateError: it is of another egeria, or of another model. Nothing has changed then.
        """
        if self._last_state is not None:
            self._last_state = dict(state)
            return
        self._run.load_state_dict(state)
        self._losses = []

    def close(self) -> None:
        """End the run and leave the model as it was found. Safe to call twice."""
        if self._last_state is not None:
            return
        try:
            self._last_state = self._run.state_dict()
        finally:
            self._run.close()


def _check(accelerator: Any, model: Any) -> None:
    """Refuse what is no accelerator, and a model that the accelerator would wrap later, without
    egeria.
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        raise ConfigError(
            "egeria.integrations.accelerate.attach takes the accelerate.Accelerator of the loop "
            "first, found "
            f"{type(accelerator).__name__}. In a loop without one call egeria.attach(model, "
            "optimizer, ...)."
        )
    if accelerator.num_processes == 1:
        return
    prepared = {
        id(part) for entry in getattr(accelerator, "_models", ()) for part in entry.modules()
    }
    if not any(id(part) in prepared for part in model.modules()):
        raise ConfigError(
            "Among several processes attach takes the model that accelerator.prepare returned, "
            "found "
            f"{type(model).__name__}, which is not prepared. Call model, optimizer, loader = "
            "accelerator.prepare(...) "
            f"first, and attach with what it returns."
        )


def _trackers(accelerator: Any) -> list[Tracker]:
    """Return what logs to the trackers of an accelerator, as they are when there is something to
    log.
    """

    def log(values: Mapping[str, float], step: int) -> None:
        for tracker in accelerator.trackers:
            if (
                tracker.name == "wandb"
            ):  # drops what comes with a smaller step, and the loop's own may count epochs
                tracker.tracker.define_metric("egeria/*", step_metric="egeria/step")
                tracker.log({**values, "egeria/step": step}, commit=False)
            else:
                tracker.log(dict(values), step=step)

    return (
        [Tracker(name="a tracker of the accelerator", log=log)]
        if accelerator.is_main_process
        else []
    )


def _mean(losses: Sequence[Any]) -> Any:
    """Return the mean of losses on their device; a single one as it is, so that `Run.step` judges
    it.
    """
    if len(losses) == 1 or not all(isinstance(loss, (Tensor, int, float)) for loss in losses):
        return losses[-1]
    return sum(losses) / len(losses)
