"""What share the default takes of the best that is known by hindsight to lose nothing, over several records.

    python -m benchmarks.best_known --default RECORD --others RECORD RECORD ... --out PAGE.md

Known are the schedules given in advance and the defaults of all these records, each by all its seeds; a default goes by
its `policy.worth_limit`. Of those that lost no more than counts as none, over enough seeds, the best is the one that
skips most of the compute, or of the time of the iterations: of that by the times that the runs of `--default` measured
of their layer modules. A record is a folder, or an archive of journals (RECORD/NAME.tar.xz).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.proving.comparing import archive
from benchmarks.proving.comparing.comparison import PER_CENT, POINTS, difference_of
from benchmarks.proving.comparing.results import Outcome, read_results
from benchmarks.proving.comparing.tables import markdown
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.policies import DEFAULT, PLAIN
from egeria.events import IntervalMeasured, RunStarted
from egeria.report.history import read_history
from egeria.report.price import freezes

Key = tuple[str, int]
"""Workload and seed."""


@dataclass(kw_only=True)
class Candidate:
    """A schedule, or a default, on one workload."""

    name: str
    limit: float
    """Mean quality lost that counts as none."""
    lost: list[float] = field(default_factory=list)
    """One for each run: points, or per cent where the workload is judged so."""
    compute: list[float] = field(default_factory=list)
    """Per cent of a run's compute that was skipped."""
    time: list[float] = field(default_factory=list)
    """Per cent of the time of the iterations, foretold from when it froze what."""
    seen: set[tuple[int, float]] = field(default_factory=set)
    """Seed and quality of its runs: one that was made again, and came to the same, counts once."""

    def is_without_loss(self, seeds: int) -> bool:
        """Tell whether it lost no more than counts as none, over so many seeds."""
        return len({seed for seed, _ in self.seen}) >= seeds and statistics.fmean(self.lost) <= self.limit

    def shows(self, saved: Sequence[float]) -> str:
        """Write what it saves, what it is and what it loses."""
        told = f"{statistics.fmean(saved):.1f} ({self.name}: {0.0 - statistics.fmean(self.lost):+.2f}"
        return f"{told}, {len(self.lost)} runs)"


MEASURES: dict[str, Callable[[Candidate], list[float]]] = {
    "compute": lambda candidate: candidate.compute,
    "time of the iterations": lambda candidate: candidate.time,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read records, print the page, and keep it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--default", type=Path, required=True, help="record of the default that is asked about")
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="records of what else is known")
    parser.add_argument("--names", default=DEFAULT, metavar="P[,P]", help="policies that are the default in --default")
    parser.add_argument("--seeds", type=int, default=3, help="that a schedule must have to be known; 3")
    parser.add_argument("--tier", default="cpu")
    parser.add_argument("--out", type=Path, help="file for the page")
    options = parser.parse_args(arguments)
    names = options.names.split(",")
    with ExitStack() as stack:
        folders = [stack.enter_context(archive.opened(path)) for path in (options.default, *options.others)]
        records = [read_results(folder, tier=options.tier) for folder in folders]
        known = _collect(records, lambda found: found.run.policy.text in names)
    page = describe(known, options.seeds)
    if options.out:
        options.out.write_text(page, encoding="utf-8")
    print(page)


def _collect(
    records: Sequence[Sequence[Outcome]], is_default: Callable[[Outcome], bool]
) -> dict[str, dict[str, Candidate]]:
    """Return by workload and name what is known; the default that is asked about stands in the first record."""
    plain: dict[Key, list[Outcome]] = {}
    for outcome in (outcome for record in records for outcome in record if outcome.run.policy.text == PLAIN):
        plain.setdefault((outcome.run.workload.name, outcome.run.seed), []).append(outcome)
    times = _times([outcome for outcome in records[0] if is_default(outcome)])
    known: dict[str, dict[str, Candidate]] = {}
    for place, record in enumerate(records):
        for outcome in record:
            name = DEFAULT if place == 0 and is_default(outcome) else _name(outcome)
            base = _beside(outcome, plain, record)
            if name is not None and base is not None:
                _add(known.setdefault(outcome.run.workload.name, {}), name, outcome, base, times)
    return known


