"""Hugging Face's Trainer: `Trainer(..., callbacks=[EgeriaCallback()])`, and nothing else.

Callbacks see neither the trainer nor the loss, nor that training ends by an exception. So the first
`EgeriaCallback` wraps the training loop of `Trainer`, once for all trainers: one that has such a
callback is followed until its loop ends.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

import egeria
from egeria.config import Config
from egeria.distributed.ranks import rank, together
from egeria.errors import brief
from egeria.journal import FILE_NAME, Recorder, replace_file, run_directory
from egeria.policy import Maker
from egeria.report.trackers import scalars
from egeria.session.attach import resume
from egeria.session.checks import choose_rule, read_config

STATE_FILE = "egeria.pt"  # the state of the run, inside each checkpoint
DIRECTORY = "egeria"  # where the journal goes, inside `output_dir`


class EgeriaCallback(TrainerCallback):
    """Watches the training of a `transformers.Trainer` and freezes its front layers.

    The model comes out of `train` as it went in: thawed and without hooks, also after an exception
    or Ctrl-C. Each checkpoint gets a file of the run, from which `resume_from_checkpoint` goes on.

    Args:
        config: as of `egeria.attach`, as are `policy` and `plan`.
        directory: where the journal and the report go. None takes `egeria` in the trainer's
            `output_dir`, or with a number (`egeria-2`) where a journal is there already.
        log: whether the entries of `Trainer.log` also have egeria's numbers, for `report_to`.

    Attributes:
        run: the `egeria.Run` while the trainer trains; None before and after.
        report: path of the HTML report of the last training; None where there is none.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        policy: str | Maker | None = None,
        directory: str | Path | None = None,
        log: bool = True,
        plan: str | None = None,
    ) -> None:
        self.run: egeria.Run | None = None
        self.report: Path | None = None
        self._config = read_config(config, None, policy, plan)
        choose_rule(self._config)  # finds what it names
        self._directory, self._logs = directory, log
        self._trainer: Any = None
        self._checkpoint: Path | None = None
        # What the micro-batches since the last optimizer step contribute to its loss.
        self._losses: list[Tensor] = []
        self._counted = 0  # the trainer's step that was counted last
        self._notes = Recorder(None)
        _wrap_loop()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _wrap_loop()  # in the process that it was sent to, such as a worker of Ray Tune

    @contextmanager
    def follow(self, trainer: Any, checkpoint: str | None) -> Iterator[None]:
        """Follow a trainer while its loop runs, from a checkpoint or the start; undo it after."""
        self._notes, self._trainer, self.report = Recorder(None, echoes=rank() > 0), trainer, None
        self._checkpoint = Path(checkpoint) if checkpoint else None
        own = vars(trainer)
        stand_ins: dict[str, Any] = {"training_step": self._note_loss, "log": self._log}
        stand_ins["_save_optimizer_and_scheduler"] = self._save_beside
        before = {name: own[name] for name in stand_ins if name in own}
        own.update({n: functools.partial(f, getattr(trainer, n)) for n, f in stand_ins.items()})
        try:
            yield
        finally:
            for name in stand_ins:
                own.pop(name, None)
            own.update(before)
            self._close()
            self._trainer = self._checkpoint = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to what is trained, from the checkpoint that the trainer goes on from."""
        self._counted = state.global_step
        if self._trainer is None:
            self._notes.decline("freezing", "the trainer has a training loop of its own")
        else:
            self._guard("attaching", lambda: self._begin(state))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the optimizer step, unless a checkpoint was written ahead of this."""
        if self.run is not None and state.global_step != self._counted:
            losses, self._losses, self._counted = self._losses, [], state.global_step
            self.run.step(sum(losses) if losses else math.nan)

    def _begin(self, state: Any) -> None:
        trainer, saved = self._trainer, self._saved_state()
        # A trial of a search has a folder of its own.
        output = Path(trainer._get_output_dir(trial=getattr(trainer, "_trial", None)))
        folder = run_directory(self._directory or output / DIRECTORY)
        given = trainer.model_wrapped, trainer.optimizer, trainer.callback_handler.train_dataloader
        settings = {"scheduler": trainer.lr_scheduler, "config": self._config}
        attach = functools.partial(egeria.attach, *given, **settings)
        if saved is not None:
            name = str(saved.get("journal"))
            is_ours = re.fullmatch(rf"{re.escape(folder.name)}(-\d+)?", name)
            place = folder.with_name(name) if is_ours else folder
            self.run = attach(total_steps=state.max_steps, directory=place)
            if resume(self.run, saved.get("run")):
                return
            self._close()
        # Without its own state a run knows of the steps to come only.
        steps = max(1, state.max_steps - state.global_step)
        self.run = attach(total_steps=steps, directory=_unused(folder))

    def _saved_state(self) -> dict[str, Any] | None:
        """Return the state in the checkpoint; None where a process has none to read."""
        if self._checkpoint is None:
            return None
        path, read = self._checkpoint / STATE_FILE, list[dict[str, Any]]()
        try:
            together(lambda: read.append(dict(torch.load(path, "cpu", weights_only=True))), "train")
        except Exception as error:  # a damaged file may raise anything
            reason = f"{path} cannot be read ({brief(error)}); it begins anew from here"
            self._notes.decline("resuming", reason)
            return None
        return read[0]

    def _close(self, *_: Any, **kwargs: Any) -> None:
        """End the run, if there is one: the model is as it was found."""
        run, self.run, self._losses = self.run, None, []
        if run is not None:
            run.close()

    on_train_end = _close

    def _note_loss(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for `training_step`, which returns a micro-batch's part of the loss."""
        loss = training_step(*args, **kwargs)
        if self.run is not None:
            self._losses.append(loss.detach())
        return loss

    def _log(self, log: Callable[..., Any], logs: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for `log`: add egeria's numbers, and end the run with the last entry."""
        run, is_last = self.run, "train_runtime" in logs
        if run is not None and self._logs and (is_last or "loss" in logs):
            self._guard("logging", lambda: logs.update(scalars(run.summary())))
        log(logs, *args, **kwargs)
        if run is not None and is_last:
            self._close()
            self._guard("reporting", lambda: self._report(run.directory))

    def _report(self, directory: Path | None) -> None:
        if directory is not None:
            self.report = egeria.report(directory).path

    def _save_beside(self, save: Callable[..., Any], output_dir: str, *args: Any) -> None:
        """Stand in for what saves the optimizer in every checkpoint: save the run beside it."""
        save(output_dir, *args)
        trainer, run = self._trainer, self.run
        self.on_step_end(trainer.args, trainer.state, trainer.control)
        if run is not None and trainer.args.should_save:
            self._guard("saving its state", lambda: _save(run, Path(output_dir) / STATE_FILE))

    def _guard(self, what: str, action: Callable[[], object]) -> None:
        """Run one of our own steps so that nothing it raises reaches the trainer."""
        try:
            action()
        except Exception as error:
            self._notes.fault(f"{what} under Trainer", error)


def _save(run: egeria.Run, path: Path) -> None:
    journal = DIRECTORY if run.directory is None else run.directory.name
    state = {"journal": journal, "run": run.state_dict()}
    replace_file(path, rb"journal", lambda file: torch.save(state, file))


def _unused(directory: Path) -> Path:
    """Return the directory, or one with a number where it has a journal."""
    numbered = (directory.with_name(f"{directory.name}-{n}") for n in itertools.count(2))
    places = itertools.chain([directory], numbered)
    return next(place for place in places if not (place / FILE_NAME).exists())


def _wrap_loop() -> None:
    """Have the loop of `Trainer` run within `follow` of its `EgeriaCallback`s.

    `auto_find_batch_size` calls it again with a smaller batch, on a thawed model.
    """
    original = Trainer._inner_training_loop
    if hasattr(original, "_egeria_follows"):
        return

    @functools.wraps(original)
    def loop(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # The third argument behind the batch size and the settings.
        checkpoint = args[2] if len(args) > 2 else kwargs.get("resume_from_checkpoint")
        with ExitStack() as stack:
            for callback in trainer.callback_handler.callbacks:
                # one with a trainer: somebody has wrapped what is wrapped here already
                if isinstance(callback, EgeriaCallback) and callback._trainer is None:
                    stack.enter_context(callback.follow(trainer, checkpoint))
            return original(trainer, *args, **kwargs)

    loop._egeria_follows = True  # type: ignore[attr-defined]
    Trainer._inner_training_loop = loop
