"""`egeria demo`: the same training, plainly and with egeria, side by side."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import egeria
from egeria.cli.digits import Digits, Outcome, load_digits, train
from egeria.errors import ConfigError
from egeria.events import ModuleFrozen, Thawed
from egeria.journal.writer import FILE_NAME

EPOCHS = 30
KINDS = ("plain", "egeria")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train, print the table and the place of the reports."""
    if arguments.seeds < 1 or arguments.epochs < 4:
        raise ConfigError(
            f"A demo needs at least 1 seed and 4 epochs, found {arguments.seeds} and {arguments.epochs}. Ask for more."
        )
    console.print(
        f"A residual net (ResNet-20) learns scikit-learn's handwritten digits: {arguments.seeds} times plainly and "
        f"{arguments.seeds} times with egeria, in turn, {arguments.epochs} epochs each."
    )
    digits = load_digits()
    train(digits, seed=0, epochs=1, directory=None, progress=lambda epoch, frozen: None)  # warms torch up
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    with _bars(console) as bars:
        for seed in range(arguments.seeds):
            for kind in KINDS:
                directory = _fresh(arguments.directory / f"seed{seed}") if kind == "egeria" else None
                outcomes[kind].append(_one(bars, digits, seed, arguments.epochs, directory))
    console.print(_table(outcomes))
    _print_timelines(console, arguments)
    pages = [egeria.report(arguments.directory / f"seed{seed}").path for seed in range(arguments.seeds)]
    console.print("Reports:", *pages, sep="\n  ", soft_wrap=True)
    return 0


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


def _print_timelines(console: Console, arguments: argparse.Namespace) -> None:
    console.print("What froze, by epoch:")
    for seed in range(arguments.seeds):
        journal = egeria.read_journal(arguments.directory / f"seed{seed}")
        steps_per_epoch = journal.events[0].to_dict()["total_steps"] / arguments.epochs
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
