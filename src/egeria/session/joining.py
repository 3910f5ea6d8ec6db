"""Checking, before the first step, that the processes of a job train the same in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from egeria.config import Config
from egeria.errors import ConfigError
from egeria.layers.modules import LayerModule
from egeria.session.ranks import Ranks, Subject, fingerprint

DECIDING = ("policy", "modules", "bootstrapping", "plasticity", "reference", "freezing", "unfreezing")
"""Groups of settings that decisions depend on."""


def agree_on_the_run(
    ranks: Ranks,
    config: Config,
    modules: Sequence[LayerModule],
    total_steps: int | None,
    interval_steps: int,
    *,
    is_apart: bool,
) -> str | None:
    """Check that all processes attach alike; return why nothing can be frozen, None if it can.

    Raises:
        ConfigError: they were given other settings, or another number of steps.
    """
    settings = {name: config.to_dict()[name] for name in DECIDING}
    steps = -1.0 if total_steps is None else float(total_steps)
    cut = fingerprint(" ".join(module.name for module in modules))
    row = (steps, fingerprint(str(_plain(settings))), cut, float(interval_steps), float(is_apart), float(len(modules)))
    rows = ranks.gather(Subject.ATTACHING, row)
    for column, what in enumerate(("total_steps", "settings")):
        apart = [rank for rank, found in enumerate(rows) if found[column] != rows[0][column]]
        if apart:
            found = f", found {[int(row[0]) for row in rows]}" if what == "total_steps" else ""
            raise ConfigError(
                f"All processes of a job attach with the same {what}; rank {apart[0]} has others than rank 0{found}. "
                f"Give attach the same on every rank; with loaders of different lengths, the number of the first."
            )
    ranks.leader_is_apart = bool(rows[0][4])
    if any(found[5] == 0 for found in rows):
        return "the model of another process of the job cannot be frozen"
    if any(found[2:4] != rows[0][2:4] for found in rows):
        return "the processes of the job cut their models into other layer modules"
    return None


def _plain(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return settings without what is another object in each process."""
    return {
        name: {key: value for key, value in group.items() if not str(value).startswith("<")}
        for name, group in settings.items()
    }
