"""What `torch.compile` has to do with freezing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from egeria.events.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompiled(Event):
    """The model was compiled since the step before."""

    kind: ClassVar[str] = "recompiled"
    wall_s: float
    by_freezing: bool
    """Whether layers had been frozen or thawed, so that the seconds count as egeria's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezeWaits(Event):
    """A layer module was decided to freeze, and trains on until a freeze repays the compiling."""

    kind: ClassVar[str] = "freeze_waits"
    module: int
    name: str
    reason: str
