"""What a run shows while it goes on: numbers, lines in the log, notices, and what trackers get."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from egeria import events
from egeria.errors import JournalError
from egeria.journal import read_journal
from egeria.report.summary import UNKNOWN_START, Summary
from egeria.report.text import duration, plural, printable, progress
from egeria.report.trackers import Tracker, scalars
from egeria.session.training import Training

logger = logging.getLogger("egeria")
LOGGED = (events.IntervalMeasured, events.PlasticityRead, events.ModuleFrozen, events.Thawed)
"""Events whose steps are logged to trackers."""


class Showing:
    """Follows the events of a run for its user; of several processes only the first `speaks`."""

    def __init__(self, training: Training, trackers: list[Tracker], *, speaks: bool) -> None:
        self._recorder, self._trackers, self._speaks = training.recorder, trackers, speaks
        self._started = replace(  # until the journal has one
            UNKNOWN_START, config=training.config.to_dict(), total_steps=training.total_steps
        )
        self._own = list[events.Event]()
        # What was in the journal before; it counts once a state is loaded.
        self._earlier: tuple[events.Event, ...] = ()
        if self._recorder.directory is not None:
            with suppress(JournalError):  # there is none, or of a newer version
                self._earlier = read_journal(self._recorder.directory).events
        self._is_resumed = self._has_news = False
        self._logged_step = -1
        self._recorder.listen(self._take_in)

    def summary(self) -> Summary:
        """Return where the run stands."""
        found = [*(self._earlier if self._is_resumed else ()), *self._own]
        directory, step = self._recorder.directory, self._recorder.step
        return Summary.from_events(found, directory, step=step, started=self._started)

    def end_step(self) -> None:
        """Log to the trackers what the step brought, and warn of a used directory."""
        if self._has_news:
            self.log()
        if not self._is_resumed and any(event.step for event in self._earlier):
            self._recorder.warn(
                "a used directory",
                f"egeria: the report shows this run alone: {self._recorder.directory} already "
                "holds the journal of another run. Give each a `directory` of its own; to continue "
                "the other, call run.load_state_dict before the first step.",
            )

    def _take_in(self, event: events.Event) -> None:
        if not isinstance(event, events.MetricLogged):  # there may be one for each step
            self._own.append(event)
        self._is_resumed |= isinstance(event, events.Resumed)
        self._has_news |= isinstance(event, LOGGED)
        if not self._speaks:
            return
        if isinstance(event, events.PlanMade):
            skipped = event.skipped_share
            skips = "" if skipped is None else f", skips {skipped:.0%} of the compute"
            plan = f"the plan is {event.plan!r}{skips}" if event.plan else "nothing is frozen"
            logger.info("%s: %s", plan, event.reason)
        elif isinstance(event, events.ModuleFrozen):
            depth = f"{event.frozen} of {len(self.summary().modules)} layer modules"
            share = f"{100 * event.parameter_share:.0f} % of the trainable parameters"
            logger.info("step %d: froze %s (%s, %s)", event.step, event.name, depth, share)
        elif isinstance(event, events.Thawed):
            thawed = f"thawed all frozen layers ({plural(event.frozen_before, 'layer module')})"
            logger.info("step %d: %s: %s", event.step, thawed, event.reason)

    def log(self) -> None:
        """Log the numbers of this step to the trackers, once."""
        if (step := self._recorder.step) == self._logged_step:
            return
        self._logged_step, self._has_news = step, False
        for tracker in list(self._trackers):
            try:
                tracker.log(scalars(self.summary()), step)
            except Exception as error:  # it gets nothing more
                self._trackers.remove(tracker)
                failed = f"{tracker.name} could not be logged to ({type(error).__name__}: {error})"
                message = f"egeria: {failed}. Nothing more is sent to it; training continues."
                self._recorder.warn(f"tracker {id(tracker)}", message)


def in_a_line(summary: Summary) -> str:
    """Return where a run stands: step, frozen depth and time saved."""
    step, saved_s = progress(summary).removesuffix(" steps"), summary.time_saved_s
    frozen = f"{summary.frozen} of {plural(len(summary.modules), 'layer module')} frozen"
    if not summary.modules:
        frozen = "no layer modules" if summary.step else "no layer modules yet"
    saved = "time saved not known" if saved_s is None else f"{printable(duration(saved_s))} saved"
    if summary.closed:
        return f"closed at step {step}, {frozen} at the end, {saved}"
    return f"step {step}, {frozen}, {saved}"
