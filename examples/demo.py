"""Fine-tunes a small network on handwritten digits, without egeria and with it, and compares.

    python examples/demo.py [--seeds N] [--epochs N] [--directory DIR]

A residual net is trained on the digits 0 to 4 of scikit-learn, with noise added. With each seed it is then fine-tuned
to the digits 5 to 9, once without egeria and once with it. Both runs begin with the same weights and see the same
batches; the two lines that end with "# egeria" are all that differs. CPU time is that of this process.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria.events import ModuleFrozen, Thawed

NUM_CLASSES, TEST_SHARE, BATCH = 5, 0.25, 64
NOISE = 0.8
"""Standard deviation of the noise; pixels are from -1 to 1. Without noise every network makes almost no mistakes."""
NOISES, TESTS = 8, 3
"""Each test image comes with 8 noises, and tests follow the last 3 epochs: one test on 220 images says little."""
WIDTHS, BLOCKS_PER_STAGE, GROUPS = (16, 32, 64), 3, 4
PRETRAINING_EPOCHS, RATE, FINE_TUNING_RATE = 12, 2e-3, 1e-3
FEWEST_EPOCHS = 4


@dataclass(frozen=True)
class Outcome:
    """The result of one fine-tuning."""

    accuracy: float
    """Share of the test digits classified correctly, mean of the last three epochs."""
    wall_s: float
    cpu_s: float


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a strided convolution where the size changes (He et al. 2016)."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.first = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.GroupNorm(GROUPS, width), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.GroupNorm(GROUPS, width))
        self.shortcut = nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H / stride, W / stride]."""
        return functional.relu(self.second(self.first(images)) + self.shortcut(images))


