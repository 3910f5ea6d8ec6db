"""The parts of the page around the pictures: headline, tables, settings, glossary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from egeria.events import (
    CacheDecided,
    ControllerChosen,
    ControllerRestarted,
    Declined,
    Event,
    FaultCaught,
    FreezeWaits,
    IntervalChanged,
    ModuleFrozen,
    Resumed,
    Rewrapped,
    RungTaken,
    StageChanged,
    Thawed,
)
from egeria.report.history import History
from egeria.report.markup import paragraph, section, table, text
from egeria.report.summary import Summary
from egeria.report.words import UNKNOWN, count, duration, mebibytes, number, percent, plural

MAX_EVENTS = 200

GLOSSARY = (
    ("layer module", "Consecutive layers that are judged and frozen as one unit; the last one is never frozen."),
    ("frontmost active module", "The first layer module that is not frozen; the only one that is monitored."),
    ("plasticity", "How much a module's activations still differ from those of the reference model."),
    ("reference model", "A snapshot of the model in training, in a cheap number format; plasticity is against it."),
    ("controller", "Who runs the reference model: a process beside the training, or the training process (inline)."),
    ("bootstrapping stage", "The early, critical period of training, in which nothing may freeze."),
    ("knowledge-guided stage", "After bootstrapping: a module freezes once its plasticity has stopped changing."),
    ("stationary", "The plasticity of a module has a slope below the tolerance."),
    ("thaw", "All modules train again, because the learning rate has moved far enough since the first freeze."),
    ("boundary", "The output of the last frozen layer module, which the cache stores."),
    ("interval", "The steps between two evaluations."),
    ("time saved", "Unfrozen minus found iteration time, times steps, less egeria's overhead. An estimate."),
)


def headline(summary: Summary) -> str:
    """Return the tiles with the most important numbers."""
    tiles = [
        _saved_tile("wall time saved", summary.wall.saved_share, summary.wall.saved_s),
        _saved_tile("CPU time saved", summary.cpu.saved_share, summary.cpu.saved_s),
        (percent(summary.wall.overhead_share), "egeria's overhead, of training time", ""),
        (*_frozen_tile(summary), ""),
        (percent(summary.mean_parameter_share), "of parameters frozen, mean over the run", ""),
    ]
    if summary.mean_skipped_share is not None:
        tiles.append((percent(summary.mean_skipped_share), "of compute skipped, mean over the run", ""))
    for metric in summary.metrics[:2]:
        tiles.append((number(metric.final), f"{metric.name}, last (best {number(metric.best)})", ""))
    of_total = "" if summary.total_steps is None else f"of {count(summary.total_steps)} "
    tiles.append((count(summary.steps_done), f"{of_total}steps; {summary.stage} stage", ""))
    items = "".join(
        f"<li><b{f' class={style!r}' if style else ''}>{text(value)}</b><span>{text(label)}</span></li>"
        for value, label, style in tiles
    )
    return f'<ul class="tiles" aria-label="Headline numbers">{items}</ul>'


def events_section(history: History) -> str:
    """Return the table of decisions, refusals and faults."""
    lines = [line for event in history.events if (line := _event_line(event)) is not None]
    if not lines:
        return section("events", "Events", paragraph("No module froze or thawed, and nothing went wrong."))
    parts = [
        table("Events", (("step", "number"), ("event", ""), ("what", "what"), ("why", "reason")), lines[:MAX_EVENTS])
    ]
    if len(lines) > MAX_EVENTS:
        parts.append(paragraph(f"{plural(len(lines) - MAX_EVENTS, 'more event')} in the journal.", "soft"))
    return section("events", "Events", *parts)


def modules_section(summary: Summary) -> str:
    """Return the table of layer modules."""
    if not summary.modules:
        return section("modules", "Layer modules", paragraph("The journal names no layer modules."))
    columns = (
        ("module", ""), ("place", "number"), ("parameters", "number"), ("share", "number"),
        ("of forward pass", "number"), ("steps frozen", "number"), ("state", ""),
    )  # fmt: skip
    lines = [
        (
            module.name,
            str(place),
            count(module.num_parameters),
            percent(module.parameter_share),
            percent(module.forward_share),
            count(module.steps_frozen),
            _module_note(summary, place),
        )
        for place, module in enumerate(summary.modules)
    ]
    return section("modules", "Layer modules", table("Layer modules, front to back", columns, lines))


def time_section(summary: Summary) -> str:
    """Return how the time saved comes about."""
    method = paragraph(
        "“Time saved” is an estimate. It compares each interval with something frozen to the median iteration time of "
        "this same run while nothing was frozen, multiplies by the steps, and takes off all that egeria itself cost. "
        "Validation and checkpoints between steps are not in it; a negative number means a loss. Only a "
        "second run without egeria can measure the saving."
    )
    if not summary.paces:
        return section("time", "Time", method, paragraph("No interval was timed.", "soft"))
    clocks = [
        (
            name,
            duration(clock.training_s),
            duration(clock.overhead_s),
            percent(clock.overhead_share),
            duration(clock.unfrozen_s),
            duration(clock.saved_s),
            percent(clock.saved_share, signed=True),
        )
        for name, clock in (("wall", summary.wall), ("CPU", summary.cpu))
    ]
    columns = ("training", "overhead", "of training", "unfrozen, estimated", "saved", "saved share")
    paces = [
        (
            "nothing" if pace.frozen == 0 else plural(pace.frozen, "module"),
            count(pace.num_steps),
            duration(pace.wall_s),
            percent(pace.wall_ratio),
            duration(pace.cpu_s),
            percent(pace.cpu_ratio),
        )
        for pace in summary.paces
    ]
    depths = ("steps", "iteration, wall", "of unfrozen", "iteration, CPU", "of unfrozen")
    return section(
        "time",
        "Time",
        method,
        table("Time by clock", (("clock", ""), *((name, "number") for name in columns)), clocks),
        paragraph(f"Times cover {plural(summary.steps_measured, 'step')} in whole intervals.", "soft"),
        table("Iteration time by depth", (("frozen", ""), *((name, "number") for name in depths)), paces),
    )


def metrics_section(summary: Summary) -> str:
    """Return the table of the user's metrics."""
    lines = [
        (
            metric.name,
            number(metric.final),
            number(metric.best),
            count(metric.best_step),
            "lowest" if metric.lower_is_better else "highest",
        )
        for metric in summary.metrics
    ]
    if not lines:
        return ""
    columns = (("metric", ""), ("last", "number"), ("best", "number"), ("at step", "number"), ("best is the", ""))
    return section("metrics", "Metrics", table("Metrics", columns, lines))


