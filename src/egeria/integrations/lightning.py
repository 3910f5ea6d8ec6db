"""egeria in Lightning: `Trainer(callbacks=[EgeriaCallback()])`."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from egeria import session
from egeria.config import Config
from egeria.controller import Controller
from egeria.errors import ConfigError, StateError
from egeria.layers.shards import without_wrapper
from egeria.policy import PolicyMaker
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
}
"""By the name of their class, which is the same in both packages, or of a class that they are made
of."""
_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
_OTHER_STRATEGIES = {"DeepSpeedStrategy", "SingleDeviceXLAStrategy"}
"""Made of the others, and yet not followed."""


class EgeriaCallback(Callback):
    """Watches a training run of Lightning and freezes its front layers as they converge.

    What it cannot follow (manual optimization, sharded strategies, StochasticWeightAveraging,
    callbacks that freeze layers) is declined with one warning, and training goes on untouched.

    Args:
        module: name of the submodule to watch, such as 'backbone'; it must be called as a whole,
            not in parts. None takes the only child with anything to train, else the
            LightningModule, whose `training_step` must then call `self(...)`.
        config: as of `egeria.attach`, as are the next three.
        policy: the name of a policy, or what makes one.
        directory: where the journal and the report go; with `fast_dev_run` they go nowhere.
        controller: 'auto', 'process' or 'inline', or a controller of your own.
        log: whether the loggers of the trainer get the scalars of the run, and at its end the
            report, where they take files (MLflow, W&B).

    Raises:
        ConfigError: a setting is outside its contract.
    """

    def __init__(
        self,
        module: str | None = None,
        *,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        policy: str | PolicyMaker | None = None,
        directory: str | Path | None = None,
        controller: str | Controller | None = None,
        log: bool = True,
    ) -> None:
        if module is not None and not isinstance(module, str):
            raise ConfigError(
                "EgeriaCallback takes the name of a submodule of the LightningModule, found "
                f"{type(module).__name__}. "
                f"Pass its name, such as 'backbone'."
            )
        self._name, self._config = module, read_config(config, controller, policy)
        choose_rule(self._config, scheduler=None, total_steps=1)  # finds what it names
        self._settings: dict[str, Any] = {
            "config": self._config,
            "policy": policy,
            "directory": directory,
            "controller": controller,
        }
        self._logs = log
        self._run: Run | None = None
        self._losses: list[Tensor] = []
        """Those of the batches since the last optimizer step."""
        self._first_step = self._global_step = 0
        """Of the trainer: when the run began, and after its newest step."""
        self._loaded: dict[str, Any] | None = None
        """From a checkpoint; it is restored once there are optimizers."""
        self._last_state: dict[str, Any] | None = None
        """When the run was closed."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def run(self) -> Run | None:
        """The run, from the start of the training to its end; None at other times, and where it was
        declined.
        """
        return self._run

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the run of an earlier `fit`."""
        if stage == "fit":
            self._loaded = self._last_state = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model; with the state from the checkpoint, if there is one."""
        reason = _reason_to_decline(trainer, pl_module) or _reason_of_policy(trainer, self._config)
        watched = reason or _find_watched(pl_module, self._name)
        if isinstance(watched, str):
            _warn(f"egeria freezes nothing in this training: {watched}")
            return
        state, self._loaded = self._loaded, None
        if state is not None:
            try:
                self._begin(trainer, watched, state)
                return
            except StateError as error:
                _warn(
                    f"egeria begins anew, since its state in the checkpoint does not fit: {error}"
                )
        self._begin(trainer, watched, None)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the optimizer step, if there was one, with the mean loss of its batches."""
        if self._run is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            num_batches = trainer.accumulate_grad_batches  # by which Lightning has divided it
            self._losses.append(loss.detach() if num_batches == 1 else loss.detach() * num_batches)
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        losses, self._losses = self._losses, []
        self._run.step(_mean(losses))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the model as it was found, after the last scalars and the report were logged."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the model as it was found."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the model as it was found, whatever way the training ended."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on as if the training had never stopped: plain
        values and tensors.
        """
        if self._run is None:
            return self._last_state or self._loaded or {}
        return {"run": self._run.state_dict(), "first_step": self._first_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training starts: there are no optimizers before. A run under way
        is rolled back.
        """
        if self._run is None:
            self._loaded = state_dict or None
            return
        try:
            self._run.load_state_dict(state_dict["run"])
            self._losses, self._first_step = [], int(state_dict["first_step"])
        except StateError as error:
            _warn(
                "egeria freezes nothing from here on, since the state that was loaded does not "
                f"fit: {error}"
            )
            self._close()

    def _begin(self, trainer: Any, watched: nn.Module, state: dict[str, Any] | None) -> None:
        """Attach; StateError where a state does not fit, and nothing has changed then."""
        self._losses, self._global_step = [], trainer.global_step
        self._first_step = trainer.global_step if state is None else int(state["first_step"])
        configs, loader = trainer.lr_scheduler_configs, trainer.train_dataloader
        settings = dict(self._settings)
        if trainer.fast_dev_run:
            self._scratch = tempfile.TemporaryDirectory(prefix="egeria-")
            settings["directory"] = self._scratch.name
        run = session.attach(
            watched,
            trainer.optimizers,
            None
            if isinstance(loader, (Mapping, Sequence))
            else loader,  # of several none is the whole input
            scheduler=configs[0].scheduler if len(configs) == 1 else None,
            total_steps=_total_steps(trainer, self._first_step),
            log_to=_trackers(trainer) if self._logs else None,
            **settings,
        )
        try:
            if state is not None:
                run.load_state_dict(state["run"])
        except StateError:
            run.close()
            raise
        self._run = run

    def _close(self) -> None:
        run = self._run
        if run is not None:
            try:
                self._last_state = self.state_dict()
            finally:
                self._run = None
                run.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None


def _reason_to_decline(trainer: Any, pl_module: Any) -> str:
    """Return why a training cannot be followed; empty where it can."""
    if not pl_module.automatic_optimization:
        return (
            "the LightningModule optimizes manually, so that Lightning does not know where a step "
            "ends. "
            "Call egeria.attach in on_train_start, and run.step(loss) after each optimizer step"
        )
    for callback in trainer.callbacks:
        kinds = [kind.__name__ for kind in type(callback).__mro__]
        what = next(
            (_DECLINED_CALLBACKS[kind] for kind in kinds if kind in _DECLINED_CALLBACKS), None
        )
        if what is not None:
            return f"the callback {kinds[0]} {what}. Use either that or EgeriaCallback"
    kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    if not _STRATEGIES.intersection(kinds) or _OTHER_STRATEGIES.intersection(kinds):
        return (
            f"the strategy {kinds[0]} is not followed. Use strategy='ddp' where a replica fits "
            "on each device"
        )
    return ""


def _reason_of_policy(trainer: Any, config: Config) -> str:
    """Return why the policy cannot be followed in a training; empty where it can."""
    name, is_default = config.policy.name, config.policy.name == "plan" and not config.policy.plan
    if _total_steps(trainer, trainer.global_step) is None and (
        is_default or not _takes_any_length(config)
    ):
        way_out = "Give it one: Trainer(max_steps=...) or Trainer(max_epochs=...)"
        if trainer.num_training_batches == math.inf:
            way_out = (
                "The loader has no length, so give Trainer(max_steps=...), or limit_train_batches "
                "as a number beside "
                "max_epochs"
            )
        return (
            f"the policy {name!r} goes by the length of the training, which is unknown. {way_out}"
        )
    return ""


def _takes_any_length(config: Config) -> bool:
    """Return whether the policy can be made where the number of steps is unknown."""
    try:
        choose_rule(config, scheduler=None, total_steps=None)
    except ConfigError:  # with a number there was none
        return False
    return True


def _find_watched(pl_module: nn.Module, name: str | None) -> nn.Module | str:
    """Return the module to watch, or why there is none.

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
                f"{name!r} ({error}). "
                f"Its children are {known}."
            ) from error
    children = {
        child: part for child, part in pl_module.named_children() if _trains(part.parameters())
    }
    if len(children) == 1 and not _trains(pl_module.parameters(recurse=False)):
        [only] = children.values()
        if _has_forward(only):
            return only
    if _has_forward(pl_module):
        return pl_module
    return (
        f"{type(pl_module).__name__} has no forward, and its parameters are in "
        f"{', '.join(map(repr, children))}. "
        f"Name the one to watch, EgeriaCallback({next(iter(children), 'backbone')!r}), or define "
        "forward and call "
        f"self(...) in training_step"
    )


