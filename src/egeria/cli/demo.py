"""`egeria demo`: fine-tunes a small network without egeria and with it, and compares."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import egeria
from egeria.cli import digits
from egeria.cli.digits import Digits, Outcome
from egeria.errors import ConfigError
from egeria.events import ModuleFrozen, Thawed
from egeria.journal import FILE_NAME

EPOCHS, FEWEST_EPOCHS = 34, 4
KINDS = ("plain", "egeria")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Fine-tune with each seed plainly and with egeria; print the comparison and the paths of the
    reports.

    Raises:
        ConfigError: fewer than 1 seed or 4 epochs.
        EgeriaError: scikit-learn is not installed.
    """
    directory, seeds = arguments.directory, arguments.seeds
    epochs = EPOCHS if arguments.epochs is None else arguments.epochs
    if seeds < 1 or epochs < FEWEST_EPOCHS:
        raise ConfigError(
            f"A demo needs at least 1 seed and {FEWEST_EPOCHS} epochs, found {seeds} and "
            f"{epochs}. Ask for more."
        )
    first, second = digits.load_digits()
    console.print(
        "A residual net that knows the digits 0 to 4 learns to tell 5 to 9 apart, under noise: "
        f"{seeds} times plainly "
        f"and {seeds} times with egeria, in turn, {epochs} epochs each."
    )
    with console.status("pretraining"):
        pretrained = digits.pretrain(first, seed=0)
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    with _bars(console) as bars:
        for seed in range(seeds):
            for kind in KINDS:
                journal = _fresh(directory / f"seed{seed}") if kind == "egeria" else None
                outcomes[kind].append(_one(bars, pretrained, second, (seed, epochs), journal))
    console.print(_table(outcomes))
    _print_timelines(console, directory, seeds=seeds, epochs=epochs)
    reports = [egeria.report(directory / f"seed{seed}") for seed in range(seeds)]
    console.print(reports[0])
    console.print("Reports:", *(found.path for found in reports), sep="\n  ", soft_wrap=True)
    return 0


def _bars(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} epochs"),
    )
    return Progress(
        *columns, TextColumn("{task.fields[frozen]}"), TimeElapsedColumn(), console=console
    )


def _fresh(directory: Path) -> Path:
    """Remove what an earlier demo left there: a journal is only ever appended to."""
    for name in (FILE_NAME, "report.html"):
        (directory / name).unlink(missing_ok=True)
    return directory


def _one(
    bars: Progress,
    pretrained: nn.Module,
    second: Digits,
    seed_and_epochs: tuple[int, int],
    directory: Path | None,
) -> Outcome:
    seed, epochs = seed_and_epochs
    kind = "plain" if directory is None else "egeria"
    task = bars.add_task(f"seed {seed}, {kind}", total=epochs, frozen="")

    def show(epoch: int, frozen: int) -> None:
        bars.update(task, completed=epoch, frozen=f"{frozen} modules frozen" if directory else "")

    return digits.fine_tune(
        pretrained, second, seed=seed, epochs=epochs, directory=directory, progress=show
    )


def _table(outcomes: dict[str, list[Outcome]]) -> Table:
    table = Table(title="Fine-tuning to new digits, mean ± sd over seeds")
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
        wall, cpu = (
            _spread([getattr(outcome, unit) for outcome in runs]) for unit in ("wall_s", "cpu_s")
        )
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
