"""Looking seldom at a module that is far from freezing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FAR = 10.0
"""Times the limit from which a change to come is far from it."""
LONGEST = 0.08
"""Share of the training that a rest takes at most: a short one has few evaluations, and its windows are long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """A break between evaluations, for as long as a snapshot is kept, after readings that were all far from a decision.

    Args:
        num_far: such readings in a row.
        until: step from which the module is looked at again.
    """

    num_far: int = 0
    until: float = 0.0

    def observe(self, change: float | None, limit: float, patience: int) -> Rest:
        """Return it with one reading more that a law came from.

        Args:
            change: still to come, as far as it can be seen; None where nobody knows the way ahead.
            limit: that it must come under.
            patience: readings in a row that would make a decision.
        """
        is_far = change is None or change > FAR * limit
        return Rest(num_far=min(patience, self.num_far + 1) if is_far else 0, until=self.until)

    def begin(self, step: int, steps: float, total_steps: int | None) -> Rest:
        """Return the rest that begins now, of so many steps."""
        return Rest(until=step + min(steps, LONGEST * (total_steps or math.inf)))

    def ends_within(self, begin: int, end: int) -> bool:
        """Tell whether a rest ended after step `begin` and until step `end`."""
        return begin < self.until <= end

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Rest:
        """Rebuild it from `state_dict`."""
        return cls(**state)
