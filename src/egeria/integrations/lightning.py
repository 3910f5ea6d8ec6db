"""Lightning: `Trainer(callbacks=[EgeriaCallback()])`."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from egeria import session
from egeria.config import Config
from egeria.errors import ConfigError
from egeria.model.compile import is_compiled
from egeria.policy import Maker
from egeria.policy.plan import PLANNED
from egeria.report.trackers import Tracker
from egeria.session import EgeriaWarning, Run
from egeria.session.attach import resume
from egeria.session.checks import choose_rule, length_of, read_config

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # the same code under its older name
    except ImportError as error:
        message = "Lightning is not installed. Run `pip install egeria[lightning]`."
        raise ImportError(message) from error

if TYPE_CHECKING:
    from egeria.controller.inline import Controller

# Callbacks that are not followed, by the name of their class or of a base.
_DECLINED = {
    "StochasticWeightAveraging": "averages the weights of all layers at a learning rate of its own",
    "BaseFinetuning": "freezes and thaws layers itself",
    "GradientAccumulationScheduler": "changes the number of steps that are still to come",
}
_FOLLOWED = {"SingleDeviceStrategy", "DDPStrategy"}
_OTHERS = {"DeepSpeedStrategy", "SingleDeviceXLAStrategy"}  # made of those, and not followed


class EgeriaCallback(Callback):
    """Watches a training run of Lightning and freezes its front layers as they converge.

    What it cannot follow (manual optimization, sharded strategies, callbacks that freeze layers) is
    declined with one warning, and training goes on untouched; `fast_dev_run` is left alone.

    Args:
        module: name of the submodule to watch, such as 'backbone'. None takes the only child with
            anything to train, else the LightningModule. The cache and the policy 'egeria' need one
            that `training_step` calls as a whole, not in parts.
        config: as of `egeria.attach`, as are `policy`, `plan`, `directory` and `controller`.
        log: whether the loggers of the trainer get the scalars of the run, and its report.

    Attributes:
        run: the `egeria.Run` of the newest `fit`, closed at its end; None where it was declined.
    """

    def __init__(
        self,
        module: str | None = None,
        *,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        policy: str | Maker | None = None,
        plan: str | None = None,
        directory: str | Path | None = None,
        controller: "str | Controller | None" = None,
        log: bool = True,
    ) -> None:
        if not isinstance(module, str | None):
            raise ConfigError(f"module names a submodule, found {type(module).__name__}. Name one.")
        self.run: Run | None = None
        self._name, self._logs = module, log
        self._config = read_config(config, controller, policy, plan)
        choose_rule(self._config)  # finds what it names
        self._settings: Any = {"directory": directory, "controller": controller}
        self._first_step = 0  # of the trainer, when the run began
        # From a checkpoint; it is restored once there are optimizers.
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the run of an earlier `fit`."""
        if stage == "fit":
            self.run = self._loaded = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the model; with the state from the checkpoint, if there is one."""
        if trainer.fast_dev_run:
            return
        if reason := _reason_to_decline(trainer, pl_module, self._config):
            text = f"egeria freezes nothing in this training: {reason}"
            warnings.warn(text, EgeriaWarning, stacklevel=2)
            return
        state, begins = self._loaded, trainer.global_step
        entry = state if isinstance(state, Mapping) else {}  # it may be damaged
        first = entry.get("first_step")
        if not (isinstance(first, int) and 0 <= first <= begins):
            entry, first = {}, begins
        run = self._begin(trainer, pl_module, first)
        if state is not None and not resume(run, entry.get("run")):
            self.on_train_end(trainer, pl_module)
            self._begin(trainer, pl_module, begins)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the optimizer step, if there was one since the last batch."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.run is not None:
            scale = trainer.accumulate_grad_batches  # by which Lightning has divided the loss
            self.run.step(loss.detach() * scale if isinstance(loss, Tensor) else math.nan)

    def on_train_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Leave the model as it was found, after the last scalars were logged."""
        if self.run is not None:
            self.run.close()

    on_exception = on_train_end

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: plain values and tensors."""
        if self.run is None:
            return self._loaded or {}
        return {"run": self.run.state_dict(), "first_step": self._first_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training starts; roll back a run that is under way."""
        if self.run is None:
            self._loaded = state_dict or None
        elif not self.run.summary().closed:
            resume(self.run, isinstance(state_dict, dict) and state_dict.get("run"))

    def _begin(self, trainer: Any, pl_module: nn.Module, first_step: int) -> Run:
        steps, loader = _total_steps(trainer), trainer.train_dataloader
        self._first_step = first_step
        self.run = session.attach(
            _find_watched(pl_module, self._name),
            trainer.optimizers,
            None if isinstance(loader, (Mapping, Sequence)) else loader,  # several: none is all
            scheduler=[entry.scheduler for entry in trainer.lr_scheduler_configs],
            total_steps=None if steps is None else steps - first_step,
            config=self._config,
            log_to=[_tracker(trainer, logger) for logger in trainer.loggers if self._logs],
            **self._settings,
        )
        return self.run


def _reason_to_decline(trainer: Any, pl_module: Any, config: Config) -> str:
    """Return why a training cannot be followed; empty where it can."""
    if not pl_module.automatic_optimization:
        return "the LightningModule optimizes manually. Call egeria.attach and run.step yourself"
    for kinds in map(_kinds, trainer.callbacks):
        if found := _DECLINED.keys() & set(kinds):
            what = _DECLINED[found.pop()]
            return f"the callback {kinds[0]} {what}. Use either that or EgeriaCallback"
    strategies = _kinds(trainer.strategy)
    if _FOLLOWED.isdisjoint(strategies) or not _OTHERS.isdisjoint(strategies):
        return f"the strategy {strategies[0]} is not followed. Use strategy='ddp' where that fits"
    name, plan = config.policy.name, config.policy.plan or ""
    units = set(plan.split()) & {"step", "epoch"}
    if "epoch" in units and trainer.num_training_batches != length_of(trainer.train_dataloader):
        return "epochs of its plan need one loader of known length, not limited. Give it in steps"
    if _total_steps(trainer) is None and name in PLANNED and not units:
        give = "Give Trainer(max_steps=...), or limit_train_batches as a number beside max_epochs"
        return f"the policy {name!r} needs the length of the training, which is unknown. {give}"
    return ""


def _kinds(entry: object) -> list[str]:
    """Return the names of the class of an object and of its bases, alike in both packages."""
    return [kind.__name__ for kind in type(entry).__mro__]


def _find_watched(pl_module: nn.Module, name: str | None) -> nn.Module:
    if name is not None:
        try:
            return pl_module.get_submodule(name)
        except AttributeError as error:
            known = ", ".join(repr(child) for child, _ in pl_module.named_children())
            raise ConfigError(
                f"module names a submodule, found {name!r} ({error}). The children are {known}."
            ) from error
    own = {entry for entry in pl_module.parameters() if entry.requires_grad}
    for child in pl_module.children():
        if own <= {*child.parameters()} and (is_compiled(child) or not is_compiled(pl_module)):
            return child
    return pl_module


def _total_steps(trainer: Any) -> int | None:
    """Return the optimizer steps of the whole training; None where it is endless or unknown."""
    steps: float = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else None


def _tracker(trainer: Any, logger: Any) -> Tracker:
    """Return what logs to one logger, at once: through `self.log` it would be a metric."""
    return Tracker(
        name=_kinds(logger)[0],
        log=lambda values, _: logger.log_metrics(dict(values), step=trainer.global_step),
    )
