"""Bars for runs that go on, one for each and one for all, with the time that is left."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

HOURS_S = 24 * 3600.0


class Show(Protocol):
    """Takes what a run says of itself."""

    def __call__(self, *, epoch: int, epochs: int, frozen: int, metric: str) -> None:
        """Show how far the run is."""


class Bars:
    """Follows several runs at once; a context manager.

    Args:
        console: where the bars are drawn; where it is no terminal, there is a line for each run that ends.
        num_runs: how many there will be.
    """

    def __init__(self, console: Console, num_runs: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=HOURS_S,  # runs differ in length; their mean over the whole time is steadier
        )
        self._all = self._progress.add_task("all runs", total=num_runs, detail="")
        self._num_runs = num_runs
        self._num_ended = 0

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def tell(self, text: str) -> None:
        """Print a line of its own."""
        self._progress.console.print(text, highlight=False, soft_wrap=True, markup=False)

    @contextmanager
    def follow(self, name: str) -> Iterator[Show]:
        """Show one run for as long as the block lasts."""
        task = self._progress.add_task(name, total=None, detail="")
        reached = 0.0
        detail = ""

        def show(*, epoch: int, epochs: int, frozen: int, metric: str) -> None:
            nonlocal reached, detail
            value = f", {float(metric):.4g}" if metric else ""
            detail = f"epoch {epoch}/{epochs}, frozen {frozen}{value}"
            self._progress.update(task, total=epochs, completed=epoch, detail=detail)
            self._progress.advance(self._all, epoch / epochs - reached)
            reached = epoch / epochs

        yield show
        self._progress.advance(self._all, 1 - reached)
        self._progress.remove_task(task)
        self._num_ended += 1
        self._progress.update(self._all, detail=f"{self._num_ended} of {self._num_runs}")
        self.tell(f"{name}: {detail or 'no epoch'}")
