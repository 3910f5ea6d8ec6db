"""The command `egeria`: one verb a file."""

from egeria.cli.main import main

__all__ = ["main"]
