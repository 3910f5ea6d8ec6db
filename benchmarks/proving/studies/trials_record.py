"""The record of trials: rank correlations of the cost of freezes with what foretold it, all points, one picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.proving.comparing.comparison import WorkloadComparison, compare
from benchmarks.proving.comparing.description import HOW_BRANCHED, HOW_JUDGED, circumstances, heading, method
from benchmarks.proving.comparing.pictures import INK, save_figure
from benchmarks.proving.comparing.record import keep_journals, to_dict, write_results
from benchmarks.proving.comparing.results import Outcome
from benchmarks.proving.comparing.statistics import Estimate, spread
from benchmarks.proving.comparing.tables import markdown
from benchmarks.proving.policies import PLAIN
from benchmarks.proving.running.runfile import ORACLE
from benchmarks.proving.studies.trials import (
    CHANGE,
    DEPTH,
    GRADIENT,
    NEWEST_READINGS,
    OBSERVED,
    OTHERS,
    PLASTICITY,
    TO_THE_END,
    WORTH,
    Point,
    average_seeds,
    comparable,
    correlate,
    find_points,
)
from egeria.report.svg import module_colour

PICTURE = "worth.svg"
Correlations = dict[str, tuple[Estimate, Estimate]]
WITHIN, ALL, AVERAGED = "within each workload and seed", "over all", "seeds averaged, within each workload"
HOW_FORETOLD = f"""\
- {WORTH}: of all that the steps of the first 5 % of the training brought, the share of the frozen modules, times the
  sum of the learning rate still to come as a share of that of the whole training.
- {PLASTICITY}: mean over the frozen modules of the newest {NEWEST_READINGS} readings of each, against a reference in
  float32; {PLASTICITY}{TO_THE_END}: what each would come to over the rate sum still to come by the law that 'forecast'
  fits to them (in proportion to the rate sum where there are fewer), added up.
- {CHANGE}: mean over the frozen modules of the relative change of the weights in an interval, in the newest
  5 % of the training; {CHANGE}{TO_THE_END}: for each unit of the learning rate, times the rate sum still to
  come, added up.
- {GRADIENT}: L1 norm of the gradients of the frozen modules, added up over an interval and divided by its
  steps, in the newest 5 % of the training; {GRADIENT}{TO_THE_END}: times the rate sum still to come.
- {DEPTH}: how many modules are frozen, times the share of the rate sum still to come. It
  measures nothing: what foretells no better has only found out that more and earlier freezes cost more.
- {OTHERS}: mean cost of the same freeze with the other seeds. It shows how far chance lets a cost
  be foretold at all."""
HOW_CORRELATED = """\
- Spearman's rank correlation with the cost. 'Within': points are ranked among those of the same workload and seed, and
  the ranks pooled. 'Over all': ranked together, whatever the unit of the metric. 'Seeds averaged': means over the
  seeds, ranked within each workload.
- The 95 % interval is a bootstrap's: workloads and seeds are drawn, then the points of each. What interval holds 0 may
  be chance. 'Above it' is by how much worth's correlation is higher, over the same draws."""
MEASURED = (PLASTICITY, PLASTICITY + TO_THE_END, CHANGE, CHANGE + TO_THE_END, GRADIENT, GRADIENT + TO_THE_END)
"""What worth has to be better than, to be worth measuring."""


def find_correlations(points: Sequence[Point]) -> dict[str, Correlations]:
    """Return the correlations in each way of ranking."""
    found = {WITHIN: correlate(points, within=True), ALL: correlate(points, within=False)}
    if len({point.seed for point in points}) > 1:
        found[AVERAGED] = correlate(average_seeds(points), within=True)
    return found


