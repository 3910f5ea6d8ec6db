"""Comparisons as markdown tables."""

import statistics
from collections.abc import Sequence

from benchmarks.proving.comparing.comparison import CLOCKS, PolicyComparison, WorkloadComparison
from benchmarks.proving.comparing.statistics import Spread
from benchmarks.proving.policies import DEFAULT

NAMES = {"wall": "wall", "cpu": "CPU"}


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
    """Return training time, one line for each policy."""
    header = ["policy"]
    for clock in CLOCKS:
        header += [f"{NAMES[clock]} s", f"{NAMES[clock]} saved % [95 %]"]
    lines = []
    for policy in comparison.policies:
        line = [policy.policy]
        for clock in CLOCKS:
            is_base = policy.policy == comparison.base
            saved = "" if is_base else _text(policy.saved[clock], digits=1, signed=True, interval=True)
            line += [policy.seconds[clock].shows(1), saved]
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
    """Return one line for each workload, then the means over them and the most that is lost.

    'short' is one policy, whatever its share of the steps.
    """
    found = [{_kind(own): own for own in compared.policies if own.policy != compared.base} for compared in comparisons]
    kinds = sorted({kind for own in found for kind in own}, key=lambda kind: (kind != DEFAULT, kind))
    header = ["workload", "metric", "plain"]
    for kind in kinds:
        header += [f"{kind}: difference", "compute skipped %", "time saved %"]
    lines = []
    for compared, own in zip(comparisons, found, strict=True):
        base, unit = compared.find(compared.base), " (differences in %)" if compared.workload.is_relative else ""
        line = [f"{compared.workload.name} ({compared.tier})", f"{compared.workload.metric}{unit}"]
        line.append(base.final.shows() if base else "not run")
        lines.append(line + [cell for kind in kinds for cell in _cells(compared, own.get(kind))])
    means, worst = ["**mean**", "", ""], ["**most lost**", "", ""]
    for kind in kinds:
        pairs = [(compared, own[kind]) for compared, own in zip(comparisons, found, strict=True) if kind in own]
        lost = [own.lost for _, own in pairs if own.lost is not None]
        skipped = [own.skipped.mean for _, own in pairs if own.skipped]
        saved = [time.mean for compared, own in pairs if (time := own.saved[compared.clock])]
        means += [_mean([-loss for loss in lost], 2, "+"), _mean(skipped, 1), _mean(saved, 1, "+")]
        worst += [f"{max(lost):.2f}" if lost else "", "", ""]
    return markdown(header, [*lines, means, worst] if len(lines) > 1 else lines)


def _kind(policy: PolicyComparison) -> str:
    return "short" if policy.policy.startswith("short:") else policy.policy


def _cells(comparison: WorkloadComparison, policy: PolicyComparison | None) -> list[str]:
    if policy is None or policy.difference is None:
        return ["not run", "", ""]
    saved = _text(policy.saved[comparison.clock], digits=1, signed=True)
    return [_text(policy.difference, signed=True), _text(policy.skipped, digits=1) or "not known", saved]


def _mean(values: Sequence[float], digits: int, sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.{digits}f}" if values else ""


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _seeds(policy: PolicyComparison) -> str:
    missing = f" ({', '.join(map(str, policy.unpaired))} without plain)" if policy.unpaired else ""
    return ", ".join(map(str, policy.seeds)) + missing


def _text(spread: Spread | None, *, digits: int = 2, signed: bool = False, interval: bool = False) -> str:
    return spread.shows(digits, signed=signed, interval=interval) if spread else ""
