"""What all events share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What all events share."""

    kind: ClassVar[str] = ""
    step: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, the kind of event first."""
        return {"event": self.kind, **dataclasses.asdict(self)}
