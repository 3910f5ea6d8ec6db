"""The pictures of the report: loss, plasticity, frozen share and pace over the steps of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from egeria.events import IntervalMeasured
from egeria.report.history import History
from egeria.report.metrics import lower_is_better
from egeria.report.pace import measured_intervals
from egeria.report.plasticity import plasticity_picture
from egeria.report.summary import Summary
from egeria.report.svg import COLOURS, Picture, draw, finite, mark_changes, module_colour, plot, thin, use_log
from egeria.report.words import duration, number, percent, plural

MAX_METRIC_PANELS = 4


def draw_pictures(history: History, summary: Summary) -> list[Picture]:
    """Draw what the journal has data for."""
    makers: tuple[Callable[[History, Summary], Picture | None], ...] = (
        loss_picture,
        plasticity_picture,
        frozen_picture,
        pace_picture,
    )
    return [picture for make in makers if (picture := make(history, summary)) is not None]


def loss_picture(history: History, summary: Summary) -> Picture | None:
    """Draw the training loss, the learning rate and the user's metrics."""
    intervals = history.of(IntervalMeasured)
    metrics = [metric for metric in summary.metrics if metric.num_finite]
    if not intervals and not metrics:
        return None
    losses = [metric for metric in metrics if lower_is_better(metric.name) and "loss" in metric.name.lower()]
    others = [metric for metric in metrics if metric not in losses]
    shown = others[:MAX_METRIC_PANELS]
    steps = [interval.step for interval in intervals]
    colours = {m.name: module_colour(place + 1, len(metrics) + 2) for place, m in enumerate((*losses, *shown))}

    def paint(panels: list[Any]) -> None:
        plot(panels[0], steps, [interval.loss for interval in intervals], COLOURS["loss"])
        for metric in losses:
            plot(panels[0], metric.steps, metric.values, colours[metric.name], marker=".")
        _use_log_where_wide(panels[0])
        panels[0].set_ylabel("loss")
        _draw_learning_rate(panels[0], steps, [interval.learning_rate for interval in intervals])
        for axes, metric in zip(panels[1:], shown, strict=True):
            plot(axes, metric.steps, metric.values, colours[metric.name], marker=".")
            # Above the panel: beside its short axis there is no room. A `$` in a name is no mathematics.
            axes.set_title(_short(metric.name), loc="left", fontsize=9, parse_math=False)
        for axes in panels:
            mark_changes(axes, summary.timeline)

    caption = "Mean training loss of each interval."
    if len(others) > len(shown):
        caption += f" The first {len(shown)} of {len(others)} other metrics are drawn."
    legend = [("var(--loss)", "training loss"), ("var(--rate)", "learning rate (right axis, logarithmic)")]
    legend += list(zip(colours.values(), colours, strict=True))
    return Picture(
        title="Loss and metrics",
        caption=caption,
        svg=draw("loss", _loss_alt(intervals, summary), [2.4, *([1.2] * len(shown))], summary.span, paint),
        legend=(*legend, *_change_legend(summary)),
    )


def frozen_picture(history: History, summary: Summary) -> Picture | None:
    """Draw the frozen share of the parameters and the skipped share of the compute."""
    if len(summary.depths) == 1 and summary.frozen_now == 0:
        return None
    steps = [*(point.step for point in summary.depths), summary.steps_done]
    curves = [("var(--freeze)", "parameters frozen", [point.parameter_share for point in summary.depths])]
    if all(point.skipped_share is not None for point in summary.depths):
        curves.append(("var(--skip)", "compute skipped", [point.skipped_share for point in summary.depths]))

    def paint(panels: list[Any]) -> None:
        for (_, _, shares), colour in zip(curves, (COLOURS["freeze"], COLOURS["skip"]), strict=False):
            heights = [100 * share for share in finite([*shares, shares[-1]])]
            panels[0].step(steps, heights, where="post", color=colour)
            panels[0].fill_between(steps, heights, step="post", color=colour, alpha=0.12, linewidth=0)
        panels[0].set_ylim(0, 100)
        panels[0].set_ylabel("%")

    return Picture(
        title="Frozen and skipped",
        caption="Share of all parameters that is frozen, and of an iteration's compute that freezing skips: the "
        "backward pass of the frozen modules, counting an iteration as one part forward and two parts backward.",
        svg=draw(
            "frozen",
            f"Step plot. At the end {percent(summary.depths[-1].parameter_share)} of the parameters are frozen; the "
            f"mean over the run is {percent(summary.mean_parameter_share)}.",
            [2.0],
            summary.span,
            paint,
        ),
        legend=tuple((colour, label) for colour, label, _ in curves),
    )


