"""The page: one HTML file that needs nothing but itself, from the template beside this module.

Its pictures are panels of curves over the steps, drawn by matplotlib.
"""

import base64
import io
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure

from egeria.events import Event, IntervalMeasured, ModuleFacts, PlanMade, PlasticityRead
from egeria.moves import read_plan
from egeria.report import text
from egeria.report.summary import Clock, Pace, Summary, ratio
from egeria.report.text import duration, mebibytes, number, percent

# Kinds of events that the page draws or sums up instead.
UNLISTED = ("run_started", "interval", "plasticity", "metric", "reading_dropped", "reference")
WIDTH_INCHES, HEIGHT_INCHES = 8.5, 1.8  # of a panel
CAPTIONS = {
    "The training": "How many front layer modules were frozen and were to be by the plan, the mean "
    "loss of each interval, and the median time of an iteration in it without egeria's overhead.",
    "Metrics": "What was logged, and the learning rate.",
    "Plasticity": "Readings of the frontmost active module (thin) and their running mean (thick).",
}
_STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "egeria", "font.size": 9.0, "axes.titlesize": 9.0},
    **{"axes.grid": True, "grid.linewidth": 0.5, "legend.frameon": False},
    "path.simplify_threshold": 1.0,  # in pixels, so that the page of a long run stays small
}
_LARGEST = 1e30  # number that is drawn
_STAIRS = {"drawstyle": "steps-post"}


