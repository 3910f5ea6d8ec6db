"""The pictures of the report: loss, plasticity, frozen share and iteration time over the steps of a
run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from egeria.events import IntervalMeasured, PlasticityRead, Resumed, Thawed
from egeria.report.history import History
from egeria.report.summary import Summary, measured_intervals
from egeria.report.svg import (
    COLOURS,
    MAX_POINTS,
    Picture,
    draw,
    finite,
    module_colour,
    plot,
    use_log,
)
from egeria.report.wording import duration, number, percent, plural

MAX_METRIC_PANELS = 4
CHANGES = {
    "frozen": ("freeze", ":", "a module freezes (dotted)"),
    "thawed": ("thaw", "--", "modules thaw (dashed)"),
}
"""Colour, line and meaning of the steps that are marked."""


def draw_pictures(summary: Summary) -> list[Picture]:
    """Draw what the journal has data for."""
    makers = (_loss_picture, _plasticity_picture, _frozen_picture, _pace_picture)
    return [picture for make in makers if (picture := make(summary)) is not None]


def _loss_picture(summary: Summary) -> Picture | None:
    """Draw the training loss, the learning rate and the user's metrics."""
    intervals = summary.history.of(IntervalMeasured)
    metrics = [metric for metric in summary.metrics if any(map(math.isfinite, metric.values))]
    if not intervals and not metrics:
        return None
    losses = [
        metric for metric in metrics if metric.lower_is_better and "loss" in metric.name.lower()
    ]
    others = [metric for metric in metrics if metric not in losses]
    shown = others[:MAX_METRIC_PANELS]
    colours = {
        m.name: module_colour(place, len(metrics) + 2)
        for place, m in enumerate((*losses, *shown), 1)
    }

    def paint(panels: list[Any]) -> None:
        steps = [interval.step for interval in intervals]
        plot(panels[0], steps, [interval.loss for interval in intervals], COLOURS["loss"])
        for metric in losses:
            plot(panels[0], metric.steps, metric.values, colours[metric.name], marker=".")
        _use_log_where_wide(panels[0])
        panels[0].set_ylabel("loss")
        _draw_learning_rate(panels[0], intervals)
        for axes, metric in zip(panels[1:], shown, strict=True):
            plot(axes, metric.steps, metric.values, colours[metric.name], marker=".")
            # Above the panel: beside its short axis there is no room. A `$` in a name is no
            # mathematics.
            axes.set_title(_short(metric.name), loc="left", fontsize=9, parse_math=False)
        for axes in panels:
            _mark_changes(axes, summary)

    caption = "Mean training loss of each interval."
    if len(others) > len(shown):
        caption += f" The first {len(shown)} of {len(others)} other metrics are drawn."
    known = [interval.loss for interval in intervals if interval.loss is not None]
    alt = f"Training loss from {number(known[0])} to {number(known[-1])}. " if known else ""
    alt += "; ".join(f"{metric.name} ends at {number(metric.final)}" for metric in summary.metrics)
    return Picture(
        title="Loss and metrics",
        caption=caption,
        svg=draw("loss", alt, [2.4, *([1.2] * len(shown))], _span(summary), paint),
        legend=(
            ("var(--loss)", "training loss"),
            ("var(--rate)", "learning rate (right axis, logarithmic)"),
            *((colour, name) for name, colour in colours.items()),
            *_change_legend(summary),
        ),
    )


