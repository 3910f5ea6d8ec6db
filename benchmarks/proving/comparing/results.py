"""Reading kept runs back: what a run came to, from its journal and its `run.json` alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.proving import RefusedError
from benchmarks.proving.comparing.skipping import UNKNOWN, Skipped, Span, measure_skipped, spans
from benchmarks.proving.journal import Journal, read_journal
from benchmarks.proving.running import runfile
from benchmarks.proving.running.course import CPU, EPOCH, JUDGED, WALL
from benchmarks.proving.running.runfile import RunFile

SHORT = "short"
"""Policy that makes fewer steps."""


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
    judged: float | None = None
    """The workload's metric on the larger set that is asked at the end; None where there is none."""

    @property
    def final(self) -> Evaluation:
        """The last evaluation."""
        return self.evaluations[-1]

    @property
    def quality(self) -> float:
        """The workload's metric at the end: the judge's, where there is one."""
        return self.final.value if self.judged is None else self.judged


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
    journal = _journal(directory)
    evaluations = tuple(
        Evaluation(
            epoch=values[EPOCH],
            step=event["step"],
            value=float(values[run.workload.metric]),
            wall_s=values[WALL],
            cpu_s=values[CPU],
        )
        for event in journal.of("metric")
        if {EPOCH, WALL, CPU, run.workload.metric} <= (values := event["values"]).keys()
    )
    num_evaluations = run.recipe["num_epochs"] * run.recipe.get("evaluations_per_epoch", 1)
    if len(evaluations) != num_evaluations:
        raise RefusedError(
            f"The journal of {run.name} must have {num_evaluations} evaluations; {directory} has "
            f"{len(evaluations)}. Remove that directory and make the run again."
        )
    return Outcome(
        run=run,
        directory=directory,
        evaluations=evaluations,
        skipped=_skipped(run, journal),
        spans=spans(journal, run.recipe["steps_per_epoch"]),
        num_modules=len(journal.cut["modules"]),
        remarks=_remarks(journal),
        judged=_judged(journal, run.workload.metric),
    )


def _skipped(run: RunFile, journal: Journal) -> Skipped:
    """Return what a run left out; of steps that were not made, `short` has none of the work."""
    if run.policy.name == SHORT:
        return Skipped(
            backward=1 - journal.last_step / (run.recipe["num_epochs"] * run.recipe["steps_per_epoch"]), forward=0.0
        )
    # What is not trained without being a front of layer modules is in no journal.
    is_known = run.policy.is_plain or run.policy.is_watched or bool(journal.cut["modules"])
    return measure_skipped(journal) if is_known else UNKNOWN


def _judged(journal: Journal, metric: str) -> float | None:
    """Return what the judge found; None where nobody was asked, as in runs from before there were judges."""
    logged = [event["values"] for event in journal.of("metric") if EPOCH in event["values"]]
    found = logged[-1].get(f"{JUDGED}{metric}") if logged else None
    return None if found is None else float(found)


def _journal(directory: Path) -> Journal:
    try:
        return read_journal(directory)
    except OSError as error:
        raise RefusedError(f"The journal in {directory} cannot be read: {error} Make the run again.") from error


def _remarks(journal: Journal) -> tuple[str, ...]:
    declined = [f"declined {event['what']}: {event['reason']}" for event in journal.of("declined")]
    faults = [f"fault in {event['where']}: {event['error']}" for event in journal.of("fault")]
    return tuple(dict.fromkeys((*declined, *faults)))
