"""A workload's policies beside plain training, seed by seed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.proving import RefusedError
from benchmarks.proving.comparing.results import Outcome
from benchmarks.proving.comparing.statistics import Spread, spread
from benchmarks.proving.running.runfile import WorkloadFacts
from benchmarks.workloads.registry import WORKLOADS

CLOCKS = ("wall", "cpu")
POINTS, PER_CENT = 0.3, 1.0
"""Mean loss of quality that counts as none: in points, or per cent of the plain value where that is `is_relative`."""


@dataclass(frozen=True, kw_only=True)
class PolicyComparison:
    """One policy on one workload; what is paired is against the plain run of the same seed."""

    policy: str
    outcomes: tuple[Outcome, ...]
    unpaired: tuple[int, ...]
    """Seeds without a plain run: they are in `final` alone."""
    final: Spread
    """The metric after the last epoch, the judge's where there is one."""
    difference: Spread | None
    """Of the metric to plain: in its own unit, or in per cent of plain where that is `is_relative`."""
    lost: float | None
    """Mean quality lost, as `difference` but positive for worse."""
    saved: dict[str, Spread | None]
    """Training time of the whole run saved, per cent of plain, by clock."""
    seconds: dict[str, Spread]
    """Training time of the whole run, by clock."""
    skipped: Spread | None
    """Per cent of the run's compute; None where it is not known."""
    skipped_forward: Spread | None
    """Of that, forward passes that the store served."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, ascending."""
        return tuple(outcome.run.seed for outcome in self.outcomes)


@dataclass(frozen=True, kw_only=True)
class WorkloadComparison:
    """All policies of a workload in one tier."""

    workload: WorkloadFacts
    tier: str
    base: str
    """The policy that the others are compared with."""
    policies: tuple[PolicyComparison, ...]
    """The base first, then by name."""

    @property
    def tolerance(self) -> float:
        """Mean loss of quality that counts as none, in the unit of `difference`."""
        return PER_CENT if self.workload.is_relative else POINTS

    @property
    def clock(self) -> str:
        """The clock that says more: CPU time on shared processors, wall clock where an accelerator works."""
        return "cpu" if self.device == "cpu" else "wall"

    @property
    def device(self) -> str:
        """What all of its runs were made on."""
        return self.policies[0].outcomes[0].run.device

    def find(self, policy: str) -> PolicyComparison | None:
        """Return a policy by its text."""
        return next((found for found in self.policies if found.policy == policy), None)

    def is_within(self, policy: PolicyComparison) -> bool:
        """Tell whether a policy loses no more quality than counts as none."""
        return policy.lost is not None and policy.lost <= self.tolerance


def compare(outcomes: Sequence[Outcome], base: str) -> list[WorkloadComparison]:
    """Compare the policies of each workload and tier.

    Raises:
        RefusedError: runs of one workload were made by different recipes.
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.run.workload.name, outcome.run.tier), []).append(outcome)
    return [_compare_workload(group, base) for _, group in sorted(groups.items())]


def _compare_workload(outcomes: list[Outcome], base: str) -> WorkloadComparison:
    first = outcomes[0]
    for outcome in outcomes:
        if (outcome.run.recipe, outcome.run.device) != (first.run.recipe, first.run.device):
            raise RefusedError(
                f"Only runs of one recipe can be compared; that of {outcome.run.name} is not that of {first.run.name}: "
                f"{outcome.directory}, {first.directory}. Make one of them again, or compare them apart."
            )
    by_policy: dict[str, dict[int, Outcome]] = {}
    settings: dict[str, Outcome] = {}
    for outcome in outcomes:
        same = settings.setdefault(outcome.run.policy.text, outcome)
        if same.run.policy != outcome.run.policy:
            raise RefusedError(
                f"Runs of one policy have the same settings; {outcome.run.name} has {outcome.run.policy.settings}, and "
                f"{same.run.name} {same.run.policy.settings}: {outcome.directory}, {same.directory}. Make one of them "
                f"again, or compare them apart."
            )
        seeds = by_policy.setdefault(outcome.run.policy.text, {})
        if seeds.setdefault(outcome.run.seed, outcome) is not outcome:
            raise RefusedError(f"{outcome.run.name} is there twice. Compare the directories apart.")
    plain = by_policy.get(base, {})
    order = sorted(by_policy, key=lambda policy: (policy != base, policy))
    return WorkloadComparison(
        workload=_as_today(first.run.workload),
        tier=first.run.tier,
        base=base,
        policies=tuple(
            _compare_policy([found for _, found in sorted(by_policy[name].items())], plain) for name in order
        ),
    )


def _as_today(workload: WorkloadFacts) -> WorkloadFacts:
    """Return a workload as it is held out today: what once was, may have been tuned on since its runs were made."""
    known = next((own for own in WORKLOADS if own.name == workload.name), None)
    return workload if known is None else replace(workload, is_held_out=known.is_held_out)


def _compare_policy(outcomes: list[Outcome], plain: dict[int, Outcome]) -> PolicyComparison:
    pairs = [(plain[outcome.run.seed], outcome) for outcome in outcomes if outcome.run.seed in plain]
    workload = outcomes[0].run.workload
    differences = [difference_of(workload, base.quality, found.quality) for base, found in pairs]
    final = spread([outcome.quality for outcome in outcomes])
    assert final is not None
    lost = None
    if differences:
        lost = statistics.fmean(differences) * (-1 if workload.higher_is_better else 1)
    return PolicyComparison(
        policy=outcomes[0].run.policy.text,
        outcomes=tuple(outcomes),
        unpaired=tuple(outcome.run.seed for outcome in outcomes if outcome.run.seed not in plain),
        final=final,
        difference=spread(differences),
        lost=lost,
        saved={clock: _saved(pairs, clock) for clock in CLOCKS},
        seconds={clock: found for clock in CLOCKS if (found := spread([_total_s(run, clock) for run in outcomes]))},
        skipped=_shares([outcome.skipped.total for outcome in outcomes]),
        skipped_forward=_shares([outcome.skipped.forward for outcome in outcomes]),
    )


def _saved(pairs: Sequence[tuple[Outcome, Outcome]], clock: str) -> Spread | None:
    """Return the per cent of the time that was saved; None where one pair was made on two kinds of machine."""
    if any(_machine(base) != _machine(found) for base, found in pairs):
        return None
    return spread([100 * (1 - _total_s(found, clock) / _total_s(base, clock)) for base, found in pairs])


def _machine(outcome: Outcome) -> tuple[Any, ...]:
    return tuple(outcome.run.made_with.get(name) for name in ("processor", "cores", "accelerator", "torch"))


def difference_of(workload: WorkloadFacts, plain: float, found: float) -> float:
    """Return how far a metric is above that of plain training: in its own unit, or in per cent where it is relative."""
    return 100 * (found / plain - 1) if workload.is_relative else found - plain


def _total_s(outcome: Outcome, clock: str) -> float:
    return outcome.final.wall_s if clock == "wall" else outcome.final.cpu_s


def _shares(shares: Sequence[float | None]) -> Spread | None:
    known = [100 * share for share in shares if share is not None]
    return spread(known) if len(known) == len(shares) else None
