"""Comparisons as markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.proving.comparing.accuracy_time import CLOCKS, CONVERGED, NEARLY
from benchmarks.proving.comparing.comparison import PolicyComparison, WorkloadComparison
from benchmarks.proving.comparing.skipping import Span
from benchmarks.proving.comparing.statistics import Spread
from benchmarks.proving.policies import DEFAULT
from benchmarks.proving.running.runfile import ORACLE
from egeria.policy.rivals import ordinal

NAMES = {"wall": "wall", "cpu": "CPU"}
RULE = "egeria"


def quality_table(comparison: WorkloadComparison) -> str:
    """Return final quality and compute, one line for each policy."""
    unit = "%" if comparison.workload.is_relative else "points"
    header = (
        "policy", "seeds", f"final {comparison.workload.metric}",
        f"difference to {comparison.base}, {unit} [95 %]", "compute skipped %", "of it by the store %",
        "of the oracle %",
    )  # fmt: skip
    lines = []
    for policy in _shown(comparison):
        share = comparison.oracle_share(policy)
        lines.append(
            (
                _name(comparison, policy),
                _seeds(policy),
                policy.final.shows(),
                "" if policy.policy == comparison.base else _text(policy.difference, signed=True, interval=True),
                _text(policy.skipped, digits=1) or "not known",
                _text(policy.skipped_forward, digits=1),
                f"{share:.0f}" if share is not None else "",
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
    for policy in _shown(comparison):
        is_base = policy.policy == comparison.base
        line = [_name(comparison, policy)]
        for clock in CLOCKS:
            saved = "" if is_base else _text(policy.saved[clock], digits=1, signed=True, interval=True)
            line += [policy.seconds[clock].shows(1), saved]
        if has_default:
            line.append(_text(policy.at_equal_time) or "not known")
        for target in (CONVERGED, NEARLY):
            line += [_accuracy_time(policy, target, clock, is_base=is_base) for clock in CLOCKS]
        lines.append(line)
    return markdown(header, lines)


def oracle_table(comparison: WorkloadComparison) -> str:
    """Return every schedule that the oracle tried, the one that skips most first; nothing where it tried none."""
    tried = [policy for policy in comparison.policies if policy.purpose == ORACLE]
    if not tried:
        return ""
    tried.sort(key=lambda policy: -(policy.skipped.mean if policy.skipped else 0.0))
    header = ("schedule", "seeds", "difference [95 %]", "without loss", "compute skipped %", "CPU saved %")
    return markdown(
        header,
        [
            (
                f"`{policy.policy}`",
                _seeds(policy),
                _text(policy.difference, signed=True, interval=True),
                "yes" if comparison.is_within(policy) else "no",
                _text(policy.skipped, digits=1),
                _text(policy.saved["cpu"], digits=1, signed=True),
            )
            for policy in tried
        ],
    )


def timelines(comparison: WorkloadComparison) -> list[str]:
    """Return for each run that froze something how many modules were frozen, or updated rarely, by epoch."""
    lines = []
    for policy in _shown(comparison):
        for outcome in policy.outcomes:
            changes = [
                f"{_resting(span)} from {span.begin:.1f}"
                for span in outcome.spans
                if span.frozen or span.periods or span.begin
            ]
            if outcome.run.policy.is_watched:
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


def _shown(comparison: WorkloadComparison) -> list[PolicyComparison]:
    """Return the policies without what the oracle tried, except its best."""
    oracle = comparison.oracle
    return [policy for policy in comparison.policies if policy.purpose != ORACLE or policy is oracle]


def _name(comparison: WorkloadComparison, policy: PolicyComparison) -> str:
    return f"oracle: `{policy.policy}`" if policy is comparison.oracle else policy.policy


def _seeds(policy: PolicyComparison) -> str:
    missing = f" ({', '.join(map(str, policy.unpaired))} without plain)" if policy.unpaired else ""
    return ", ".join(map(str, policy.seeds)) + missing


def _resting(span: Span) -> str:
    """Return what rests, such as '1 (and 2 at every 4th step)'."""
    behind = [period for period in span.periods[span.frozen :] if period > 1]
    told = [f"{behind.count(period)} at every {ordinal(period)} step" for period in dict.fromkeys(behind)]
    return f"{span.frozen} (and {', '.join(told)})" if told else str(span.frozen)


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
