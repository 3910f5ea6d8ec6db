"""`egeria cache DIR [--verify] [--prune]`: what runs keep in a cache directory, or left there."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from egeria.cache.gate import size_text
from egeria.cache.store.directory import LOCK_NAME, is_live, runs_in, size_bytes, stores_of, sweep
from egeria.cache.store.disk import DiskStore
from egeria.cache.store.rows import StoreError, as_store_error
from egeria.journal import FILE_NAME
from egeria.session.skipping import SUBDIRECTORY

LARGEST_NOTE = 4096
YEAR_3000 = 32.5e9


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the table, and remove what no process holds if asked to; 1 if something is damaged."""
    directory = _cache_of(arguments.directory)
    complaints: list[str] = []
    with as_store_error(f"The cache directory {directory} cannot be read"):
        rows = [
            row
            for path in runs_in(directory)
            for row in _rows_of(path, arguments.verify, complaints)
        ]
    if rows:
        console.print(_table(rows, str(directory), verified=arguments.verify))
    else:
        console.print(f"No run keeps anything in {escape(str(directory))}.", soft_wrap=True)
    for complaint in complaints:
        console.print(f"[bold red]Damaged:[/] {escape(complaint)}", highlight=False, soft_wrap=True)
    if arguments.prune:
        with as_store_error(f"The cache directory {directory} cannot be pruned"):
            num_runs, num_bytes = sweep(directory)
        console.print(
            f"Removed {num_runs} left over run{'' if num_runs == 1 else 's'}, "
            f"{size_text(num_bytes)}."
        )
    return 1 if complaints else 0


def _cache_of(directory: Path) -> Path:
    """Return the cache directory in the directory of a run, and any other as it is."""
    inside = directory / SUBDIRECTORY
    return inside if (directory / FILE_NAME).is_file() and inside.is_dir() else directory


def _table(rows: list[list[str]], directory: str, *, verified: bool) -> Table:
    table = Table(title=escape(f"Stored activations in {directory}"))
    for heading in ("run", "state", "begun", "generation", "boundary"):
        table.add_column(heading)
    for heading in ("rows", "size", *(["damaged"] if verified else [])):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row[: len(table.columns)])
    return table


def _rows_of(run: Path, verify: bool, complaints: list[str]) -> list[list[str]]:
    """Return the rows of the table for one run, and complain about its damaged stores; nothing is
    changed.
    """
    note = _read_note(run)
    created, pid = note.get("created"), note.get("pid")
    is_time = isinstance(created, (int, float)) and 0 < created < YEAR_3000
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(created)) if is_time else "unknown"
    live = f"live, begun by process {pid}" if isinstance(pid, int) else "live"
    shown = [run.name.partition("-")[2], live if is_live(run) else "left over", begun]
    stores = [_store_cells(path, verify, complaints) for path in stores_of(run)]
    stores = stores or [["none", "", "", size_text(size_bytes(run)), ""]]
    return [
        [*(shown if index == 0 else ["", "", ""]), *cells] for index, cells in enumerate(stores)
    ]


def _read_note(run: Path) -> dict[str, Any]:
    """Return who began a run: 'pid' and 'created'; empty where that cannot be read."""
    with contextlib.suppress(OSError, ValueError), (run / LOCK_NAME).open("rb") as file:
        found = json.loads(file.read(LARGEST_NOTE))
        return found if isinstance(found, dict) else {}
    return {}


def _store_cells(path: Path, verify: bool, complaints: list[str]) -> list[str]:
    """Return the cells of one store, and complain if something is wrong with it."""
    boundary, rows, damaged = "", "cannot be read", "unread"
    try:
        with contextlib.closing(DiskStore.join(path, read_only=True)) as store:
            boundary, rows = store.boundary, f"{store.num_stored:,} of {store.capacity:,}"
            if verify:
                num_stored, num_damaged = store.verify()
                damaged = f"{num_damaged:,}"
                if num_damaged:
                    complaints.append(
                        f"{num_damaged} of {num_stored} rows in {path} have a wrong checksum."
                    )
    except StoreError as error:
        if path.exists():  # else its run has removed it meanwhile: no damage
            complaints.append(str(error))
    return [
        escape(path.name.partition("-")[2]),
        escape(boundary),
        rows,
        size_text(size_bytes(path)),
        damaged,
    ]
