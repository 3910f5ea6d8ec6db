"""Classify images with a small residual network in Lightning.

    python examples/lightning_images.py [--data DIR] [--steps N]

DIR holds CIFAR-10, as examples/cifar10.py takes it; without it the digits of scikit-learn are trained on. The two lines
that end with "# egeria" are all that egeria needs; without them the Trainer trains plainly.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from egeria.integrations.lightning import EgeriaCallback  # egeria
from resnet import cifar_resnet
from small_images import load_images


class ImageClassifier(pl.LightningModule):
    """A residual network, its loss and its optimizer."""

    def __init__(self, channels: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.model = cifar_resnet(20, in_channels=channels)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the share of images classified correctly."""
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return the optimizer, and its schedule by steps."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(options: argparse.Namespace) -> float:
    """Train, and return the share of test images that are classified correctly."""
    pl.seed_everything(options.seed, verbose=False)
    images, held_out, channels = load_images(options.data)
    loader = DataLoader(images, batch_size=64, shuffle=True, drop_last=True)
    trainer = pl.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        precision=options.precision,
        logger=CSVLogger(options.logs),
        log_every_n_steps=10,
        callbacks=[
            EgeriaCallback(),  # egeria
        ],
    )
    trainer.fit(ImageClassifier(channels, options.steps), loader, DataLoader(held_out, batch_size=256))
    return float(trainer.callback_metrics["accuracy"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=630, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed", "16-mixed"], default="32-true")
    parser.add_argument("--logs", type=Path, default=Path(), metavar="DIR", help="where the metrics go, as CSV")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(f"accuracy {train(parse()):.2%}")
