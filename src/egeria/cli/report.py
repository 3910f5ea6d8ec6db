"""`egeria report DIR`: what a run did."""

from __future__ import annotations

import argparse

from rich.console import Console

import egeria


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Print the summary of a run and write its page."""
    console.print(egeria.report(arguments.directory))
    return 0
