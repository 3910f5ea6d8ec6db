"""What `egeria demo` trains: a small residual net, pretrained on the digits 0 to 4 and fine-tuned
to 5 to 9.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria.errors import EgeriaError

NUM_CLASSES = 5
"""Of the pretraining and of the fine-tuning."""
BATCH = 64
NOISE = 0.8
"""Standard deviation of what is added to each pixel, of -1 to 1: without it nobody would make a
mistake."""
TEST_SHARE = 0.25
WIDTHS, BLOCKS_PER_STAGE = (16, 32, 64), 3
PRETRAINING_EPOCHS, RATE, FINE_TUNING_RATE = 12, 0.05, 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one training run came to."""

    accuracy: float
    """Share of the test digits classified correctly, mean of the last three epochs."""
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits:
    """Noisy digits of 8 x 8 pixels, enlarged to 16 x 16; a quarter is for testing."""

    train: TensorDataset
    test: TensorDataset


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a strided one where the size changes (He et al.
    2016, figure 2).
    """

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.first = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.second = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        )
        self.shortcut = (
            nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride, bias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H / stride, W / stride]."""
        return functional.relu(self.second(self.first(images)) + self.shortcut(images))


class DigitNet(nn.Module):
    """A residual net of 20 layers for small grey images [B, 1, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, WIDTHS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()
        )
        widths = [WIDTHS[0], *(width for width in WIDTHS for _ in range(BLOCKS_PER_STAGE))]
        self.blocks = nn.Sequential(*map(Block, widths[:-1], widths[1:]))
        self.head = nn.Linear(WIDTHS[-1], NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [B, 5]."""
        found: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return found


def load_digits() -> tuple[Digits, Digits]:
    """Read the digits that ship inside scikit-learn: 0 to 4, and 5 to 9.

    Raises:
        EgeriaError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets  # noqa: PLC0415 (an extra: only the demo needs it)
    except ImportError as error:
        raise EgeriaError(
            "The demo trains on digits that ship with scikit-learn, which is not installed. "
            "Run: pip install 'egeria[demo]'"
        ) from error
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = functional.interpolate(images, scale_factor=2, mode="bilinear").to(
        memory_format=torch.channels_last
    )
    images = images + NOISE * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(bunch.target)
    return _split(images, labels, labels < NUM_CLASSES), _split(
        images, labels, labels >= NUM_CLASSES
    )


def _split(images: Tensor, labels: Tensor, chosen: Tensor) -> Digits:
    images, labels = images[chosen], labels[chosen] % NUM_CLASSES
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: int(len(order) * TEST_SHARE)], order[int(len(order) * TEST_SHARE) :]
    return Digits(
        train=TensorDataset(images[train], labels[train]),
        test=TensorDataset(images[test], labels[test]),
    )


def pretrain(digits: Digits, *, seed: int, epochs: int = PRETRAINING_EPOCHS) -> nn.Module:
    """Return a network that tells the first digits apart."""
    torch.manual_seed(seed)
    model: nn.Module = DigitNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _fit(
        model,
        digits,
        rate=RATE,
        seed=seed,
        epochs=epochs,
        directory=None,
        progress=lambda epoch, frozen: None,
    )
    return model


def fine_tune(
    pretrained: nn.Module,
    digits: Digits,
    *,
    seed: int,
    epochs: int,
    directory: Path | None,
    progress: Callable[[int, int], None],
) -> Outcome:
    """Fine-tune a copy with a fresh head; the same seed gives the same start and the same batches.

    Args:
        pretrained: stays as it is.
        digits: the data.
        seed: of the head and of the order of the batches.
        epochs: passes over the training digits; the learning rate falls straight to nothing.
        directory: where egeria's journal goes; None trains plainly.
        progress: told the epoch and how many modules are frozen, once an epoch.
    """
    torch.manual_seed(seed)
    model: Any = copy.deepcopy(pretrained)
    model.head.reset_parameters()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    accuracies = _fit(
        model,
        digits,
        rate=FINE_TUNING_RATE,
        seed=seed,
        epochs=epochs,
        directory=directory,
        progress=progress,
    )
    return Outcome(
        accuracy=sum(accuracies[-3:]) / len(accuracies[-3:]),
        wall_s=time.perf_counter() - begin,
        cpu_s=time.process_time() - begin_cpu,
    )


def _fit(
    model: nn.Module,
    digits: Digits,
    *,
    rate: float,
    seed: int,
    epochs: int,
    directory: Path | None,
    progress: Callable[[int, int], None],
) -> list[float]:
    """Train; return the accuracy after each epoch."""
    shuffling = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        digits.train, batch_size=BATCH, shuffle=True, drop_last=True, generator=shuffling
    )
    steps = len(loader) * epochs
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, total_iters=steps)
    run = None
    if directory is not None:  # this line ...
        run = egeria.attach(
            model, optimizer, loader, scheduler=scheduler, total_steps=steps, directory=directory
        )
    accuracies = []
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            loss: Any = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if run:
                run.step(loss)  # ... and this one are all that differs
        accuracies.append(_accuracy(model, digits.test))
        if run:
            run.log(accuracy=accuracies[-1])
        progress(epoch + 1, run.frozen if run else 0)
    if run:
        run.close()
    return accuracies


def _accuracy(model: nn.Module, test: TensorDataset) -> float:
    images, labels = test.tensors
    model.eval()
    with torch.no_grad():
        found: Tensor = model(images).argmax(dim=1)
    return float((found == labels).float().mean())
