"""What a run shows of itself while it goes on: its numbers, lines in the log, notices, and what
trackers are sent.
"""

from __future__ import annotations

import html
import logging
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from torch import nn

from egeria import events
from egeria.journal import Recorder
from egeria.layers.atoms import can_be_called
from egeria.report.build import write_files
from egeria.report.live import LiveHistory, RunSummary
from egeria.report.trackers import Tracker, scalars
from egeria.report.wording import (
    count,
    duration,
    percent,
    plural,
    printable,
)

logger = logging.getLogger("egeria")
LOGGED = (
    events.IntervalMeasured,
    events.PlasticityRead,
    events.ModuleFrozen,
    events.Thawed,
)
"""Events whose steps are logged to trackers."""


class Showing:
    """Follows the events of a run for its user.

    Args:
        recorder: of the run.
        trackers: what the run is logged to.
        speaks: whether this process writes the lines of the log: of several only the first does.
    """

    def __init__(self, recorder: Recorder, trackers: Sequence[Tracker], *, speaks: bool) -> None:
        self._recorder, self._trackers, self._speaks = recorder, list(trackers), speaks
        self._live = LiveHistory(recorder.directory)
        self._num_modules = 0
        self._has_stepped = self._has_news = False
        self._logged_step = -1
        recorder.listen(self._take_in)

    def summary(self) -> RunSummary:
        """Return where the run stands."""
        return self._live.summary(self._recorder.step)

    def end_step(self) -> None:
        """Log to the trackers what the step brought, and at the first step of a run in a used
        directory say so.
        """
        if not self._has_stepped:
            self._has_stepped = True
            self._note_used_directory()
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
        self._live.take_in(event)
        self._has_news = self._has_news or isinstance(event, LOGGED)
        if isinstance(event, (events.RunStarted, events.ModulesOrdered)):
            self._num_modules = len(event.modules)
        elif self._speaks:
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
        if isinstance(event, events.ModuleFrozen):
            text = "step %d: froze %s (%d of %d layer modules, %.0f %% of the trainable parameters)"
            logger.info(
                text,
                event.step,
                event.name,
                event.frozen,
                self._num_modules,
                100 * event.parameter_share,
            )
        elif isinstance(event, events.Thawed):
            modules = plural(event.frozen_before, "layer module")
            logger.info(
                "step %d: thawed all frozen layers (%s): %s", event.step, modules, event.reason
            )

    def _note_used_directory(self) -> None:
        if self._live.follows_another_run:
            self._recorder.warn(
                "a used directory",
                f"egeria: {self._recorder.directory} already holds the journal of another run. "
                "This run is written "
                "behind it, and the report shows this one alone. Give each run a `directory` of "
                "its own; to continue "
                f"the other, call run.load_state_dict before the first step.",
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


def in_a_line(summary: RunSummary) -> str:
    """Return where a run stands: stage, frozen depth and time saved."""
    total = "" if summary.total_steps is None else f" of {count(summary.total_steps)}"
    step, saved = f"step {count(summary.step)}{total}", _saved(summary)
    frozen = f"{summary.frozen} of {plural(summary.num_modules, 'layer module')} frozen"
    if summary.closed:
        return f"closed at {step}, {frozen} at the end, {saved}"
    return f"{step}, {summary.stage}, {frozen}, {saved}"


def as_html(summary: RunSummary) -> str:
    """Return where a run stands, as a table for notebooks."""
    total = "" if summary.total_steps is None else f" of {count(summary.total_steps)}"
    frozen = ", ".join(summary.modules[: summary.frozen]) or "nothing"
    rows = (
        ("state", "closed" if summary.closed else summary.stage),
        ("step", f"{count(summary.step)}{total}"),
        (
            "frozen at the end" if summary.closed else "frozen",
            f"{summary.frozen} of {summary.num_modules}: {frozen}",
        ),
        ("trainable parameters frozen", percent(summary.parameter_share)),
        ("compute skipped", percent(summary.skipped_share)),
        ("time saved", duration(summary.time_saved_s)),
        ("overhead", f"{duration(summary.overhead_s)} ({percent(summary.overhead_share)})"),
    )
    cells = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(printable(text))}</td></tr>"
        for name, text in rows
    )
    return f"<table><caption>egeria</caption>{''.join(cells)}</table>"


def _saved(summary: RunSummary) -> str:
    if summary.time_saved_s is None:
        return "time saved not known"
    return f"{printable(duration(summary.time_saved_s))} saved"


def outermost(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return submodules by the names of what they have in common: `encoder` for `encoder.0` and
    `encoder.1`.
    """
    by_child: dict[str, list[list[str]]] = {}
    for name in names:
        path = name.split(".")
        by_child.setdefault(path[0], []).append(path)
    found: list[str] = []
    for paths in by_child.values():
        alike = takewhile(lambda entries: len(set(entries)) == 1, zip(*paths, strict=False))
        common = [entries[0] for entries in alike]
        is_called = can_be_called(
            model.get_submodule(".".join(common))
        )  # rather than a list of modules
        found += map(".".join, [common] if is_called else paths)
    return found
