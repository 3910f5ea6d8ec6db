"""The time that a command may take: what may still begin in it, and when everything has to end."""

import math
import time
from dataclasses import dataclass, field

END_S = 6.0
"""Kept for ending: a controller is closed, a process leaves its accelerator, what is left is told."""
LAST_S = 2.0
"""What still goes on so long before the end took longer than anybody could foresee, and is broken off."""


def now_s() -> float:
    """Return the wall clock, which all processes of a command share, in seconds since 1970."""
    return time.time()


@dataclass(frozen=True)
class Limit:
    """When a command has to be over."""

    ends_at_s: float | None = None
    """By `now_s`; None where it may take as long as it likes."""

    @classmethod
    def after(cls, minutes: float | None, began_s: float) -> "Limit":
        """Return the limit of a command that began then."""
        return cls(None if minutes is None else began_s + 60 * minutes)

    @property
    def is_set(self) -> bool:
        """Whether there is a limit, so that runs are made in pieces."""
        return self.ends_at_s is not None

    def left_s(self) -> float:
        """Return the seconds that are left; infinity without a limit."""
        return math.inf if self.ends_at_s is None else self.ends_at_s - now_s()

    def allows(self, needed_s: float) -> bool:
        """Tell whether there is time for something that will probably take so long, and for ending after it."""
        return self.left_s() >= needed_s + END_S


UNLIMITED = Limit()


@dataclass
class Experience:
    """How long runs took from the start of their process to the end of its first epoch, as seen in this command."""

    longest_s: dict[str, float] = field(default_factory=dict)
    """By workload."""
    num_epochs: int = 0
    """Epochs that ended."""

    def note(self, workload: str, taken_s: float) -> None:
        """Take in a first epoch."""
        self.longest_s[workload] = max(taken_s, self.longest_s.get(workload, 0.0))

    def needed_s(self, workload: str) -> float:
        """Return what a run needs to get anywhere: as long as its like, else as any other; 0 before there was one."""
        return self.longest_s.get(workload, max(self.longest_s.values(), default=0.0))
