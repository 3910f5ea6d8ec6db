"""The answer to a study of sweeps: tables, one picture, and a record of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.proving.comparing.accuracy_time import CLOCKS
from benchmarks.proving.comparing.comparison import PolicyComparison, WorkloadComparison
from benchmarks.proving.comparing.description import HOW_COMPUTE, HOW_SPREAD, HOW_TIME, circumstances, heading, method
from benchmarks.proving.comparing.pictures import INK, save_figure
from benchmarks.proving.comparing.record import keep_journals, to_dict, write_results
from benchmarks.proving.comparing.statistics import Spread
from benchmarks.proving.comparing.tables import NAMES, markdown
from benchmarks.proving.studies.sweeps import Point, Study, Sweep
from egeria.report.svg import module_colour

PICTURE = "sensitivity.svg"
INTERVAL = "plasticity.interval_steps"
MOST_COLUMNS = 4
QUALITY_COLOUR, SKIPPED_COLOUR = module_colour(0, 2), module_colour(1, 2)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A value of a parameter, and what it came to on one workload."""

    label: str
    value: Any
    is_default: bool
    found: PolicyComparison


def write_sensitivity(study: Study, comparisons: Sequence[WorkloadComparison], folder: Path) -> None:
    """Write a record: README.md, results.json, one picture, the journals packed, and what was asked."""
    folder.mkdir(parents=True, exist_ok=True)
    keep_journals(comparisons, folder, study.save)
    draw(study, comparisons, folder / PICTURE)
    sweeps = [_sweep_dict(comparison, sweep) for comparison in comparisons for sweep in study.sweeps]
    write_results({"sweeps": sweeps, "comparisons": [to_dict(found) for found in comparisons]}, folder)
    (folder / "README.md").write_text(_describe(study, comparisons), encoding="utf-8")


def sweep_table(comparison: WorkloadComparison, sweep: Sweep) -> str:
    """Return one line for each value."""
    unit = "%" if comparison.workload.is_relative else "points"
    header = [sweep.parameter, "seeds", f"final {comparison.workload.metric}"]
    header += [f"difference to {comparison.base}, {unit}", "compute skipped %"]
    header += [f"{NAMES[clock]} saved %" for clock in reversed(CLOCKS)]
    lines = []
    for row in _rows(comparison, sweep):
        found = row.found
        cells = [f"{row.label} (default)" if row.is_default else row.label, ", ".join(map(str, found.seeds))]
        cells += [found.final.shows(), _shows(found.difference)]
        cells.append(found.skipped.shows(1) if found.skipped else "not known")
        lines.append([*cells, *(_shows(found.saved[clock], 1) for clock in reversed(CLOCKS))])
    return markdown(header, lines)


def section(study: Study, comparison: WorkloadComparison) -> list[str]:
    """Return what is said of a workload: what plain training comes to, and a table for each sweep."""
    plain = comparison.policies[0]
    seconds = ", ".join(f"{plain.seconds[clock].shows(1)} s of {NAMES[clock]} time" for clock in reversed(CLOCKS))
    parts = [f"Plain training: {comparison.workload.metric} {plain.final.shows()}, {seconds}."]
    for sweep in study.sweeps:
        parts += [f"### `{sweep.base}`: {sweep.parameter}", sweep_table(comparison, sweep)]
    return parts


def draw(study: Study, comparisons: Sequence[WorkloadComparison], path: Path) -> None:
    """Draw a panel for each sweep, a few beside each other; the panels of a workload have one scale."""
    columns = min(MOST_COLUMNS, len(study.sweeps))
    rows = math.ceil(len(study.sweeps) / columns)

    def paint(figure: Figure) -> None:
        grid = figure.subplots(rows * len(comparisons), columns, squeeze=False)
        for place, comparison in enumerate(comparisons):
            _draw_workload(grid[place * rows : (place + 1) * rows], study, comparison)

    save_figure(path, (1.4 + 2.6 * columns, 0.4 + 2.8 * rows * len(comparisons)), paint)


def _draw_workload(grid: Any, study: Study, comparison: WorkloadComparison) -> None:
    """Draw all sweeps of a workload, row by row; what is left over stays empty."""
    panels, columns, num_sweeps = grid.ravel(), grid.shape[1], len(study.sweeps)
    for axes in panels[num_sweeps:]:
        axes.remove()
    panels = panels[:num_sweeps]
    twins = [_panel(axes, comparison, sweep) for axes, sweep in zip(panels, study.sweeps, strict=True)]
    lows, highs = zip(*(axes.get_ylim() for axes in panels), strict=True)
    highest = max(twin.get_ylim()[1] for twin in twins)
    unit = "%" if comparison.workload.is_relative else "points"
    for place, (axes, twin) in enumerate(zip(panels, twins, strict=True)):
        is_first, is_last = place % columns == 0, place % columns == columns - 1 or place == num_sweeps - 1
        axes.set_ylim(min(lows), max(highs))
        twin.set_ylim(0, max(highest, 1.0))
        axes.tick_params(axis="y", colors=QUALITY_COLOUR, labelleft=is_first)
        twin.tick_params(axis="y", colors=SKIPPED_COLOUR, labelright=is_last, right=is_last)
        if is_first:
            axes.set_ylabel(f"{comparison.workload.metric}, {unit} better than {comparison.base}", color=QUALITY_COLOUR)
        if is_last:
            twin.set_ylabel("compute skipped, %", color=SKIPPED_COLOUR)