def write_trials(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write a record: README.md, results.json, a picture and the journals packed.

    Args:
        outcomes: by `trials.choose`.
        folder: of the record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    points, comparisons = find_points(outcomes), compare(outcomes, PLAIN)
    keep_journals(comparisons, folder)
    draw(points, comparisons, folder / PICTURE)
    correlations = find_correlations(points)
    results = {
        "points": [asdict(point) for point in points],
        "correlations": {
            kind: {name: {"rho": asdict(own), "worth_above": asdict(above)} for name, (own, above) in found.items()}
            for kind, found in correlations.items()
        },
        "comparisons": [to_dict(found) for found in comparisons],
    }
    write_results(results, folder)
    (folder / "README.md").write_text(_describe(points, comparisons, correlations), encoding="utf-8")


def describe_findings(points: Sequence[Point], correlations: dict[str, Correlations]) -> list[str]:
    """Return what was found: in words, then as a table."""
    compared, _ = comparable(points)
    groups = {(point.workload, point.seed) for point in compared}
    told = f"{len(compared)} of {len(points)} points, of {len(groups)} trainings"
    if len(compared) < len(points):
        told += (
            "; elsewhere something is not known: worth where a model begins untrained, plasticity before it was read"
        )
    found = correlations[WITHIN]
    if WORTH not in found:
        return [f"{told}. Worth is known at none of them: nothing can be said of it."]
    return [f"{told}. {_verdict(found)}", correlation_table(correlations)]


def correlation_table(correlations: dict[str, Correlations]) -> str:
    """Return a line for each thing that may foretell the cost."""
    kinds = [kind for kind, found in correlations.items() if found]
    header = ["foretold by", *(f"{kind} [95 %]" for kind in kinds), f"worth's above it, {WITHIN} [95 %]"]
    lines = []
    for name, (_, above) in correlations[WITHIN].items():
        cells = [correlations[kind][name][0].shows() if name in correlations[kind] else "" for kind in kinds]
        lines.append([name, *cells, "" if name == WORTH else above.shows()])
    return markdown(header, lines)


def draw(points: Sequence[Point], comparisons: Sequence[WorkloadComparison], path: Path) -> None:
    """Draw worth against cost, a panel for each workload that has any: a point for each freeze and seed."""
    known = [point for point in points if point.foretold[WORTH] is not None]
    shown = [found for found in comparisons if any(point.workload == _label(found) for point in known)] or comparisons
    depths = sorted({point.depth for point in points})

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, comparison in zip(panels, shown, strict=True):
            own = [point for point in known if point.workload == _label(comparison)]
            axes.axhline(0, color=INK, linewidth=0.8)
            for depth in depths:
                here = [point for point in own if point.depth == depth]
                xs, ys = [100 * (point.foretold[WORTH] or 0.0) for point in here], [point.cost for point in here]
                colour = module_colour(depths.index(depth), len(depths))
                axes.scatter(xs, ys, s=16, color=colour, label=f"{depth} frozen")
            axes.set_title(comparison.workload.name, fontsize=9)
            axes.set_xlabel("worth still to come, % of that of the training")
            axes.set_ylabel(f"{comparison.workload.metric} lost, {_unit(comparison)}")
        panels[0].legend(fontsize=8)

    save_figure(path, (0.6 + 3.4 * len(shown), 3.4), paint)


def _verdict(found: Correlations) -> str:
    """Return what the correlations within each workload and seed show of worth."""
    own = found[WORTH][0]
    if own.value is None:
        return "The cost, or worth, is the same at all points: there is nothing to foretell."
    sentence = (
        f"Within a workload and seed worth foretells what a freeze costs with a rank correlation of {own.shows()}"
    )
    sentence += ", which may be chance." if _holds_zero(own) else "."
    rivals = {name: found[name] for name in (*MEASURED, DEPTH) if name in found and found[name][0].value is not None}
    better, worse, alike = [], [], []
    for name, (_, above) in rivals.items():
        (alike if _holds_zero(above) else better if (above.value or 0.0) > 0 else worse).append(name)
    told = (
        ("It foretells it better than", better),
        ("It foretells it worse than", worse),
        ("Not told apart from", alike),
    )
    sentence += "".join(f" {words}: {', '.join(names)}." for words, names in told if names)
    if OTHERS in found and found[OTHERS][0].value is not None:
        sentence += f" The same freeze with other seeds foretells it with {found[OTHERS][0].shows()}."
    return sentence


def _holds_zero(estimate: Estimate) -> bool:
    return estimate.low is None or estimate.high is None or estimate.low <= 0 <= estimate.high


def _describe(
    points: Sequence[Point], comparisons: Sequence[WorkloadComparison], correlations: dict[str, Correlations]
) -> str:
    parts = ["# Worth against branched trials: does it foretell what a freeze costs?"]
    parts += describe_findings(points, correlations)
    num_trials = sum(len(it.outcomes) for found in comparisons for it in found.policies if it.purpose == ORACLE)
    if num_trials > len(points):
        told = "are no points: they never froze so deep, or ended without a finite metric."
        parts.append(f"Of {num_trials} trials {num_trials - len(points)} {told}")
    parts.append(f"![worth against cost]({PICTURE})")
    if len(comparisons) > 1:
        parts += ["## Each workload by itself", _by_workload(points)]
    for comparison in comparisons:
        own = [point for point in points if point.workload == _label(comparison)]
        parts += [heading(comparison), _point_table(own, comparison), _watching(comparison)]
    told = method(HOW_FORETOLD, HOW_CORRELATED, HOW_JUDGED, HOW_BRANCHED)
    return "\n\n".join([*parts, told, circumstances(comparisons), _command(points, comparisons)]) + "\n"


def _by_workload(points: Sequence[Point]) -> str:
    workloads = list(dict.fromkeys(point.workload for point in points))
    found = {name: correlate([point for point in points if point.workload == name], within=True) for name in workloads}
    names = [name for name in points[0].foretold if any(name in own for own in found.values())]
    lines = [[name, *(own[name][0].shows() if name in own else "" for own in found.values())] for name in names]
    return markdown(["foretold by, within each seed [95 %]", *workloads], lines)


def _point_table(points: Sequence[Point], comparison: WorkloadComparison) -> str:
    """Return a line for each freeze, means over the seeds."""
    names = [name for name in (WORTH, *MEASURED) if any(point.foretold[name] is not None for point in points)]
    header = [
        "frozen from",
        "layer modules",
        "seeds",
        f"{comparison.workload.metric} lost, {_unit(comparison)}",
        *names,
    ]
    lines = []
    for time, depth in dict.fromkeys((point.time, point.depth) for point in points):
        same = [point for point in points if (point.time, point.depth) == (time, depth)]
        cost, seeds = spread([point.cost for point in same]), ", ".join(str(point.seed) for point in same)
        cells = [_mean([point.foretold[name] for point in same]) for name in names]
        lines.append([f"{time:g}", str(depth), seeds, cost.shows(signed=True) if cost else "", *cells])
    return markdown(header, lines)


def _watching(comparison: WorkloadComparison) -> str:
    """Tell whether watching changed the training: what was measured would be of another one."""
    plain, observed = comparison.policies[0], comparison.find(OBSERVED)
    assert observed is not None, "there are no points without"
    pairs = zip(plain.outcomes, observed.outcomes, strict=True)
    num_same = sum(one.quality == other.quality for one, other in pairs)
    return f"Observed runs ended with the quality of plain ones in {num_same} of {len(observed.outcomes)} seeds."


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.3g}" if len(known) == len(values) else "not known"


def _label(comparison: WorkloadComparison) -> str:
    return f"{comparison.workload.name} ({comparison.tier})"


def _unit(comparison: WorkloadComparison) -> str:
    return "%" if comparison.workload.is_relative else "points"


def _command(points: Sequence[Point], comparisons: Sequence[WorkloadComparison]) -> str:
    def listed(values: Sequence[Any]) -> str:
        return ",".join(f"{value:g}" for value in sorted(set(values)))

    command = (
        f"python -m benchmarks trials {','.join(found.workload.name for found in comparisons)} \\\n"
        f"  --seeds {listed([point.seed for point in points])} --times {listed([point.time for point in points])} "
        f"--depths {listed([point.depth for point in points])} \\\n"
        f"  --tier {comparisons[0].tier} --data DIR --results RESULTS --out RECORD"
    )
    told = "This page from the journals kept here: `trials --results RECORD/journals --out RECORD`."
    return f"## Command\n\n```\n{command}\n```\n\n{told}"
