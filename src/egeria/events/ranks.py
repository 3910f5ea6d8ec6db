"""What happens among the processes of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from egeria.events.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrapped(Event):
    """The gradients that the processes reduce are others from here on."""

    kind: ClassVar[str] = "rewrapped"
    wall_s: float
    """Seconds that it took to lay them out anew."""
    reduced_bytes: int
    """Of the parameters whose gradients are reduced now."""
