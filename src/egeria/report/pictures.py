"""The pictures of the report: loss, plasticity, frozen share and iteration time over the steps."""

from __future__ import annotations

import math
import statistics
from typing import Any

from egeria.events import IntervalMeasured, PlasticityRead, Resumed, Thawed
from egeria.report.summary import Summary
from egeria.report.svg import COLOURS, Picture, draw, module_colour, plot, use_log
from egeria.report.wording import duration, number, percent, plural

MAX_METRIC_PANELS = 4
Legend = list[tuple[str, str]]


def draw_pictures(summary: Summary) -> list[Picture]:
    """Draw what the journal has data for."""
    makers = (_loss_picture, _plasticity_picture, _frozen_picture, _pace_picture)
    return [picture for make in makers if (picture := make(summary)) is not None]


def _loss_picture(summary: Summary) -> Picture | None:
    """Draw the training loss, the learning rate and the user's metrics."""
    intervals = summary.of(IntervalMeasured)
    metrics = [metric for metric in summary.metrics if metric.best is not None]
    if not intervals and not metrics:
        return None
    losses = [each for each in metrics if each.lower_is_better and "loss" in each.name.lower()]
    shown = [metric for metric in metrics if metric not in losses][:MAX_METRIC_PANELS]
    colours = {m.name: module_colour(place, len(metrics)) for place, m in enumerate(metrics)}
    steps = [interval.step for interval in intervals]

    def paint(panels: list[Any]) -> None:
        plot(panels[0], steps, [interval.loss for interval in intervals], COLOURS["loss"])
        for axes, metric in [(panels[0], loss) for loss in losses] + list(
            zip(panels[1:], shown, strict=True)
        ):
            plot(axes, metric.steps, metric.values, colours[metric.name], marker=".")
        for axes, metric in zip(panels[1:], shown, strict=True):
            # Above the panel: beside its short axis there is no room.
            axes.set_title(_short(metric.name), loc="left", fontsize=9, parse_math=False)
        panels[0].set_ylabel("loss")
        rates = [interval.learning_rate for interval in intervals]
        twin = panels[0].twinx()
        twin.grid(False)
        plot(twin, steps, rates, COLOURS["rate"], linewidth=1.0, drawstyle="steps-post", marker="")
        twin.set_ylabel("learning rate")
        twin.spines["right"].set_visible(True)
        _mark_changes(panels, summary)

    known = [interval.loss for interval in intervals if interval.loss is not None]
    return Picture(
        title="Loss and metrics",
        caption="Mean training loss of each interval, and what was logged.",
        svg=draw(
            "loss",
            f"Training loss from {number(known[0])} to {number(known[-1])}."
            if known
            else "Metrics.",
            [2.4, *([1.2] * len(shown))],
            (summary.first_step, summary.step),
            paint,
        ),
        legend=[
            ("var(--loss)", "training loss"),
            ("var(--rate)", "learning rate (right axis)"),
            *((colours[metric.name], metric.name) for metric in (*losses, *shown)),
            *_change_legend(summary),
        ],
    )


def _plasticity_picture(summary: Summary) -> Picture | None:
    """Draw raw and smoothed readings, a colour for each module."""
    pieces = _curves(summary)
    if not pieces:
        return None
    num_readings = sum(map(len, pieces))
    num_modules = max(summary.num_modules, 1 + max(piece[0].module for piece in pieces))

    def paint(panels: list[Any]) -> None:
        use_log(panels[0])
        for piece in pieces:
            colour = module_colour(piece[0].module, num_modules)
            steps = [reading.step for reading in piece]
            # Half of the points for the raw curve, half for the smoothed one.
            for values, style in (
                (
                    [_positive(reading.value) for reading in piece],
                    {"linewidth": 0.8, "alpha": 0.45},
                ),
                ([_positive(reading.smoothed) for reading in piece], {"linewidth": 1.8}),
            ):
                plot(panels[0], steps, values, colour, len(piece) / num_readings / 2, **style)
        panels[0].set_ylabel("plasticity")
        _mark_changes(panels, summary)

    names = {piece[0].module: piece[0].name for piece in pieces}
    read = f"{plural(num_readings, 'reading')} of {plural(len(names), 'module')}"
    return Picture(
        title="Plasticity",
        caption=(
            "Readings of the frontmost active module (thin) and their running mean (thick). A flat "
            "curve means that the module has stopped changing what it computes."
        ),
        svg=draw(
            "plasticity",
            f"Plasticity over steps, logarithmic: {read}.",
            [2.8],
            (summary.first_step, summary.step),
            paint,
        ),
        legend=[
            *(
                (module_colour(place, num_modules), f"{place} {name}")
                for place, name in sorted(names.items())
            ),
            *_change_legend(summary),
        ],
    )


