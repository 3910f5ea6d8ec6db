"""The pictures of a record as SVG files: accuracy over time, what was frozen when, compute skipped against quality."""

import colorsys
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.proving.comparing.comparison import PolicyComparison, WorkloadComparison
from benchmarks.proving.comparing.results import Outcome

LONGEST_LABEL = 44
INK, GRID = "#767c84", "#8a919a"
"""Read on a light and on a dark page alike: the files have no background of their own."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "egeria",
    "font.size": 9.0,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.3,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "text.parse_math": False,
    "axes.unicode_minus": False,
}
CLOCK_NAMES = {"wall": "wall-clock", "cpu": "CPU"}


def draw_all(comparison: WorkloadComparison, folder: Path) -> list[str]:
    """Draw what there is data for; return the names of the files."""
    shown = comparison.policies
    colours = {policy.policy: _colour(place / max(1, len(shown) - 1)) for place, policy in enumerate(shown)}
    prefix = f"{comparison.workload.name}-{comparison.tier}"
    names = [f"{prefix}-accuracy.svg"]
    draw_curves(comparison, shown, colours, folder / names[0])
    if any(outcome.num_modules for policy in shown for outcome in policy.outcomes):
        names.append(f"{prefix}-frozen.svg")
        draw_timeline(shown, colours, folder / names[-1])
    if any(policy.difference and policy.policy != comparison.base for policy in shown):
        names.append(f"{prefix}-plane.svg")
        draw_plane(comparison, shown, colours, folder / names[-1])
    return names


def draw_curves(
    comparison: WorkloadComparison, shown: Sequence[PolicyComparison], colours: dict[str, str], path: Path
) -> None:
    """Draw the metric over seconds of training: thin for each seed, thick for the mean of the seeds by epoch."""

    def paint(axes: Any) -> None:
        for policy in shown:
            colour = colours[policy.policy]
            curves = [_curve(outcome, comparison.clock) for outcome in policy.outcomes]
            for seconds, values in curves:
                axes.plot(seconds, values, color=colour, linewidth=0.5, alpha=0.5)
            seconds, values = ([statistics.fmean(column) for column in zip(*rows, strict=True)]
                               for rows in zip(*curves, strict=True))  # fmt: skip
            axes.plot(seconds, values, color=colour, linewidth=1.6, label=_short(policy.policy))
        axes.set_xlabel(f"seconds of training, {CLOCK_NAMES[comparison.clock]}, evaluation excluded")
        axes.set_ylabel(comparison.workload.metric)
        axes.legend(fontsize=8)

    _save(path, (7.6, 3.6), paint)


def draw_timeline(shown: Sequence[PolicyComparison], colours: dict[str, str], path: Path) -> None:
    """Draw for each run how many modules are frozen when: the more, the stronger the colour."""
    runs = [(policy, outcome) for policy in shown for outcome in policy.outcomes if outcome.num_modules]

    def paint(axes: Any) -> None:
        for row, (policy, outcome) in enumerate(runs):
            for span in outcome.spans:
                if not span.frozen:
                    continue
                share = span.frozen / max(outcome.num_modules - 1, span.frozen, 1)
                axes.barh(
                    row, span.end - span.begin, left=span.begin, height=0.8, linewidth=0,
                    color=colours[policy.policy], alpha=0.2 + 0.8 * share,
                )  # fmt: skip
                if span.end - span.begin > 0.02 * outcome.final.epoch:
                    axes.text(span.begin, row, f" {span.frozen}", va="center", ha="left", fontsize=7)
        labels = [f"{_short(policy.policy)}, seed {run.run.seed}" for policy, run in runs]
        axes.set_yticks(range(len(runs)), labels, fontsize=8)
        axes.set_xlim(0, max(outcome.final.epoch for _, outcome in runs))
        axes.set_ylim(len(runs) - 0.5, -0.5)
        axes.set_xlabel("epoch; numbers: frozen layer modules")
        axes.grid(axis="y", visible=False)

    _save(path, (7.6, 0.8 + 0.22 * len(runs)), paint)


def draw_plane(
    comparison: WorkloadComparison, shown: Sequence[PolicyComparison], colours: dict[str, str], path: Path
) -> None:
    """Draw quality against the compute that is skipped: a point and its 95 % interval for each policy."""
    sign = 1 if comparison.workload.higher_is_better else -1
    unit = "%" if comparison.workload.is_relative else "points"

    def paint(axes: Any) -> None:
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.axhline(-comparison.tolerance, color=INK, linewidth=0.8, linestyle="--")
        for policy in shown:
            skipped, difference = policy.skipped, policy.difference
            if policy.policy == comparison.base or skipped is None or difference is None:
                continue
            colour = colours[policy.policy]
            errors = [
                [[spread.mean - spread.low], [spread.high - spread.mean]]
                if spread.low is not None and spread.high is not None
                else None
                for spread in (skipped, difference)
            ]
            axes.errorbar(
                skipped.mean, sign * difference.mean, xerr=errors[0],
                yerr=errors[1] if sign > 0 or errors[1] is None else errors[1][::-1],
                color=colour, marker="o", markersize=6, linewidth=0.8, label=_short(policy.policy),
            )  # fmt: skip
        axes.set_xlabel("compute skipped, %")
        axes.set_ylabel(f"{comparison.workload.metric}, {unit} better than {comparison.base}")
        axes.legend(fontsize=8)

    _save(path, (7.6, 3.6), paint)


def _curve(outcome: Outcome, clock: str) -> tuple[list[float], list[float]]:
    seconds = [found.wall_s if clock == "wall" else found.cpu_s for found in outcome.evaluations]
    return seconds, [found.value for found in outcome.evaluations]


def _short(text: str) -> str:
    """Return a policy as a label; the tables have it in full."""
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 3]}..."


def _colour(place: float) -> str:
    """Return a colour from blue at 0 to orange at 1, to be read on a light and on a dark page alike."""
    channels = colorsys.hls_to_rgb((0.58 + 0.5 * place) % 1.0, 0.45, 0.6)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _save(path: Path, size: tuple[float, float], paint: Callable[[Any], None]) -> None:
    """Write a picture in the style of the records; the same content gives the same bytes."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.subplots())
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