def _name(outcome: Outcome) -> str | None:
    """Return what a run goes by: its schedule, the limit of its default, or None for what is no candidate."""
    if outcome.run.policy.name != DEFAULT:
        return outcome.run.policy.schedule
    started = read_history(outcome.directory).last(RunStarted)
    limit = None if started is None else started.config.get("policy", {}).get("worth_limit")
    return None if limit is None else f"default at {limit:g}"


def _beside(outcome: Outcome, plain: dict[Key, list[Outcome]], record: Sequence[Outcome]) -> Outcome | None:
    """Return the plain run that a run is compared with: of its own record, or made alike on such a machine."""

    def made(found: Outcome) -> tuple[Any, ...]:
        return found.run.recipe, found.run.device, *(found.run.made_with.get(name) for name in ("processor", "torch"))

    candidates = plain.get((outcome.run.workload.name, outcome.run.seed), [])
    own = [found for found in candidates if found.run.recipe == outcome.run.recipe and found in record]
    alike = [found for found in candidates if made(found) == made(outcome)]
    return next(iter(own or alike), None)


def _times(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return by workload what each layer module's freeze saves, as a share of an iteration: means over runs."""
    rows: dict[str, list[Sequence[float]]] = {}
    for outcome in outcomes:
        intervals = read_history(outcome.directory).of(IntervalMeasured)
        found = next((event.time_shares for event in reversed(intervals) if event.time_shares), None)
        if found is not None:
            rows.setdefault(outcome.run.workload.name, []).append(found)
    return {name: [statistics.fmean(column) for column in zip(*own, strict=True)] for name, own in rows.items()}


def _add(own: dict[str, Candidate], name: str, found: Outcome, base: Outcome, times: dict[str, list[float]]) -> None:
    if found.skipped.total is None:
        return
    workload = found.run.workload
    candidate = own.setdefault(name, Candidate(name=name, limit=PER_CENT if workload.is_relative else POINTS))
    if (found.run.seed, found.quality) in candidate.seen:
        return
    candidate.seen.add((found.run.seed, found.quality))
    above = difference_of(workload, base.quality, found.quality)
    candidate.lost.append(-above if workload.higher_is_better else above)
    candidate.compute.append(100 * found.skipped.total)
    shares, begins = times.get(workload.name, []), freezes(read_history(found.directory))
    candidate.time.append(
        100 * math.fsum(shares[module] * (1 - at) for module, at in begins.items() if module < len(shares))
    )


def describe(known: dict[str, dict[str, Candidate]], seeds: int) -> str:
    """Return the page.

    Raises:
        RefusedError: the default has no run beside a plain one.
    """
    asked = {workload: own for workload, own in sorted(known.items()) if DEFAULT in own}
    if not asked:
        raise RefusedError("The record of --default must have runs of the default beside plain ones; it has none.")
    parts = []
    for name, measure in MEASURES.items():
        rows, shares, tops = [], [], []
        for workload, candidates in asked.items():
            without_loss = [candidate for candidate in candidates.values() if candidate.is_without_loss(seeds)]
            best = max(without_loss, key=lambda it: statistics.fmean(measure(it)), default=None)
            top = 0.0 if best is None else statistics.fmean(measure(best))
            default = candidates[DEFAULT]
            share = min(100.0, 100 * statistics.fmean(measure(default)) / top) if top > 0 else None
            shown = "none is known" if best is None else best.shows(measure(best))
            rows.append([workload, default.shows(measure(default)), shown, "" if share is None else f"{share:.0f}"])
            shares += [] if share is None else [share]
            tops.append(top)
        told = f"; the default takes {statistics.fmean(shares):.0f} % of that" if shares else ""
        parts += [
            f"By {name}: the best without loss saves {statistics.fmean(tops):.1f} % on average{told}.",
            markdown(["workload", "the default: %", "the best without loss: %", "share %"], rows),
        ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