def _panel(axes: Any, comparison: WorkloadComparison, sweep: Sweep) -> Any:
    """Draw one sweep; return the axes of the compute skipped, whose scale is still to be set."""
    rows = _rows(comparison, sweep)
    places, default, is_log = _places(sweep, rows)
    sign = 1 if comparison.workload.higher_is_better else -1
    twin = axes.twinx()
    twin.grid(visible=False)
    for mark in (0.0, -comparison.tolerance):
        axes.axhline(mark, color=INK, linewidth=0.8, linestyle="--" if mark else "-")
    _curve(axes, places, [row.found.difference for row in rows], QUALITY_COLOUR, sign)
    _curve(twin, places, [row.found.skipped for row in rows], SKIPPED_COLOUR)
    if default is not None:
        axes.axvline(default, color=INK, linewidth=0.8, linestyle=":")
        axes.text(default, 1.0, "default", transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=7)
    if is_log:
        axes.set_xscale("log")
    axes.set_xticks(places, [row.label for row in rows], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.margins(x=0.12)
    axes.set_xlabel(sweep.parameter)
    policy, _, settings = sweep.base.partition(":")
    axes.set_title(f"{comparison.workload.name}, {policy}\n{settings}".rstrip(), fontsize=8, pad=12)
    return twin


def _curve(axes: Any, places: Sequence[float], spreads: Sequence[Spread | None], colour: str, sign: int = 1) -> None:
    """Draw means with their standard deviation, in the order of the values."""
    known = sorted(
        (x, sign * spread.mean, spread.sd or 0.0) for x, spread in zip(places, spreads, strict=True) if spread
    )
    if known:
        xs, means, deviations = zip(*known, strict=True)
        axes.errorbar(xs, means, yerr=deviations, color=colour, marker="o", markersize=4, linewidth=1.2, capsize=2)


def _places(sweep: Sweep, rows: Sequence[_Row]) -> tuple[list[float], float | None, bool]:
    """Return where the values are drawn, where the default is, and whether the scale is logarithmic.

    Values that are not all numbers stand side by side.
    """
    values = [row.value for row in rows]
    own = [place for place, row in enumerate(rows) if row.is_default]
    if not all(map(_is_number, values)):
        return [float(place) for place in range(len(rows))], float(own[0]) if own else None, False
    default = values[own[0]] if own else sweep.default
    shown = [*values, default] if _is_number(default) else values
    return values, default if _is_number(default) else None, min(shown) > 0 and max(shown) >= 10 * min(shown)


def _rows(comparison: WorkloadComparison, sweep: Sweep) -> list[_Row]:
    return [_row(comparison, sweep, point) for point in sweep.points]


def _row(comparison: WorkloadComparison, sweep: Sweep, point: Point) -> _Row:
    found = comparison.find(point.policy)
    assert found is not None, "a study compares all that it asks for"
    value, label = point.value, point.label
    if value is None and sweep.parameter == INTERVAL:  # derived from the length of the training
        value = found.outcomes[0].interval_steps
        label = str(value)
    return _Row(label=label, value=value, is_default=point.is_default, found=found)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shows(spread: Spread | None, digits: int = 2) -> str:
    return spread.shows(digits, signed=True) if spread else ""


def _sweep_dict(comparison: WorkloadComparison, sweep: Sweep) -> dict[str, Any]:
    points = [
        {
            **asdict(point),
            "value": row.value,
            "difference": _as_dict(row.found.difference),
            "skipped": _as_dict(row.found.skipped),
            "saved": {clock: _as_dict(spread) for clock, spread in row.found.saved.items()},
        }
        for point, row in zip(sweep.points, _rows(comparison, sweep), strict=True)
    ]
    return {**asdict(sweep), "workload": comparison.workload.name, "tier": comparison.tier, "points": points}


def _as_dict(spread: Spread | None) -> dict[str, Any] | None:
    return asdict(spread) if spread else None


def _describe(study: Study, comparisons: Sequence[WorkloadComparison]) -> str:
    caption = (
        "Left scale: quality against plain training of the same seed, up is better; dashed: the loss that counts as\n"
        "none. Right scale: compute skipped. Bars: standard deviation over seeds. Dotted: the default."
    )
    parts = ["# Sensitivity: what each parameter does to quality and saving", f"![sensitivity]({PICTURE})", caption]
    for comparison in comparisons:
        parts += [heading(comparison), *section(study, comparison)]
    parts += [method(HOW_SPREAD, HOW_TIME, HOW_COMPUTE), circumstances(comparisons), _command(study)]
    return "\n\n".join(parts) + "\n"


def _command(study: Study) -> str:
    sweeps = " \\\n  ".join(f"--sweep '{sweep.text}'" for sweep in study.sweeps)
    command = (
        f"python -m benchmarks sensitivity {','.join(study.workloads)} \\\n  {sweeps} \\\n"
        f"  --seeds {','.join(map(str, study.seeds))} --tier {study.tier} --data DIR --results RESULTS --out RECORD"
    )
    told = "This page from the journals kept here: `sensitivity --results RECORD/journals --out RECORD`."
    return f"## Command\n\n```\n{command}\n```\n\n{told}"
