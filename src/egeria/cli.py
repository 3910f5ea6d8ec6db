"""The command `egeria` and its verbs."""

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from torch import nn

import egeria
from egeria.advice import advise
from egeria.config import ModulesConfig, check
from egeria.errors import ConfigError, EgeriaError, brief, printable
from egeria.journal import check_own, replace_file
from egeria.model.cut import LayerModule, is_mostly_trained, make_modules, settings_of_cut
from egeria.moves import wrong_shares
from egeria.report.text import percent

ABOUT = "Train faster by freezing layers once they have converged."
MARK = rb'"egeria": "'  # in each file of `--json`
NAMES = ("model", "optimizer", "loader", "loss")
RETURNS = "(model, optimizer, loader, loss), or a dictionary of the arguments of egeria.advise"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status: 0 done, 1 something failed, 2 wrong use."""
    chosen = _parser().parse_args(arguments)
    try:
        verbs = {"advise": _advise, "modules": _modules, "report": _report}
        return verbs[chosen.verb](chosen, Console())
    except EgeriaError as error:
        said, status = str(error), 2
    except KeyboardInterrupt:
        said, status = "interrupted", 130  # as shells count it
    except BaseException as error:  # also sys.exit in the user's code
        said, status = brief(error), 1
    said = f"[bold red]egeria {chosen.verb}:[/] {escape(said)}"
    Console(stderr=True).print(said, highlight=False, soft_wrap=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="egeria", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"egeria {egeria.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser("advise", help="measure what freezing could save, on a copy")
    verb.add_argument("training", help=f"package.module:callable that returns {RETURNS}")
    verb.add_argument("--plan", help='such as "0.5:2 0.75:3": also show what it would save')
    verb.add_argument("--rounds", type=int, help="how often each depth is measured")
    verb.add_argument("--json", type=Path, metavar="FILE", help="where to write the measurements")
    verb = verbs.add_parser("modules", help="print how a model is cut into layer modules, and why")
    verb.add_argument("model", help="package.module:callable that returns the model")
    verb.add_argument("--pattern", help="regular expression: each submodule it matches becomes one")
    verb = verbs.add_parser("report", help="print what a run did, and write its page report.html")
    verb.add_argument("directory", metavar="DIR", help="of the run")
    return parser


def _report(arguments: argparse.Namespace, console: Console) -> int:
    made = egeria.report(arguments.directory)
    console.print(str(made), markup=False, highlight=False, soft_wrap=True)
    return int(made.path is None)


def _advise(arguments: argparse.Namespace, console: Console) -> int:
    plan, file = arguments.plan, arguments.json
    check("plan", plan or "", wrong_shares)
    if file is not None:
        check_own(file, MARK)
    given = _arguments(arguments.training)
    if arguments.rounds is not None:
        given["rounds"] = arguments.rounds
    with console.status("measuring on a copy"):
        advice = advise(**given)
    console.print(printable(repr(advice)), markup=False, highlight=False)
    if plan is not None:
        saved = percent(advice.saving(plan))
        console.print(f"The plan {plan!r} would save {saved} of the training time.")
    if file is not None:
        text = json.dumps({"egeria": egeria.__version__, **advice.to_dict()}, indent=1) + "\n"
        replace_file(file, MARK, lambda stream: stream.write(text.encode()))
    return 0


def _arguments(path: str) -> dict[str, Any]:
    """Return the arguments of `advise` that the path names."""
    made = _call_named(path, "training", RETURNS)
    if isinstance(made, tuple) and 3 <= len(made) <= len(NAMES):
        return dict(zip(NAMES, made, strict=False))
    known = inspect.signature(advise).parameters.keys()
    if isinstance(made, Mapping) and made.keys() <= known and set(NAMES[:3]) <= set(made):
        return dict(made)
    found = sorted(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
    raise ConfigError(f"{path} must return {RETURNS}, found {found}. Return one of these.")


def _modules(arguments: argparse.Namespace, console: Console) -> int:
    model = _call_named(arguments.model, "model", "a model")
    if not isinstance(model, nn.Module):
        what, found = f"{arguments.model} must return a torch.nn.Module", type(model).__name__
        raise ConfigError(f"{what}, found {found}. Return the model itself.")
    settings = ModulesConfig(pattern=arguments.pattern)
    given = settings_of_cut(settings, is_pretrained=is_mostly_trained(model))
    console.print(_cut_table(model, make_modules(model, **given)))
    console.print("In definition order; a run takes the order of its first step.")
    return 0


def _call_named(path: str, what: str, returns: str) -> Any:
    """Import and call what a path such as package.module:callable names, without arguments."""
    package, _, name = path.partition(":")
    if not (package and name):
        raise ConfigError(f"The {what} is named as package.module:callable, found {path!r}.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(package), name)()
    except Exception as error:
        what = f"{path} must be a callable without required arguments that returns {returns}"
        raise ConfigError(f"{what}; {brief(error)}. Write a function that builds it.") from error


def _cut_table(model: torch.nn.Module, modules: tuple[LayerModule, ...]) -> Table:
    """Return a table of the layer modules; shares are those of the trainable parameters."""
    total = sum(module.num_parameters for module in modules)
    trained = [sum(model.get_parameter(n).numel() for n in each.parameters) for each in modules]
    among = f", {sum(trained):,} of them trainable," if sum(trained) != total else ""
    title = f"{type(model).__name__}: {total:,} parameters{among} in {len(modules)} layer modules"
    numbers = [Column(name, justify="right") for name in ("parameters", "share")]
    texts = [Column(name, overflow="fold") for name in ("submodules", "why")]
    table = Table("layer module", *numbers, *texts, title=title, show_lines=True)
    for module, count in zip(modules, trained, strict=True):
        share = f"{count / max(1, sum(trained)):.1%}"
        why = module.reason + (" Never frozen." if module is modules[-1] else "")
        size, submodules = f"{module.num_parameters:,}", ", ".join(module.submodules)
        cells = module.name, size, share, submodules, why
        table.add_row(*(escape(printable(cell)) for cell in cells))
    return table
