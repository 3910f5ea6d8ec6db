"""The pictures of the report: panels of curves over the steps, drawn as inline SVG."""

from __future__ import annotations

import html
import io
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from egeria.events import IntervalMeasured, PlanMade, PlasticityRead
from egeria.moves import read_plan
from egeria.report.summary import Summary
from egeria.report.wording import percent

MAX_METRICS = 4
WIDTH_INCHES = 7.6
SHARES = (
    ("parameters frozen", "freeze", "parameter_share"),
    ("compute skipped", "skip", "skipped_share"),
)
MAX_POINTS = 2000
"""Points of all curves of a panel; longer ones are thinned so that the page stays small."""
PALETTE = (
    *("#1f7ed6", "#4377e4", "#6070e8", "#746aea", "#8863e9", "#9d58e7", "#b349e5", "#cb2ce1"),
    *("#d91fca", "#e024ab", "#e12f8c", "#e2366d", "#e33b4f", "#e24032", "#d4511e", "#b9671a"),
)
"""Of layer modules and metrics; all with a contrast of 3.5 and more to a light and a dark card."""
NAMES = ("ink", "grid", "loss", "rate", "freeze", "thaw", "skip")
COLOURS = {name: "#" + 3 * f"{place:02x}" for place, name in enumerate(NAMES, 1)}
"""What matplotlib draws with; on the page each becomes the CSS variable of its name."""
CAPTIONS = {
    "Layers frozen": "How many front layer modules were frozen, by the plan and in truth, and what "
    "share of the parameters and of an iteration's compute (their backward pass) that is.",
    "Loss and metrics": "Mean loss of each interval, and what was logged.",
    "Iteration time": "Median time of an iteration in each interval, without egeria's overhead.",
    "Plasticity": "Readings of the frontmost active module (thin) and their running mean (thick). "
    "A flat curve means that the module has stopped changing what it computes.",
}
_INK = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
_GRID = ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
_OFF = ("axes.spines.top", "axes.spines.right", "text.parse_math", "axes.unicode_minus")
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(_INK, COLOURS["ink"]),
    **dict.fromkeys(_GRID, COLOURS["grid"]),
    **dict.fromkeys((*_OFF, "axes.formatter.use_mathtext"), False),
    **{"svg.fonttype": "none", "svg.hashsalt": "egeria", "font.size": 9.0, "axes.titlesize": 9.0},
    **{"axes.grid": True, "grid.linewidth": 0.5, "lines.linewidth": 1.5, "path.simplify": True},
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel; values that are missing or not finite leave gaps."""

    label: str
    colour: str  # a name of `COLOURS`, or a colour
    steps: Sequence[float]
    values: Sequence[float | None]
    style: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that share their axes."""

    title: str
    curves: list[Curve]
    top: float | None = None  # end of the y axis, which then begins at 0
    is_log: bool = False
    height_inches: float = 1.7


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the page, with what stands around it."""

    title: str
    caption: str
    svg: str
    legend: list[tuple[str, str]]  # CSS colours and what they stand for; long names wrap


def draw_pictures(summary: Summary) -> list[Picture]:
    """Draw what the journal has data for."""
    made = (_depth_panels, _loss, _pace_panels, _plasticity_panels)
    found = [(*titles, make(summary)) for titles, make in zip(CAPTIONS.items(), made, strict=True)]
    return [_draw(*entry, summary) for entry in found if any(panel.curves for panel in entry[2])]


def _depth_panels(summary: Summary) -> list[Panel]:
    points = [*summary.depths, summary.depths[-1]]
    steps = [*(point.step for point in summary.depths), summary.step]
    plan = summary.last(PlanMade)
    moves = read_plan(plan.plan) if plan is not None else ()
    if not summary.changes and not moves:
        return []
    as_steps, deepest = {"drawstyle": "steps-post"}, summary.started.deepest_freeze
    frozen = Curve("frozen", "freeze", steps, [point.frozen for point in points], as_steps)
    times = [0.0, *(move.step(summary.total_steps) for move in moves)]
    depths = [0, *(min(move.depth, deepest) for move in moves)]
    end = float(summary.total_steps or summary.step)
    dashed = {**as_steps, "linestyle": "--"}
    planned = Curve("planned", "rate", [*times, end], [*depths, depths[-1]], dashed)
    curves = []
    for name, colour, field_name in SHARES:
        values = [getattr(point, field_name) for point in points]
        percents = [None if value is None else 100 * value for value in values]
        curves.append(Curve(name, colour, steps, percents, as_steps))
    most = 1.1 * max(deepest, *depths, *(point.frozen for point in points))
    return [
        Panel("layer modules", [frozen, *([planned] if moves else [])], top=most),
        Panel("% of parameters, of compute", curves, top=100, height_inches=1.2),
    ]


def _loss(summary: Summary) -> list[Panel]:
    intervals, metrics = summary.of(IntervalMeasured), summary.metrics
    steps = [interval.step for interval in intervals]
    colours = [_colour(place, len(metrics)) for place in range(len(metrics))]
    curves = [Curve(m.name, c, m.steps, m.values) for m, c in zip(metrics, colours, strict=True)]
    losses = [curve for curve in curves if "loss" in curve.label.lower()]
    others = [curve for curve in curves if curve not in losses][:MAX_METRICS]
    if intervals:
        losses.insert(0, Curve("training loss", "loss", steps, [each.loss for each in intervals]))
    rates = [interval.learning_rate for interval in intervals]
    rate = Curve("learning rate", "rate", steps, rates, {"drawstyle": "steps-post"})
    return [
        Panel("loss", losses, height_inches=2.2),
        *(Panel(curve.label, [curve], height_inches=1.2) for curve in others),
        *([Panel("learning rate", [rate], height_inches=0.9)] if intervals else []),
    ]


def _pace_panels(summary: Summary) -> list[Panel]:
    panels, ends = [], [summary.first_step, summary.step]
    steps = [interval.step for interval in summary.intervals]
    for name, clock in (("wall", summary.wall), ("cpu", summary.cpu)) if steps else ():
        times_ms = [1000 * getattr(e, f"iteration_{name}_s") for e in summary.intervals]
        unfrozen_ms = 1000 * (clock.unfrozen_iteration_s or 0.0)
        line = Curve("unfrozen median", "ink", ends, [unfrozen_ms] * 2, {"ls": "--", "lw": 1})
        # A slow first interval must not press all others flat.
        usual = 2 * max(statistics.median(times_ms), unfrozen_ms)
        curves = [Curve("iteration time", "loss", steps, times_ms)]
        curves += [line] if unfrozen_ms else []
        top = max(1.1 * min(max(times_ms), usual), 1e-6)
        panels.append(Panel(f"{name} time, ms", curves, top=top))
    return panels


def _plasticity_panels(summary: Summary) -> list[Panel]:
    readings: dict[tuple[int, str], list[PlasticityRead]] = {}
    for event in summary.of(PlasticityRead):
        readings.setdefault((event.module, event.name), []).append(event)
    curves = []
    for (module, name), found in sorted(readings.items()):
        steps, colour = [each.step for each in found], _colour(module, len(summary.modules))
        for field_name, style in (("value", {"lw": 0.8, "alpha": 0.45}), ("smoothed", {"lw": 1.8})):
            values = [getattr(each, field_name) for each in found]
            positive = [value if value > 0 else None for value in values]
            curves.append(Curve(f"{module} {name}", colour, steps, positive, style))
    return [Panel("plasticity", curves, is_log=True, height_inches=2.8)]


def _draw(title: str, caption: str, panels: list[Panel], summary: Summary) -> Picture:
    """Draw panels that share their x axis, top to bottom."""
    heights = [panel.height_inches for panel in panels]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.3), layout="constrained")
        FigureCanvasSVG(figure)
        grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)
        for panel, axes in zip(panels, grid[:, 0], strict=True):
            _draw_panel(panel, axes, summary)
        first, last = summary.first_step, summary.step
        margin = max(0.02 * (last - first), 0.5)
        axes.set_xlim(first - margin, last + margin)
        axes.set_xlabel("step")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    labels = {curve.label: curve.colour for panel in panels for curve in panel.curves}
    if summary.changes:
        labels |= {"modules freeze (dotted)": "freeze", "modules thaw (dashed)": "thaw"}
    legend = [(f"var(--{e})" if e in COLOURS else e, label) for label, e in labels.items()]
    skipped = percent(summary.skipped_share)
    alt = f"{title} over {summary.step:,} steps; {skipped} of the compute was skipped."
    prefix = title.partition(" ")[0].lower()
    return Picture(title, caption, _inline(buffer.getvalue(), prefix, alt), legend)


def _draw_panel(panel: Panel, axes: Any, summary: Summary) -> None:
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    # Names are the user's: matplotlib may lack their letters, and the legend has them in full.
    name = "".join(c if c.isascii() and c.isprintable() else "?" for c in panel.title)[:60]
    axes.set_title(name, loc="left", parse_math=False)
    limit = max(20, MAX_POINTS // max(1, len(panel.curves)))
    for curve in panel.curves:
        finite = [e if e is not None and math.isfinite(e) else math.nan for e in curve.values]
        steps, values = _thin(curve.steps, finite, limit)
        marker = {"marker": "."} if len(curve.steps) <= 1 else {}
        colour = COLOURS.get(curve.colour, curve.colour)
        axes.plot(steps, values, color=colour, **marker | curve.style)
    if panel.is_log:
        axes.set_yscale("log")  # in plain text: mathematics is not parsed
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.0, 0.4)))
    if panel.top is not None:
        axes.set_ylim(0, panel.top)
    for step, before, after in summary.changes:
        colour, line = ("freeze", ":") if after > before else ("thaw", "--")
        axes.axvline(step, color=COLOURS[colour], linestyle=line, linewidth=1.2)


def _colour(place: int, count: int) -> str:
    """Return the colour of a module: from blue at the front to orange at the back."""
    return PALETTE[min(place * len(PALETTE) // max(count, 1), len(PALETTE) - 1)]


def _thin(
    steps: Sequence[float], values: list[float], limit: int
) -> tuple[list[float], list[float]]:
    """Keep about `limit` points: the lowest and highest of each stretch, so that spikes stay."""
    stretch = math.ceil(2 * len(steps) / limit) if len(steps) > limit else 1
    kept: list[int] = []
    for start in range(0, len(steps), stretch):
        places = range(start, min(start + stretch, len(steps)))
        solid = [place for place in places if math.isfinite(values[place])] or list(places[:1])
        kept += sorted({min(solid, key=values.__getitem__), max(solid, key=values.__getitem__)})
    return [steps[place] for place in kept], [values[place] for place in kept]


def _inline(text: str, prefix: str, alt: str) -> str:
    """Strip what belongs to a file of its own, and make ids, colours and numbers the page's."""
    text = text[text.index("<svg") :].replace("xlink:href", "href")
    # matplotlib's own style sheet would apply to the whole page.
    text = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r'\b(d|x|y)="[^"]*"', lambda match: re.sub(r"(\.\d)\d+", r"\1", match[0]), text)
    for name, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{name})")
    view_box = re.search(r'viewBox="[^"]*"', text)
    body = re.sub(r">\s+<", "><", text[text.index(">", text.index("<svg")) + 1 :]).strip()
    box = view_box[0] if view_box else ""
    return f'<svg {box} role="img" aria-label="{html.escape(alt)}">{body}'
