"""The same under Trainer, Accelerate and Lightning: once with egeria's callback, once freezing by hand at its moments."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import lightning.pytorch as pl
import torch
import transformers
from laws.models import BATCH
from laws.support import differences, outside
from torch import Tensor, nn
from torch.utils.data import DataLoader

from egeria.integrations import accelerate as egeria_accelerate
from egeria.integrations import lightning as egeria_lightning
from egeria.integrations import transformers as egeria_transformers
from soak.by_hand import ByHand
from soak.cases import Case, make_optimizers
from soak.training import Attached, as_bytes

for name in ("lightning.pytorch", "transformers", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.net = case.spec.build().train()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x).float(), labels)}


class Moments:
    """What happens at two moments of a step, for both of a pair."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case, self.directory, self.followed = case, directory, Attached(case, directory)

    def begin(self, model: nn.Module) -> None:
        """Begin with a model that is ready."""

    def before_update(self, step: int) -> None:
        """Called between the backward pass and the update."""

    def after_step(self, step: int) -> None:
        """Called behind the step, and behind egeria's own callback."""
        course = self.followed.course
        course.ends[step] = course.starts[step + 1] = course.updates[step + 1] = self.followed.told()
        course.updates.setdefault(0, self.first())

    def first(self) -> int:
        """Return how many layer modules were frozen in the first update."""
        kinds = [record for record in self.followed.records if record["event"] == "frozen" and record["step"] == 0]
        return max((record["frozen"] for record in kinds), default=0)


class MomentsByHand(Moments):
    """Freezes at the moments of a course."""

    def __init__(self, case: Case, other: Moments) -> None:
        self.case, self.hand, self.directory = case, ByHand(other.followed.course), Path()

    def begin(self, model: nn.Module) -> None:
        self.hand.watch(model, tuple(f"net.{name}" for name in self.case.spec.tied))

    def before_update(self, step: int) -> None:
        self.hand.freeze(self.hand.course.updates.get(step, 0))

    def after_step(self, step: int) -> None:
        self.hand.freeze(self.hand.course.ends.get(step, 0))


def try_in_framework(case: Case, folder: Path) -> list[str]:
    """Return what was wrong with a training in a framework."""
    ways: dict[str, Callable[..., Any]] = {"transformers": by_trainer, "accelerate": by_accelerate, "lightning": by_lightning}
    with contextlib.redirect_stdout(None):
        torch.manual_seed(case.seed)
        ours = Moments(case, folder / "run")
        groups, given = ours.followed.settings()
        first = ways[case.framework](case, folder / "a", ours, {"config": groups, **given})
        torch.manual_seed(case.seed)
        hand = MomentsByHand(case, ours)
        second = ways[case.framework](case, folder / "b", hand, None)
    hand.hand.close()
    wrong = [f"by hand: {entry}" for entry in differences(_numbers(*second), _numbers(*first))]
    views = [outside(SimpleNamespace(model=model, optimizer=optimizer)) for model, optimizer in (first, second)]
    for view in views:
        view["groups"] = None
        view["attributes"] = None
    return wrong + [f"left behind: {entry}" for entry in differences(*views)]


def _numbers(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    state = {str(index): {name: as_bytes(value) for name, value in entry.items()} for index, entry in optimizer.state_dict()["state"].items()}
    return {**{name: as_bytes(value) for name, value in model.state_dict().items()}, "optimizer": state, "random": torch.get_rng_state()}


def _rows(case: Case) -> list[dict[str, Tensor]]:
    columns = case.spec.rows(torch.Generator().manual_seed(case.seed))
    return [{"x": x, "labels": y} for x, y in zip(*columns, strict=True)]


class TrainerCallback(transformers.TrainerCallback):
    """Passes the moments on."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.moments.before_update(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.moments.after_step(state.global_step - 1)


def by_trainer(case: Case, folder: Path, moments: Moments, given: Any) -> tuple[nn.Module, Any]:
    """Train in a Trainer."""
    model = WithLoss(case)
    optimizer = make_optimizers(case, model)[0]
    moments.begin(model)
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    options |= {"max_steps": case.steps, "per_device_train_batch_size": BATCH, "seed": case.seed}
    options |= {"gradient_accumulation_steps": case.accumulation, "max_grad_norm": 0.5 if case.clips else 0.0}
    ours = [egeria_transformers.EgeriaCallback(directory=moments.directory, **given)] if given else []
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **options),
        train_dataset=_rows(case),
        optimizers=(optimizer, None),
        callbacks=[*ours, TrainerCallback(moments)],
    )
    trainer.train()
    return model, optimizer


def by_accelerate(case: Case, folder: Path, moments: Moments, given: Any) -> tuple[nn.Module, Any]:
    """Train in a loop of Accelerate."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=case.accumulation)
    net = WithLoss(case)
    own = make_optimizers(case, net)[0]
    model, optimizer, loader = accelerator.prepare(net, own, DataLoader(_rows(case), batch_size=BATCH))
    moments.begin(net)
    run: Any = SimpleNamespace(step=lambda loss: None, close=lambda: None)
    if given:
        options = {"total_steps": case.steps, "directory": moments.directory, **given}
        run = egeria_accelerate.attach(accelerator, model, optimizer, loader, **options)
    step = 0
    while step < case.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    if case.clips:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    moments.before_update(step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=case.sets_to_none)
            run.step(loss)
            if accelerator.sync_gradients and step < case.steps:
                moments.after_step(step)
                step += 1
    run.close()
    return net, own


class Module(pl.LightningModule):
    """A module of Lightning around a model."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.model = case, WithLoss(case)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return make_optimizers(self.case, self.model)[0]


class LightningCallback(pl.Callback):
    """Passes the moments on."""

    def __init__(self, moments: Moments) -> None:
        self.moments, self.num_steps = moments, 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.moments.before_update(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self.num_steps:
            self.num_steps = trainer.global_step
            self.moments.after_step(self.num_steps - 1)


def by_lightning(case: Case, folder: Path, moments: Moments, given: Any) -> tuple[nn.Module, Any]:
    """Train in Lightning."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    options = {"max_steps": case.steps, "accelerator": "cpu", "devices": 1, "accumulate_grad_batches": case.accumulation}
    options |= {"gradient_clip_val": 0.5 if case.clips else None, **quiet}
    module = Module(case)
    moments.begin(module.model)
    ours = [egeria_lightning.EgeriaCallback(directory=moments.directory, **given)] if given else []
    trainer = pl.Trainer(callbacks=[*ours, LightningCallback(moments)], **options)
    trainer.fit(module, DataLoader(_rows(case), batch_size=BATCH))
    return module.model, trainer.optimizers[0]
