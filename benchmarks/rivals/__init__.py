"""Rivals of egeria: other people's rules, controls, and what is done by hand, each in a plain loop without egeria.

A rival may use the library's cut into layer modules, but decides, measures and freezes by itself.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.proving import RefusedError
from benchmarks.proving.journal import JournalWriter
from benchmarks.rivals.base import Rival, read_options
from benchmarks.rivals.by_hand import Half, HeadOnly, Short
from benchmarks.rivals.freezeout import FreezeOut
from benchmarks.rivals.gradients import AutoFreeze
from benchmarks.workloads.workload import Training

PLAIN = "none"
RIVALS: dict[str, type[Rival]] = {
    PLAIN: Rival,
    "head-only": HeadOnly,
    "hft": Half,
    "short": Short,
    "freezeout": FreezeOut,
    "autofreeze": AutoFreeze,
}
Settings = Mapping[str, Mapping[str, Any]]


def check_rival(name: str, settings: Settings) -> None:
    """Check the settings of a rival.

    Raises:
        RefusedError: it has no such settings, or lacks one.
    """
    values = read_options(name, RIVALS[name].options, settings)
    if name == "short" and values["share"] is None:
        raise RefusedError("'short' needs the share of the steps that are left, as in 'short:share=0.75'.")


def shorten(training: Training, name: str, settings: Settings) -> Training:
    """Return the training with the steps that a policy makes: 'short' fewer, all others all."""
    rival = RIVALS.get(name, Rival)
    return rival.shorten(training, read_options(name, rival.options, settings)) if name in RIVALS else training


def make_rival(training: Training, name: str, settings: Settings, journal: JournalWriter) -> Rival:
    """Return a rival, before the training begins; what it freezes goes into the journal."""
    rival = RIVALS[name]
    return rival(training, read_options(name, rival.options, settings), journal)