class DigitNet(nn.Module):
    """A residual net of 20 layers for small grey images [B, 1, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, WIDTHS[0], 3, 1, 1, bias=False), nn.GroupNorm(GROUPS, WIDTHS[0]), nn.ReLU()
        )
        widths = [WIDTHS[0], *(width for width in WIDTHS for _ in range(BLOCKS_PER_STAGE))]
        self.blocks = nn.Sequential(*map(Block, widths[:-1], widths[1:]))
        self.head = nn.Linear(WIDTHS[-1], NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [B, 5]."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def load_digits() -> list[tuple[TensorDataset, TensorDataset]]:
    """Return training and test images of the digits 0 to 4, and of 5 to 9, both with labels 0 to 4."""
    try:
        from sklearn import datasets  # noqa: PLC0415 (an extra: only some examples need it)
    except ImportError:
        sys.exit("The demo trains on digits that ship with scikit-learn. Run: pip install 'egeria[demo]'")
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = functional.interpolate(images, scale_factor=2, mode="bilinear").to(memory_format=torch.channels_last)
    noise = NOISE * torch.randn((NOISES, *images.shape), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(bunch.target)
    parts = []
    for chosen in (labels < NUM_CLASSES, labels >= NUM_CLASSES):
        own_images, own_labels = (images + noise)[:, chosen], labels[chosen] % NUM_CLASSES
        order = torch.randperm(len(own_labels), generator=torch.Generator().manual_seed(0))
        test, train = order.split([int(len(order) * TEST_SHARE), len(order) - int(len(order) * TEST_SHARE)])
        test_images, test_labels = own_images[:, test].flatten(0, 1), own_labels[test].repeat(NOISES)
        training = TensorDataset(own_images[0, train], own_labels[train])
        parts.append((training, TensorDataset(test_images, test_labels)))
    return parts


def fit(
    model: nn.Module,
    data: tuple[TensorDataset, TensorDataset],
    *,
    rate: float,
    seed: int,
    epochs: int,
    directory: Path | None = None,
) -> list[float]:
    """Train a model; return the test accuracy after each of the last epochs.

    Args:
        model: it is trained in place.
        data: the digits to train on, and those to test with.
        rate: the learning rate at the beginning; it falls linearly.
        seed: of the order of the batches.
        epochs: passes over the training digits.
        directory: where egeria writes its journal; None trains without egeria.
    """
    shuffling = torch.Generator().manual_seed(seed)
    loader = DataLoader(data[0], batch_size=BATCH, shuffle=True, drop_last=True, generator=shuffling)
    steps = len(loader) * epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, total_iters=steps)
    run, more = None, {"scheduler": scheduler, "total_steps": steps, "directory": directory}
    if directory is not None:
        run = egeria.attach(model, optimizer, loader, **more)  # egeria
    accuracies = []
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if run is not None:
                run.step(loss)  # egeria
        if epoch >= epochs - TESTS:
            accuracies.append(accuracy_of(model, data[1]))
            if run is not None:
                run.log(accuracy=accuracies[-1])
    if run is not None:
        run.close()
    return accuracies


def accuracy_of(model: nn.Module, test: TensorDataset) -> float:
    """Return the share of images that are classified correctly."""
    images, labels = test.tensors
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def pretrain(data: tuple[TensorDataset, TensorDataset], *, epochs: int = PRETRAINING_EPOCHS) -> nn.Module:
    """Return a network that was trained on the first digits."""
    torch.manual_seed(0)
    model = DigitNet().to(memory_format=torch.channels_last)
    fit(model, data, rate=RATE, seed=0, epochs=epochs)
    return model


def fine_tune(pretrained: nn.Module, data: Any, *, seed: int, epochs: int, directory: Path | None) -> Outcome:
    """Fine-tune a copy with a new head; the seed decides its first weights and the order of the batches."""
    torch.manual_seed(seed)
    model: Any = copy.deepcopy(pretrained)
    model.head.reset_parameters()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    accuracies = fit(model, data, rate=FINE_TUNING_RATE, seed=seed, epochs=epochs, directory=directory)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    return Outcome(statistics.fmean(accuracies), wall_s, cpu_s)


def main() -> None:
    """Fine-tune with each seed without egeria and with it; print both results and where the reports are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--epochs", type=int, default=14, help="epochs of a run (default 14)")
    new = Path(time.strftime("egeria_runs/demo-%Y%m%d-%H%M%S"))
    parser.add_argument("--directory", type=Path, default=new, help="for journals and reports (default: a new one)")
    options = parser.parse_args()
    if options.seeds < 1 or options.epochs < FEWEST_EPOCHS:
        parser.error(f"at least 1 seed and {FEWEST_EPOCHS} epochs are needed")
    if any(options.directory.glob("seed*/journal.jsonl")):
        parser.error(f"{options.directory} holds an earlier demo. Give another directory, or remove it")
    first, second = load_digits()
    print("pretraining on the digits 0 to 4 ...", flush=True)
    pretrained = pretrain(first)
    print(f"fine-tuning to the digits 5 to 9, {options.epochs} epochs a run ...", flush=True)
    plain, with_egeria = [], []
    for seed in range(options.seeds):
        directory = options.directory / f"seed{seed}"
        for outcomes, place in ((plain, None), (with_egeria, directory)):
            outcomes.append(fine_tune(pretrained, second, seed=seed, epochs=options.epochs, directory=place))
            kind, found = "plain" if place is None else "egeria", outcomes[-1]
            numbers = f"accuracy {found.accuracy:6.2%}  wall {found.wall_s:5.1f} s  CPU {found.cpu_s:5.1f} s"
            print(f"  seed {seed}  {kind:6}  {numbers}", flush=True)
        print(f"          frozen at epoch: {timeline(directory, options.epochs)}", flush=True)
    print(compared(plain, with_egeria))
    print(
        "Reports:",
        *(egeria.report(options.directory / f"seed{seed}").path for seed in range(options.seeds)),
        sep="\n  ",
    )


def timeline(directory: Path, epochs: int) -> str:
    """Return which layer modules were frozen in a run, and when, in epochs."""
    journal = egeria.read_journal(directory)
    steps_per_epoch = journal.events[0].to_dict()["total_steps"] / epochs
    found = [
        f"{event.name if isinstance(event, ModuleFrozen) else 'thaw'} {event.step / steps_per_epoch:.1f}"
        for event in journal
        if isinstance(event, (ModuleFrozen, Thawed))
    ]
    return ", ".join(found) or "nothing"


def compared(plain: list[Outcome], with_egeria: list[Outcome]) -> str:
    """Return the means over the seeds and the differences of the pairs, as mean ± standard deviation."""
    pairs = list(zip(plain, with_egeria, strict=True))
    wall = spread([100 * (1 - mine.wall_s / other.wall_s) for other, mine in pairs])
    cpu = spread([100 * (1 - mine.cpu_s / other.cpu_s) for other, mine in pairs])
    points = spread([100 * (mine.accuracy - other.accuracy) for other, mine in pairs])
    lines = [f"with egeria over {len(pairs)} seeds: {cpu} % of the CPU time saved, {wall} % of the wall time"]
    accuracies = [spread([100 * outcome.accuracy for outcome in outcomes]) for outcomes in (plain, with_egeria)]
    lines.append(f"accuracy: {accuracies[1]} % with egeria, {accuracies[0]} % without; difference {points} points")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation in words."""
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.2f}"


if __name__ == "__main__":
    main()
