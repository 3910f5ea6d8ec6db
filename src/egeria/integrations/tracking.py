"""Sending the numbers of a run to the experiment trackers that a framework has."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from egeria.errors import brief
from egeria.events import Event, ModuleFrozen, PlasticityRead, Thawed
from egeria.report.trackers import scalars
from egeria.session import EgeriaWarning

LOGGING_SHARE = 0.002
"""Share of the time that may go into logging readings; freezes and thaws are logged in any case."""


class ScalarLog:
    """Logs the scalars of a run at each freeze and thaw, at readings in between as time allows, and at the end.

    Args:
        run: made by `egeria.attach`.
        send: is given the scalars by name, and the optimizer steps done. What it raises ends the logging, not the
            training.
    """

    def __init__(self, run: Any, send: Callable[[dict[str, float], int], object]) -> None:
        self._run = run
        self._send: Callable[[dict[str, float], int], object] | None = send
        self._is_due = self._is_urgent = False
        self._not_before_s = 0.0
        run.on_event(self._note)

    def after_step(self) -> None:
        """Log what has happened in the step, if anything has."""
        if self._is_urgent or (self._is_due and time.perf_counter() >= self._not_before_s):
            self.log()

    def log(self) -> None:
        """Log the scalars as they are now."""
        self._is_due = self._is_urgent = False
        if self._send is None:
            return
        begin_s = time.perf_counter()
        try:
            summary = self._run.summary()
            self._send(scalars(summary), summary.steps_done)
        except Exception as error:  # a tracker that is not reached is no reason to stop training
            self._send = None
            text = f"egeria logs no more scalars, since a tracker failed ({brief(error)}). The training goes on."
            warnings.warn(text, EgeriaWarning, stacklevel=2)
        end_s = time.perf_counter()
        self._not_before_s = end_s + (end_s - begin_s) / LOGGING_SHARE

    def _note(self, event: Event) -> None:
        self._is_urgent |= isinstance(event, (ModuleFrozen, Thawed))
        self._is_due |= isinstance(event, PlasticityRead)
