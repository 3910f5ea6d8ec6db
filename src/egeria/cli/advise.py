"""`egeria advise package.module:callable`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from egeria.advice import Advice, advise
from egeria.cli.modules import call_named
from egeria.config.checks import check
from egeria.config.plan_text import wrong_plan
from egeria.errors import ConfigError
from egeria.report.wording import percent

NAMES = ("model", "optimizer", "loader", "loss")
RETURNS = "(model, optimizer, loader, loss), or a dictionary of the arguments of egeria.advise"


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Build the training, measure it, print the advice; write it where that is asked for."""
    if arguments.plan is not None:
        check("plan", arguments.plan, wrong_plan)
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ConfigError(
            f"--json takes a file in a folder that exists, found {arguments.json}. Make the "
            "folder first."
        )
    given = _arguments(arguments.training)
    with console.status("measuring on a copy"):
        advice = advise(
            **{**given, **({} if arguments.rounds is None else {"rounds": arguments.rounds})}
        )
    saving = None if arguments.plan is None else advice.saving(arguments.plan)
    console.print(_table(advice))
    for note in advice.notes():
        console.print(escape(note), highlight=False)
    if saving is not None:
        console.print(
            f"The plan {arguments.plan!r} would save {percent(saving)} of the training time."
        )
    if arguments.json is not None:
        arguments.json.write_text(advice.to_json() + "\n", encoding="utf-8")
        console.print(f"written: {arguments.json}", highlight=False)
    return 0


def _arguments(path: str) -> dict[str, Any]:
    made = call_named(path, "training", RETURNS)
    if isinstance(made, tuple) and 3 <= len(made) <= len(NAMES):
        return dict(zip(NAMES, made, strict=False))
    known = inspect.signature(advise).parameters
    if isinstance(made, Mapping) and set(made) <= set(known) and set(NAMES[:3]) <= set(made):
        return dict(made)
    found = sorted(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
    raise ConfigError(f"{path} must return {RETURNS}, found {found}. Return one of these.")


def _table(advice: Advice) -> Table:
    head, *rows = advice.rows()
    table = Table(
        title="What freezing could save: an iteration with the front layer modules frozen"
    )
    for name in head:
        table.add_column(name, justify="left" if name == "up to" else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
