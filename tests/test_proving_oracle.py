"""The search for the best schedule, with a made-up truth in place of training."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.proving.comparison import compare
from benchmarks.proving.description import describe
from benchmarks.proving.oracle import Trials, survey
from benchmarks.proving.policies import parse_policy
from benchmarks.proving.results import read_results
from benchmarks.proving.runfile import RunFile, WorkloadFacts
from benchmarks.proving.schedules import Schedule, Search, all_at_once, cut_into_blocks, moves, to_text
from benchmarks.proving.tables import oracle_table, quality_table
from benchmarks.workloads.workload import Setting
from tests.toy_workloads import build_clusters
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from egeria.events import ComputeProfiled, MetricLogged, ModuleFrozen, RunStarted
from egeria.journal import Recorder

pytestmark = pytest.mark.bench


class Truth:
    """Freezing module `i` is without loss from share `earliest[i]` on."""

    def __init__(self, earliest: Schedule, budget: int = 1000) -> None:
        self.earliest = earliest
        self.asked: list[Schedule] = []
        self.budget = budget

    def __call__(self, schedule: Schedule) -> bool | None:
        if len(self.asked) == self.budget:
            return None
        self.asked.append(schedule)
        return all(share >= limit for share, limit in zip(schedule, self.earliest, strict=True))


WEIGHTS = (0.1, 0.15, 0.2)


@pytest.mark.parametrize(
    "earliest",
    [(0.25, 0.5, 0.75), (0.0, 0.0, 1.0), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)],
)
def test_finds_the_best_schedule_on_its_grid(earliest):
    truth = Truth(earliest)
    found = Search(WEIGHTS, truth).run()
    assert found.finished
    best = sum(weight * (1 - limit) for weight, limit in zip(WEIGHTS, earliest, strict=True))
    assert found.saving == pytest.approx(best)
    assert next(iter(found.lossless), (1.0, 1.0, 1.0)) == earliest
    assert len(truth.asked) == len(set(truth.asked)) <= 20


def test_between_the_points_of_the_grid_it_comes_close():
    earliest = (0.2, 0.45, 0.8)
    found = Search(WEIGHTS, truth := Truth(earliest)).run()
    best = sum(weight * (1 - limit) for weight, limit in zip(WEIGHTS, earliest, strict=True))
    assert best - 0.03 < found.saving <= best
    assert all(share >= limit for share, limit in zip(found.lossless[0], earliest, strict=True))
    assert len(truth.asked) <= 25


def test_never_tries_what_an_earlier_failure_rules_out():
    truth = Truth((0.4, 0.6, 0.9))
    Search(WEIGHTS, truth).run()
    for place, schedule in enumerate(truth.asked):
        for before in truth.asked[:place]:
            failed = any(share < limit for share, limit in zip(before, truth.earliest, strict=True))
            assert not (failed and all(share <= other for share, other in zip(schedule, before, strict=True)))


def test_the_budget_ends_it_with_the_best_so_far():
    everything = Search(WEIGHTS, Truth((0.25, 0.5, 0.75))).run()
    some = Search(WEIGHTS, Truth((0.25, 0.5, 0.75), budget=4)).run()
    assert not some.finished
    assert len(some.tried) == 4
    assert 0 < some.saving <= everything.saving
    assert some.tried[some.lossless[0]]
    nothing = Search(WEIGHTS, Truth((0.25, 0.5, 0.75), budget=0)).run()
    assert (nothing.lossless, nothing.saving) == ((), 0)


def test_few_trials_find_most_of_what_can_be_saved():
    draw = random.Random(0)
    found, possible, nothing = 0.0, 0.0, 0
    for weights in [(0.28, 0.19), (0.26, 0.16, 0.08), (0.14, 0.12, 0.12, 0.07), (0.23, 0.22, 0.07, 0.05, 0.05)] * 25:
        middle = draw.uniform(0.3, 0.95)
        earliest = sorted(min(1.0, max(0.0, draw.gauss(middle, 0.15))) for _ in weights)
        saving = Search(weights, Truth(tuple(earliest), budget=5)).run().saving
        found, nothing = found + saving, nothing + (not saving)
        possible += sum(weight * (1 - limit) for weight, limit in zip(weights, earliest, strict=True))
    assert found > 0.6 * possible
    assert nothing < 10  # of a hundred


def test_many_modules_freeze_in_blocks_of_similar_weight():
    assert cut_into_blocks((0.1, 0.2, 0.3)) == [1, 1, 1]
    assert cut_into_blocks((0.4, *[0.05] * 8)) == [1, 4, 4]
    truth = Truth((0.25,) * 5 + (0.5,) * 5 + (1.0,) * 10)
    found = Search((0.03,) * 20, truth).run()
    assert found.lossless[0] == truth.earliest
    assert len(truth.asked) <= 25


def test_proposals_are_schedules():
    proposed = [*all_at_once(3), *moves((0.25, 0.5, 1.0), 0.125)]
    for schedule in proposed:
        assert all(before <= after for before, after in itertools.pairwise(schedule))
        assert min(schedule) >= 0
        assert max(schedule) <= 1


def test_a_schedule_is_written_as_a_policy():
    assert to_text((0.0, 0.5, 0.5, 1.0)) == "static:schedule=0.02:1+0.5:3"
    policy = parse_policy(to_text((0.125, 0.5, 0.5, 1.0)))
    assert policy.settings["policy"]["schedule"] == "0.125:1 0.5:3"


RECIPE = {
    "num_epochs": 1,
    "steps_per_epoch": 100,
    "model": "Made",
    "num_parameters": 30,
    "optimizer": "SGD",
    "scheduler": "StepLR",
    "torch_threads": 1,
}


class Maker:
    """Writes runs in place of training: a module that freezes before half of it costs a point, 3/4 from seed 2 on."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.made: list[RunFile] = []

    def __call__(self, wanted: Sequence[RunFile]) -> None:
        for run in wanted:
            self.made.append(run)
            replace(run, status="finished", recipe=RECIPE).save(self._place(run))
            self._write_journal(run)

    def _place(self, run: RunFile) -> Path:
        return self.results / run.place

    def _write_journal(self, run: RunFile) -> None:
        text = run.policy.settings.get("policy", {}).get("schedule", "")
        entries = [(float(share), int(depth)) for share, depth in (entry.split(":") for entry in text.split())]
        lost = sum(share < (0.5 if run.seed < 2 else 0.75) for share, _ in entries)
        writer = Recorder(self._place(run))
        modules = [{"name": name, "num_parameters": 10} for name in "abc"]
        writer.write(
            RunStarted(
                step=0, config={}, modules=modules, trainable=[True] * 3, deepest_freeze=2, rule="", total_steps=100,
                interval_steps=1, interval_reason="", environment={},
            )
        )  # fmt: skip
        writer.write(ComputeProfiled(step=0, forward_shares=[0.3, 0.3, 0.4]))
        for share, depth in entries:
            step = int(100 * share)
            writer.write(
                ModuleFrozen(step=step, module=depth - 1, name="", frozen=depth, reason="", parameter_share=0.3)
            )
        values = {"accuracy": 90.0 + run.seed - lost, "epoch": 1, "train_wall_s": 10.0, "train_cpu_s": 10.0}
        writer.write(MetricLogged(step=100, values=values))
        writer.close()