def render_page(summary: Summary) -> str:
    """Return the HTML of the report."""
    started, loader = summary.started, PackageLoader("egeria.report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    limits = {"total_steps": summary.total_steps, "unfreezing rule": started.rule}
    return environment.get_template("page.html.jinja").render(
        summary=summary,
        progress=text.progress(summary),
        verdict=text.verdict(summary),
        headline=text.headline(summary),
        cautions=text.cautions(summary),
        pictures=_pictures(summary),
        clocks=[_clock("wall", summary.wall), _clock("CPU", summary.cpu)],
        paces=[_pace(pace, summary) for pace in summary.paces],
        events=[_event(event) for event in summary.events if event.kind not in UNLISTED],
        modules=[_module(place, e, summary) for place, e in enumerate(started.modules)],
        settings={"run": limits, **started.config, "environment": started.environment},
    )


def _clock(name: str, clock: Clock) -> tuple[str, ...]:
    overhead = duration(clock.overhead_s), percent(clock.overhead_share)
    saved = duration(clock.saved_s), percent(clock.saved_share, signed=True)
    return name, duration(clock.training_s), *overhead, duration(clock.unfrozen_s), *saved


def _pace(pace: Pace, summary: Summary) -> tuple[str, ...]:
    wall = percent(ratio(pace.wall_s, summary.wall.unfrozen_iteration_s))
    cpu = percent(ratio(pace.cpu_s, summary.cpu.unfrozen_iteration_s))
    head = str(pace.frozen or "nothing"), f"{pace.num_steps:,}", duration(pace.wall_s), wall
    return *head, duration(pace.cpu_s), cpu, mebibytes(pace.memory_bytes)


def _module(place: int, module: ModuleFacts, summary: Summary) -> tuple[str, ...]:
    state = "frozen" if place < summary.frozen else ""
    state = state if place < summary.started.deepest_freeze else "never frozen"
    num_steps = sum(point.num_steps for point in summary.depths if point.frozen > place)
    counts = module["num_parameters"], module["num_trainable"], num_steps
    return module["name"], *map("{:,}".format, counts), state


def _event(event: Event) -> tuple[str, ...]:
    """Return step, kind, what and why, as the event says it."""
    fields = event.to_dict()
    kind, step, why = fields.pop("event"), fields.pop("step"), fields.pop("reason", "")
    values = {k: number(v) if isinstance(v, float) else v for k, v in fields.items()}
    what = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
    return f"{step:,}", kind.replace("_", " "), what, why


class Curve(NamedTuple):
    """One line of a panel; values that are missing, not finite or too large leave gaps."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]
    style: Mapping[str, Any] = {}


class Panel(NamedTuple):
    """Curves that share their axes."""

    title: str
    curves: list[Curve]
    top: float | None = None  # end of the y axis, which then begins at 0
    is_log: bool = False


def _pictures(summary: Summary) -> list[tuple[str, str, str]]:
    """Return title, caption and drawing of each picture that the journal has data for."""
    losses, metrics = _metric_panels(summary)
    training = [*_depth_panels(summary), *losses, *_pace_panels(summary)]
    made = zip(CAPTIONS.items(), (training, metrics, _plasticity_panels(summary)), strict=True)
    return [(*titles, _draw(panels, summary)) for titles, panels in made if panels]


def _depth_panels(summary: Summary) -> list[Panel]:
    plan, deepest = summary.last(PlanMade), summary.started.deepest_freeze
    moves = read_plan(plan.plan) if plan is not None else ()
    if not moves and not any(point.frozen for point in summary.depths):
        return []
    points = [*summary.depths, summary.depths[-1]]
    steps = [*(point.step for point in summary.depths), summary.step]
    depths = [Curve("frozen", steps, [point.frozen for point in points], _STAIRS)]
    if moves:
        end = float(summary.total_steps or summary.step)
        times = [0.0, *(move.step(summary.total_steps) for move in moves), end]
        planned = [0, *(min(move.depth, deepest) for move in moves)]
        style = {**_STAIRS, "linestyle": "--"}
        depths.append(Curve("planned", times, [*planned, planned[-1]], style))
    return [Panel("layer modules frozen", depths, top=1.1 * max(deepest, 1))]


def _metric_panels(summary: Summary) -> tuple[list[Panel], list[Panel]]:
    """Return the panel of the losses, and those of all else that was logged."""
    intervals = summary.of(IntervalMeasured)
    curves = [Curve(metric.name, metric.steps, metric.values) for metric in summary.metrics]
    losses = [curve for curve in curves if "loss" in curve.label.lower()]
    others = [curve for curve in curves if curve not in losses][: text.MAX_METRICS]
    if intervals:
        steps, rates = [e.step for e in intervals], [e.learning_rate for e in intervals]
        losses.insert(0, Curve("training loss", steps, [e.loss for e in intervals]))
        others.append(Curve("learning rate", steps, rates, _STAIRS))
    panels = [Panel("loss", losses)] if losses else []
    return panels, [Panel(curve.label, [curve]) for curve in others]


def _pace_panels(summary: Summary) -> list[Panel]:
    if not summary.intervals:
        return []
    steps = [interval.step for interval in summary.intervals]
    times_ms = [1000 * interval.iteration_wall_s for interval in summary.intervals]
    curves, usual_ms = [Curve("measured", steps, times_ms)], statistics.median(times_ms)
    if summary.wall.unfrozen_iteration_s is not None:
        unfrozen_ms = 1000 * summary.wall.unfrozen_iteration_s
        ends, usual_ms = [summary.first_step, summary.step], max(usual_ms, unfrozen_ms)
        curves.append(Curve("nothing frozen", ends, [unfrozen_ms] * 2, {"linestyle": "--"}))
    # A slow first interval must not press all others flat.
    return [Panel("time of an iteration, ms", curves, top=2 * usual_ms)]


def _plasticity_panels(summary: Summary) -> list[Panel]:
    readings: dict[tuple[int, str], list[PlasticityRead]] = {}
    for event in summary.of(PlasticityRead):
        readings.setdefault((event.module, event.name), []).append(event)
    curves = []
    for (module, name), found in sorted(readings.items()):
        steps = [each.step for each in found]
        style = {"color": matplotlib.colormaps["plasma"](module / (len(summary.modules) + 1))}
        thin = {**style, "linewidth": 0.8, "alpha": 0.5}
        curves.append(Curve("", steps, [each.value for each in found], thin))
        curves.append(Curve(f"{module} {name}", steps, [each.smoothed for each in found], style))
    return [Panel("plasticity", curves, is_log=True)] if curves else []


def _draw(panels: list[Panel], summary: Summary) -> str:
    """Draw panels that share their x axis, top to bottom; return the SVG as a URL."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * len(panels)), layout="constrained")
        grid = figure.subplots(len(panels), sharex=True, squeeze=False)
        for panel, axes in zip(panels, grid[:, 0], strict=True):
            _draw_panel(panel, axes, summary)
        axes.set_xlim(summary.first_step - 0.5, summary.step + 0.5)
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _draw_panel(panel: Panel, axes: Any, summary: Summary) -> None:
    axes.set_title(_drawable(panel.title), loc="left")
    for curve in panel.curves:
        values = [e if e is not None and abs(e) < _LARGEST else math.nan for e in curve.values]
        marker = {"marker": "."} if len(values) == 1 else {}
        axes.plot(curve.steps, values, label=_drawable(curve.label), **marker, **curve.style)
    if panel.is_log:
        axes.set_yscale("log", nonpositive="mask")
    if panel.top is not None:
        axes.set_ylim(0, min(panel.top, _LARGEST))
    for before, after in itertools.pairwise(summary.depths):
        line = ":" if after.frozen > before.frozen else "--"
        axes.axvline(after.step, color="gray", linestyle=line)
    if len(panel.curves) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _drawable(name: str) -> str:
    """Return a name of the user's without letters that matplotlib may lack, or would interpret."""
    return "".join(c if c.isascii() and c.isprintable() and c != "$" else "?" for c in name)[:40]
