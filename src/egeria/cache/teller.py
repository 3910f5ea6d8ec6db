"""Where the cache tells what it does."""

from __future__ import annotations

from typing import Protocol

from egeria.events import Event


class Teller(Protocol):
    """Where the cache tells what it does: the recorder of a session."""

    step: int

    def write(self, event: Event) -> None:
        """Append an event to the journal."""
        ...

    def decline(self, what: str, reason: str) -> None:
        """Journal that the library will not do something, and warn once."""
        ...

    def fault(self, where: str, error: Exception) -> int:
        """Journal a failure of ours, and warn once."""
        ...
