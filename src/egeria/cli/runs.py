"""`egeria report DIR` and `egeria replay DIR [--config FILE]`: what a run did, and what it would
decide again.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import egeria
from egeria.config import Config
from egeria.report.replay import Replay, ReplayedDecision
from egeria.report.replay import replay as replay_run


def report(arguments: argparse.Namespace, console: Console) -> int:
    """Print the summary of a run and write its page."""
    console.print(egeria.report(arguments.directory))
    return 0


def replay(arguments: argparse.Namespace, console: Console) -> int:
    """Print both lists of decisions; 1 if the run's own settings no longer lead
    to its decisions.
    """
    config = Config.load(arguments.config) if arguments.config else None
    result = replay_run(arguments.directory, config)
    console.print(
        _table(result, "with its own settings" if config is None else f"with {arguments.config}")
    )
    if result.waiting_since is not None:
        console.print(
            f"From step {result.waiting_since} these settings wait for readings that the run did "
            "not take: "
            f"what they would have decided after that cannot be known from this journal."
        )
    if result.num_unused:
        console.print(
            f"{result.num_unused} readings were of a module these settings were not waiting for."
        )
    if config is None:
        console.print(
            "The replay agrees." if result.agrees else "[bold red]The replay disagrees.[/]"
        )
        return 0 if result.agrees else 1
    return 0


def _table(result: Replay, how: str) -> Table:
    table = Table(title=escape("Decisions of the run, and of its replay " + how))
    for heading in ("step", "decided", "replayed"):
        table.add_column(heading)
    names = result.module_names
    for step in sorted({entry.step for entry in (*result.recorded, *result.replayed)}):
        both = (
            _describe(decisions, step, names) for decisions in (result.recorded, result.replayed)
        )
        table.add_row(str(step), *map(escape, both))
    return table


def _describe(decisions: tuple[ReplayedDecision, ...], step: int, names: tuple[str, ...]) -> str:
    return ", ".join(
        " ".join(
            [
                entry.kind,
                *([] if entry.module is None else [names[entry.module]]),
                *map(str, entry.periods or ()),
            ]
        )
        for entry in decisions
        if entry.step == step
    )
