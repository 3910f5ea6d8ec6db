"""Hugging Face Accelerate: `attach`, called after `accelerator.prepare`."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from egeria import session
from egeria.errors import ConfigError
from egeria.report.trackers import Tracker
from egeria.session import Run
from egeria.session.attach import resume

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(
    accelerator: "Accelerator",
    model: nn.Module,
    optimizer: Any,
    loader: Any = None,
    scheduler: Any = None,
    *,
    log: bool = True,
    **options: Any,
) -> Run:
    """Watch a training run of Accelerate and freeze its front layers as they converge.

    The loop calls `run.step(loss)` once in every iteration; those that only accumulate gradients,
    and steps skipped because gradients overflowed, are not counted. The run is registered for
    checkpointing: `accelerator.save_state` saves it, and `accelerator.load_state` restores it, or
    leaves it alone once it is closed.

    Args:
        accelerator: of the loop.
        model: as `accelerator.prepare` returned it, as are the next three.
        optimizer: one, or a list of them.
        loader: the training loader.
        scheduler: of the learning rate.
        log: whether the trackers of the accelerator get the scalars of the run.
        options: `total_steps` (optimizer steps of the whole run, of one process: fewer than batches
            with accumulation) and others of `egeria.attach`.
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        what, found = "attach takes the accelerate.Accelerator first", type(accelerator).__name__
        raise ConfigError(f"{what}, found {found}. In a loop without one call egeria.attach.")
    log_to = Tracker("a tracker of the accelerator", partial(_log, accelerator)) if log else None
    run = session.attach(model, optimizer, loader, scheduler=scheduler, log_to=log_to, **options)
    # Checkpoints have one state for each known object: a second run takes the place of the first.
    places = [e for e in getattr(accelerator, "_custom_objects", ()) if isinstance(e, _Place)]
    if closed := [place for place in places if place.run.summary().closed]:
        closed[0].run = run
    else:
        accelerator.register_for_checkpointing(_Place(run))
    return run


class _Place:
    """Among what the accelerator saves, the place of the newest run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return self.run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.run.summary().closed:  # then weights may be loaded, for a test of the best
            resume(self.run, state)


def _log(accelerator: Any, values: Mapping[str, float], step: int) -> None:
    """Log to the trackers that an accelerator has now."""
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            # It drops what comes with a smaller step, and the loop's own may count epochs.
            tracker.tracker.define_metric("egeria/*", step_metric="egeria/step")
            tracker.log({**values, "egeria/step": step}, commit=False)
        else:
            tracker.log(dict(values), step=step)
