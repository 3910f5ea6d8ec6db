"""A record of what schedules of freezing cost in fine-tunings, beside what worth and the loss foretold.

    python -m benchmarks run W[,W] --policy none,default,static:schedule=0.5:6,... --seeds 0,1,2 --results RESULTS
    python -m benchmarks.schedule_costs --results RESULTS --out benchmarks/records/NAME

Times are left out: such runs may be made many at a time, on an accelerator that they share (`--device cuda --jobs 15`).
The page from a record: `--results RECORD --out RECORD`. With `--replays RECORD` it has what the default would freeze
now on the evidence of other runs of it, such as those of record 0015. With `--rivals` the other policies stand beside
the schedules, by what they froze; with `--limits 0.03,0.06` the page tells what the default would take, and lose as far
as foretold, at these values of `policy.worth_limit`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.proving.comparing import archive
from benchmarks.proving.comparing.comparison import WorkloadComparison, compare
from benchmarks.proving.comparing.description import circumstances
from benchmarks.proving.comparing.record import keep_journals, write_results
from benchmarks.proving.comparing.results import Outcome, read_results
from benchmarks.proving.comparing.statistics import rank_correlations
from benchmarks.proving.comparing.tables import markdown
from benchmarks.proving.policies import DEFAULT, PLAIN
from benchmarks.proving.running.course import LOSS
from egeria.config import Config
from egeria.config.checks import read_timetable
from egeria.errors import EgeriaError
from egeria.events import IntervalMeasured, MetricLogged
from egeria.policy.worth import FADING
from egeria.report.freezing import backward_shares_of
from egeria.report.history import read_history
from egeria.report.price import freezes, worth_shares
from egeria.report.replay import replay

POWERS = (1.0, 1.5, 2.0, 2.5, 3.0)
"""Of the learning rate at which a freeze comes, as a share of its largest, that what it costs may fall with."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Of a workload, means over seeds."""

    shares: list[float]
    """Of what the steps of all layer modules but the last brought in the first steps, front to back."""
    rates: list[tuple[float, float]]
    """By share of the training the learning rate, as a share of its largest."""
    final_loss: float
    """Of plain training, over the last stretch before an evaluation."""

    def part(self, schedule: str, power: float = FADING + 1) -> float | None:
        """Return the share of what steps bring that a schedule such as '0.3:3 0.65:6' gives up, as far as foretold."""
        begins: dict[int, float] = {}
        for at, front in read_timetable(schedule):
            for module in range(front.frozen):
                begins.setdefault(module, at)
        return self.part_of(begins, power)

    def part_of(self, begins: Mapping[int, float], power: float = FADING + 1) -> float | None:
        """Return the same of freezes: for each layer module the share of the training at which it froze.

        None where one froze that did not come trained, of which worth does not tell.
        """
        if max(begins, default=0) >= len(self.shares):
            return None
        times, rates = zip(*self.rates, strict=True)
        return math.fsum(self.shares[module] * np.interp(at, times, rates) ** power for module, at in begins.items())


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one schedule, or rival, cost on one workload."""

    workload: str
    is_held_out: bool
    schedule: str
    """Or the name of the rival."""
    seeds: int
    lost: float
    """Mean over the seeds: points, or per cent where the workload is judged so."""
    scatter: float | None
    """Standard deviation over the seeds; None for one."""
    is_within: bool
    """Whether it lost no more than counts as none."""
    skipped: float | None
    """Per cent of the run's compute; None where that is not known."""
    part: float | None
    """Of what steps bring, given up as far as foretold; None where worth was not measured."""
    by_loss: float | None
    """That times the square root of the training loss that plain training ends with."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """What a workload lost for each part given up: least squares through nothing, weighed by seeds."""

    workload: str
    is_held_out: bool
    final_loss: float
    lost_per_part: float
    lost_per_part_by_loss: float
    unexplained: dict[str, float]
    """By power of the rate, share of the squares of what its schedules cost that parts do not explain."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What the default would take of a workload now, means over seeds; shares of a run, in per cent."""

    workload: str
    seeds: int
    time: float
    """By the share of an iteration that a freeze saves, as these runs measured it."""
    compute: float


