"""What a controller reports besides readings: into the journal, and to the user where it matters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

from egeria import events
from egeria.controller import FidelityRead, Refreshed, Report, Restarted, RungTaken, SteppedBack
from egeria.session.recorder import Recorder


@dataclass(frozen=True, slots=True)
class RefreshCost:
    """What the newest refresh took from the training process."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


def tell(recorder: Recorder, report: Report, cost: RefreshCost) -> None:
    """Write the event that a report stands for, with a warning where something fell short."""
    _tell(report, recorder, cost)


@singledispatch
def _tell(report: object, recorder: Recorder, cost: RefreshCost) -> None:
    raise TypeError(f"a controller reports what its protocol knows, found {type(report).__name__}")


@_tell.register
def _(report: Refreshed, recorder: Recorder, cost: RefreshCost) -> None:
    if report.error:
        recorder.fault("refreshing the reference", RuntimeError(report.error))
        return
    recorder.write(
        events.ReferenceRefreshed(
            step=recorder.step,
            evaluation=report.evaluation,
            builder=report.builder,
            wall_s=cost.wall_s,
            cpu_s=cost.cpu_s,
            controller_wall_s=report.wall_s,
            controller_cpu_s=report.cpu_s,
        )
    )


@_tell.register
def _(report: RungTaken, recorder: Recorder, cost: RefreshCost) -> None:
    recorder.write(events.RungTaken(step=recorder.step, before=report.before, after=report.after, reason=report.reason))
    if report.before:
        change = f"the reference model goes from {report.before} to {report.after}"
        recorder.warn(f"rung {report.after}", f"egeria: {change}: {report.reason}. Training goes on.")


@_tell.register
def _(report: FidelityRead, recorder: Recorder, cost: RefreshCost) -> None:
    recorder.write(
        events.FidelityChecked(
            step=recorder.step,
            tap=report.tap,
            rung=report.rung,
            error=report.error,
            plasticity=report.plasticity,
            outcome=report.outcome,
        )
    )


@_tell.register
def _(report: Restarted, recorder: Recorder, cost: RefreshCost) -> None:
    recorder.write(events.ControllerRestarted(step=recorder.step, count=report.count, reason=report.reason))
    message = f"egeria: the controller process was replaced: {report.reason}. Training goes on."
    recorder.warn("restarts of the controller", message)


@_tell.register
def _(report: SteppedBack, recorder: Recorder, cost: RefreshCost) -> None:
    recorder.decline(report.what, report.reason)
