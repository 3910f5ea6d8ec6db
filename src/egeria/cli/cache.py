"""`egeria cache DIR [--verify] [--prune]`: what runs keep in a cache directory, or left there."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from egeria.cache.store.directory import FoundRun, FoundStore, survey, sweep
from egeria.cache.store.rows import StoreError
from egeria.journal import FILE_NAME
from egeria.session.skipping import SUBDIRECTORY

YEAR_3000 = 32.5e9
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the table, and remove what no process holds if asked to; 1 if something is damaged."""
    directory = arguments.directory / SUBDIRECTORY
    if not (directory.is_dir() and (arguments.directory / FILE_NAME).is_file()):
        directory = arguments.directory  # not that of a run
    found = survey(directory, verify=arguments.verify)
    if found:
        console.print(_table(found, str(directory), verified=arguments.verify))
    else:
        console.print(f"No run keeps anything in {escape(str(directory))}.", soft_wrap=True)
    damaged = [store for entry in found for store in entry.stores if store.is_damaged]
    for store in damaged:
        wrong = f"{store.num_damaged} of {store.num_stored} rows in {store.path} have a wrong checksum."
        complaint = escape(store.problem or wrong)
        console.print(f"[bold red]Damaged:[/] {complaint}", highlight=False, soft_wrap=True)
    if arguments.prune:
        _prune(directory, console)
    return 1 if damaged else 0


def _prune(directory: Path, console: Console) -> None:
    try:
        num_runs, num_bytes = sweep(directory)
    except OSError as error:
        raise StoreError(f"The cache directory {directory} cannot be pruned: {error}.") from error
    console.print(f"Removed {num_runs} left over run{'' if num_runs == 1 else 's'}, {_size(num_bytes)}.")


def _table(found: list[FoundRun], directory: str, *, verified: bool) -> Table:
    table = Table(title=escape(f"Stored activations in {directory}"))
    for heading in ("run", "state", "begun", "generation", "boundary"):
        table.add_column(heading)
    for heading in ("rows", "size", *(["damaged"] if verified else [])):
        table.add_column(heading, justify="right")
    for entry in found:
        shown = [_run_cells(entry), ["", "", ""]]
        for index, store in enumerate(entry.stores):
            table.add_row(*shown[min(index, 1)], *_store_cells(store, verified=verified))
        if not entry.stores:
            table.add_row(*shown[0], "none", "", "", _size(entry.size_bytes))
    return table


def _run_cells(entry: FoundRun) -> list[str]:
    created, pid = entry.note.get("created"), entry.note.get("pid")
    is_time = isinstance(created, (int, float)) and 0 < created < YEAR_3000
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(created)) if is_time else "unknown"
    state = f"live, begun by process {pid}" if entry.is_live and isinstance(pid, int) else "live"
    return [entry.path.name.partition("-")[2], state if entry.is_live else "left over", begun]


def _store_cells(store: FoundStore, *, verified: bool) -> list[str]:
    rows = f"{store.num_stored:,} of {store.capacity:,}" if store.capacity else "cannot be read"
    unread = "unread" if store.num_damaged is None else f"{store.num_damaged:,}"
    cells = [escape(store.path.name.partition("-")[2]), escape(store.boundary), rows, _size(store.size_bytes)]
    return [*cells, unread] if verified else cells


def _size(size_bytes: int) -> str:
    factor, unit = next(entry for entry in UNITS if size_bytes >= entry[0] or entry[0] == 1)
    return f"{size_bytes / factor:.1f} {unit}" if factor > 1 else f"{size_bytes} bytes"
