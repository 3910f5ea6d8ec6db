"""The page: one HTML file that needs nothing but itself, from the template beside this module."""

from __future__ import annotations

import dataclasses

from jinja2 import Environment, PackageLoader

from egeria import events
from egeria.report import text
from egeria.report.pictures import draw_pictures
from egeria.report.summary import Clock, Pace, Summary, ratio
from egeria.report.wording import UNKNOWN, duration, mebibytes, number, percent

MAX_EVENTS = 200
UNLISTED = ("run_started", "interval", "plasticity", "metric", "reading_dropped", "reference")
"""Kinds of events that the page draws or sums up instead."""


def render_page(summary: Summary) -> str:
    """Return the HTML of the report."""
    started, loader = summary.started, PackageLoader("egeria.report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    listed = [event for event in summary.events if event.kind not in UNLISTED]
    limits = {"total_steps": summary.total_steps, "unfreezing rule": started.rule}
    return environment.get_template("page.html.jinja").render(
        summary=summary,
        progress=text.progress(summary),
        verdict=text.verdict(summary),
        headline=text.headline(summary),
        cautions=text.cautions(summary),
        pictures=draw_pictures(summary),
        clocks=[_clock("wall", summary.wall), _clock("CPU", summary.cpu)],
        paces=[_pace(pace, summary) for pace in summary.paces],
        events=list(map(_event, listed[:MAX_EVENTS])),
        num_unlisted=max(0, len(listed) - MAX_EVENTS),
        modules=_modules(summary),
        settings={"run": limits, **started.config, "environment": started.environment},
    )


def _clock(name: str, clock: Clock) -> tuple[str, ...]:
    times = (clock.training_s, clock.overhead_s, clock.unfrozen_s, clock.saved_s)
    training, overhead, unfrozen, saved = map(duration, times)
    shares = percent(clock.overhead_share), percent(clock.saved_share, signed=True)
    return name, training, overhead, shares[0], unfrozen, saved, shares[1]


def _pace(pace: Pace, summary: Summary) -> tuple[str, ...]:
    wall = percent(ratio(pace.wall_s, summary.wall.unfrozen_iteration_s))
    cpu = percent(ratio(pace.cpu_s, summary.cpu.unfrozen_iteration_s))
    frozen, steps = str(pace.frozen or "nothing"), f"{pace.num_steps:,}"
    memory = UNKNOWN if pace.memory_bytes is None else mebibytes(pace.memory_bytes)
    return frozen, steps, duration(pace.wall_s), wall, duration(pace.cpu_s), cpu, memory


def _modules(summary: Summary) -> list[tuple[str, ...]]:
    rows = []
    for place, module in enumerate(summary.started.modules):
        state = "frozen" if place < summary.frozen else ""
        state = state if place < summary.started.deepest_freeze else "never frozen"
        counts = module["num_parameters"], module["num_trainable"], summary.steps_frozen(place)
        rows.append((module["name"], *map("{:,}".format, counts), state))
    return rows


def _event(event: events.Event) -> tuple[str, ...]:
    """Return step, kind, what and why, as the event says it."""
    fields = dataclasses.asdict(event)
    step, why = fields.pop("step"), fields.pop("reason", "")
    values = {k: number(v) if isinstance(v, float) else v for k, v in fields.items()}
    what = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
    return f"{step:,}", event.kind.replace("_", " "), what, why
