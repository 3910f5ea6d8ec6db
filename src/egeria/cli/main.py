"""Reading the command line and calling the verb."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import egeria
from egeria.advice import advise
from egeria.cli import doctor, modules
from egeria.cli.modules import call_named
from egeria.config.checks import check, wrong_plan
from egeria.errors import ConfigError, EgeriaError
from egeria.report.wording import percent


def report(arguments: argparse.Namespace, console: Console) -> int:
    """Print the summary of a run and write its page."""
    console.print(str(egeria.report(arguments.directory)), markup=False, highlight=False)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 done, 1 a check failed, 2 bad input."""
    chosen = _parser().parse_args(arguments)
    console = Console()
    try:
        return VERBS[chosen.verb](chosen, console)
    except EgeriaError as error:
        said = f"[bold red]egeria {chosen.verb}:[/] {escape(str(error))}"
        Console(stderr=True).print(said, highlight=False, soft_wrap=True)
        return 2


def _parser() -> argparse.ArgumentParser:
    about = "Train faster by freezing layers once they have converged."
    parser = argparse.ArgumentParser(prog="egeria", description=about)
    parser.add_argument("--version", action="version", version=f"egeria {egeria.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser(
        "advise", help="measure what freezing could save in a training, on a copy of it"
    )
    verb.add_argument("training", help=f"package.module:callable that returns {RETURNS}")
    verb.add_argument(
        "--plan", help='such as "0.5:2 0.75:3": also tell what freezing by it would save'
    )
    verb.add_argument("--rounds", type=int, help="how often each depth is measured")
    verb.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write all that was measured"
    )

    verb = verbs.add_parser("modules", help="print how a model is cut into layer modules, and why")
    verb.add_argument(
        "model",
        help="package.module:callable that returns the model, or (model, example arguments)",
    )
    verb.add_argument(
        "--pattern", help="regular expression: each submodule it matches becomes a layer module"
    )

    verb = verbs.add_parser("report", help="print what a run did, and write its page report.html")
    verb.add_argument("directory", metavar="DIR", help="directory of the run, or its URL")

    verb = verbs.add_parser(
        "doctor", help="show what this machine offers: threads, quantization, disk, torch"
    )
    verb.add_argument(
        "--directory", type=Path, default=Path(), help="where to measure the disk (default: here)"
    )
    return parser


NAMES = ("model", "optimizer", "loader", "loss")
RETURNS = "(model, optimizer, loader, loss), or a dictionary of the arguments of egeria.advise"


def run_advise(arguments: argparse.Namespace, console: Console) -> int:
    """Build the training, measure it, print the advice; write it where that is asked for."""
    if arguments.plan is not None:
        check("plan", arguments.plan, wrong_plan)
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ConfigError(
            f"--json takes a file in a folder that exists, found {arguments.json}. Make the "
            "folder first."
        )
    given = _arguments(arguments.training)
    if arguments.rounds is not None:
        given["rounds"] = arguments.rounds
    with console.status("measuring on a copy"):
        advice = advise(**given)
    console.print(repr(advice), markup=False, highlight=False)
    if arguments.plan is not None:
        saved = percent(advice.saving(arguments.plan))
        console.print(f"The plan {arguments.plan!r} would save {saved} of the training time.")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(advice.to_dict(), indent=1) + "\n", encoding="utf-8")
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


VERBS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    "advise": run_advise,
    "modules": modules.run,
    "report": report,
    "doctor": doctor.run,
}
