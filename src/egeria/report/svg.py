"""From a matplotlib figure to inline SVG that follows the page's colours, fonts and ids."""

from __future__ import annotations

import colorsys
import html
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

WIDTH_INCHES = 7.6
COLOURS = {
    "ink": "#010101",
    "grid": "#020202",
    "loss": "#030303",
    "rate": "#040404",
    "freeze": "#050505",
    "thaw": "#060606",
    "metric": "#070707",
    "skip": "#080808",
}
"""Stand-ins drawn by matplotlib; on the page each becomes the CSS variable of its name, light or dark."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "egeria",
    "path.simplify": True,
    "font.size": 9.0,
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["grid"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.5,
    "xtick.color": COLOURS["grid"],
    "ytick.color": COLOURS["grid"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "lines.linewidth": 1.5,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": False,
}


def draw(prefix: str, alt: str, heights_inches: Sequence[float], paint: Callable[[list[Any]], None]) -> str:
    """Draw panels that share their x axis, one above the other, as an inline SVG element.

    Args:
        prefix: goes before every id, so that several pictures can share a page.
        alt: what a reader who cannot see the picture needs to know.
        heights_inches: height of each panel, top to bottom.
        paint: draws into the panels.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, sum(heights_inches) + 0.3), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(
            len(heights_inches), 1, sharex=True, squeeze=False, height_ratios=list(heights_inches)
        )[:, 0].tolist()
        for axes in panels:
            axes.set_axisbelow(True)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        paint(panels)
        panels[-1].set_xlabel("step")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), prefix, alt)


def module_colour(place: int, num_modules: int) -> str:
    """Return the colour of a module: from blue at the front to orange at the back, legible on light and dark."""
    hue = 0.58 + 0.5 * place / max(num_modules - 1, 1)
    channels = colorsys.hls_to_rgb(hue % 1.0, 0.53, 0.68)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def thin(steps: Sequence[int], values: Sequence[float], limit: int) -> tuple[list[int], list[float]]:
    """Keep at most about `limit` points of a curve: the lowest and highest of each stretch, so that spikes stay."""
    if len(steps) <= limit:
        return list(steps), list(values)
    stretch = math.ceil(2 * len(steps) / limit)
    kept: list[int] = []
    for start in range(0, len(steps), stretch):
        places = range(start, min(start + stretch, len(steps)))
        finite = [place for place in places if math.isfinite(values[place])] or list(places[:1])
        kept.extend(sorted({min(finite, key=lambda i: values[i]), max(finite, key=lambda i: values[i])}))
    return [steps[place] for place in kept], [values[place] for place in kept]


def _inline(text: str, prefix: str, alt: str) -> str:
    """Strip what belongs to a file of its own, and make ids, colours and numbers the page's."""
    text = text[text.index("<svg") :].replace("xlink:href", "href")
    # matplotlib's own style sheet would apply to the whole page.
    for element in ("metadata", "style"):
        text = re.sub(rf"<{element}\b.*?</{element}>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r'\b(d|x|y)="[^"]*"', lambda match: re.sub(r"(\.\d)\d+", r"\1", match[0]), text)
    for name, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{name})")
    view_box = re.search(r'viewBox="[^"]*"', text)
    body = text[text.index(">", text.index("<svg")) + 1 :]
    label = html.escape(alt)
    box = view_box[0] if view_box else ""
    return f'<svg {box} role="img" aria-label="{label}">' + re.sub(r">\s+<", "><", body).strip()
