"""The record of an analysis afterwards: a table and a picture for each run, beside what policies froze."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks.proving.comparing.comparison import WorkloadComparison
from benchmarks.proving.comparing.description import circumstances, method
from benchmarks.proving.comparing.pictures import INK, save_figure
from benchmarks.proving.comparing.record import write_results
from benchmarks.proving.comparing.results import Outcome
from benchmarks.proving.comparing.tables import markdown
from benchmarks.proving.studies.posthoc import MOST_BATCHES, SLOPE, STABLE, Analysis
from egeria.report.svg import module_colour

HOW_ANALYSED = f"""\
- Distance: PWCCA between the activations of a layer module at a checkpoint of plain training and those at its end, for
  positions drawn from up to {MOST_BATCHES} training batches in inference mode, 0 for what is a linear map of it;
  weighted by the trained network. Positions of one picture or text are alike, so that it errs on the low side.
- Stable: the distance changes by no more than {STABLE:g} in a sixteenth of the training (figure 1 of the paper).
  Stationary: the similarities between samples change at no more than {SLOPE:.0%} of the module's largest pace so
  far, that of the first stretch left out. The first needs the trained network, the second what a run has.
- Theoretical saving: backward pass and optimizer of what is at rest, by operations, as if every verdict were free and
  froze for exactly that stretch; what the freeze does to the learning is not in it."""


def describe_analysis(analysis: Analysis) -> list[str]:
    """Return what was found: in words, then as a table."""
    stationary = f"what is stationary, front to back, {analysis.saving(analysis.stationary):.0%}."
    if all(reading.distance is None for readings in analysis.readings for reading in readings):
        return [f"There are too few samples for PWCCA. Freezing {stationary}", _table(analysis)]
    unknown = f" Not known of, and counted as moving: {', '.join(analysis.unknown)}." if analysis.unknown else ""
    in_any_order, stable = analysis.saving(analysis.stable, in_any_order=True), analysis.saving(analysis.stable)
    told = (
        f"Freezing what is stable would save {in_any_order:.0%} of the time in any order, {stable:.0%} front to back; "
        f"{stationary} Behind the first of {len(analysis.lengths)} stretches, change of similarities and change of "
        f"distance agree with a rank correlation of {_number(analysis.agreement())} within a module.{unknown}"
    )
    return [told, _table(analysis)]


def write_posthoc(analyses: Sequence[tuple[WorkloadComparison, int, Analysis]], folder: Path, command: str) -> None:
    """Write a record: README.md, results.json and a picture for each run.

    Args:
        analyses: with the kept runs of the workload, and the seed.
        folder: of the record.
        command: that it was made by.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["# When did each layer module become what it is in the trained network?"]
    results: list[dict[str, Any]] = []
    for comparison, seed, analysis in analyses:
        picture = f"{comparison.workload.name}-{comparison.tier}-seed{seed}.svg"
        others = [
            outcome
            for policy in comparison.policies
            for outcome in policy.outcomes
            if outcome.run.seed == seed and outcome.run.policy.is_watched
        ]
        draw(analysis, others, folder / picture)
        parts.append(f"## {comparison.workload.name}, tier {comparison.tier}, seed {seed}")
        parts += [*describe_analysis(analysis), f"![distances, and what froze]({picture})"]
        parts += [
            f"What {outcome.run.policy.text} would have frozen in any order is "
            f"{in_any_order(analysis, outcome):.0%} of the time."
            for outcome in others
            if outcome.predicted
        ]
        results.append(
            {
                "workload": comparison.workload.name,
                "tier": comparison.tier,
                "seed": seed,
                **asdict(analysis),
                "saving_in_any_order": analysis.saving(analysis.stable, in_any_order=True),
                "saving_stable": analysis.saving(analysis.stable),
                "saving_stationary": analysis.saving(analysis.stationary),
                "agreement": analysis.agreement(),
                "unknown": analysis.unknown,
            }
        )
    comparisons = list({id(comparison): comparison for comparison, _, _ in analyses}.values())
    parts += [method(HOW_ANALYSED), circumstances(comparisons), f"```\n{command}\n```"]
    write_results({"analyses": results}, folder)
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def draw(analysis: Analysis, others: Sequence[Outcome], path: Path) -> None:
    """Draw distances over the training, changes of similarities, and how many modules each way would have frozen."""
    shares = [reading.share for reading in analysis.readings[0]]

    def paint(figure: Figure) -> None:
        top, middle, bottom = figure.subplots(3, 1, sharex=True)
        for module, readings in enumerate(analysis.readings):
            colour = module_colour(module, len(analysis.readings))
            distances = [reading.distance for reading in readings]
            if None not in distances:
                top.plot(shares, distances, color=colour, marker=".", label=analysis.names[module])
            moved = [reading.moved or float("nan") for reading in readings]
            middle.plot(shares, moved, color=colour, marker=".")
        top.set_ylabel("PWCCA distance")
        if top.lines:
            top.legend(fontsize=6, loc="upper right")
        middle.set_ylabel("similarities changed")
        middle.set_yscale("log")
        middle.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bottom.yaxis.set_major_locator(MaxNLocator(integer=True))
        ways = {"stable, by PWCCA": analysis.front(analysis.stable), "stationary": analysis.front(analysis.stationary)}
        for place, (name, depths) in enumerate(ways.items()):
            bottom.step(shares, [depths[0], *depths], where="pre", label=name, color=INK, linestyle=("-", ":")[place])
        for place, outcome in enumerate(others):
            _draw_run(bottom, outcome, module_colour(place, len(others)))
        bottom.set_ylabel("front modules frozen")
        bottom.set_xlabel("share of the training")
        bottom.legend(fontsize=6, loc="upper left")

    save_figure(path, (7.6, 7.2), paint)


