"""egeria in Lightning: `Trainer(callbacks=[EgeriaCallback()])`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from egeria import session
from egeria.config import Config
from egeria.controller import Controller
from egeria.errors import ConfigError, StateError
from egeria.model.compile import is_compiled
from egeria.policy import Maker
from egeria.policy.plan import PLANNED
from egeria.report.trackers import FOLDER, Tracker
from egeria.session import EgeriaWarning, Run
from egeria.session.checks import choose_rule, read_config

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # the same code under its older name
    except ImportError as error:
        raise ImportError(
            "egeria.integrations.lightning needs lightning or pytorch_lightning, found neither. "
            "Run `pip install egeria[lightning]`."
        ) from error

_DECLINED_CALLBACKS = {
    "StochasticWeightAveraging": "averages the weights of all layers at a learning rate of its own",
    "BaseFinetuning": "freezes and thaws layers itself",
    "GradientAccumulationScheduler": "changes the number of steps that are still to come",
}
"""By the name of their class, which is the same in both packages, or of a class that they are made
of."""
_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
_OTHER_STRATEGIES = {"DeepSpeedStrategy", "SingleDeviceXLAStrategy"}
"""Made of the others, and yet not followed."""


class EgeriaCallback(Callback):
    """Watches a training run of Lightning and freezes its front layers as they converge.

    What it cannot follow (manual optimization, sharded strategies, callbacks that freeze layers) is
    declined with one warning, and training goes on untouched; with `fast_dev_run` nothing is done.

    Args:
        module: name of the submodule to watch, such as 'backbone'. None takes the only child with
            anything to train, else the LightningModule. The cache and the policy 'egeria' need one
            that `training_step` calls as a whole, not in parts.
        config: as of `egeria.attach`, as are the next four.
        policy: the name of a policy, or what makes one.
        plan: how many front layer modules are frozen from when on, such as "0.5:1 0.75:2".
        directory: where the journal and the report go.
        controller: 'auto', 'process' or 'inline', or a controller of your own.
        log: whether the loggers of the trainer get the scalars of the run, and at its end the
            report, where they take files (MLflow, W&B).

    Attributes:
        run: the `egeria.Run` of the newest `fit`, closed at its end; None where it was declined.

    Raises:
        ConfigError: a setting is outside its contract.
    """

    def __init__(
        self,
        module: str | None = None,
        *,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        policy: str | Maker | None = None,
        plan: str | None = None,
        directory: str | Path | None = None,
        controller: str | Controller | None = None,
        log: bool = True,
    ) -> None:
        if module is not None and not isinstance(module, str):
            raise ConfigError(
                "EgeriaCallback takes the name of a submodule of the LightningModule, found "
                f"{type(module).__name__}. Pass its name, such as 'backbone'."
            )
        self.run: Run | None = None
        self._name, self._logs = module, log
        self._config = read_config(config, controller, policy, plan)
        choose_rule(self._config, scheduler=None, total_steps=1)  # finds what it names
        self._settings: Any = {"directory": directory, "controller": controller}
        self._first_step = 0
        """Of the trainer, when the run began."""
        self._loaded: dict[str, Any] | None = None
        """From a checkpoint; it is restored once there are optimizers."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the run of an earlier `fit`."""
        if stage == "fit":
            self.run = self._loaded = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model; with the state from the checkpoint, if there is one."""
        if trainer.fast_dev_run:
            return
        if reason := _reason_to_decline(trainer, pl_module, self._config):
            _warn(f"egeria freezes nothing in this training: {reason}")
            return
        watched, state = _find_watched(pl_module, self._name), self._loaded
        if state is None:
            self._begin(trainer, watched, trainer.global_step)
            return
        self._begin(trainer, watched, int(state["first_step"]))
        try:
            self.load_state_dict(state)
        except StateError as error:
            self._close()
            _warn(f"egeria begins anew, since its state in the checkpoint does not fit: {error}")
            self._begin(trainer, watched, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the optimizer step, if there was one since the last batch."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.run is not None:
            scale = trainer.accumulate_grad_batches  # by which Lightning has divided the loss
            self.run.step(loss.detach() * scale if isinstance(loss, Tensor) else math.nan)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the model as it was found, after the last scalars and the report were logged."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the model as it was found."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on as if the training had never stopped: plain
        values and tensors.
        """
        if self.run is None:
            return self._loaded or {}
        return {"run": self.run.state_dict(), "first_step": self._first_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training starts: there are no optimizers before. A run under way
        is rolled back, a closed one left as it is.
        """
        if self.run is None:
            self._loaded = state_dict or None
        elif not self.run.summary().closed:
            self.run.load_state_dict(state_dict["run"])
            self._first_step = int(state_dict["first_step"])

    def _begin(self, trainer: Any, watched: nn.Module, first_step: int) -> None:
        self._first_step, loader = first_step, trainer.train_dataloader
        steps = _total_steps(trainer)
        self.run = session.attach(
            watched,
            trainer.optimizers,
            # Of several none is the whole input.
            None if isinstance(loader, (Mapping, Sequence)) else loader,
            scheduler=[entry.scheduler for entry in trainer.lr_scheduler_configs],
            total_steps=None if steps is None else steps - first_step,
            config=self._config,
            log_to=[_tracker(trainer, logger) for logger in trainer.loggers if self._logs],
            **self._settings,
        )

    def _close(self) -> None:
        if self.run is not None:
            self.run.close()


def _reason_to_decline(trainer: Any, pl_module: Any, config: Config) -> str:
    """Return why a training cannot be followed; empty where it can."""
    if not pl_module.automatic_optimization:
        return (
            "the LightningModule optimizes manually, so that Lightning does not know where a step "
            "ends. Call egeria.attach in on_train_start, and run.step(loss) after each optimizer "
            "step"
        )
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if what := _DECLINED_CALLBACKS.get(kind.__name__):
                name = type(callback).__name__
                return f"the callback {name} {what}. Use either that or EgeriaCallback"
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    if not _STRATEGIES.intersection(kinds) or _OTHER_STRATEGIES.intersection(kinds):
        return (
            f"the strategy {kinds[0]} is not followed. Use strategy='ddp' where a replica fits "
            "on each device"
        )
    name, plan = config.policy.name, config.policy.plan or ""
    if _total_steps(trainer) is None and name in PLANNED and "step" not in plan:
        return (
            f"the policy {name!r} goes by the length of the training, which is unknown. Give "
            "Trainer(max_steps=...), or limit_train_batches as a number beside max_epochs"
        )
    return ""


def _find_watched(pl_module: nn.Module, name: str | None) -> nn.Module:
    """Return the module to watch.

    Raises:
        ConfigError: there is no submodule of this name.
    """
    if name is not None:
        try:
            return pl_module.get_submodule(name)
        except AttributeError as error:
            known = ", ".join(repr(child) for child, _ in pl_module.named_children())
            raise ConfigError(
                "EgeriaCallback(module=...) names a submodule of the LightningModule, found "
                f"{name!r} ({error}). Its children are {known}."
            ) from error
    own = {id(entry) for entry in pl_module.parameters() if entry.requires_grad}
    for child in pl_module.children():
        is_only = own <= {id(entry) for entry in child.parameters()}
        if is_only and (is_compiled(child) or not is_compiled(pl_module)):
            return child
    return pl_module


def _total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps of the whole training; None where it is endless or unknown."""
    steps: float = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else None


def _tracker(trainer: Any, logger: Any) -> Tracker:
    """Return what logs to one logger, at once: through `self.log` it would be among the metrics of
    Lightning.
    """
    kinds = {kind.__name__ for kind in type(logger).__mro__}

    def log(values: Mapping[str, float], step: int) -> None:
        logger.log_metrics(dict(values), step=trainer.global_step)

    def keep(folder: Path) -> None:
        if "MLFlowLogger" in kinds:
            logger.experiment.log_artifacts(logger.run_id, str(folder), FOLDER)
        else:
            logger.experiment.log_artifact(str(folder), name="egeria-report", type="report")

    takes_files = bool(kinds & {"MLFlowLogger", "WandbLogger"})
    return Tracker(name=type(logger).__name__, log=log, keep=keep if takes_files else None)


def _warn(text: str) -> None:
    warnings.warn(text, EgeriaWarning, stacklevel=3)
