"""Events into the journal, and one warning for each thing that the library declines to do."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

from egeria.events import Declined, Event, FaultCaught
from egeria.journal.writer import JournalWriter


class EgeriaWarning(UserWarning):
    """The library stepped back from something; training continues."""


class Recorder:
    """Writes the journal and warns the user, each reason once.

    Args:
        directory: where the journal lives; None keeps it in memory.
        echoes: whether another process of the job says the same, so that only failures of this one are told here.
    """

    def __init__(self, directory: Path | None, *, echoes: bool = False) -> None:
        self.step = 0
        self._echoes = echoes
        self._warned: set[str] = set()
        self._faults: dict[str, int] = {}
        self.journal = JournalWriter(directory, on_failure=lambda message: self.warn("journal", message))

    def write(self, event: Event) -> None:
        """Append an event to the journal."""
        self.journal.write(event)

    def warn(self, what: str, message: str) -> None:
        """Warn unless there was a warning about `what` before."""
        if what not in self._warned:
            self._warned.add(what)
            try:
                warnings.warn(message, EgeriaWarning, stacklevel=2)
            except EgeriaWarning:  # warnings are errors here; ours must still not stop the training
                logging.getLogger("egeria").warning(message)

    def decline(self, what: str, reason: str, *, by_this_process: bool = False) -> None:
        """Journal that the library will not do something, and say so, the first time.

        Args:
            what: it will not do.
            reason: why.
            by_this_process: whether no other process of the job says the same.
        """
        if what not in self._warned:
            self.write(Declined(step=self.step, what=what, reason=reason))
        if by_this_process or not self._echoes:
            self.warn(what, f"egeria: {what}: {reason.rstrip('.')}. Training continues without it.")

    def fault(self, where: str, error: Exception) -> int:
        """Journal a failure of ours, warn the first time, and return how many there were in this place."""
        count = self._faults[where] = self._faults.get(where, 0) + 1
        text = f"{type(error).__name__}: {error}"
        self.write(FaultCaught(step=self.step, where=where, error=text, count=count))
        self.warn(f"fault in {where}", f"egeria: {where} failed ({text}). Training continues; see the journal.")
        return count