def _frozen_picture(summary: Summary) -> Picture | None:
    """Draw the frozen share of the parameters and the skipped share of the compute."""
    points = [*summary.depths, summary.depths[-1]]
    if not summary.changes:
        return None
    steps = [*(point.step for point in summary.depths), summary.step]
    curves = {
        "freeze": [_percentage(point.parameter_share) for point in points],
        "skip": [_percentage(point.skipped_share) for point in points],
    }

    def paint(panels: list[Any]) -> None:
        for name, heights in curves.items():
            panels[0].step(steps, heights, where="post", color=COLOURS[name])
            panels[0].fill_between(
                steps, heights, step="post", color=COLOURS[name], alpha=0.12, linewidth=0
            )
        panels[0].set_ylim(0, 100)
        panels[0].set_ylabel("%")

    return Picture(
        title="Frozen and skipped",
        caption=(
            "Share of the trainable parameters that is frozen, and of an iteration's compute that "
            "freezing skips: the backward pass of the frozen modules."
        ),
        svg=draw(
            "frozen",
            f"Step plot. At the end {percent(summary.parameter_share)} of the parameters are "
            f"frozen; the mean over the run is {percent(summary.mean_parameter_share)}.",
            [2.0],
            (summary.first_step, summary.step),
            paint,
        ),
        legend=[("var(--freeze)", "parameters frozen"), ("var(--skip)", "compute skipped")],
    )


def _pace_picture(summary: Summary) -> Picture | None:
    """Draw the iteration time of each interval, by both clocks, with the unfrozen pace."""
    intervals = summary.intervals
    if not intervals:
        return None
    steps = [interval.step for interval in intervals]
    curves = (
        ("wall, ms", [1000 * entry.iteration_wall_s for entry in intervals], summary.wall),
        ("CPU, ms", [1000 * entry.iteration_cpu_s for entry in intervals], summary.cpu),
    )

    def paint(panels: list[Any]) -> None:
        for axes, (name, times_ms, clock) in zip(panels, curves, strict=True):
            unfrozen_ms = 1000 * (clock.unfrozen_iteration_s or 0.0)
            plot(axes, steps, times_ms, COLOURS["loss"])
            if unfrozen_ms:
                axes.axhline(unfrozen_ms, color=COLOURS["ink"], linestyle="--", linewidth=1)
            # A slow first interval must not press all others flat.
            usual = 2 * max(statistics.median(times_ms), unfrozen_ms)
            axes.set_ylim(0, max(1.1 * min(max(times_ms), usual), 1e-6))
            axes.set_ylabel(name)
        _mark_changes(panels, summary)

    return Picture(
        title="Iteration time",
        caption="Median time of an iteration in each interval, egeria's overhead excluded.",
        svg=draw(
            "pace",
            "Iteration time over steps. Unfrozen median: "
            f"{duration(summary.wall.unfrozen_iteration_s)} of wall time; last interval: "
            f"{duration(intervals[-1].iteration_wall_s)}.",
            [1.7, 1.7],
            (summary.first_step, summary.step),
            paint,
        ),
        legend=[
            ("var(--loss)", "iteration time"),
            ("currentColor", "unfrozen median (dashed)"),
            *_change_legend(summary),
        ],
    )


def _mark_changes(panels: list[Any], summary: Summary) -> None:
    """Draw a line where modules freeze or thaw."""
    for step, before, after in summary.changes:
        colour, line = ("freeze", ":") if after > before else ("thaw", "--")
        for axes in panels:
            axes.axvline(step, color=COLOURS[colour], linestyle=line, linewidth=1.2)


def _change_legend(summary: Summary) -> Legend:
    """Return what the lines mean."""
    if not summary.changes:
        return []
    return [
        ("var(--freeze)", "modules freeze (dotted)"),
        ("var(--thaw)", "modules thaw (dashed)"),
    ]


def _short(name: str) -> str:
    """Return a name that the drawing library has letters for; the legend has it in full."""
    letters = (letter if letter.isascii() and letter.isprintable() else "?" for letter in name)
    return "".join(letters)[:60]


def _curves(summary: Summary) -> list[list[PlasticityRead]]:
    """Cut the readings where another module, a thaw or a resume begins a fresh curve."""
    pieces: list[list[PlasticityRead]] = [[]]
    for event in summary.events:
        if isinstance(event, (Thawed, Resumed)):
            pieces.append([])
        elif isinstance(event, PlasticityRead):
            if pieces[-1] and pieces[-1][-1].module != event.module:
                pieces.append([])
            pieces[-1].append(event)
    return [piece for piece in pieces if piece]


def _positive(value: float) -> float:
    return value if value > 0 else math.nan


def _percentage(share: float | None) -> float:
    return math.nan if share is None else 100 * share
