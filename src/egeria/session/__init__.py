"""Attaching to a training loop: the one place where decisions are applied."""

from egeria.journal import EgeriaWarning
from egeria.session.attach import Run, attach

__all__ = ["EgeriaWarning", "Run", "attach"]