def pace_picture(history: History, summary: Summary) -> Picture | None:
    """Draw the iteration time of each interval, by both clocks, with the unfrozen pace."""
    intervals = measured_intervals(history)
    if not intervals:
        return None
    steps = [interval.step for interval in intervals]
    clocks = (
        ("wall", [1000 * interval.iteration_wall_s for interval in intervals], summary.wall.unfrozen_iteration_s),
        ("CPU", [1000 * interval.iteration_cpu_s for interval in intervals], summary.cpu.unfrozen_iteration_s),
    )
    tops = [_top(values, unfrozen_s) for _, values, unfrozen_s in clocks]
    num_above = sum(value > top for (_, values, _), top in zip(clocks, tops, strict=True) for value in values)

    def paint(panels: list[Any]) -> None:
        for axes, (name, values, unfrozen_s), top in zip(panels, clocks, tops, strict=True):
            plot(axes, steps, values, COLOURS["loss"])
            if unfrozen_s is not None:
                axes.axhline(1000 * unfrozen_s, color=COLOURS["ink"], linestyle="--", linewidth=1)
            axes.set_ylim(0, top)
            axes.set_ylabel(f"{name}, ms")
            mark_changes(axes, summary.timeline)

    caption = "Median time of an iteration in each interval, egeria's overhead excluded."
    if num_above:
        caption += f" {plural(num_above, 'value')} above the top edge."
    return Picture(
        title="Iteration time",
        caption=caption,
        svg=draw(
            "pace",
            f"Iteration time over steps. Unfrozen median: {duration(summary.wall.unfrozen_iteration_s)} of wall time; "
            f"last interval: {duration(intervals[-1].iteration_wall_s)}.",
            [1.7, 1.7],
            summary.span,
            paint,
        ),
        legend=(
            ("var(--loss)", "iteration time"),
            ("currentColor", "unfrozen median (dashed)"),
            *_change_legend(summary),
        ),
    )


def _draw_learning_rate(axes: Any, steps: Sequence[int], rates: Sequence[float]) -> None:
    points = [(step, rate) for step, rate in zip(steps, finite(rates), strict=True) if rate > 0]
    if not points:
        return
    twin = axes.twinx()
    twin.grid(False)
    use_log(twin)
    kept_steps, kept_rates = thin([step for step, _ in points], [rate for _, rate in points], 1000)
    twin.step(kept_steps, kept_rates, where="post", color=COLOURS["rate"], linewidth=1.0)
    low, high = min(kept_rates), max(kept_rates)
    # A constant rate would leave the logarithmic axis without a single number on it.
    twin.set_ylim(low / 3, high * 3)
    twin.set_ylabel("learning rate")
    twin.spines["right"].set_visible(True)


def _use_log_where_wide(axes: Any) -> None:
    heights = [value for line in axes.get_lines() for value in line.get_ydata() if math.isfinite(value)]
    if heights and min(heights) > 0 and max(heights) > 50 * min(heights):
        use_log(axes)


def _top(values: Sequence[float], unfrozen_s: float | None) -> float:
    """Return the upper end of the axis: a slow first interval must not press all others flat."""
    usual = max(statistics.median(values), 1000 * (unfrozen_s or 0.0))
    return max(1.1 * min(max(values), 2 * usual), 1e-6)


def _change_legend(summary: Summary) -> list[tuple[str, str]]:
    actions = {mark.action for mark in summary.timeline}
    return [
        (f"var(--{colour})", label)
        for action, colour, label in (
            ("frozen", "freeze", "a module freezes (dotted)"),
            ("thawed", "thaw", "modules thaw (dashed)"),
        )
        if action in actions
    ]


def _loss_alt(intervals: Sequence[IntervalMeasured], summary: Summary) -> str:
    losses = [interval.loss for interval in intervals if interval.loss is not None]
    ends = f"Training loss from {number(losses[0])} to {number(losses[-1])}. " if losses else ""
    return ends + "; ".join(f"{metric.name} ends at {number(metric.final)}" for metric in summary.metrics)


def _short(name: str) -> str:
    """Return a name that the drawing library has letters for; the legend has it in full."""
    letters = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name)
    return letters if len(letters) <= 60 else letters[:57] + "..."
