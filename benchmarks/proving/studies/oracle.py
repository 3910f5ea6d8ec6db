"""The oracle of a workload: trains by schedules given in advance until it knows the one that saves most for nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import egeria
from benchmarks.proving.comparing.comparison import PolicyComparison, WorkloadComparison, compare
from benchmarks.proving.comparing.results import Outcome, read_results
from benchmarks.proving.policies import PLAIN, Policy, parse_policy
from benchmarks.proving.running.runfile import COMPARISON, ORACLE, RunFile
from benchmarks.proving.schedules import Found, Schedule, Search, Verdict, to_text
from benchmarks.workloads.workload import Training
from egeria.config import FreezingConfig
from egeria.events import ComputeProfiled, ModulesOrdered, RunStarted
from egeria.report.freezing import backward_shares

Make = Callable[[Sequence[RunFile]], None]
"""Makes those of the runs that are not finished; raises where one fails."""
COUNTED_STEPS = 4
"""Of the training that is thrown away to count operations."""
LEAST_FALL = 4.0
"""How far the learning rate falls at one step, behind a plateau, where naps are tried."""


@dataclasses.dataclass
class Trials:
    """Judges schedules by training with each seed; every run is kept as an ordinary result.

    Args:
        pattern: a run of the workload; policy and seed are put in.
        seeds: of each schedule of a search, and of plain training.
        results: where the runs are kept.
        make: makes runs.
        most_runs: how many a search may want, plain and finished ones counted, so that a search that
            goes on decides like one that was never broken off.
        may_branch: whether schedules begin where they first differ from plain training.
        settings: of egeria, such as 'modules.target_share=0.1', for every schedule of a search.
    """

    pattern: RunFile
    seeds: Sequence[int]
    results: Path
    make: Make
    most_runs: int
    may_branch: bool = True
    settings: Sequence[str] = ()
    num_runs: int = 0

    def search(self, weights: Sequence[float], falls: Sequence[float] = ()) -> Found:
        """Train plainly, then search.

        Args:
            weights: share of an iteration that freezing each layer module saves, front to back.
            falls: shares of the training at which the learning rate falls behind a plateau.
        """
        self._train(parse_policy(PLAIN), self.seeds)
        may_land = can_land() and not any(setting.startswith("freezing.landing=") for setting in self.settings)
        return Search(weights, self.judge, falls, may_land).run()

    def confirm(self, more_seeds: Sequence[int]) -> PolicyComparison | None:
        """Return what skips most of all that lost nothing with the seeds of a search, and nothing with more.

        The more schedules are tried with few seeds, the more of what seems to be without loss is luck, so that it must
        hold with the new seeds alone too. Kept trials of other searches count as well.

        Returns:
            None where nothing holds.
        """
        seeds, fresh = sorted({*self.seeds, *more_seeds}), sorted({*more_seeds} - {*self.seeds})
        for policy in self._find_lossless():
            self._train(parse_policy(PLAIN), more_seeds)
            self._train(policy, more_seeds)
            comparison, compared = self.compare(policy, seeds)
            alone = self.compare(policy, fresh)[1] if fresh else compared
            if comparison.is_within(compared) and comparison.is_within(alone):
                return compared
        return None

    def _find_lossless(self) -> list[Policy]:
        """Return the schedules whose trials lost nothing with the seeds of a search, what skips most first."""
        kept = [
            outcome
            for outcome in self._read()
            if outcome.run.policy.name in (PLAIN, "static") and outcome.run.seed in self.seeds
        ]
        (comparison,) = compare(kept, PLAIN)
        lossless = [
            found
            for found in comparison.policies
            if found.policy != PLAIN and len(found.seeds) == len(self.seeds) and comparison.is_within(found)
        ]
        skipped = {found.policy: found.skipped.mean for found in lossless if found.skipped is not None}
        return [parse_policy(text) for text in sorted(skipped, key=lambda text: -skipped[text])]

    def judge(self, schedule: Schedule) -> Verdict | None:
        """Train by a schedule; tell whether nothing was lost and what was skipped; None where the budget is spent."""
        if self.num_runs + len(self.seeds) > self.most_runs:
            return None
        policy = parse_policy(to_text(schedule, self.settings))
        self._train(policy, self.seeds)
        comparison, found = self.compare(policy, self.seeds)
        return Verdict(comparison.is_within(found), found.skipped.mean / 100 if found.skipped else None)

    def compare(self, policy: Policy, seeds: Sequence[int]) -> tuple[WorkloadComparison, PolicyComparison]:
        """Compare a policy with plain training over these seeds."""
        outcomes = [
            outcome
            for outcome in self._read()
            if outcome.run.policy.text in (PLAIN, policy.text) and outcome.run.seed in seeds
        ]
        (comparison,) = compare(outcomes, PLAIN)
        found = comparison.find(policy.text)
        assert found is not None, "its runs were just made"
        return comparison, found

    def _read(self) -> list[Outcome]:
        return read_results(self.results, [self.pattern.workload.name], self.pattern.tier)

    def _train(self, policy: Policy, seeds: Sequence[int]) -> None:
        self.num_runs += len(seeds)
        pattern = dataclasses.replace(
            self.pattern,
            policy=policy,
            purpose=COMPARISON if policy.is_plain else ORACLE,
            keeps_epochs=policy.is_plain and self.may_branch,
        )
        self.make([dataclasses.replace(pattern, seed=seed) for seed in seeds])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """What is to be known of a network before its schedules are searched."""

    weights: list[float]
    """Share of an iteration that freezing each layer module saves, front to back, the last one left out."""
    is_in_order: bool
    """Whether modules run in the order of their definition. Else egeria learns it from the first steps of a run, and
    nothing can branch off behind them."""
    falls: list[float]
    """Shares of the training at which the learning rate falls to a quarter or less behind a plateau; of a schedule
    without plateaus none."""
    modules: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The layer modules, front to back, the last one too."""


