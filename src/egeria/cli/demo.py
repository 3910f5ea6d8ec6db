"""`egeria demo`: the example `examples/digits.py` of the source checkout."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from rich.console import Console

import egeria
from egeria.errors import EgeriaError

SCRIPT = Path("examples", "digits.py")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Train plainly and with egeria; print the comparison and the paths of the reports."""
    # The example imports its network from beside itself, and so does the controller's process, which gets this path.
    sys.path.insert(0, str(_examples()))
    digits = importlib.import_module(SCRIPT.stem)
    epochs = arguments.epochs or digits.EPOCHS
    digits.compare(console, arguments.directory, seeds=arguments.seeds, epochs=epochs)
    return 0


def _examples() -> Path:
    """Return the folder of the examples: beside an editable installation, or in the working directory."""
    for root in (Path(egeria.__file__).resolve().parents[2], Path.cwd()):
        if (root / SCRIPT).is_file() and (root / "src" / "egeria").is_dir():
            return (root / SCRIPT).parent
    raise EgeriaError(
        f"The demo is {SCRIPT} of egeria's source checkout, found neither beside the installed package nor in "
        f"{Path.cwd()}. Clone the repository and run scripts/demo there."
    )