def _trains(parameters: Iterator[nn.Parameter]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: those of torch and Lightning have a forward that only
    raises.
    """
    kinds = type(without_wrapper(module)).__mro__
    owner = next(kind for kind in kinds if "forward" in vars(kind))
    return owner.__name__ not in ("Module", "LightningModule")


def _mean(losses: Sequence[Tensor]) -> Tensor | float:
    """Return the mean loss of a step, on its device; not a number where `training_step` returned
    none.
    """
    if not losses:
        return math.nan
    return (
        losses[0] if len(losses) == 1 else torch.stack([loss.reshape(()) for loss in losses]).mean()
    )


def _total_steps(trainer: Any, first_step: int) -> int | None:
    """Return the optimizer steps from one of them to the end; None for endless training, and where
    it is unknown.
    """
    try:
        steps = _last_step(trainer)
    except Exception:  # where Lightning fails at it, it is unknown
        return None
    return int(steps) - first_step if first_step < steps < math.inf else None


def _last_step(trainer: Any) -> float:
    """Return the optimizer steps of the whole training: infinite where it is endless, -1 where they
    are unknown.
    """
    schedules = [
        entry for entry in trainer.callbacks if hasattr(entry, "get_accumulate_grad_batches")
    ]
    steps: float = trainer.estimated_stepping_batches
    if not schedules or trainer.max_epochs == -1 or trainer.num_training_batches == math.inf:
        return steps
    # Such a callback sets the accumulation as epochs begin; before the first Lightning takes it for
    # none.
    sizes = [schedules[0].get_accumulate_grad_batches(epoch) for epoch in range(trainer.max_epochs)]
    steps = sum(math.ceil(trainer.num_training_batches / size) for size in sizes)
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def _trackers(trainer: Any) -> list[Tracker]:
    """Return what logs to the loggers of a trainer."""
    return (
        [_tracker(trainer, logger) for logger in trainer.loggers] if trainer.is_global_zero else []
    )


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
