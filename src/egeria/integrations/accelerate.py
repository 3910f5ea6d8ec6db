"""egeria in a training loop of Hugging Face Accelerate: `attach`, called after
`accelerator.prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from egeria import session
from egeria.errors import ConfigError
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
    log: bool = True,
    **options: Any,
) -> Run:
    """Watch a training run of Accelerate and freeze its front layers as they converge.

    The loop goes on calling `model(...)`, and calls `run.step(loss)` once in every iteration:
    iterations that only accumulate gradients, and steps that were skipped because gradients
    overflowed, are not counted. The run is registered for checkpointing: `accelerator.save_state`
    saves it, and `accelerator.load_state` restores it, or leaves it alone once it is closed.

    Args:
        accelerator: of the loop.
        model: as `accelerator.prepare` returned it.
        optimizer: as `accelerator.prepare` returned it, or a list of them.
        loader: the training loader, as `accelerator.prepare` returned it.
        scheduler: as `accelerator.prepare` returned it.
        log: whether the trackers of the accelerator get the scalars of the run.
        options: `total_steps` (optimizer steps of the whole run, of one process: with accumulation
            these are fewer than batches), `config`, `policy`, `plan`, `directory` and `controller`
            of `egeria.attach`.

    Raises:
        ConfigError: an argument is outside its contract.
    """
    if not hasattr(accelerator, "register_for_checkpointing"):
        raise ConfigError(
            "egeria.integrations.accelerate.attach takes the accelerate.Accelerator of the loop "
            f"first, found {type(accelerator).__name__}. In a loop without one call "
            "egeria.attach(model, optimizer, ...)."
        )
    trackers = _trackers(accelerator) if log else None
    run = session.attach(model, optimizer, loader, scheduler=scheduler, log_to=trackers, **options)
    # Checkpoints have as many states as the accelerator knows objects: a second run takes the place
    # of the first.
    known = getattr(accelerator, "_custom_objects", ())
    places = [entry for entry in known if isinstance(entry, _Place)]
    place = next((entry for entry in places if entry.run.summary().closed), None)
    if place is None:
        accelerator.register_for_checkpointing(_Place(run))
    else:
        place.run = run
    return run


class _Place:
    """Among what the accelerator saves, the place of the newest run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return self.run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.run.summary().closed:  # then weights may be loaded, for a test of the best
            self.run.load_state_dict(state)


def _trackers(accelerator: Any) -> list[Tracker]:
    """Return what logs to the trackers of an accelerator, as they are when there is something to
    log.
    """

    def log(values: Mapping[str, float], step: int) -> None:
        for tracker in accelerator.trackers:
            if tracker.name == "wandb":
                # It drops what comes with a smaller step, and the loop's own may count epochs.
                tracker.tracker.define_metric("egeria/*", step_metric="egeria/step")
                tracker.log({**values, "egeria/step": step}, commit=False)
            else:
                tracker.log(dict(values), step=step)

    return [Tracker(name="a tracker of the accelerator", log=log)]