def settings_section(summary: Summary) -> str:
    """Return the settings and versions, folded away."""
    run = {
        "total_steps": summary.total_steps,
        "interval_steps": f"{summary.interval_steps} ({summary.interval_reason})",
        "unfreezing rule": summary.rule,
        "deepest freeze": plural(summary.deepest_freeze, "module"),
        "readings": f"{count(summary.num_readings)}, {count(summary.num_dropped)} dropped",
    }
    groups: list[tuple[str, Any]] = [("run", run), *summary.config.items(), ("environment", summary.environment)]
    parts = [
        f"<h3>{text(name)}</h3>" + table(name, (("setting", ""), ("value", "reason")), _settings(values))
        for name, values in groups
    ]
    return f'<details class="card" id="settings"><summary>Settings and versions</summary>{"".join(parts)}</details>'


def glossary_section() -> str:
    """Return the words used."""
    entries = "".join(f"<dt>{text(word)}</dt><dd>{text(meaning)}</dd>" for word, meaning in GLOSSARY)
    return section("glossary", "Words", f"<dl>{entries}</dl>")


def _frozen_tile(summary: Summary) -> tuple[str, str]:
    number_of = f"{summary.frozen_now} of {len(summary.modules)}" if summary.modules else str(summary.frozen_now)
    return number_of, f"modules frozen now, {percent(summary.depths[-1].parameter_share)} of parameters"


def _saved_tile(label: str, share: float | None, seconds: float | None) -> tuple[str, str, str]:
    if share is None or seconds is None:
        return UNKNOWN, f"{label}: not known", ""
    return percent(share, signed=True), f"{label}, estimated: {duration(seconds)}", "good" if seconds >= 0 else "bad"


_LINES: dict[type[Event], Callable[[Any], tuple[str, str, str]]] = {
    ControllerChosen: lambda event: ("controller", event.controller, event.reason),
    ControllerRestarted: lambda event: ("controller", f"replaced, {event.count} so far", event.reason),
    CacheDecided: lambda event: ("frozen forward", event.mode, event.reason),
    IntervalChanged: lambda event: ("interval", f"{event.before} to {event.after} steps", event.reason),
    RungTaken: lambda event: ("reference", event.after, event.reason),
    ModuleFrozen: lambda event: ("frozen", f"{event.module} {event.name}", event.reason),
    FreezeWaits: lambda event: ("waits", f"{event.module} {event.name}", event.reason),
    Rewrapped: lambda event: (
        "reduced",
        mebibytes(event.reduced_bytes),
        f"of gradients between the processes from here on; laid out anew in {duration(event.wall_s)}",
    ),
    Thawed: lambda event: (
        "thawed",
        plural(event.frozen_before, "module"),
        f"{event.reason}; window now {event.window}",
    ),
    StageChanged: lambda event: ("stage", event.stage, event.reason),
    Resumed: lambda event: ("resumed", f"{plural(event.frozen, 'module')} frozen, {event.stage}", ""),
    Declined: lambda event: ("declined", event.what, event.reason),
    FaultCaught: lambda event: ("fault", event.where, event.error),
}


def _event_line(event: Event) -> Sequence[str] | None:
    line = _LINES.get(type(event))
    return None if line is None else (count(event.step), *line(event))


def _module_note(summary: Summary, place: int) -> str:
    if not summary.modules[place].trainable:
        return "nothing to train from the start"
    if place < summary.frozen_now:
        return "frozen"
    return "" if place < summary.deepest_freeze else "never frozen"


def _settings(values: Any) -> list[tuple[str, str]]:
    if not isinstance(values, dict):
        return [("", str(values))]
    return [(str(key), "none" if value is None else str(value)) for key, value in values.items()]
