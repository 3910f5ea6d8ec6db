"""A fine-tuning under finetuning-scheduler: the package itself, with its default schedule, in Lightning's loop.

    pip install finetuning-scheduler
    python -m benchmarks.rivals.finetuning_scheduler WORKLOAD --data DIR --results DIR [--seed 0] [--tier cpu]

By default it trains the last parameters alone, evaluates after each epoch, and thaws two more parameters, at a lower
rate, each time the validation has not become better for three epochs. The training has as many epochs as the workload;
more are given with `--epochs`. Written down: the judge's quality, CPU time, and the parameters in training by epoch.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from finetuning_scheduler import FinetuningScheduler
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.proving.catalogue import find_workloads
from benchmarks.proving.running.execution import build
from benchmarks.proving.running.recipe import describe_circumstances
from benchmarks.workloads.workload import Training, Workload


class Tuned(lightning.LightningModule):
    """A workload as a LightningModule; its validation is the workload's own, asked once in each epoch."""

    def __init__(self, workload: Workload, training: Training, total_steps: int) -> None:
        super().__init__()
        self.workload, self.training_of, self.total_steps = workload, training, total_steps
        self.model = training.model
        self.num_trained: list[int] = []
        """Elements of the parameters in training, by epoch."""

    def training_step(self, batch: Any, _: int) -> Tensor:
        """Return the loss of a batch."""
        return self.training_of.loss(self.model, batch)

    def on_train_epoch_start(self) -> None:
        """Note what trains."""
        self.num_trained.append(sum(entry.numel() for entry in self.parameters() if entry.requires_grad))

    def validation_step(self, *_: Any) -> None:
        """Evaluate; what is to fall is called `val_loss`, as the package expects it."""
        value = self.training_of.evaluate(self.model)[self.workload.metric]
        self.log("val_loss", -value if self.workload.higher_is_better else value, batch_size=1)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return an optimizer of what trains first, like the workload's, and its schedule."""
        own = self.training_of.optimizer
        known = {"lr", "betas", "eps", "weight_decay", "momentum", "nesterov"}
        settings = {name: value for name, value in own.defaults.items() if name in known}
        settings["lr"] = max(group["initial_lr"] for group in own.param_groups)
        optimizer = type(own)([entry for entry in self.parameters() if entry.requires_grad], **settings)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, total_iters=self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def tune(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return what came of it."""
    torch.set_num_threads(1)
    ((_, workload),) = find_workloads([name], [])
    training = build(workload, options.data, options.tier, options.seed, torch.device("cpu"))
    epochs = options.epochs or training.num_epochs
    tuned = Tuned(workload, training, epochs * len(training.loader))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            callbacks=[FinetuningScheduler()],
            default_root_dir=folder,
            gradient_clip_val=training.clip_norm,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            logger=False,
        )
        begin_cpu = time.process_time()
        trainer.fit(tuned, training.loader, DataLoader([0]))
        cpu_s = time.process_time() - begin_cpu
    with torch.inference_mode():
        tuned.model.eval()
        judged = (training.judge or training.evaluate)(tuned.model)
    found = {"workload": name, "seed": options.seed, "tier": options.tier, "epochs": epochs, "cpu_s": cpu_s}
    found |= {"judged": judged, "num_trained": tuned.num_trained}
    return {**found, "made_with": describe_circumstances(torch.device("cpu"))}


def main() -> None:
    """Train, and write down what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", default="cpu")
    parser.add_argument("--epochs", type=int)
    options = parser.parse_args()
    found = tune(options.workload, options)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{options.workload}-seed{options.seed}-epochs{found['epochs']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