def trials(results: Path, most_runs: int) -> tuple[Trials, Maker]:
    facts = WorkloadFacts(name="made-up", metric="accuracy", higher_is_better=True, is_relative=False, paper="")
    pattern = RunFile(
        status="waiting", workload=facts, module="", tier="cpu", seed=0, policy=parse_policy("none"), device="cpu"
    )
    maker = Maker(results)
    return Trials(pattern, [0, 1], results, maker, most_runs), maker


def test_trials_are_kept_as_results_that_compare_knows(tmp_path):
    search, maker = trials(tmp_path, 100)
    found = search.search([0.2, 0.2])
    assert found.lossless[0] == (0.5, 0.5)
    assert (len(maker.made), {run.seed for run in maker.made}) == (search.num_runs, {0, 1})
    assert [run.keeps_epochs for run in maker.made] == [run.policy.is_plain for run in maker.made]
    (comparison,) = compare(read_results(tmp_path), "none")
    assert comparison.oracle.policy == "static:schedule=0.5:2"
    assert comparison.oracle.skipped.mean == pytest.approx(100 * found.saving)
    shown, tried = quality_table(comparison), oracle_table(comparison)
    assert "oracle: `static:schedule=0.5:2`" in shown
    assert len(shown.splitlines()) == 4  # plain and the oracle, without what else was tried
    assert len(tried.splitlines()) == 2 + len(found.tried)
    search.confirm([3])
    told = describe(compare(read_results(tmp_path), "none"), collections.defaultdict(tuple))
    assert "python -m benchmarks oracle made-up --seeds 0,1 --confirm 3 --tier cpu --data DIR" in told
    assert "Where plain training kept its epochs, a schedule that the oracle tried" in told


