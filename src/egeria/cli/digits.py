"""The main job of the demo: a small residual net on scikit-learn's handwritten digits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from egeria.errors import EgeriaError
from egeria.session import Run, attach
from egeria.testing.convnets import cifar_resnet

BATCH = 64
TEST_SHARE = 0.25
# In half a minute the evaluations that a decision needs are a larger share of the time than in a run of hours.
SHORT_RUN_BUDGET = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one training run came to."""

    accuracy: float
    """Share of the test digits classified correctly, mean of the last three epochs."""
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits:
    """1797 digits of 8 x 8 pixels, enlarged to 16 x 16; a quarter is for testing."""

    train: TensorDataset
    test: TensorDataset


def load_digits() -> Digits:
    """Read the digits that ship inside scikit-learn.

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
    images = functional.interpolate(images, scale_factor=2, mode="bilinear").to(memory_format=torch.channels_last)
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = int(len(order) * TEST_SHARE)
    test, train = order[:held_out], order[held_out:]
    return Digits(train=TensorDataset(images[train], labels[train]), test=TensorDataset(images[test], labels[test]))


def train(
    digits: Digits, *, seed: int, epochs: int, directory: Path | None, progress: Callable[[int, int], None]
) -> Outcome:
    """Train once; the same seed gives the same start and the same batches.

    Args:
        digits: the data.
        seed: of the initial weights and of the order of the batches.
        epochs: passes over the training digits; the learning rate falls tenfold at half of them.
        directory: where egeria's journal goes; None trains plainly.
        progress: told the epoch and how many modules are frozen, once an epoch.
    """
    torch.manual_seed(seed)
    model: nn.Module = cifar_resnet(20, in_channels=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [epochs // 2])
    shuffling = torch.Generator().manual_seed(seed)
    loader = DataLoader(digits.train, batch_size=BATCH, shuffle=True, drop_last=True, generator=shuffling)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    run = None
    if directory is not None:
        steps, config = len(loader) * epochs, {"controller": {"budget_share": SHORT_RUN_BUDGET}}
        run = attach(
            model, optimizer, loader, scheduler=scheduler, total_steps=steps, config=config, directory=directory
        )
    accuracies = []
    for epoch in range(epochs):
        _train_epoch(model, optimizer, loader, run)
        scheduler.step()
        accuracies.append(_accuracy(model, digits.test))
        if run:
            run.log(accuracy=accuracies[-1])
        progress(epoch + 1, run.frozen if run else 0)
    if run:
        run.close()
    last = accuracies[-3:]
    return Outcome(
        accuracy=sum(last) / len(last),
        wall_s=time.perf_counter() - begin,
        cpu_s=time.process_time() - begin_cpu,
    )


def _train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, run: Run | None) -> None:
    network = run.model if run else model
    network.train()
    for images, labels in loader:
        loss: Any = functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run:
            run.step(loss)


def _accuracy(network: nn.Module, test: TensorDataset) -> float:
    images, labels = test.tensors
    network.eval()
    with torch.no_grad():
        found: Tensor = network(images).argmax(dim=1)
    return float((found == labels).float().mean())
