"""A run that goes on: its course so far, as the journal will have it, and the numbers of that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from egeria import events
from egeria.errors import JournalError
from egeria.journal import Journal, read_journal
from egeria.report import freezing
from egeria.report.history import History, course_of
from egeria.report.summary import stage_of, wall_clock

COUNTING = (
    *(
        events.RunStarted,
        events.ModulesOrdered,
        events.ComputeProfiled,
        events.Resumed,
        events.RunClosed,
    ),
    *(events.IntervalMeasured, events.PlasticityRead, events.ReferenceRefreshed),
    *(
        events.StageChanged,
        events.ModuleFrozen,
        events.Thawed,
        events.Declined,
    ),
    events.PlanMade,
)
"""Events that a `RunSummary` is computed from; others are not kept in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Where a run stands; shares are between 0 and 1, and what is not known yet is None.

    The numbers are those that `egeria.report` would give for the journal so far.
    """

    step: int
    """Optimizer steps done."""
    total_steps: int | None
    """Optimizer steps of the whole run, as `attach` was given them."""
    stage: str
    """Either 'bootstrapping' or 'knowledge-guided'."""
    modules: tuple[str, ...]
    """Names of the layer modules, front to back; empty where the model could not be cut."""
    frozen: int
    """How many front layer modules are frozen; of a closed run, how many were."""
    parameter_share: float | None
    """Share of the trainable parameters that is frozen."""
    skipped_share: float | None
    """Share of the compute so far that was skipped, mean over the steps."""
    time_saved_s: float | None
    """Estimated seconds of wall clock saved so far, egeria's own work deducted; negative where it
    cost more."""
    overhead_s: float
    """Seconds that egeria itself took; while the run is open, to the end of its newest interval."""
    overhead_share: float | None
    """The overhead as a share of the training time."""
    plasticity: float | None
    """The newest reading."""
    closed: bool

    @property
    def num_modules(self) -> int:
        """How many layer modules the model has."""
        return len(self.modules)


class LiveHistory:
    """The course of a run so far, event by event; what came before it in the same journal counts
    once it is resumed.

    Args:
        directory: that of the run, where a journal may be already; None without one.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory or Path()
        self._earlier: tuple[events.Event, ...] = ()
        if directory is not None:
            try:
                self._earlier = read_journal(directory).events
            except JournalError:  # there is none, or none that this version can read
                self._earlier = ()
        self._counting: list[events.Event] = []
        self._newest: events.Event | None = None
        self.is_resumed = False
        """Whether a saved state was loaded."""

    @property
    def follows_another_run(self) -> bool:
        """Whether the journal was begun by another run, which this one did not resume."""
        return not self.is_resumed and any(event.step > 0 for event in self._earlier)

    def take_in(self, event: events.Event) -> None:
        """Add an event of this run."""
        self._newest = event
        self.is_resumed = self.is_resumed or isinstance(event, events.Resumed)
        if isinstance(event, COUNTING):
            self._counting.append(event)

    def course(self) -> History:
        """Return the course as the report reads it from the journal."""
        found = [*(self._earlier if self.is_resumed else ()), *self._counting]
        if self._newest is not None and not isinstance(self._newest, COUNTING):
            found.append(self._newest)  # for its step alone
        return course_of(
            Journal(directory=self._directory, events=tuple(found), times=(), num_damaged=0)
        )

    def summary(self, step: int) -> RunSummary:
        """Return the numbers at a step."""
        history = self.course()
        started, clock = history.last(events.RunStarted), wall_clock(history)
        depths = freezing.depth_points(history)
        reading = history.last(events.PlasticityRead)
        return RunSummary(
            step=max(step, history.last_step),
            total_steps=started.total_steps if started else None,
            stage=stage_of(history),
            modules=tuple(module.name for module in freezing.list_modules(history, depths)),
            frozen=depths[-1].frozen,
            parameter_share=depths[-1].parameter_share,
            skipped_share=freezing.mean_over_steps(depths, lambda point: point.skipped_share),
            time_saved_s=clock.saved_s,
            overhead_s=clock.overhead_s,
            overhead_share=clock.overhead_share,
            plasticity=reading.value if reading else None,
            closed=history.closed,
        )
