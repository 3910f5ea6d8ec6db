"""The page: one HTML file that needs nothing but itself, from the template beside this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from egeria import events
from egeria.report import wording
from egeria.report.pictures import draw_pictures
from egeria.report.summary import Summary

MAX_EVENTS = 200


def render_page(summary: Summary) -> str:
    """Return the HTML of the report."""
    environment = Environment(
        loader=PackageLoader("egeria.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    for write in (
        wording.count,
        wording.duration,
        wording.mebibytes,
        wording.number,
        wording.percent,
        wording.plural,
    ):
        environment.filters[write.__name__] = write
    return environment.get_template("page.html.jinja").render(
        summary=summary,
        progress=wording.progress(summary),
        verdict=wording.verdict(summary),
        cautions=wording.cautions(summary),
        frozen_when=wording.frozen_when(summary),
        pictures=draw_pictures(summary),
        events=[
            (wording.count(event.step), *line(event))
            for event in summary.history.events
            if (line := _LINES.get(type(event))) is not None
        ],
        max_events=MAX_EVENTS,
        settings=_settings(summary),
    )


_LINES: dict[type[events.Event], Callable[[Any], tuple[str, str, str]]] = {
    events.ControllerChosen: lambda event: ("controller", event.controller, event.reason),
    events.ControllerRestarted: lambda event: (
        "controller",
        f"replaced, {event.count} so far",
        event.reason,
    ),
    events.CacheDecided: lambda event: ("frozen forward", event.mode, event.reason),
    events.IntervalChanged: lambda event: (
        "interval",
        f"{event.before} to {event.after} steps",
        event.reason,
    ),
    events.RungTaken: lambda event: ("reference", event.after, event.reason),
    events.ModuleFrozen: lambda event: ("frozen", f"{event.module} {event.name}", event.reason),
    events.FreezeWaits: lambda event: ("waits", f"{event.module} {event.name}", event.reason),
    events.Rewrapped: lambda event: (
        "reduced",
        wording.mebibytes(event.reduced_bytes),
        "of gradients between the processes from here on; laid out anew in "
        f"{wording.duration(event.wall_s)}",
    ),
    events.Thawed: lambda event: (
        "thawed",
        wording.plural(event.frozen_before, "module"),
        f"{event.reason}; window now {event.window}",
    ),
    events.PlanMade: lambda event: ("plan", event.plan or "freezes nothing", event.reason),
    events.StageChanged: lambda event: ("stage", event.stage, event.reason),
    events.Resumed: lambda event: (
        "resumed",
        f"{wording.plural(event.frozen, 'module')} frozen, {event.stage}",
        "",
    ),
    events.Declined: lambda event: ("declined", event.what, event.reason),
    events.FaultCaught: lambda event: ("fault", event.where, event.error),
}
"""Event, what and why; the page leaves out other kinds."""


def _settings(summary: Summary) -> list[tuple[str, Any]]:
    started = summary.started
    run = {
        "total_steps": started.total_steps,
        "interval_steps": f"{started.interval_steps} ({started.interval_reason})",
        "unfreezing rule": started.rule,
        "deepest freeze": wording.plural(summary.deepest_freeze, "module"),
        "readings": (
            f"{wording.count(summary.num_readings)}, {wording.count(summary.num_dropped)} dropped"
        ),
    }
    return [("run", run), *started.config.items(), ("environment", started.environment)]