def _plasticity_picture(summary: Summary) -> Picture | None:
    """Draw raw and smoothed readings, a colour for each module, and the smoothed one at which each
    module froze.
    """
    pieces = _curves(summary.history)
    if not pieces:
        return None
    num_readings = sum(map(len, pieces))
    num_modules = max(len(summary.modules), 1 + max(piece[0].module for piece in pieces))
    freezes = {(mark.module, mark.step) for mark in summary.timeline if mark.action == "frozen"}
    num_hidden = sum(math.isnan(_positive(reading.value)) for piece in pieces for reading in piece)

    def paint(panels: list[Any]) -> None:
        (axes,) = panels
        for piece in pieces:
            # Half of the points for the raw curve, half for the smoothed one.
            limit = max(20, MAX_POINTS * len(piece) // (2 * num_readings))
            colour = module_colour(piece[0].module, num_modules)
            steps = [reading.step for reading in piece]
            plot(
                axes,
                steps,
                [_positive(r.value) for r in piece],
                colour,
                limit=limit,
                linewidth=0.8,
                alpha=0.45,
            )
            plot(
                axes,
                steps,
                [_positive(r.smoothed) for r in piece],
                colour,
                limit=limit,
                linewidth=1.8,
            )
            last = piece[-1]
            if (last.module, last.step) in freezes:
                axes.plot([last.step], [_positive(last.smoothed)], "o", color=colour, markersize=6)
        if num_hidden < num_readings:
            use_log(axes)
        axes.set_ylabel("plasticity")
        _mark_changes(axes, summary, {"thawed"})

    names = {piece[0].module: piece[0].name for piece in pieces}
    caption = (
        "Readings of the frontmost active module (thin), their running mean (thick), and where it "
        "froze (dot). "
        "A flat curve means that the module has stopped changing what it computes."
    )
    if num_hidden:
        caption += (
            f" {plural(num_hidden, 'reading')} of 0 or not finite have no place on the "
            "logarithmic axis."
        )
    alt = (
        f"Plasticity over steps, logarithmic: {plural(num_readings, 'reading')} of "
        f"{plural(len(names), 'module')}."
    )
    return Picture(
        title="Plasticity",
        caption=caption,
        svg=draw("plasticity", alt, [2.8], _span(summary), paint),
        legend=(
            *(
                (module_colour(place, num_modules), f"{place} {name}")
                for place, name in sorted(names.items())
            ),
            *_change_legend(summary, {"thawed"}),
        ),
    )


def _frozen_picture(summary: Summary) -> Picture | None:
    """Draw the frozen share of the parameters and the skipped share of the compute."""
    if len(summary.depths) == 1 and summary.frozen_now == 0:
        return None
    steps = [*(point.step for point in summary.depths), summary.steps_done]
    curves = [("freeze", "parameters frozen", [point.parameter_share for point in summary.depths])]
    if all(point.skipped_share is not None for point in summary.depths):
        curves.append(
            ("skip", "compute skipped", [point.skipped_share for point in summary.depths])
        )

    def paint(panels: list[Any]) -> None:
        for name, _, shares in curves:
            heights = [100 * share for share in finite([*shares, shares[-1]])]
            panels[0].step(steps, heights, where="post", color=COLOURS[name])
            panels[0].fill_between(
                steps, heights, step="post", color=COLOURS[name], alpha=0.12, linewidth=0
            )
        panels[0].set_ylim(0, 100)
        panels[0].set_ylabel("%")

    alt = (
        f"Step plot. At the end {percent(summary.depths[-1].parameter_share)} of the parameters "
        "are frozen; the "
        f"mean over the run is {percent(summary.mean_parameter_share)}."
    )
    return Picture(
        title="Frozen and skipped",
        caption="Share of the trainable parameters that is frozen, and of an iteration's compute "
        "that freezing skips: "
        "the backward pass of the frozen modules, as much as the forward pass and as much again "
        "where weights train.",
        svg=draw("frozen", alt, [2.0], _span(summary), paint),
        legend=tuple((f"var(--{name})", label) for name, label, _ in curves),
    )


def _pace_picture(summary: Summary) -> Picture | None:
    """Draw the iteration time of each interval, by both clocks, with the unfrozen pace."""
    intervals = measured_intervals(summary.history)
    if not intervals:
        return None
    steps = [interval.step for interval in intervals]
    clocks = (
        (
            "wall",
            [1000 * interval.iteration_wall_s for interval in intervals],
            summary.wall.unfrozen_iteration_s,
        ),
        (
            "CPU",
            [1000 * interval.iteration_cpu_s for interval in intervals],
            summary.cpu.unfrozen_iteration_s,
        ),
    )
    tops = [_top(values, unfrozen_s) for _, values, unfrozen_s in clocks]
    num_above = sum(
        value > top for (_, values, _), top in zip(clocks, tops, strict=True) for value in values
    )

    def paint(panels: list[Any]) -> None:
        for axes, (name, values, unfrozen_s), top in zip(panels, clocks, tops, strict=True):
            plot(axes, steps, values, COLOURS["loss"])
            if unfrozen_s is not None:
                axes.axhline(1000 * unfrozen_s, color=COLOURS["ink"], linestyle="--", linewidth=1)
            axes.set_ylim(0, top)
            axes.set_ylabel(f"{name}, ms")
            _mark_changes(axes, summary)

    caption = "Median time of an iteration in each interval, egeria's overhead excluded."
    if num_above:
        caption += f" {plural(num_above, 'value')} above the top edge."
    alt = (
        "Iteration time over steps. Unfrozen median: "
        f"{duration(summary.wall.unfrozen_iteration_s)} of wall time; "
        f"last interval: {duration(intervals[-1].iteration_wall_s)}."
    )
    return Picture(
        title="Iteration time",
        caption=caption,
        svg=draw("pace", alt, [1.7, 1.7], _span(summary), paint),
        legend=(
            ("var(--loss)", "iteration time"),
            ("currentColor", "unfrozen median (dashed)"),
            *_change_legend(summary),
        ),
    )


def _span(summary: Summary) -> tuple[int, int]:
    return summary.history.first_step, summary.steps_done


def _mark_changes(axes: Any, summary: Summary, actions: Collection[str] = CHANGES) -> None:
    """Draw a line where modules freeze or thaw."""
    for step, action in dict.fromkeys(
        (mark.step, mark.action) for mark in summary.timeline if mark.action in actions
    ):
        colour, line, _ = CHANGES[action]
        axes.axvline(step, color=COLOURS[colour], linestyle=line, linewidth=1.2)


def _change_legend(summary: Summary, actions: Collection[str] = CHANGES) -> list[tuple[str, str]]:
    found = {mark.action for mark in summary.timeline}.intersection(actions)
    return [
        (f"var(--{colour})", label)
        for action, (colour, _, label) in CHANGES.items()
        if action in found
    ]


def _draw_learning_rate(axes: Any, intervals: Sequence[IntervalMeasured]) -> None:
    points = [
        (interval.step, rate)
        for interval in intervals
        if (rate := finite([interval.learning_rate])[0]) > 0
    ]
    if not points:
        return
    twin = axes.twinx()
    twin.grid(False)
    use_log(twin)
    steps, rates = zip(*points, strict=True)
    plot(
        twin,
        steps,
        rates,
        COLOURS["rate"],
        limit=1000,
        linewidth=1.0,
        drawstyle="steps-post",
        marker="",
    )
    # A constant rate would leave the logarithmic axis without a single number on it.
    twin.set_ylim(min(rates) / 3, max(rates) * 3)
    twin.set_ylabel("learning rate")
    twin.spines["right"].set_visible(True)


def _use_log_where_wide(axes: Any) -> None:
    heights = [
        value for line in axes.get_lines() for value in line.get_ydata() if math.isfinite(value)
    ]
    if heights and min(heights) > 0 and max(heights) > 50 * min(heights):
        use_log(axes)


def _top(values: Sequence[float], unfrozen_s: float | None) -> float:
    """Return the upper end of the axis: a slow first interval must not press all others flat."""
    usual = max(statistics.median(values), 1000 * (unfrozen_s or 0.0))
    return max(1.1 * min(max(values), 2 * usual), 1e-6)


def _short(name: str) -> str:
    """Return a name that the drawing library has letters for; the legend has it in full."""
    letters = "".join(
        letter if letter.isascii() and letter.isprintable() else "?" for letter in name
    )
    return letters if len(letters) <= 60 else letters[:57] + "..."


def _curves(history: History) -> list[list[PlasticityRead]]:
    """Cut the readings where another module, a thaw or a resume begins a fresh curve."""
    pieces: list[list[PlasticityRead]] = [[]]
    for event in history.events:
        if isinstance(event, (Thawed, Resumed)):
            pieces.append([])
        elif isinstance(event, PlasticityRead):
            if pieces[-1] and pieces[-1][-1].module != event.module:
                pieces.append([])
            pieces[-1].append(event)
    return [piece for piece in pieces if piece]


def _positive(value: float) -> float:
    return value if finite([value])[0] > 0 else math.nan