def _draw_run(axes: Any, outcome: Outcome, colour: str) -> None:
    """Draw how many front modules a run had frozen."""
    length = outcome.final.epoch
    xs = [edge / length for span in outcome.spans for edge in (span.begin, span.end)]
    ys = [span.frozen for span in outcome.spans for _ in range(2)]
    axes.plot(xs, ys, color=colour, linewidth=1.2, label=outcome.run.policy.text)
    if outcome.predicted:
        at = [epoch / length for epoch, _ in outcome.predicted]
        counts = [sum(rests) for _, rests in outcome.predicted]
        label = f"{outcome.run.policy.text}, in any order"
        axes.step(at, counts, where="post", color=colour, linewidth=0.8, linestyle="--", label=label)


def in_any_order(analysis: Analysis, outcome: Outcome) -> float:
    """Return the share of the training's time that the backward pass of what 'smartfrz' would freeze takes.

    In any order, as the original does: behind a module that trains a freeze saves its optimizer step and the gradients
    of its weights alone, about half of what is counted here.
    """
    ends = [*(epoch for epoch, _ in outcome.predicted[1:]), outcome.final.epoch]
    return sum(
        (end - begin) / outcome.final.epoch * sum(itertools.compress(analysis.weights, rests))
        for (begin, rests), end in zip(outcome.predicted, ends, strict=True)
    )


def _number(value: float | None) -> str:
    return "unknown size" if value is None else f"{value:+.2f}"


def _table(analysis: Analysis) -> str:
    shares = [reading.share for reading in analysis.readings[0]]
    shown = [min(range(len(shares)), key=lambda place: abs(shares[place] - share)) for share in (0.0, 0.25, 0.5, 0.75)]
    header = ["layer module", "of an iteration", *(f"distance at {shares[place]:.0%}" for place in shown)]
    header += ["stable", "stationary", "comes to rest later than by PWCCA"]
    lines = []
    for module, readings in enumerate(analysis.readings):
        weight = f"{analysis.weights[module]:.1%}" if module < len(analysis.weights) else "never freezes"
        distances = [readings[place].distance for place in shown]
        cells = ["not known" if distance is None else f"{distance:.3f}" for distance in distances]
        spent = [
            sum(length for length, rests in zip(analysis.lengths, verdict(module), strict=True) if rests)
            for verdict in (analysis.stable, analysis.stationary)
        ]
        delay = analysis.delay(module)
        told = "not by both" if delay is None else f"{delay:+.0%} of the training"
        lines.append(
            [analysis.names[module], weight, *cells, *(f"{share:.0%} of the training" for share in spent), told]
        )
    return markdown(header, lines)