@dataclass(frozen=True, kw_only=True)
class Limited:
    """What the default takes at a value of `policy.worth_limit`, by replays: mean over workloads."""

    limit: float
    compute: float
    """Per cent of a run."""
    by_loss: float | None
    """The part given up times the root of the loss, of workloads that are judged in points."""
    by_loss_relative: float | None
    """The same of those that are judged in per cent; None for none."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read runs, print what was found, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="of `run`, or a record")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--replays", type=Path, help="runs of the default, or a record with some")
    parser.add_argument("--rivals", action="store_true", help="other policies beside the schedules")
    parser.add_argument("--limits", type=_numbers, default=[], metavar="A,B", help="values of policy.worth_limit")
    parser.add_argument("--tier", default="cpu")
    options = parser.parse_args(arguments)
    with archive.opened(options.results) as results:
        comparisons = compare(read_results(results, tier=options.tier), PLAIN)
        known = {found.workload.name: _know(found) for found in comparisons}
        points = [
            point for found in comparisons for point in _points(found, known[found.workload.name], options.rivals)
        ]
        slopes = [
            _slope(found, own, [point for point in points if point.workload == found.workload.name])
            for found in comparisons
            if (own := known[found.workload.name]) is not None
            and any(policy.outcomes[0].run.policy.schedule for policy in found.policies)
            and not options.rivals
        ]
        limited = [_limit(comparisons, known, limit) for limit in options.limits]
        options.out.mkdir(parents=True, exist_ok=True)
        keep_journals(comparisons, options.out)
    replayed: list[Replayed] = []
    if options.replays:
        with archive.opened(options.replays) as results:
            replayed = _replay(read_results(results, tier=options.tier))
    page = f"{describe(points, slopes, replayed, limited)}\n{circumstances(comparisons)}\n"
    parts = {"points": points, "slopes": slopes, "replayed": replayed, "limited": limited}
    write_results({name: list(map(asdict, part)) for name, part in parts.items()}, options.out)
    (options.out / "README.md").write_text(page, encoding="utf-8")
    print(page)


def _know(comparison: WorkloadComparison) -> Known | None:
    """Return what worth needs, from runs of the default and plain ones; None where none of them measured worth."""
    plain, default = comparison.find(PLAIN), comparison.find(DEFAULT)
    if plain is None or default is None:
        return None
    measured = [read_history(outcome.directory).of(IntervalMeasured) for outcome in default.outcomes]
    rows = [shares for shares in map(worth_shares, measured) if shares is not None]
    if not rows:
        return None
    losses = [
        event.values[LOSS]
        for outcome in plain.outcomes
        for event in read_history(outcome.directory).of(MetricLogged)[-1:]
    ]
    return Known(
        shares=[statistics.fmean(column) for column in zip(*rows, strict=True)],
        rates=_rates(measured[0]),
        final_loss=statistics.fmean(losses),
    )


def _rates(intervals: Sequence[IntervalMeasured]) -> list[tuple[float, float]]:
    last, largest = max(event.step for event in intervals), max(event.learning_rate for event in intervals)
    return [(event.step / last, event.learning_rate / largest) for event in intervals]


def _points(comparison: WorkloadComparison, known: Known | None, rivals: bool) -> list[Point]:
    points = []
    for policy in comparison.policies:
        own = policy.outcomes[0].run.policy
        is_meant = own.schedule is not None or (rivals and not own.is_plain)
        if not is_meant or policy.lost is None or policy.difference is None:
            continue
        part = None
        if known and own.schedule is not None:
            part = known.part(own.schedule)
        elif known and own.is_watched:
            parts = [known.part_of(freezes(read_history(outcome.directory))) for outcome in policy.outcomes]
            part = None if None in parts else statistics.fmean(found or 0.0 for found in parts)
        points.append(
            Point(
                workload=comparison.workload.name,
                is_held_out=comparison.workload.is_held_out,
                schedule=own.schedule or own.text,
                seeds=policy.difference.count,
                lost=policy.lost,
                scatter=policy.difference.sd,
                is_within=comparison.is_within(policy),
                skipped=policy.skipped.mean if policy.skipped else None,
                part=part,
                by_loss=part * math.sqrt(known.final_loss) if known and part is not None else None,
            )
        )
    return sorted(points, key=lambda point: math.inf if point.skipped is None else -point.skipped)


def _slope(comparison: WorkloadComparison, known: Known, points: Sequence[Point]) -> Slope:
    costs, weights = np.array([point.lost for point in points]), np.array([point.seeds for point in points])

    def fit(power: float) -> tuple[float, float]:
        parts = np.array([known.part(point.schedule, power) or 0.0 for point in points])
        slope = float((weights * parts * costs).sum() / (weights * parts**2).sum())
        return slope, float((weights * (costs - slope * parts) ** 2).sum() / (weights * costs**2).sum())

    slope, _ = fit(FADING + 1)
    return Slope(
        workload=comparison.workload.name,
        is_held_out=comparison.workload.is_held_out,
        final_loss=known.final_loss,
        lost_per_part=slope,
        lost_per_part_by_loss=slope / math.sqrt(known.final_loss),
        unexplained={f"{power:g}": fit(power)[1] for power in POWERS},
    )


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _limit(comparisons: Sequence[WorkloadComparison], known: Mapping[str, Known | None], limit: float) -> Limited:
    """Return what the default would take, at a limit, in these very runs of it; what is held out does not count."""
    computes, parts = [], dict[bool, list[float]]({False: [], True: []})
    for comparison in comparisons:
        default, own = comparison.find(DEFAULT), known[comparison.workload.name]
        if default is None or own is None or comparison.workload.is_held_out:
            continue
        rows = [_replay_at(outcome, {"worth_limit": limit}) for outcome in default.outcomes]
        computes.append(statistics.fmean(compute for _, compute in rows))
        part = statistics.fmean(own.part_of(begins) or 0.0 for begins, _ in rows)
        parts[comparison.workload.is_relative].append(part * math.sqrt(own.final_loss))
    return Limited(
        limit=limit,
        compute=statistics.fmean(computes) if computes else math.nan,
        by_loss=statistics.fmean(parts[False]) if parts[False] else None,
        by_loss_relative=statistics.fmean(parts[True]) if parts[True] else None,
    )


def _replay_at(outcome: Outcome, settings: Mapping[str, float]) -> tuple[dict[int, float], float]:
    """Return when a replay of a run freezes what is frozen at its end, and the per cent of the compute that skips."""
    history = read_history(outcome.directory)
    last = max(event.step for event in history.of(IntervalMeasured))
    begins: dict[int, float] = {}
    for decision in replay(outcome.directory, Config.from_dict({"policy": {"name": "worth", **settings}})).replayed:
        if decision.kind == "thaw":
            begins = {}
        elif decision.kind == "freeze" and decision.module is not None:
            begins[decision.module] = decision.step / last
    shares = backward_shares_of(history) or ()
    return begins, 100 * math.fsum(shares[module] * (1 - at) for module, at in begins.items())


def _replay(outcomes: Sequence[Outcome]) -> list[Replayed]:
    """Return what the default takes by replays; runs of earlier versions that cannot be replayed are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        if outcome.run.policy.name != DEFAULT:
            continue
        intervals = read_history(outcome.directory).of(IntervalMeasured)
        times = next((event.time_shares for event in reversed(intervals) if event.time_shares), None)
        try:
            begins, compute = _replay_at(outcome, {})
        except EgeriaError:
            continue
        if times is not None:
            time = 100 * math.fsum(times[module] * (1 - at) for module, at in begins.items())
            found.setdefault(outcome.run.workload.name, []).append((time, compute))
    return [
        Replayed(workload=name, seeds=len(rows), time=statistics.fmean(times), compute=statistics.fmean(computes))
        for name, rows in found.items()
        for times, computes in [tuple(zip(*rows, strict=True))]
    ]


