"""Hugging Face's Trainer: `Trainer(..., callbacks=[EgeriaCallback()])`, and nothing else.

Callbacks of a Trainer see neither the trainer nor the loss, and are told nothing when training ends
by an exception. So the first `EgeriaCallback` that is made wraps `Trainer.train` once, for all
trainers: one without an `EgeriaCallback` is passed through; one that has it is followed until
`train` ends, however it ends.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import egeria
from egeria import dist
from egeria.config import Config
from egeria.errors import EgeriaError, brief
from egeria.journal import FILE_NAME, Recorder, is_url
from egeria.policy import PolicyMaker
from egeria.report.build import write_files
from egeria.report.trackers import find_trackers, scalars
from egeria.session.checks import choose_rule, read_config

STATE_FILE = "egeria.pt"
"""The state of the run, inside each checkpoint."""
DIRECTORY = "egeria"
"""Where the journal goes, inside `output_dir`."""
MOST_DIRECTORIES = 1000
TRACKERS = ("_wandb", "_ml_flow")
"""Attributes of the trainer's own callbacks that hold trackers which take files."""

logger = logging.getLogger("egeria")


class EgeriaCallback(TrainerCallback):
    """Watches the training of a `transformers.Trainer` and freezes its front layers as they
    converge.

    The model comes out of `train` as it went in: thawed and without hooks, also after an exception
    or Ctrl-C. Each checkpoint gets a file of the run, from which `resume_from_checkpoint` goes on.

    Args:
        config: an `egeria.Config`, nested dictionaries, or the path of a TOML file.
        policy: the name of a policy, before `config`'s own; or an `egeria.policy.PolicyMaker` of
            your own.
        directory: where the journal and the report go. None takes `egeria` in the trainer's
            `output_dir`. Where the journal of another training is there already, a number is
            appended: `egeria-2`; not to a URL.
        log: whether the entries of `Trainer.log` about the training also have egeria's numbers, so
            that all trackers in `report_to` draw them.
        save_reference: whether checkpoints hold the reference model too, which may take as many
            bytes as the weights. Without it, it is made again from the weights on resuming, and
            decisions may then differ from those of an uninterrupted run.

    Attributes:
        run: the `egeria.Run` while the trainer trains; None before, after, and where it was
            declined.
        report: path of the HTML report of the last training; None where there is none.

    Raises:
        ConfigError: a setting is outside its contract.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        policy: str | PolicyMaker | None = None,
        directory: str | Path | None = None,
        log: bool = True,
        save_reference: bool = True,
    ) -> None:
        self.run: egeria.Run | None = None
        self.report: Path | None = None
        self._config = read_config(config, None, policy)
        choose_rule(self._config, scheduler=None, total_steps=1)  # finds what it names
        self._url = str(directory) if is_url(directory) else None
        self._directory = None if directory is None or self._url else Path(directory)
        self._logs, self._saves_reference = log, save_reference
        self._trainer: Any = None
        self._checkpoint: Path | None = None
        self._losses: list[Tensor] = []
        self._counted = 0
        """The trainer's step that was counted last."""
        self._saved: Path | None = None
        """The checkpoint that got its file last."""
        self._notes = Recorder(None)
        _wrap_train()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _wrap_train()  # in the process that it was sent to, such as a worker of Ray Tune

    @contextmanager
    def follow(self, trainer: Any, checkpoint: Path | None) -> Iterator[None]:
        """Follow a trainer while the body runs, which is its `train`; leave trainer and model as
        they were.

        Args:
            trainer: the `transformers.Trainer` that has this callback.
            checkpoint: the folder that the training goes on from; None where it begins.
        """
        self._notes = Recorder(None, echoes=dist.rank() > 0)
        self._trainer, self._checkpoint, self.report = trainer, checkpoint, None
        stand_ins: dict[str, Callable[..., Any]] = {
            "training_step": self._note_loss,
            "log": self._log,
            "_inner_training_loop": self._attempt,
            "_save_checkpoint": self._save_checkpoint,
            "_save_optimizer_and_scheduler": self._save_beside,
        }
        try:
            with ExitStack() as stack:
                for name, stand_in in stand_ins.items():
                    stack.enter_context(_replaced(trainer, name, stand_in))
                yield
        finally:
            self.close()
            self._trainer = self._checkpoint = None

    def close(self) -> None:
        """End the run, if there is one: the model is as it was found. `train` does this itself,
        however it ends.
        """
        run, self.run = self.run, None
        self._losses = []
        if run is not None:
            self._guard("closing the run", run.close)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to what is trained, and go on from the checkpoint that the
        trainer goes on from.
        """
        self.close()
        self._counted, self._saved = state.global_step, None
        refusal = self._refusal(args)
        if refusal:
            self._notes.decline("freezing", refusal)
        else:
            self._guard("attaching", lambda: self._begin(args, state, **kwargs))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the optimizer step, unless a checkpoint was written ahead of this."""
        self._count(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the run into the checkpoint, where a trainer has written that in a way
        of its own.
        """
        if self.run is None or args.save_only_model:
            return
        folder = self._output_folder(args) / f"checkpoint-{state.global_step}"
        if folder != self._saved:
            self._write(args, folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run."""
        self.close()

    def _refusal(self, args: Any) -> str:
        """Return why this training is left alone; nothing where it is not."""
        trainer = self._trainer
        if trainer is None:
            return "the trainer has a `train` of its own, which is not that of transformers.Trainer"
        if args.deepspeed or getattr(trainer, "is_deepspeed_enabled", False):
            return (
                "DeepSpeed keeps gradients and optimizer to itself, so that nothing can be "
                "taken out of them"
            )
        if getattr(trainer, "is_fsdp_enabled", False):
            return (
                "FSDP by the arguments of the trainer is not supported; train with "
                "DistributedDataParallel"
            )
        if args.n_gpu > 1:
            return (
                "DataParallel makes the model anew at each step; start one process for each "
                "GPU with torchrun"
            )
        if getattr(trainer, "is_distributed_loading_by_transformers", False):
            return "the model was divided among processes when it was loaded"
        return ""

    def _begin(
        self,
        args: Any,
        state: Any,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        parent, name = self._journal_place(args)
        saved = self._saved_state()

        def attach(directory: Path, done: int) -> egeria.Run:
            self.run = egeria.attach(
                model,
                optimizer,
                train_dataloader,
                scheduler=lr_scheduler,
                total_steps=max(1, state.max_steps - done),
                config=self._config,
                directory=self._url or directory,
            )
            return self.run

        if saved is not None:
            try:
                attach(parent / saved["journal"], 0).load_state_dict(saved["run"])
                return
            except (EgeriaError, LookupError, TypeError) as error:
                self.close()
                self._notes.decline(
                    "resuming",
                    f"the state in the checkpoint does not fit ({brief(error)}); it begins anew "
                    "from here",
                )
        # Without its own state a run knows of the steps to come only.
        attach(_unused(parent / name), state.global_step)

    def _saved_state(self) -> dict[str, Any] | None:
        """Return the state in the checkpoint that training goes on from; None where a process has
        none to read.
        """
        if self._checkpoint is None:
            return None
        path, state, reason = self._checkpoint / STATE_FILE, None, ""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            reason = f"there is no {path}, so this checkpoint was written without egeria"
        except Exception as error:  # a damaged file may raise anything
            reason = f"{path} cannot be read ({brief(error)})"
        missing = [found for found in _gather(reason) if found]
        if missing:
            self._notes.decline("resuming", f"{missing[0]}; it begins anew from here")
            return None
        return state

    def _count(self, step: int) -> None:
        """Count an optimizer step once, with the sum of what its micro-batches contribute to the
        loss.
        """
        if step == self._counted:
            return
        self._counted = step
        losses, self._losses = self._losses, []
        if self.run is not None:
            self._guard("counting a step", functools.partial(self._step, self.run, losses))

    def _step(self, run: egeria.Run, losses: list[Tensor]) -> None:
        run.step(
            torch.stack(losses).sum() if len(losses) > 1 else losses[0] if losses else math.nan
        )

    def _write(self, args: Any, folder: Path) -> None:
        self._saved = folder
        if self.run is not None and args.should_save:
            self._guard(
                "saving its state", functools.partial(self._save, self.run, folder), ends_run=False
            )

    def _save(self, run: egeria.Run, folder: Path) -> None:
        if not folder.is_dir():  # `save_total_limit` may have removed it at once
            return
        state = run.state_dict()
        if not self._saves_reference and state["engine"] is not None:
            state["engine"]["evaluator"]["controller"] = {}
        journal = DIRECTORY if run.directory is None else run.directory.name
        unfinished = folder / f"{STATE_FILE}.part"
        torch.save({"journal": journal, "run": state}, unfinished)
        unfinished.replace(folder / STATE_FILE)

    def _journal_place(self, args: Any) -> tuple[Path, str]:
        """Return the folder in which the journal gets a directory, and the name of that."""
        given = self._directory or self._output_folder(args) / DIRECTORY
        return given.parent, given.name

    def _output_folder(self, args: Any) -> Path:
        """Return where checkpoints go: `output_dir`, or in a hyperparameter search the folder of
        the trial in it.
        """
        trainer = self._trainer
        trial, folder_of = (
            getattr(trainer, "_trial", None),
            getattr(trainer, "_get_output_dir", None),
        )
        return Path(args.output_dir if folder_of is None else folder_of(trial=trial))

    def _attempt(self, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for the loop of `train`: where it fails, `auto_find_batch_size` wraps the model,
        thawed, anew.
        """
        try:
            return loop(*args, **kwargs)
        finally:
            self.close()

    def _save_checkpoint(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for `trainer._save_checkpoint`, which `enable_jit_checkpoint` may call ahead of
        `on_step_end`.
        """
        self._count(
            self._trainer.state.global_step
        )  # may also change weights, where layer modules land
        return save(*args, **kwargs)

    def _save_beside(
        self, save: Callable[..., Any], output_dir: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for what saves the optimizer in every checkpoint, before it is uploaded: save
        the run beside it.
        """
        result = save(output_dir, *args, **kwargs)
        self._write(self._trainer.args, Path(output_dir))
        return result

    def _note_loss(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for `trainer.training_step`, which returns what a micro-batch contributes to the
        step's loss.
        """
        loss = training_step(*args, **kwargs)
        if self.run is not None and isinstance(loss, Tensor):
            self._losses.append(loss.detach())
        return loss

    def _log(
        self, log: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for `trainer.log`: add egeria's numbers, and after the last entry write the
        report.
        """
        is_last = "train_runtime" in logs
        if self.run is not None and self._logs and (is_last or "loss" in logs) and dist.rank() == 0:
            run = self.run
            self._guard("logging", lambda: logs.update(scalars(run.summary())), ends_run=False)
        log(logs, *args, **kwargs)
        if is_last and self.run is not None:
            self._guard("reporting", self._report, ends_run=False)

    def _report(self) -> None:
        """End the run, whose training is done; write its report and give it to the trackers, which
        still take files.
        """
        run, callbacks = self.run, self._trainer.callback_handler.callbacks
        self.close()
        if run is None or run.directory is None:
            return
        self.report = egeria.report(run.directory).path
        held = [getattr(entry, name, None) for entry in callbacks for name in TRACKERS]
        trackers = (
            find_trackers([entry for entry in held if entry is not None]) if self._logs else []
        )
        keepers = [tracker.keep for tracker in trackers if tracker.keep is not None]
        if keepers:
            with TemporaryDirectory(prefix="egeria-report-") as folder:
                write_files(run.directory, Path(folder))
                for keep in keepers:
                    keep(Path(folder))

    def _guard(self, what: str, action: Callable[[], object], *, ends_run: bool = True) -> None:
        """Run one of our own steps so that nothing it raises reaches the trainer.

        Args:
            what: it does, for the warning.
            action: the step.
            ends_run: whether a failure ends the run.
        """
        try:
            action()
        except Exception as error:
            self._notes.fault(f"{what} under Trainer", error)
            if ends_run:
                self.close()


def _wrap_train() -> None:
    """Have `Trainer.train` run within `EgeriaCallback.follow` of the callbacks of its trainer; done
    once.
    """
    original = Trainer.train
    if hasattr(original, "_egeria_follows"):
        return

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        callbacks = [
            entry for entry in self.callback_handler.callbacks if isinstance(entry, EgeriaCallback)
        ]
        with ExitStack() as stack:
            for callback in callbacks:
                if (
                    callback._trainer is not None
                ):  # somebody has wrapped what is wrapped here already
                    continue
                stack.enter_context(
                    callback.follow(self, _checkpoint(self, resume_from_checkpoint))
                )
            return original(self, resume_from_checkpoint, *args, **kwargs)

    train._egeria_follows = True  # type: ignore[attr-defined]
    Trainer.train = train


def _checkpoint(trainer: Any, resume_from_checkpoint: Any) -> Path | None:
    """Return the folder that `train` is going to take its checkpoint from."""
    if resume_from_checkpoint is True:
        folder = Path(trainer.args.output_dir)
        resume_from_checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return Path(os.fspath(resume_from_checkpoint)) if resume_from_checkpoint else None


@contextmanager
def _replaced(owner: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Call `stand_in(method, ...)` in place of a method of one object while the body runs."""
    before, method = vars(owner).get(name), getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return stand_in(method, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if vars(owner).get(name) is call:  # somebody else's is left alone
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)


def _gather(text: str) -> list[str]:
    """Return the text of each process."""
    if dist.world_size() == 1:
        return [text]
    found: list[Any] = [None] * dist.world_size()
    torch.distributed.all_gather_object(found, text)
    return found


def _unused(directory: Path) -> Path:
    """Return the directory, or one with a number where it has a journal."""
    others = (
        directory.with_name(f"{directory.name}-{count}") for count in range(2, MOST_DIRECTORIES)
    )
    return next(
        (found for found in (directory, *others) if not (found / FILE_NAME).exists()), directory
    )