def test_a_search_wants_no_more_runs_than_it_may(tmp_path):
    search, maker = trials(tmp_path, 7)
    found = search.search([0.2, 0.2])
    assert not found.finished
    assert len(maker.made) == 6  # plain and two schedules, two seeds each; a third would need 8


def test_what_a_search_found_must_hold_with_further_seeds(tmp_path):
    search, maker = trials(tmp_path, 100)
    search.search([0.2, 0.2])
    for schedule in ((0.8, 0.8), (0.75, 0.75)):  # as another search may have left them
        assert search.judge(schedule)
    assert search.confirm([]).policy == "static:schedule=0.5:2"
    del maker.made[:]
    confirmed = search.confirm([2, 3])
    assert (confirmed.policy, confirmed.seeds) == ("static:schedule=0.75:2", (0, 1, 2, 3))
    wanted = {(run.policy.text, run.seed) for run in maker.made}
    assert wanted == {
        (policy, seed) for policy in ("none", "static:schedule=0.5:2", "static:schedule=0.75:2") for seed in (2, 3)
    }  # nothing is tried behind what holds


def test_where_nothing_holds_with_further_seeds_nothing_is_found(tmp_path):
    search, _ = trials(tmp_path, 4)
    assert search.search([0.2, 0.2]).lossless == ((0.5, 0.5),)
    assert search.confirm([2, 3]) is None


def test_weights_are_what_freezing_each_module_saves():
    training = build_clusters(Setting(data=Path(), tier="smoke", seed=0, device=torch.device("cpu")))
    weights = survey(training).weights
    assert len(weights) == 3  # of four modules the last never freezes
    assert sum(weights) < 2 / 3
    assert weights == pytest.approx([weights[0]] * 3)


def test_weights_are_counted_in_operations_not_in_parameters():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 32, 3, stride=8, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(512, 4)),
    )
    data = TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(4, (32,)))
    clusters = build_clusters(Setting(data=Path(), tier="smoke", seed=0, device=torch.device("cpu")))
    training = replace(
        clusters,
        model=model,
        loader=DataLoader(data, batch_size=4),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda network, batch: functional.cross_entropy(network(batch[0]), batch[1]),
    )
    operations = [32 * 32 * 8 * 27, 4 * 4 * 32 * 72, 512 * 4]
    expected = [2 / 3 * count / sum(operations) for count in operations]
    assert survey(training).weights == pytest.approx(expected[:2], rel=0.01)


class Swapped(nn.Module):
    """Defines its layers in another order than it runs them in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 16)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            points = functional.relu(layer(points))
        return self.last(points)


def test_trials_of_a_network_that_runs_in_another_order_train_whole(tmp_path):
    clusters = build_clusters(Setting(data=Path(), tier="smoke", seed=0, device=torch.device("cpu")))
    assert survey(clusters).is_in_order
    model = Swapped()
    found = survey(replace(clusters, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert not found.is_in_order
    search, maker = trials(tmp_path, 4)
    search.may_branch = found.is_in_order
    search.search(found.weights)
    assert [run.keeps_epochs for run in maker.made] == [False] * 4
