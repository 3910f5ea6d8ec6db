"""Comparisons as markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.proving.comparing.accuracy_time import CLOCKS, CONVERGED, NEARLY
from benchmarks.proving.comparing.comparison import PolicyComparison, WorkloadComparison
from benchmarks.proving.comparing.statistics import Spread
from benchmarks.proving.policies import DEFAULT

NAMES = {"wall": "wall", "cpu": "CPU"}
RULE = "egeria"


def quality_table(comparison: WorkloadComparison) -> str:
    """Return final quality and compute, one line for each policy."""
    unit = "%" if comparison.workload.is_relative else "points"
    header = (
        "policy", "seeds", f"final {comparison.workload.metric}",
        f"difference to {comparison.base}, {unit} [95 %]", "compute skipped %", "of it by the store %",
    )  # fmt: skip
    lines = []
    for policy in comparison.policies:
        lines.append(
            (
                policy.policy,
                _seeds(policy),
                policy.final.shows(),
                "" if policy.policy == comparison.base else _text(policy.difference, signed=True, interval=True),
                _text(policy.skipped, digits=1) or "not known",
                _text(policy.skipped_forward, digits=1),
            )
        )
    return markdown(header, lines)


def time_table(comparison: WorkloadComparison) -> str:
    """Return training time and time to accuracy, one line for each policy."""
    header = ["policy"]
    has_default = comparison.find(DEFAULT) is not None
    for clock in CLOCKS:
        header += [f"{NAMES[clock]} s", f"{NAMES[clock]} saved % [95 %]"]
    if has_default:
        header.append(f"{comparison.workload.metric} when {DEFAULT} ended")
    for target in (CONVERGED, NEARLY):
        header += [f"time to {target}: saved, {NAMES[clock]}" for clock in CLOCKS]
    lines = []
    for policy in comparison.policies:
        is_base = policy.policy == comparison.base
        line = [policy.policy]
        for clock in CLOCKS:
            saved = "" if is_base else _text(policy.saved[clock], digits=1, signed=True, interval=True)
            line += [policy.seconds[clock].shows(1), saved]
        if has_default:
            line.append(_text(policy.at_equal_time) or "not known")
        for target in (CONVERGED, NEARLY):
            line += [_accuracy_time(policy, target, clock, is_base=is_base) for clock in CLOCKS]
        lines.append(line)
    return markdown(header, lines)


def timelines(comparison: WorkloadComparison) -> list[str]:
    """Return for each run that froze something how many modules were frozen, by epoch."""
    lines = []
    for policy in comparison.policies:
        for outcome in policy.outcomes:
            changes = [f"{span.frozen} from {span.begin:.1f}" for span in outcome.spans if span.frozen or span.begin]
            if outcome.num_modules:
                told = f" ({'; '.join(outcome.remarks)})" if outcome.remarks else ""
                course = ", ".join(changes) or "nothing frozen"
                lines.append(f"- {policy.policy}, seed {outcome.run.seed}: {course}{told}")
    return lines


def overview(comparisons: Sequence[WorkloadComparison]) -> str:
    """Return one line for each workload, the worst marked: the table of the project's README."""
    header = ("workload", "metric", "plain", *(f"{name}: {what}" for name in (DEFAULT, RULE) for what in (
        "difference", "time saved %", f"time to {CONVERGED}: saved",
    )))  # fmt: skip
    worst = worst_of(comparisons)
    lines = []
    for comparison in comparisons:
        base = comparison.find(comparison.base)
        mark = "**worst:** " if comparison is worst else ""
        unit = " (differences in %)" if comparison.workload.is_relative else ""
        line = [
            f"{mark}{comparison.workload.name} ({comparison.tier})",
            f"{comparison.workload.metric}{unit}",
            base.final.shows() if base else "not run",
        ]
        for name in (DEFAULT, RULE):
            line += _overview_cells(comparison, comparison.find(name))
        lines.append(line)
    return markdown(header, lines)


def worst_of(comparisons: Sequence[WorkloadComparison]) -> WorkloadComparison | None:
    """Return the workload that the default policy (where it has not run, the paper's rule) serves worst.

    That is the one that loses most quality for what counts as none; where all lose no more than
    that, the one that saves least time.
    """
    judged = [
        (comparison, policy)
        for comparison in comparisons
        if (policy := comparison.find(DEFAULT) or comparison.find(RULE)) is not None and policy.lost is not None
    ]
    if len(judged) < 2:
        return None
    losing = [(comparison, policy) for comparison, policy in judged if not comparison.is_within(policy)]
    if losing:
        return max(losing, key=lambda pair: _or_worst(pair[1].lost) / pair[0].tolerance)[0]
    return min(judged, key=lambda pair: spread.mean if (spread := pair[1].saved[pair[0].clock]) else 0.0)[0]


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _overview_cells(comparison: WorkloadComparison, policy: PolicyComparison | None) -> list[str]:
    if policy is None or policy.difference is None:
        return ["not run", "", ""]
    return [
        _text(policy.difference, signed=True),
        _text(policy.saved[comparison.clock], digits=1, signed=True),
        policy.accuracy_times[CONVERGED][comparison.clock].shows(),
    ]


def _seeds(policy: PolicyComparison) -> str:
    missing = f" ({', '.join(map(str, policy.unpaired))} without plain)" if policy.unpaired else ""
    return ", ".join(map(str, policy.seeds)) + missing


def _accuracy_time(policy: PolicyComparison, target: str, clock: str, *, is_base: bool) -> str:
    if not policy.accuracy_times:
        return ""
    found = policy.accuracy_times[target][clock]
    if not is_base:
        return found.shows()
    mean_s = sum(reached.plain_s for reached in found.seeds) / len(found.seeds)
    return f"at {mean_s:.1f} s"


def _text(spread: Spread | None, *, digits: int = 2, signed: bool = False, interval: bool = False) -> str:
    return spread.shows(digits, signed=signed, interval=interval) if spread else ""


def _or_worst(lost: float | None) -> float:
    """Return a loss of quality for sorting; one that is not a number is worse than any."""
    return lost if lost is not None and lost == lost else float("inf")  # noqa: PLR0124 (only nan differs from itself)
