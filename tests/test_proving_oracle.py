"""The oracle's trials, with made-up runs in place of training, and the command."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.proving.comparing.comparison import compare
from benchmarks.proving.comparing.description import describe
from benchmarks.proving.comparing.results import read_results
from benchmarks.proving.comparing.tables import oracle_table, quality_table, timelines
from benchmarks.proving.policies import parse_policy
from benchmarks.proving.running import runfile
from benchmarks.proving.running.branching import branch_off
from benchmarks.proving.running.runfile import RunFile, WorkloadFacts
from benchmarks.proving.schedules import Schedule, settings_of, to_text
from benchmarks.proving.studies import oracle
from benchmarks.proving.studies.oracle import Trials, can_land, survey
from benchmarks.workloads.workload import Setting
from tests.toy_workloads import build_clusters
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from egeria.config.checks import read_timetable
from egeria.errors import ConfigError
from egeria.events import ComputeProfiled, MetricLogged, ModuleFrozen, PeriodsChanged, RunStarted
from egeria.journal import Recorder

pytestmark = pytest.mark.bench


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
    """Writes runs in place of training: a module that rests before half of it costs a point, 3/4 from seed 2 on.

    Args:
        results: where the runs are kept.
        harmless: the longest period that costs nothing at any time.
    """

    def __init__(self, results: Path, harmless: int = 1) -> None:
        self.results, self.harmless = results, harmless
        self.made: list[RunFile] = []

    def __call__(self, wanted: Sequence[RunFile]) -> None:
        for run in wanted:
            self.made.append(run)
            replace(run, status="finished", recipe=RECIPE).save(self._place(run))
            self._write_journal(run)

    def _place(self, run: RunFile) -> Path:
        return self.results / run.place

    def _write_journal(self, run: RunFile) -> None:
        entries = read_timetable(run.policy.settings.get("policy", {}).get("schedule", ""))
        rests = [(share, 0 if front.frozen else max(front.periods, default=1)) for share, front in entries]
        too_rare = [share for share, period in rests if not period or period > self.harmless]
        lost = sum(share < (0.5 if run.seed < 2 else 0.75) for share in too_rare)
        writer = Recorder(self._place(run))
        modules = [{"name": name, "num_parameters": 10} for name in "abc"]
        writer.write(
            RunStarted(
                step=0, config={}, modules=modules, trainable=[True] * 3, deepest_freeze=2, rule="", total_steps=100,
                interval_steps=1, interval_reason="", environment={},
            )
        )  # fmt: skip
        writer.write(ComputeProfiled(step=0, forward_shares=[0.3, 0.3, 0.4]))
        for share, front in entries:
            step, depth = int(100 * share), front.frozen
            if depth:
                writer.write(
                    ModuleFrozen(step=step, module=depth - 1, name="", frozen=depth, reason="", parameter_share=0.3)
                )
            writer.write(PeriodsChanged(step=step, periods=list(front.periods), reason=""))
        values = {"accuracy": 90.0 + run.seed - lost, "epoch": 1, "train_wall_s": 10.0, "train_cpu_s": 10.0}
        writer.write(MetricLogged(step=100, values=values))
        writer.close()


def trials(results: Path, most_runs: int, harmless: int = 1, settings: Sequence[str] = ()) -> tuple[Trials, Maker]:
    facts = WorkloadFacts(name="made-up", metric="accuracy", higher_is_better=True, is_relative=False, paper="")
    pattern = RunFile(
        status="waiting", workload=facts, module="", tier="cpu", seed=0, policy=parse_policy("none"), device="cpu"
    )
    maker = Maker(results, harmless)
    return Trials(pattern, [0, 1], results, maker, most_runs, settings=settings), maker


def test_trials_are_kept_as_results_that_compare_knows(tmp_path):
    search, maker = trials(tmp_path, 100)
    found = search.search([0.2, 0.2])
    assert found.lossless[0] == Schedule.freezing((0.5, 0.5))
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
    for freezes in ((0.8, 0.8), (0.75, 0.75)):  # as another search may have left them
        assert search.judge(Schedule.freezing(freezes)).is_lossless
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
    assert search.search([0.2, 0.2]).lossless == (Schedule.freezing((0.5, 0.5)),)
    assert search.confirm([2, 3]) is None


def test_what_is_updated_rarely_counts_as_results_count_it(tmp_path):
    search, _ = trials(tmp_path, 100, harmless=2)
    found = search.search([0.2, 0.2])
    assert to_text(found.lossless[0]) == "static:schedule=0.01:2/2+0.5:2"
    assert found.saving == pytest.approx(0.4 * (0.49 / 2 + 0.5))
    (comparison,) = compare(read_results(tmp_path), "none")
    assert comparison.oracle.policy == "static:schedule=0.01:2/2+0.5:2"
    assert comparison.oracle.skipped.mean == pytest.approx(100 * found.saving)
    assert "0 (and 2 at every 2nd step) from 0.0, 2 from 0.5" in "\n".join(timelines(comparison))


def test_a_search_that_was_broken_off_goes_on_to_the_same_end(tmp_path):
    whole, at_once = trials(tmp_path / "whole", 60, harmless=2)
    expected = whole.search([0.2, 0.2])
    first, made = trials(tmp_path / "pieces", 60, harmless=2)

    def break_off(wanted: Sequence[RunFile]) -> None:
        if len(made.made) >= 13:
            raise KeyboardInterrupt
        made([run for run in wanted if not (tmp_path / "pieces" / run.place).exists()])

    first.make = break_off
    with pytest.raises(KeyboardInterrupt):
        first.search([0.2, 0.2])
    second, _ = trials(tmp_path / "pieces", 60)
    second.make = lambda wanted: made([run for run in wanted if not (tmp_path / "pieces" / run.place).exists()])
    assert second.search([0.2, 0.2]) == expected
    assert [run.place for run in made.made] == [run.place for run in at_once.made]


def test_settings_are_in_every_trial_and_in_no_plain_run(tmp_path):
    settings = ["modules.target_share=0.1", "cache.enabled=false"]
    search, maker = trials(tmp_path, 20, settings=settings)
    search.search([0.2, 0.2])
    tried = [run.policy for run in maker.made if not run.policy.is_plain]
    assert {run.policy.text for run in maker.made if run.policy.is_plain} == {"none"}
    assert {settings_of(policy.text) for policy in tried} == {tuple(settings)}
    assert all(policy.settings["modules"] == {"target_share": 0.1} for policy in tried)
    best = search.confirm([])
    (comparison,) = compare(read_results(tmp_path), "none")
    assert comparison.oracle == best
    assert len(quality_table(comparison).splitlines()) == 4  # plain and the oracle, without what else was tried
    assert len(oracle_table(comparison).splitlines()) == 2 + len({policy.text for policy in tried})
    told = describe([comparison], collections.defaultdict(tuple))
    assert "oracle made-up --seeds 0,1 --setting modules.target_share=0.1 --setting cache.enabled=false --tier" in told


@dataclasses.dataclass
class WithLanding:
    """Settings of an egeria whose freezes can land."""

    landing: str = "none"


@pytest.mark.parametrize(
    ("settings", "fields", "lands"),
    [((), WithLanding, True), (("freezing.landing=both",), WithLanding, False), ((), oracle.FreezingConfig, None)],
)
def test_freezes_land_where_egeria_has_a_setting_for_it(settings, fields, lands, tmp_path, monkeypatch):
    expected = can_land() if lands is None else lands
    monkeypatch.setattr(oracle, "FreezingConfig", fields)
    search, maker = trials(tmp_path, 100, settings=settings)
    found = search.search([0.2, 0.2])
    assert any(schedule.lands for schedule in found.tried) == expected
    written = {run.policy.text.count("freezing.landing=both") for run in maker.made if not run.policy.is_plain}
    assert written == ({1} if settings else {0, 1} if expected else {0})


def test_a_trial_with_freezes_that_land_is_made_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(runfile, "load", lambda _: pytest.fail("looked for plain training to branch off from"))
    pattern = trials(tmp_path, 2)[0].pattern
    run = replace(pattern, policy=parse_policy("static:schedule=0.5:1,freezing.landing=both"), purpose=runfile.ORACLE)
    assert branch_off(run, tmp_path) is None


TOY = Setting(data=Path(), tier="smoke", seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("schedule", "falls"),
    [
        (lambda epoch, _: 0.1 ** (epoch >= 2) * 0.2 ** (epoch >= 4), [0.4, 0.8]),
        (lambda epoch, _: 0.5 ** (epoch >= 2) * 0.1 ** (epoch >= 3), []),  # too little, then no plateau before it
        (lambda epoch, _: 0.1**epoch, []),  # stepped once in each epoch
        (lambda _, share: 1 - share, []),
        (lambda _, share: (1 - share) ** 4, []),
        (lambda epoch, share: share if epoch < 1 else 0.25 ** (epoch >= 3), [0.6]),  # behind a warmup
    ],
)
def test_naps_are_tried_where_the_rate_falls_behind_a_plateau(schedule, falls):
    training = build_clusters(TOY)
    steps = len(training.loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        training.optimizer, lambda step: schedule(step // steps, step / (5 * steps))
    )
    assert survey(replace(training, scheduler=scheduler)).falls == falls


def test_a_finer_cut_has_more_weights():
    parameters = {"modules.pattern=[01]": 1, "modules.pattern=[012]": 2}
    for setting, count in parameters.items():
        assert len(survey(build_clusters(TOY), [setting]).weights) == count
    with pytest.raises(ConfigError, match="target"):
        survey(build_clusters(TOY), ["modules.target=0.1"])


def test_what_has_nothing_to_train_saves_nothing():
    training = build_clusters(TOY)
    training.model[0].requires_grad_(False)
    first, *others = survey(training).weights
    assert first == 0
    assert min(others) > 0


@pytest.mark.timeout(600)
def test_the_command_searches_with_a_setting_and_goes_on_to_the_same_end(tmp_path, capsys):
    command = ["oracle", "toy", "--workloads", "tests.toy_workloads", "--tier", "smoke", "--seeds", "0"]
    command += ["--most-runs", "5", "--results", str(tmp_path), "--setting", "cache.enabled=false"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "schedules tried: 4" in first
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(runfile.FILE_NAME)}
    assert len(files) == 5
    texts = [json.loads(path.read_text())["policy"]["text"] for path in files]
    assert sum(text.endswith(",cache.enabled=false") for text in texts) == 4
    assert main(command) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[-3:] == first.splitlines()[-3:]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob(runfile.FILE_NAME)} == files


@pytest.mark.parametrize("setting", ["policy.limit=0.1", "landing=both", "modules.pattern=a,b", "modules.target_share"])
def test_settings_that_no_schedule_could_carry_are_refused(setting, tmp_path, capsys):
    command = ["oracle", "toy", "--workloads", "tests.toy_workloads", "--tier", "smoke", "--results", str(tmp_path)]
    assert main([*command, "--setting", setting]) == 2
    assert repr(setting) in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_weights_are_what_freezing_each_module_saves():
    training = build_clusters(TOY)
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
    clusters = build_clusters(TOY)
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
    clusters = build_clusters(TOY)
    assert survey(clusters).is_in_order
    model = Swapped()
    found = survey(replace(clusters, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert not found.is_in_order
    search, maker = trials(tmp_path, 4)
    search.may_branch = found.is_in_order
    search.search(found.weights)
    assert [run.keeps_epochs for run in maker.made] == [False] * 4
