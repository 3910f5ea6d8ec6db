"""What a run shows of itself while it goes on: its numbers, lines in the log, notices, and what
trackers are sent.
"""

from __future__ import annotations

import contextlib
import html
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from egeria import events
from egeria.errors import JournalError
from egeria.journal import Recorder, read_journal
from egeria.report.build import write_files
from egeria.report.summary import Summary
from egeria.report.text import headline, progress
from egeria.report.trackers import Tracker, scalars
from egeria.report.wording import duration, plural, printable

logger = logging.getLogger("egeria")
LOGGED = (events.IntervalMeasured, events.PlasticityRead, events.ModuleFrozen, events.Thawed)
"""Events whose steps are logged to trackers."""


class Showing:
    """Follows the events of a run for its user.

    Args:
        recorder: of the run.
        trackers: what the run is logged to.
        started: what is known of the run before its first step.
        speaks: whether this process writes the lines of the log: of several only the first does.
    """

    def __init__(
        self,
        recorder: Recorder,
        trackers: Sequence[Tracker],
        started: events.RunStarted,
        *,
        speaks: bool,
    ) -> None:
        self._recorder, self._trackers, self._speaks = recorder, list(trackers), speaks
        self._started = started
        self._earlier: tuple[events.Event, ...] = ()
        """What was in the journal before; it counts once a state is loaded."""
        if recorder.directory is not None:
            with contextlib.suppress(JournalError):  # there is none, or of a newer version
                self._earlier = read_journal(recorder.directory).events
        self._own: list[events.Event] = []
        self._is_resumed = self._has_stepped = self._has_news = False
        self._logged_step = -1
        recorder.listen(self._take_in)

    def summary(self) -> Summary:
        """Return where the run stands."""
        found = [*(self._earlier if self._is_resumed else ()), *self._own]
        step, directory = self._recorder.step, self._recorder.directory
        return Summary(found, directory, step=step, started=self._started)

    def end_step(self) -> None:
        """Log to the trackers what the step brought; at the first one warn of a used directory."""
        if not self._has_stepped:
            self._has_stepped = True
            if not self._is_resumed and any(event.step for event in self._earlier):
                self._recorder.warn(
                    "a used directory",
                    f"egeria: {self._recorder.directory} already holds the journal of another run. "
                    "This run is written behind it, and the report shows this one alone. Give each "
                    "run a `directory` of its own; to continue the other, call "
                    "run.load_state_dict before the first step.",
                )
        if self._has_news:
            self._log()

    def close(self) -> None:
        """Log the last numbers, and give the report to the trackers that take files."""
        if self._logged_step < self._recorder.step:
            self._log()
        keepers = [tracker for tracker in self._trackers if tracker.keep is not None]
        if not keepers or self._recorder.directory is None:
            return
        try:
            with tempfile.TemporaryDirectory(prefix="egeria-report-") as folder:
                write_files(self._recorder.directory, Path(folder))
                for tracker in keepers:
                    self._keep(tracker, Path(folder))
        except Exception as error:
            message = (
                "egeria: the report could not be made for the trackers "
                f"({type(error).__name__}: {error})."
            )
            self._recorder.warn("the report for trackers", message)

    def _take_in(self, event: events.Event) -> None:
        if not isinstance(event, events.MetricLogged):  # there may be one for each step
            self._own.append(event)
        self._is_resumed = self._is_resumed or isinstance(event, events.Resumed)
        self._has_news = self._has_news or isinstance(event, LOGGED)
        if self._speaks:
            self._say(event)

    def _say(self, event: events.Event) -> None:
        """Write the line of the plan, a freeze or a thaw to the log."""
        if isinstance(event, events.PlanMade):
            skips = (
                ""
                if event.skipped_share is None
                else f", skips {event.skipped_share:.0%} of the compute"
            )
            plan = f"the plan is {event.plan!r}{skips}" if event.plan else "nothing is frozen"
            logger.info("%s: %s", plan, event.reason)
        elif isinstance(event, events.ModuleFrozen):
            depth = f"{event.frozen} of {self.summary().num_modules} layer modules"
            share = f"{100 * event.parameter_share:.0f} % of the trainable parameters"
            logger.info("step %d: froze %s (%s, %s)", event.step, event.name, depth, share)
        elif isinstance(event, events.Thawed):
            modules = plural(event.frozen_before, "layer module")
            logger.info(
                "step %d: thawed all frozen layers (%s): %s", event.step, modules, event.reason
            )

    def _log(self) -> None:
        self._has_news, self._logged_step = False, self._recorder.step
        if not self._trackers:
            return
        try:
            values = scalars(self.summary())
        except Exception as error:
            self._recorder.fault("summing up for the trackers", error)
            return
        for tracker in list(self._trackers):
            try:
                tracker.log(values, self._recorder.step)
            except Exception as error:
                self._drop(tracker, error)

    def _keep(self, tracker: Tracker, folder: Path) -> None:
        assert tracker.keep is not None
        try:
            tracker.keep(folder)
        except Exception as error:
            self._drop(tracker, error)

    def _drop(self, tracker: Tracker, error: Exception) -> None:
        self._trackers.remove(tracker)
        self._recorder.warn(
            f"tracker {id(tracker)}",
            f"egeria: {tracker.name} could not be logged to ({type(error).__name__}: {error}). "
            "Nothing more is sent "
            f"to it; training continues.",
        )


def in_a_line(summary: Summary) -> str:
    """Return where a run stands: stage, frozen depth and time saved."""
    step = progress(summary).removesuffix(" steps")
    frozen = f"{summary.frozen} of {plural(summary.num_modules, 'layer module')} frozen"
    if not summary.modules:
        frozen = "no layer modules" if summary.step else "no layer modules yet"
    known = summary.time_saved_s is not None
    saved = (
        f"{printable(duration(summary.time_saved_s))} saved" if known else "time saved not known"
    )
    if summary.closed:
        return f"closed at step {step}, {frozen} at the end, {saved}"
    return f"step {step}, {summary.stage}, {frozen}, {saved}"


def as_html(summary: Summary) -> str:
    """Return where a run stands, as a table for notebooks."""
    names = ", ".join(summary.modules[: summary.frozen]) or "none"
    cells = (
        f"<tr><th>{html.escape(printable(name))}</th><td>{html.escape(printable(value))}</td></tr>"
        for name, value in [*headline(summary), ("frozen modules", names)]
    )
    return f"<table><caption>egeria</caption>{''.join(cells)}</table>"
