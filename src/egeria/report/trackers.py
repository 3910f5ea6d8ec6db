"""What a run tells while it goes on, in the log and to trackers; none of these is imported."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from egeria import events
from egeria.errors import ConfigError, JournalError, brief, printable
from egeria.journal import Recorder, read_journal
from egeria.report.summary import Summary
from egeria.report.text import plural

logger = logging.getLogger("egeria")
# Events whose steps are logged to trackers.
LOGGED = (events.IntervalMeasured, events.PlasticityRead, events.ModuleFrozen, events.Thawed)
Log: TypeAlias = Callable[[Mapping[str, float], int], object]


class Tracker(NamedTuple):
    """One place where a run is logged to."""

    name: str
    log: Log  # takes values, and the optimizer step


def scalars(summary: Summary) -> dict[str, float]:
    """Return the values that trackers are sent; what is not known yet is left out."""
    reading = summary.last(events.PlasticityRead)
    known = {
        "egeria/frozen": summary.frozen,
        "egeria/params_frozen": summary.parameter_share,
        "egeria/compute_skipped": summary.skipped_share,
        "egeria/time_saved_s": summary.time_saved_s,
        "egeria/plasticity": reading.value if reading else None,
        "egeria/overhead": summary.wall.overhead_share,
    }
    return {name: float(value) for name, value in known.items() if value is not None}


def find_trackers(log_to: Any) -> list[Tracker]:
    """Return what logs to each of the objects given to `attach`, recognised by its methods."""
    given = [] if log_to is None else log_to if isinstance(log_to, list) else [log_to]
    return [entry if isinstance(entry, Tracker) else _find(entry) for entry in given]


def _find(entry: Any) -> Tracker:
    is_class = isinstance(entry, type)
    for name, methods, make in _KINDS:
        if not is_class and all(callable(getattr(entry, method, None)) for method in methods):
            own_name = getattr(entry, "__qualname__", type(entry).__name__)
            return Tracker(name=name or own_name, log=make(entry))
    found = f"the class {entry.__name__}" if is_class else type(entry).__name__
    raise ConfigError(
        "log_to is TensorBoard's SummaryWriter, a W&B or Trackio run, mlflow, a callable "
        f"(values, step), or a list of these; found {found}. Give what you log with yourself."
    )


def _tensorboard(writer: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def _mlflow(module: Any) -> Log:
    run: dict[str, str] = {}

    def log(values: Mapping[str, float], step: int) -> None:
        module.log_metrics(values, step=step, **run)
        if not run:  # it stays in this run, also when another is active later, or none
            run["run_id"] = module.active_run().info.run_id

    return log


def _wandb(run: Any, values: Mapping[str, float], step: int) -> None:
    # With `step=` W&B would drop what the user logs at a lower one.
    run.define_metric("egeria/*", step_metric="egeria/step")
    run.log({**values, "egeria/step": step})


# Name and log function of an object that has these methods; the first match counts.
_KINDS: tuple[tuple[str, tuple[str, ...], Callable[[Any], Log]], ...] = (
    ("TensorBoard", ("add_scalar",), lambda writer: partial(_tensorboard, writer)),
    ("MLflow", ("log_metrics", "active_run"), _mlflow),
    ("Weights & Biases", ("log", "define_metric"), lambda run: partial(_wandb, run)),
    ("Trackio", ("log", "finish"), lambda run: lambda values, step: run.log(values, step=step)),
    ("", ("__call__",), lambda function: function),
)


class Showing:
    """Tells the user of a run's events, in the log and trackers; only the first rank `speaks`."""

    def __init__(
        self, recorder: Recorder, started: events.RunStarted, trackers: list[Tracker], speaks: bool
    ) -> None:
        self._recorder, self._trackers, self._speaks = recorder, trackers, speaks
        self._started = started  # until the journal has this event
        self._events = list[events.Event]()
        self._is_resumed = self._has_news = False
        self._logged_step, self._num_modules = -1, 0
        self._recorder.listen(self._take_in)

    def summary(self) -> Summary:
        """Return where the run stands."""
        directory, step = self._recorder.directory, self._recorder.step
        return Summary.from_events(self._events, directory, step=step, started=self._started)

    def end_step(self) -> None:
        """Log to the trackers what is new, and warn if the directory has another run's journal."""
        if self._has_news:
            self.log()
        if self._recorder.is_shared or (self._recorder.is_used and not self._is_resumed):
            other = "another run, still open" if self._recorder.is_shared else "another run"
            self._recorder.warn(
                "a used directory",
                f"egeria: the report shows this run alone: {self._recorder.directory} already "
                f"holds the journal of {other}. Give each a `directory` of its own; to continue "
                "the other, call run.load_state_dict before the first step.",
            )

    def _read_earlier(self) -> None:
        """Have what was in the journal before count too."""
        with suppress(JournalError):  # nothing is written, or by the first rank alone
            found = read_journal(self._recorder.directory)  # type: ignore[arg-type]
            if found.events[-1:] == tuple(self._events[-1:]):
                self._events = [e for e in found if not isinstance(e, events.MetricLogged)]

    def _take_in(self, event: events.Event) -> None:
        if not isinstance(event, events.MetricLogged):  # there may be one for each step
            self._events.append(event)
        if isinstance(event, events.Resumed):
            self._is_resumed = True
            self._read_earlier()
        self._has_news |= isinstance(event, LOGGED)
        if not self._speaks:
            return
        if isinstance(event, events.RunStarted):
            self._num_modules = len(event.modules)
        elif isinstance(event, events.PlanMade):
            skipped = event.skipped_share
            skips = "" if skipped is None else f", skips {skipped:.0%} of the compute"
            plan = f"the plan is {event.plan!r}{skips}" if event.plan else "nothing is frozen"
            logger.info("%s: %s", plan, printable(event.reason))
        elif isinstance(event, events.ModuleFrozen):
            depth = f"{event.frozen} of {self._num_modules} layer modules"
            share = f"{100 * event.parameter_share:.0f} % of the trainable parameters"
            name = printable(event.name)
            logger.info("step %d: froze %s (%s, %s)", event.step, name, depth, share)
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
            except Exception as error:  # it is not called again
                self._trackers.remove(tracker)
                failed = f"{tracker.name} could not be logged to ({brief(error)})"
                message = f"egeria: {failed}. Nothing more is sent to it; training continues."
                self._recorder.warn(f"tracker {id(tracker)}", message)
