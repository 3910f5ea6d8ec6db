"""The picture of the plasticity readings, a colour for each module."""

from __future__ import annotations

import math
from typing import Any

from egeria.events import PlasticityRead, Resumed, Thawed
from egeria.report.history import History
from egeria.report.summary import Summary
from egeria.report.svg import MAX_POINTS, Picture, draw, finite, mark_changes, module_colour, plot, use_log
from egeria.report.words import plural


def plasticity_picture(history: History, summary: Summary) -> Picture | None:
    """Draw raw and smoothed readings, and the smoothed one at which each module froze."""
    pieces = _pieces(history)
    if not pieces:
        return None
    num_readings = sum(map(len, pieces))
    num_modules = max(len(summary.modules), 1 + max(piece[0].module for piece in pieces))
    freezes = {(mark.module, mark.step) for mark in summary.timeline if mark.action == "frozen"}
    num_hidden = sum(math.isnan(_positive(reading.value)) for piece in pieces for reading in piece)

    def paint(panels: list[Any]) -> None:
        axes = panels[0]
        for piece in pieces:
            # Half of the points for the raw curve, half for the smoothed one.
            limit = max(20, MAX_POINTS * len(piece) // (2 * num_readings))
            colour = module_colour(piece[0].module, num_modules)
            steps = [reading.step for reading in piece]
            plot(axes, steps, [_positive(r.value) for r in piece], colour, limit=limit, linewidth=0.8, alpha=0.45)
            plot(axes, steps, [_positive(r.smoothed) for r in piece], colour, limit=limit, linewidth=1.8)
            last = piece[-1]
            if (last.module, last.step) in freezes:
                axes.plot([last.step], [_positive(last.smoothed)], "o", color=colour, markersize=6)
        if num_hidden < num_readings:
            use_log(axes)
        axes.set_ylabel("plasticity")
        mark_changes(axes, [mark for mark in summary.timeline if mark.action == "thawed"])

    names = {piece[0].module: piece[0].name for piece in pieces}
    caption = (
        "Readings of the frontmost active module (thin), their running mean (thick), and where it froze (dot). "
        "A flat curve means that the module has stopped changing what it computes."
    )
    if num_hidden:
        caption += f" {plural(num_hidden, 'reading')} of 0 or not finite have no place on the logarithmic axis."
    legend = [(module_colour(place, num_modules), f"{place} {name}") for place, name in sorted(names.items())]
    if any(mark.action == "thawed" for mark in summary.timeline):
        legend.append(("var(--thaw)", "modules thaw (dashed)"))
    alt = f"Plasticity over steps, logarithmic: {plural(num_readings, 'reading')} of {plural(len(names), 'module')}."
    return Picture(
        title="Plasticity",
        caption=caption,
        svg=draw("plasticity", alt, [2.8], summary.span, paint),
        legend=tuple(legend),
    )


def _pieces(history: History) -> list[list[PlasticityRead]]:
    """Cut the readings where another module, a thaw or a resume begins a fresh curve."""
    pieces: list[list[PlasticityRead]] = []
    fresh = True
    for event in history.events:
        if isinstance(event, (Thawed, Resumed)):
            fresh = True
        elif isinstance(event, PlasticityRead):
            if fresh or pieces[-1][-1].module != event.module:
                pieces.append([])
            pieces[-1].append(event)
            fresh = False
    return pieces


def _positive(value: float) -> float:
    return value if finite([value])[0] > 0 else math.nan
