"""The page: one HTML file that needs nothing but itself, from the template beside this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from egeria import events
from egeria.report import text, wording
from egeria.report.pictures import draw_pictures
from egeria.report.summary import Summary, ratio

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
    for name in ("count", "duration", "mebibytes", "number", "percent", "plural"):
        environment.filters[name] = getattr(wording, name)
    uses = {event.generation: event for event in summary.of(events.CacheUsed)}  # the last of each
    return environment.get_template("page.html.jinja").render(
        summary=summary,
        progress=text.progress(summary),
        verdict=text.verdict(summary),
        cautions=text.cautions(summary),
        frozen_when=text.frozen_when(summary),
        pictures=draw_pictures(summary),
        events=[
            (wording.count(event.step), *line(event))
            for event in summary.events
            if (line := _LINES.get(type(event))) is not None
        ],
        max_events=MAX_EVENTS,
        cache=list(uses.values()),
        ratio=ratio,
        settings=[
            ("run", {"total_steps": summary.total_steps, "unfreezing rule": summary.started.rule}),
            *summary.started.config.items(),
            ("environment", summary.started.environment),
        ],
    )


_LINES: dict[type[events.Event], Callable[[Any], tuple[str, str, str]]] = {
    events.ControllerChosen: lambda event: ("controller", event.controller, event.reason),
    events.CacheDecided: lambda event: ("frozen forward", event.mode, event.reason),
    events.IntervalChanged: lambda event: (
        "interval",
        f"{event.before} to {event.after} steps",
        event.reason,
    ),
    events.RungTaken: lambda event: ("reference", event.after, event.reason),
    events.ModuleFrozen: lambda event: ("frozen", f"{event.module} {event.name}", event.reason),
    events.DepthRefused: lambda event: ("refused", f"depth {event.asked}", event.reason),
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
