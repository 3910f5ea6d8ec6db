"""A record of advice: what `egeria.advise` foretells that a schedule saves, beside what runs by that schedule saved.

    python -m benchmarks run WORKLOAD --policy none,static:schedule=0.5:4 --seeds 0,1,2 --data DIR --results RESULTS
    python -m benchmarks.advice_record --data DIR --results RESULTS --record benchmarks/records/NAME

Reads the finished runs of 'none' and of every schedule of 'static', and asks for advice on each of their workloads,
with one thread as they had. What it foretells is a share of the time of iterations, as the runs' times are without
evaluations.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import egeria
from benchmarks.proving.catalogue import find_workloads
from benchmarks.proving.comparing.comparison import PolicyComparison, WorkloadComparison, compare
from benchmarks.proving.comparing.results import read_results
from benchmarks.proving.policies import PLAIN
from benchmarks.proving.running.execution import build
from benchmarks.proving.running.recipe import describe_circumstances
from benchmarks.workloads.workload import Training

ALLOWED = 0.1
"""Relative error that counts as foretold."""
NONE = 3.0
"""Per cent under which a saving that was measured is none: runs of one schedule differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule on one workload; savings are per cent of the training time."""

    workload: str
    schedule: str
    foretold: float
    measured_cpu: float
    measured_wall: float
    scatter_cpu: float
    """Standard deviation over seeds; 0 for one seed."""
    seeds: int
    verdict: str

    @property
    def is_nothing(self) -> bool:
        """Whether advice said that it is not worth it, and there was nothing to save."""
        return self.verdict.startswith("Not worth it") and abs(self.measured_cpu) < NONE

    @property
    def error(self) -> float:
        """Relative, of the CPU time."""
        return (self.foretold - self.measured_cpu) / self.measured_cpu if self.measured_cpu else float("inf")

    def in_words(self) -> str:
        """Return a row of the table."""
        error = "none was there" if self.is_nothing else f"{100 * self.error:+.0f} %"
        return (
            f"| {self.workload} | {self.schedule} | {self.foretold:.1f} % | {self.measured_cpu:.1f} "
            f"± {self.scatter_cpu:.1f} % | {self.measured_wall:.1f} % | {error} | {self.seeds} |"
        )


def main() -> None:
    """Ask for advice on each workload, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--tier", default="cpu")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    advices: dict[str, Any] = {}
    for comparison in compare(read_results(options.results, tier=options.tier), PLAIN):
        schedules = [policy for policy in comparison.policies if policy.outcomes[0].run.policy.schedule]
        if not schedules:
            continue
        advice = ask(options, comparison)
        advices[comparison.workload.name] = advice.to_dict()
        print(f"{comparison.workload.name}\n{advice}\n", flush=True)
        rows += [_row(comparison, policy, advice) for policy in schedules]
    options.record.mkdir(parents=True, exist_ok=True)
    found = {"rows": [asdict(row) for row in rows], "advice": advices, "made_with": describe_circumstances(_CPU)}
    (options.record / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.record / "README.md").write_text(describe(rows, advices), encoding="utf-8")


_CPU = torch.device("cpu")


def ask(options: argparse.Namespace, comparison: WorkloadComparison) -> egeria.Advice:
    """Return the advice on a workload, as a run of its first seed begins."""
    run = comparison.policies[0].outcomes[0].run
    (_, workload), *_ = find_workloads([run.workload.name], [run.module])
    training: Training = build(workload, options.data, options.tier, run.seed, _CPU)
    return egeria.advise(training.model, training.optimizer, training.loader, loss=training.loss, rounds=options.rounds)


def _row(comparison: WorkloadComparison, policy: PolicyComparison, advice: egeria.Advice) -> Row:
    schedule = policy.outcomes[0].run.policy.schedule
    cpu, wall = policy.saved["cpu"], policy.saved["wall"]
    assert schedule is not None and cpu is not None and wall is not None, "there are plain runs, of the same machine"
    return Row(
        workload=comparison.workload.name,
        schedule=schedule,
        foretold=100 * advice.saving(schedule),
        measured_cpu=cpu.mean,
        measured_wall=wall.mean,
        scatter_cpu=cpu.sd or 0.0,
        seeds=len(policy.seeds),
        verdict=advice.verdict,
    )


def describe(rows: list[Row], advices: dict[str, Any]) -> str:
    """Return the README of the record."""
    some = [row for row in rows if not row.is_nothing]
    good = sum(abs(row.error) <= ALLOWED for row in some)
    lines = [
        "# Advice: what is foretold, and what was saved",
        "",
        f"{good} of {len(some)} savings were foretold within {ALLOWED:.0%} of what was measured; "
        f"of {len(rows) - len(some)} it was rightly said that there are none.",
        "",
        "| workload | schedule | foretold | CPU time saved | wall clock saved | relative error | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(row.in_words() for row in rows),
    ]
    lines += ["", "## What was said of each workload", ""]
    lines += [f"- {name}: {advice['verdict']}" for name, advice in advices.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
