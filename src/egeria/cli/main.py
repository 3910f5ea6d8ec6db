"""Reading the command line and calling the verb."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

import egeria
from egeria.cli import advise, doctor, modules
from egeria.errors import EgeriaError


def report(arguments: argparse.Namespace, console: Console) -> int:
    """Print the summary of a run and write its page."""
    console.print(egeria.report(arguments.directory))
    return 0


VERBS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    "advise": advise.run,
    "modules": modules.run,
    "report": report,
    "doctor": doctor.run,
}


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
    verb.add_argument("training", help=f"package.module:callable that returns {advise.RETURNS}")
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
