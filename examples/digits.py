"""Train a residual net on scikit-learn's handwritten digits, plainly and with egeria, side by side.

    python examples/digits.py [--seeds N] [--epochs E] [--directory DIR]

`egeria demo` runs this file. Needs scikit-learn, which ships the digits: pip install 'egeria[demo]'.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria.errors import ConfigError, EgeriaError
from egeria.events import ModuleFrozen, Thawed
from egeria.journal import FILE_NAME
from resnet import cifar_resnet

EPOCHS = 30
KINDS = ("plain", "egeria")
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
        run = egeria.attach(
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


def _train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, run: egeria.Run | None) -> None:
    model.train()
    for images, labels in loader:
        loss: Any = functional.cross_entropy(model(images), labels)
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


def compare(console: Console, directory: Path, *, seeds: int = 3, epochs: int = EPOCHS) -> None:
    """Train with each seed plainly and with egeria; print the table and where the reports are.

    Args:
        console: where to print.
        directory: where journals and reports go.
        seeds: runs of each kind.
        epochs: epochs of a run.

    Raises:
        ConfigError: fewer than 1 seed or 4 epochs.
        EgeriaError: scikit-learn is not installed.
    """
    if seeds < 1 or epochs < 4:
        raise ConfigError(f"A demo needs at least 1 seed and 4 epochs, found {seeds} and {epochs}. Ask for more.")
    console.print(
        f"A residual net (ResNet-20) learns scikit-learn's handwritten digits: {seeds} times plainly and "
        f"{seeds} times with egeria, in turn, {epochs} epochs each."
    )
    digits = load_digits()
    train(digits, seed=0, epochs=1, directory=None, progress=lambda epoch, frozen: None)  # warms torch up
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    with _bars(console) as bars:
        for seed in range(seeds):
            for kind in KINDS:
                journal = _fresh(directory / f"seed{seed}") if kind == "egeria" else None
                outcomes[kind].append(_one(bars, digits, seed, epochs, journal))
    console.print(_table(outcomes))
    _print_timelines(console, directory, seeds=seeds, epochs=epochs)
    pages = [egeria.report(directory / f"seed{seed}").path for seed in range(seeds)]
    console.print("Reports:", *pages, sep="\n  ", soft_wrap=True)


def _bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description:28}"), BarColumn(), TextColumn("{task.completed}/{task.total} epochs"))
    return Progress(*columns, TextColumn("{task.fields[frozen]}"), TimeElapsedColumn(), console=console)


def _fresh(directory: Path) -> Path:
    """Remove what an earlier demo left there: a journal is only ever appended to."""
    for name in (FILE_NAME, "report.html"):
        (directory / name).unlink(missing_ok=True)
    return directory


def _one(bars: Progress, digits: Digits, seed: int, epochs: int, directory: Path | None) -> Outcome:
    kind = "plain" if directory is None else "egeria"
    task = bars.add_task(f"seed {seed}, {kind}", total=epochs, frozen="")

    def show(epoch: int, frozen: int) -> None:
        bars.update(task, completed=epoch, frozen=f"{frozen} modules frozen" if directory else "")

    return train(digits, seed=seed, epochs=epochs, directory=directory, progress=show)


def _table(outcomes: dict[str, list[Outcome]]) -> Table:
    table = Table(title="Handwritten digits, mean ± sd over seeds")
    for heading in ("", "accuracy %", "wall s", "CPU s", "wall saved %", "CPU saved %"):
        table.add_column(heading, justify="right")
    for kind, runs in outcomes.items():
        saved = ("", "")
        if kind == "egeria":
            pairs = list(zip(runs, outcomes["plain"], strict=True))
            saved = (
                _spread([100 * (1 - mine.wall_s / plain.wall_s) for mine, plain in pairs]),
                _spread([100 * (1 - mine.cpu_s / plain.cpu_s) for mine, plain in pairs]),
            )
        accuracy = _spread([100 * outcome.accuracy for outcome in runs], digits=2)
        wall, cpu = (_spread([getattr(outcome, unit) for outcome in runs]) for unit in ("wall_s", "cpu_s"))
        table.add_row(kind, accuracy, wall, cpu, *saved)
    return table


def _print_timelines(console: Console, directory: Path, *, seeds: int, epochs: int) -> None:
    console.print("What froze, by epoch:")
    for seed in range(seeds):
        journal = egeria.read_journal(directory / f"seed{seed}")
        steps_per_epoch = journal.events[0].to_dict()["total_steps"] / epochs
        said = [
            f"{event.name} {event.step / steps_per_epoch:.1f}"
            if isinstance(event, ModuleFrozen)
            else f"thaw {event.step / steps_per_epoch:.1f}"
            for event in journal
            if isinstance(event, (ModuleFrozen, Thawed))
        ]
        console.print(f"  seed {seed}: {', '.join(said) or 'nothing'}", highlight=False)


def _spread(values: list[float], digits: int = 1) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of a run")
    parser.add_argument(
        "--directory", type=Path, default=Path("egeria_runs/demo"), help="where journals and reports go"
    )
    options = parser.parse_args()
    compare(Console(), options.directory, seeds=options.seeds, epochs=options.epochs)
