"""Ray Train: `attach`, in the function that a `TorchTrainer` runs, after `prepare_model`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from egeria import session
from egeria.report.trackers import scalars
from egeria.session import Run

try:
    from ray import train
except ImportError as error:
    raise ImportError("Ray Train is not installed. Run `pip install egeria[ray]`.") from error

STATE_FILE, FOLDER = "egeria.pt", "egeria"


def attach(
    model: nn.Module,
    optimizer: Any,
    loader: Any = None,
    scheduler: Any = None,
    *,
    directory: str | Path | None = None,
    **options: Any,
) -> RayRun:
    """Watch the training of a Ray worker and freeze its front layers as they converge.

    Call it in all workers, before a checkpoint is loaded, and `restore` after that. The loop goes
    on calling what `prepare_model` returned; it calls `run.step(loss)` after each optimizer step,
    and `run.report` in place of `ray.train.report`.

    Args:
        model: as `ray.train.torch.prepare_model` returned it.
        optimizer: of the loop, or a list of them.
        loader: the training loader, also as `ray.train.torch.prepare_data_loader` returned it.
        scheduler: of the loop.
        directory: where the journal and the report go; None takes the folder `egeria` where Ray
            keeps the run, if that is a folder and not a bucket: then give a URL.
        options: `total_steps` (optimizer steps of the whole run, of one worker) and others of
            `egeria.attach`.
    """
    place = directory or _place()
    run = session.attach(model, optimizer, loader, scheduler=scheduler, directory=place, **options)
    run.__class__ = RayRun  # the very run that egeria knows, with two methods more
    return cast(RayRun, run)


class RayRun(Run):
    """An `egeria.Run` with its state in Ray's checkpoints and its numbers in Ray's results."""

    def report(
        self, metrics: Mapping[str, Any], checkpoint: train.Checkpoint | None = None, **options: Any
    ) -> None:
        """Report metrics to Ray, with the numbers of egeria; all workers call it.

        Args:
            metrics: of the loop; where they have one of egeria's names, theirs counts.
            checkpoint: what the loop has saved, in a local folder; the first worker adds the state
                of the run.
            options: as of `ray.train.report`.
        """
        if checkpoint is not None and train.get_context().get_world_rank() == 0:
            file = Path(checkpoint.path) / STATE_FILE
            try:
                torch.save(self.state_dict(), file)
            except Exception as error:
                file.unlink(missing_ok=True)
                self._recorder.fault("saving its state", error)
        train.report({**scalars(self.summary()), **metrics}, checkpoint, **options)

    def restore(self, checkpoint: train.Checkpoint | None = None) -> bool:
        """Go on from a checkpoint; all workers call it, after model and optimizer have theirs.

        Args:
            checkpoint: None takes the one that Ray restarts from, if it does.

        Returns:
            Whether there was a state. Without one egeria warns and starts from scratch.

        Raises:
            StateError: the state is of another egeria or model; nothing has changed then.
        """
        checkpoint = checkpoint or train.get_checkpoint()
        if checkpoint is None:
            return False
        with checkpoint.as_directory() as folder:
            file = Path(folder) / STATE_FILE
            if not file.is_file():
                reason = f"the checkpoint {checkpoint.path} has no {STATE_FILE}; it begins anew"
                self._recorder.decline("resuming", reason)
                return False
            self.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return True


def _place() -> str | None:
    """Return where the journal goes: beside the checkpoints, if they are in a folder."""
    with suppress(Exception):  # Ray may change this, and has none in local mode
        storage = train.get_context().get_storage()
        if storage.storage_filesystem.type_name == "local":
            return f"{storage.experiment_fs_path}/{FOLDER}"
    return None
