"""`egeria modules package.module:callable`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from egeria.config import ModulesConfig
from egeria.errors import ConfigError
from egeria.model.cut import LayerModule, make_modules
from egeria.model.group import find_pieces
from egeria.model.pretrained import find_trained_norms, is_mostly_trained, settings_of_cut
from egeria.model.watch import Watch


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Build the model, cut it, print the layer modules."""
    model, example = _build(arguments.model)
    settings = asdict(ModulesConfig(pattern=arguments.pattern))
    settings = settings_of_cut(settings, is_pretrained=is_mostly_trained(find_trained_norms(model)))
    watch = None
    if example is not None:
        watch = Watch(model, find_pieces(model, arguments.pattern))
        _forward(arguments.model, model, example, watch)
    cut = make_modules(model, watch=watch, **settings)
    console.print(_table(model, cut))
    console.print(
        "In execution order."
        if example is not None
        else "In definition order; a run goes by its first step."
    )
    return 0


def call_named(path: str, what: str, returns: str) -> Any:
    """Import and call what the path names, without arguments.

    Args:
        path: package.module:callable, found from the working directory too.
        what: it stands for, such as 'model'.
        returns: what it must return.
    """
    package, colon, name = path.partition(":")
    if not (package and colon and name):
        raise ConfigError(
            f"The {what} is named as package.module:callable, found {path!r}. Write it like that."
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(package), name)()
    except Exception as error:
        raise ConfigError(
            f"{path} must be a callable without required arguments that returns {returns}; "
            f"{type(error).__name__}: {error}. Write a small function that builds it."
        ) from error


def _build(path: str) -> tuple[nn.Module, Any]:
    """Return the model that the path names, and example arguments or None without them."""
    made = call_named(path, "model", "a model")
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{path} must return a torch.nn.Module, or a tuple of it and example arguments, "
            f"found {type(model).__name__}. Return one of these."
        )
    return model, example


def _forward(path: str, model: nn.Module, example: Any, watch: Watch) -> None:
    positional = example if isinstance(example, (tuple, list)) else (example,)
    watch.open()
    try:
        if isinstance(example, Mapping):
            model(**example)
        else:
            model(*positional)
    except Exception as error:
        raise ConfigError(
            f"The model of {path} must take its example arguments; {type(error).__name__}: "
            f"{error}. Return arguments that a call of the model accepts."
        ) from error
    finally:
        watch.close()


def _table(model: nn.Module, modules: tuple[LayerModule, ...]) -> Table:
    """Return a table of the layer modules; shares are those of the trainable parameters."""
    total = sum(module.num_parameters for module in modules)
    trained = [
        sum(model.get_parameter(name).numel() for name in module.parameters) for module in modules
    ]
    among = f", {sum(trained):,} of them trainable," if sum(trained) != total else ""
    title = f"{type(model).__name__}: {total:,} parameters{among} in {len(modules)} layer modules"
    table = Table(title=title, show_lines=True)
    table.add_column("layer module", style="bold")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    table.add_column("submodules", overflow="fold")
    table.add_column("why", overflow="fold")
    for index, module in enumerate(modules):
        note = " Never frozen." if index == len(modules) - 1 else ""
        table.add_row(
            escape(module.name),
            f"{module.num_parameters:,}",
            f"{trained[index] / max(1, sum(trained)):.1%}",
            escape(", ".join(module.submodules)),
            escape(module.reason + note),
        )
    return table
