"""Reading kept runs back: what a run came to, from its journal and its `run.json` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.proving.comparing.skipping import Skipped, Span, measure_skipped, spans
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.running import runfile
from benchmarks.proving.running.course import CPU, EPOCH, JUDGED, WALL
from benchmarks.proving.running.runfile import RunFile
from egeria.errors import JournalError
from egeria.events import Declined, FaultCaught, IntervalMeasured, MetricLogged, RunStarted
from egeria.report.history import History, read_history


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was found on held-out data, and the training it took to get there."""

    epoch: float
    """Whole at the end of one."""
    step: int
    value: float
    """Of the workload's metric."""
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run came to."""

    run: RunFile
    directory: Path
    evaluations: tuple[Evaluation, ...]
    skipped: Skipped
    spans: tuple[Span, ...]
    """How deep it was frozen when, by epoch."""
    num_modules: int
    remarks: tuple[str, ...]
    """What egeria declined, and what failed."""
    interval_steps: int = 0
    """Steps between evaluations of plasticity as the run began; 0 where nothing is judged."""
    judged: float | None = None
    """The workload's metric on the larger set that is asked at the end; None where there is none."""

    predicted: tuple[tuple[float, tuple[bool, ...]], ...] = ()
    """Of 'smartfrz', at the end of each interval: the epochs done, and for each layer module whether it is frozen or,
    by the predictor, might be. That is what the original freezes, which goes by no order."""

    @property
    def final(self) -> Evaluation:
        """The last evaluation."""
        return self.evaluations[-1]

    @property
    def quality(self) -> float:
        """The workload's metric at the end: the judge's, where there is one."""
        return self.final.value if self.judged is None else self.judged


UNKNOWN = Skipped(backward=None, forward=None)


def read_results(results: Path, workloads: Sequence[str] = (), tier: str | None = None) -> list[Outcome]:
    """Return the finished runs below a directory, in a steady order.

    Args:
        results: a directory of `run`, or what `archive.opened` makes of the journals of a record.
        workloads: names; none stands for all.
        tier: 'cpu' for example; None for all.

    Raises:
        RefusedError: there is none, or a journal does not belong to its run.
    """
    outcomes = []
    for path in sorted(results.rglob(runfile.FILE_NAME)):
        run = runfile.load(path.parent)
        if run is None or run.status != runfile.FINISHED or (workloads and run.workload.name not in workloads):
            continue
        if tier is None or run.tier == tier:
            outcomes.append(read_outcome(path.parent, run))
    absent = set(workloads) - {outcome.run.workload.name for outcome in outcomes}
    if not outcomes or absent:
        raise RefusedError(
            f"{results} has no finished run of {', '.join(sorted(absent)) or 'any workload'}. "
            f"Make some with `python -m benchmarks run`, or give another --results."
        )
    return outcomes


def read_outcome(directory: Path, run: RunFile) -> Outcome:
    """Return what a finished run came to.

    Raises:
        RefusedError: its journal cannot be read, or does not reach to its end.
    """
    history = _history(directory)
    evaluations = tuple(
        Evaluation(
            epoch=event.values[EPOCH],
            step=event.step,
            value=event.values[run.workload.metric],
            wall_s=event.values[WALL],
            cpu_s=event.values[CPU],
        )
        for event in history.of(MetricLogged)
        if {EPOCH, WALL, CPU, run.workload.metric} <= event.values.keys()
    )
    num_evaluations = run.recipe["num_epochs"] * run.recipe.get("evaluations_per_epoch", 1)
    if len(evaluations) != num_evaluations:
        raise RefusedError(
            f"The journal of {run.name} must have {num_evaluations} evaluations; {directory} has "
            f"{len(evaluations)}. Remove that directory and make the run again."
        )
    found = spans(history, run.recipe["steps_per_epoch"])
    return Outcome(
        run=run,
        directory=directory,
        evaluations=evaluations,
        # What rests, or is left out, without egeria is in no journal.
        skipped=measure_skipped(history) if run.policy.is_plain or run.policy.is_watched else UNKNOWN,
        spans=found,
        num_modules=max([len(getattr(event, "modules", ())) for event in history.events], default=0),
        remarks=_remarks(history),
        interval_steps=max([event.interval_steps for event in history.of(RunStarted)], default=0),
        judged=_judged(history, run.workload.metric),
        predicted=tuple(_predicted(history, run.recipe["steps_per_epoch"])),
    )


def _predicted(history: History, steps_per_epoch: int) -> Iterator[tuple[float, tuple[bool, ...]]]:
    limit = max(
        [event.config.get("policy", {}).get("freeze_score", 0.0) for event in history.of(RunStarted)], default=0.0
    )
    for event in history.of(IntervalMeasured):
        if event.freeze_scores is not None:
            rests = (
                place < event.frozen or (score is not None and score > limit)
                for place, score in enumerate(event.freeze_scores)
            )
            yield event.step / steps_per_epoch, tuple(rests)


def _judged(history: History, metric: str) -> float | None:
    """Return what the judge found; None where nobody was asked, as in runs from before there were judges."""
    found = [event.values.get(f"{JUDGED}{metric}") for event in history.of(MetricLogged) if EPOCH in event.values]
    return found[-1] if found else None


def _history(directory: Path) -> History:
    try:
        return read_history(directory)
    except (OSError, JournalError) as error:
        raise RefusedError(f"The journal in {directory} cannot be read: {error} Make the run again.") from error


def _remarks(history: History) -> tuple[str, ...]:
    declined = [f"declined {event.what}: {event.reason}" for event in history.of(Declined)]
    faults = [f"fault in {event.where}: {event.error}" for event in history.of(FaultCaught)]
    return tuple(dict.fromkeys((*declined, *faults)))
