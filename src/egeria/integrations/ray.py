"""egeria in Ray Train: `attach`, called in the function that a `TorchTrainer` runs, after
`prepare_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egeria import session
from egeria.config import Config
from egeria.controller import Controller
from egeria.errors import ConfigError
from egeria.integrations.wrapped import WrappedRun
from egeria.policy import PolicyMaker
from egeria.report.trackers import scalars
from egeria.session import Run

try:
    from ray import train
except ImportError as error:
    raise ImportError(
        "egeria.integrations.ray needs Ray Train. Run `pip install egeria[ray]`."
    ) from error

STATE_FILE, FOLDER = "egeria.pt", "egeria"


def attach(
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
) -> RayRun:
    """Watch the training of a Ray worker and freeze its front layers as they converge.

    Call it in all workers, before a checkpoint is loaded, and `restore` after that. The loop goes
    on calling what `prepare_model` returned; it calls `run.step(loss)` after each optimizer step,
    and `run.report` in place of `ray.train.report`.

    Args:
        model: as `ray.train.torch.prepare_model` returned it.
        optimizer: of the loop, or a list of them.
        loader: the training loader, as `ray.train.torch.prepare_data_loader` returned it, or
            another.
        scheduler: of the loop.
        total_steps: optimizer steps of the whole run, of one worker.
        config: as of `egeria.attach`, as are the next two.
        policy: the name of a policy, or what makes one.
        directory: where the journal and the report go; None takes the folder `egeria` where Ray
            keeps the run, if that is a folder and not a bucket: then give a URL.
        controller: 'auto', 'process' or 'inline', or a controller of your own.

    Returns:
        The run: all that `egeria.Run` has.

    Raises:
        ConfigError: this is no worker of Ray Train, or an argument is outside its contract.
    """
    context = _context()
    run = session.attach(
        model,
        optimizer,
        loader,
        scheduler=scheduler,
        total_steps=total_steps,
        config=config,
        policy=policy,
        directory=_place(context) if directory is None else directory,
        controller=controller,
    )
    return RayRun(run, leads=context.get_world_rank() == 0)


class RayRun(WrappedRun):
    """An `egeria.Run` whose state rides in the checkpoints of Ray, and whose numbers are in its
    results.
    """

    def __init__(self, run: Run, *, leads: bool) -> None:
        super().__init__(run)
        self._leads = leads

    def report(
        self, metrics: Mapping[str, Any], checkpoint: train.Checkpoint | None = None, **options: Any
    ) -> None:
        """Report metrics to Ray, those of egeria beside them, and its state in the checkpoint of
        the first worker.

        All workers call it, as `ray.train.report`. Where the state cannot be saved, the checkpoint
        goes without it.

        Args:
            metrics: of the loop; where they have one of egeria's names, theirs counts.
            checkpoint: with what the loop has saved, in a local folder.
            options: as of `ray.train.report`.
        """
        if checkpoint is not None and self._leads:
            self._save(Path(checkpoint.path) / STATE_FILE)
        train.report({**self._scalars(), **metrics}, checkpoint, **options)

    def restore(self, checkpoint: train.Checkpoint | None = None) -> bool:
        """Go on from the state in a checkpoint; to be called in all workers, after model and
        optimizer have theirs.

        Args:
            checkpoint: None takes the one that Ray restarts from, if it does.

        Returns:
            Whether there was a state. A checkpoint without one is told of by a warning: nothing is
            frozen then.

        Raises:
            StateError: the state is of another egeria, or of another model. Nothing has changed
                then.
        """
        checkpoint = train.get_checkpoint() if checkpoint is None else checkpoint
        if checkpoint is None:
            return False
        with checkpoint.as_directory() as folder:
            file = Path(folder) / STATE_FILE
            if not file.is_file():
                self._warn(
                    f"the checkpoint {checkpoint.path} has no {STATE_FILE}, so that freezing "
                    "begins anew"
                )
                return False
            self._run.load_state_dict(torch.load(file, map_location="cpu", weights_only=False))
        return True

    def _save(self, file: Path) -> None:
        try:
            torch.save(self._run.state_dict(), file)
        except Exception as error:
            file.unlink(missing_ok=True)
            self._warn(
                f"its state could not be saved ({error}), so that a restart from here begins "
                "unfrozen"
            )

    def _warn(self, what: str) -> None:
        self._run._recorder.warn(what, f"egeria: {what}")

    def _scalars(self) -> dict[str, float]:
        try:
            return scalars(self._run.summary())
        except Exception as error:
            self._warn(f"its numbers could not be told ({error})")
            return {}


def _place(context: Any) -> str | None:
    """Return where the journal goes: beside the checkpoints; None where that is no folder, or is
    not told.
    """
    try:
        storage = context.get_storage()
        if storage.storage_filesystem.type_name == "local":
            return f"{storage.experiment_fs_path}/{FOLDER}"
    except Exception:  # Ray may change what it tells, and does not tell it in its local mode
        return None
    return None


def _context() -> Any:
    try:
        context = train.get_context()
        context.get_world_rank()
    except Exception as error:
        raise ConfigError(
            "egeria.integrations.ray.attach is for the function that a TorchTrainer of Ray runs "
            "in its workers, and "
            f"this is no worker ({error}). Call it there, or `egeria.attach` elsewhere."
        ) from error
    return context