def can_land() -> bool:
    """Tell whether this egeria has a setting for freezes that land."""
    return "landing" in {field.name for field in dataclasses.fields(FreezingConfig)}


def survey(training: Training, settings: Sequence[str] = ()) -> Survey:
    """Find out what freezing saves, and how the learning rate falls.

    Freezes in a few steps of a training that is thrown away: operations are counted before the first freeze. Where
    they cannot be counted, parameters stand for them.

    Args:
        training: new; of no use afterwards.
        settings: of egeria, such as 'modules.target_share=0.1'.

    Raises:
        ConfigError: egeria has no such setting, or it cannot have such a value.
    """
    text = ",".join(["static:schedule=0.5:1", *settings, "controller.kind=inline"])
    arguments = parse_policy(text).attach_arguments()
    with tempfile.TemporaryDirectory() as directory:
        parts = training.model, training.optimizer, training.loader
        with egeria.attach(*parts, directory=directory, total_steps=COUNTED_STEPS, **arguments) as run:
            network = training.model
            network.train()
            for batch, _ in zip(training.loader, range(COUNTED_STEPS), strict=False):
                loss = training.loss(network, batch)
                loss.backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
                run.step(loss)
        journal = egeria.read_journal(directory)
    ordered = journal.of(ModulesOrdered)
    cut = (ordered or journal.of(RunStarted))[-1]
    profile = journal.first(ComputeProfiled)
    sizes = [float(module["num_parameters"]) for module in cut.modules]
    shares = profile.forward_shares if profile else [size / sum(sizes) for size in sizes]
    trained = [module.get("num_trainable", size) / size for module, size in zip(cut.modules, sizes, strict=True)]
    weights = [
        share if trains else 0.0  # what has nothing to train has no backward pass of its own
        for share, trains in zip(backward_shares(shares, trained)[: cut.deepest_freeze], cut.trainable, strict=False)
    ]
    return Survey(weights=weights, is_in_order=not ordered, falls=_find_falls(training), modules=list(cut.modules))


def _find_falls(training: Training) -> list[float]:
    """Return where the learning rate falls, by stepping the scheduler to the end of the training.

    A plateau lasts longer than an epoch: a smooth schedule may also be stepped once in each.
    """
    length = len(training.loader)
    num_steps = length * training.num_epochs
    falls, done = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch asks for a step of the optimizer before each of these
        runs = [(rate, len(list(steps))) for rate, steps in itertools.groupby(_rates(training, num_steps))]
    for (before, lasted), (after, _) in itertools.pairwise(runs):
        done += lasted
        if lasted > length and after * LEAST_FALL <= before * (1 + 1e-6):
            falls.append(math.floor(1e4 * done / num_steps) / 1e4)  # as it is written: no later than the fall
    return falls


def _rates(training: Training, num_steps: int) -> Iterator[float]:
    """Yield the largest learning rate of each step."""
    for step in range(num_steps):
        if step:
            training.scheduler.step()
        yield max(map(float, training.scheduler.get_last_lr()))