def describe(
    points: Sequence[Point],
    slopes: Sequence[Slope],
    replayed: Sequence[Replayed] = (),
    limited: Sequence[Limited] = (),
) -> str:
    """Return the page of the record."""
    known = [point for point in points if None not in (point.part, point.by_loss, point.skipped)]
    parts = ["# What schedules of freezing cost, and what foretold it"]
    if len({point.workload for point in known}) > 1:
        columns = {
            "the part given up · √loss": [point.by_loss or 0.0 for point in known],
            "the part given up": [point.part or 0.0 for point in known],
            "compute skipped": [point.skipped or 0.0 for point in known],
        }
        found = rank_correlations(
            columns, [point.lost for point in known], [point.workload for point in known], within=False
        )
        lines = [
            [name, own.shows(), above.shows() if place else ""]
            for place, (name, (own, above)) in enumerate(found.items())
        ]
        told = f"Rank correlation with what was lost, over all {len(known)} schedules whose worth is known [95 %]:"
        parts += [told, markdown(["foretold by", "correlation", "of the first above it"], lines)]
    if slopes:
        parts += [
            "Lost for each part given up, by workload: the part is the share of what steps bring in the first steps, "
            "times the learning rate at its freeze, as a share of the largest, to the power of "
            f"{FADING + 1:g}. The loss is that of the training at its end.",
            markdown(
                ["workload", "held out", "training loss at the end", "lost per part", "per part · √loss"]
                + [f"unexplained, power {power:g}" for power in POWERS],
                [_slope_line(slope) for slope in slopes],
            ),
        ]
    header = ["workload", "schedule", "seeds", "lost", "without loss", "compute skipped %", "part given up", "· √loss"]
    parts += [
        "Lost: points, or per cent of the metric where the workload is judged so.",
        markdown(header, list(map(_line, points))),
    ]
    if replayed:
        lines = [[own.workload, str(own.seeds), f"{own.time:.1f}", f"{own.compute:.1f}"] for own in replayed]
        parts += [
            "What the default takes by replays of other runs:",
            markdown(["workload", "seeds", "time of iterations %", "compute %"], lines),
        ]
    if limited:
        numbers = [(own.limit, own.compute, own.by_loss, own.by_loss_relative) for own in limited]
        lines = [
            [f"{limit:g}", f"{compute:.1f}", *("" if part is None else f"{part:.4f}" for part in parts_given_up)]
            for limit, compute, *parts_given_up in numbers
        ]
        header = ["policy.worth_limit", "compute %", "part given up · √loss, judged in points", "judged in per cent"]
        parts += ["What the default would take at other limits, by replays of these runs:", markdown(header, lines)]
    return "\n\n".join(parts) + "\n"


def _slope_line(slope: Slope) -> list[str]:
    numbers = [f"{slope.final_loss:.3f}", f"{slope.lost_per_part:.2f}", f"{slope.lost_per_part_by_loss:.2f}"]
    shares = [f"{100 * share:.0f} %" for share in slope.unexplained.values()]
    return [slope.workload, "yes" if slope.is_held_out else "no", *numbers, *shares]


def _line(point: Point) -> list[str]:
    lost = f"{point.lost:+.2f}" + ("" if point.scatter is None else f" ± {point.scatter:.2f}")
    part, by_loss = ("" if value is None else f"{value:.3f}" for value in (point.part, point.by_loss))
    skipped = "" if point.skipped is None else f"{point.skipped:.1f}"
    told = "yes" if point.is_within else "no"
    return [point.workload, point.schedule, str(point.seeds), lost, told, skipped, part, by_loss]


if __name__ == "__main__":
    main()
