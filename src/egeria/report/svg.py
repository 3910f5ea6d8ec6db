"""From a matplotlib figure to inline SVG that follows the page's colours, fonts and ids."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

WIDTH_INCHES = 7.6
MAX_POINTS = 2000
"""Points of a curve; a longer one is thinned so that the page stays small."""
PALETTE = (
    *("#1f7ed6", "#4377e4", "#6070e8", "#746aea", "#8863e9", "#9d58e7", "#b349e5", "#cb2ce1"),
    *("#d91fca", "#e024ab", "#e12f8c", "#e2366d", "#e33b4f", "#e24032", "#d4511e", "#b9671a"),
)
"""All with a contrast of 3.5 and more to a light and to a dark card."""
NAMES = ("ink", "grid", "loss", "rate", "freeze", "thaw", "skip")
COLOURS = {name: "#" + 3 * f"{place:02x}" for place, name in enumerate(NAMES, 1)}
"""Stand-ins drawn by matplotlib; on the page each becomes the CSS variable of its name, light or
dark."""

_STYLE: dict[Any, Any] = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), COLOURS["ink"]
    ),
    **dict.fromkeys(
        ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), COLOURS["grid"]
    ),
    **dict.fromkeys(
        ("axes.spines.top", "axes.spines.right", "text.parse_math", "axes.unicode_minus"), False
    ),
    "svg.fonttype": "none",
    "svg.hashsalt": "egeria",
    "font.size": 9.0,
    "axes.grid": True,
    "axes.formatter.use_mathtext": False,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.5,
    "path.simplify": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture of the page, with what stands around it."""

    title: str
    caption: str
    svg: str
    legend: list[tuple[str, str]]
    """CSS colours and what they stand for; outside the SVG, where long names wrap."""


def draw(
    prefix: str,
    alt: str,
    heights_inches: Sequence[float],
    steps: tuple[int, int],
    paint: Callable[[list[Any]], None],
) -> str:
    """Draw panels that share their x axis from the first to the last of `steps`, top to bottom, as
    inline SVG.

    The prefix goes before every id, so that several pictures can share a page; `alt` is for a
    reader who sees none.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, sum(heights_inches) + 0.3), layout="constrained")
        FigureCanvasSVG(figure)
        grid = figure.subplots(
            len(heights_inches), sharex=True, squeeze=False, height_ratios=list(heights_inches)
        )
        panels = grid[:, 0].tolist()
        for axes in panels:
            axes.set_axisbelow(True)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        paint(panels)
        margin = max(0.02 * (steps[1] - steps[0]), 0.5)
        panels[-1].set_xlim(steps[0] - margin, steps[1] + margin)
        panels[-1].set_xlabel("step")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), prefix, alt)


def plot(
    axes: Any,
    steps: Sequence[int],
    values: Sequence[float | None],
    colour: str,
    share: float = 1.0,
    **style: Any,
) -> None:
    """Plot a curve with a gap where a value is missing or not finite, thinned to `share` of
    `MAX_POINTS`.
    """
    solid = [value if value is not None and math.isfinite(value) else math.nan for value in values]
    kept_steps, kept_values = thin(steps, solid, max(20, int(share * MAX_POINTS)))
    few = {"marker": "."} if len(steps) <= 1 else {}
    axes.plot(kept_steps, kept_values, color=colour, **few | style)


def use_log(axes: Any) -> None:
    """Make the y axis logarithmic, its numbers plain text: mathematics is not parsed in these
    pictures.
    """
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.0, 0.4)))


def module_colour(place: int, num_modules: int) -> str:
    """Return the colour of a module: from blue at the front to orange at the back."""
    return PALETTE[min(place * len(PALETTE) // max(num_modules, 1), len(PALETTE) - 1)]


def thin(
    steps: Sequence[int], values: Sequence[float], limit: int
) -> tuple[list[int], list[float]]:
    """Keep at most about `limit` points of a curve: the lowest and highest of each stretch, so that
    spikes stay.
    """
    if len(steps) <= limit:
        return list(steps), list(values)
    stretch = math.ceil(2 * len(steps) / limit)
    kept: list[int] = []
    for start in range(0, len(steps), stretch):
        places = range(start, min(start + stretch, len(steps)))
        solid = [place for place in places if math.isfinite(values[place])] or list(places[:1])
        kept.extend(
            sorted({min(solid, key=values.__getitem__), max(solid, key=values.__getitem__)})
        )
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
    return (
        f'<svg {view_box[0] if view_box else ""} role="img" aria-label="{html.escape(alt)}">{body}'
    )
