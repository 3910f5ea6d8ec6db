"""Whether worth foretells what a freeze costs: rank correlations, what is foretold, and the command on a toy."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.proving.comparing.results import read_results
from benchmarks.proving.comparing.statistics import rank_correlations
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.observer import ROUNDS
from benchmarks.proving.running import runfile
from benchmarks.proving.studies.oracle import Survey
from benchmarks.proving.studies.trials import (
    CHANGE,
    DEPTH,
    GRADIENT,
    OBSERVED,
    OTHERS,
    PLASTICITY,
    TO_THE_END,
    WORTH,
    Observed,
    Point,
    average_seeds,
    choose,
    comparable,
    correlate,
    find_points,
    plan,
)
from benchmarks.proving.studies.trials_record import describe_findings, find_correlations
from tests.pieces import COMMON, ROOT, bench, files, wanted_run

from egeria.events import IntervalMeasured, PlasticityRead
from egeria.report.history import read_history

ASKED = ["toy-tuned", *COMMON, "--seeds", "0,1", "--times", "0.06,0.6", "--depths", "1,3,4"]
NUM_STEPS = 1000
# Processes that import torch take long on machines that do other things too.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


# Rank correlations


def rho(column, target, groups=None, *, within=True):
    groups = groups or ["all"] * len(target)
    return rank_correlations({"it": column}, target, groups, within=within)["it"][0]


def test_what_has_the_order_of_the_cost_foretells_it_and_what_has_the_other_does_not():
    costs = [0.1, 3.0, -0.4, 1.7, 0.9, 12.0]
    assert rho(costs, costs).value == 1.0
    assert (rho(costs, costs).low, rho(costs, costs).high) == (1.0, 1.0)
    assert rho([cost**3 for cost in costs], costs).value == 1.0  # the order is all that counts
    assert rho([-cost for cost in costs], costs).value == -1.0


def test_it_is_the_coefficient_of_spearman_with_ties_at_their_mean_rank():
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: Pearson's coefficient of these is 4.5 / sqrt(4.5 * 5).
    assert rho([1, 5, 5, 9], [10, 30, 20, 40]).value == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    # No ties: 1 - 6 * (1 + 1 + 0 + 0) / (4 * 15).
    assert rho([2, 1, 3, 4], [1, 2, 3, 4]).value == pytest.approx(0.8)


def test_within_groups_it_does_not_matter_how_groups_differ():
    column, target = [1, 2, 3, 101, 102, 103], [13, 12, 11, 3, 2, 1]
    groups = ["a"] * 3 + ["b"] * 3
    assert rho(column, target, groups).value == -1.0
    opposite = [103, 102, 101, 3, 2, 1]
    assert rho(opposite, target, groups).value == 1.0
    assert -1 < rho([*column[3:], *column[:3]], target, groups, within=False).value < 1


def test_intervals_hold_nothing_for_noise_narrow_with_points_and_are_the_same_again():
    noise = [(7919 * place) % 101 for place in range(60)]
    costs = [(104729 * place) % 97 for place in range(60)]
    groups = [place // 12 for place in range(60)]
    found = rho(noise, costs, groups)
    assert found.low < 0 < found.high
    assert rho(noise, costs, groups) == found
    bent = [cost + value / 2 for cost, value in zip(costs, noise, strict=True)]
    wide, narrow = rho(bent[:12], costs[:12]), rho(bent, costs, groups)
    assert 0 < narrow.low < narrow.value < narrow.high < 1
    assert narrow.high - narrow.low < wide.high - wide.low


def test_trainings_that_disagree_make_a_wide_interval_however_many_points_they_have():
    costs = [float(place) for place in range(40)]
    found = rho([*costs, *costs[::-1]], costs * 2, ["one"] * 40 + ["other"] * 40)
    assert found.value == pytest.approx(0.0)
    assert found.low < -0.95
    assert found.high > 0.95


def test_what_is_the_same_everywhere_has_no_correlation():
    assert rho([2.0] * 5, [1, 2, 3, 4, 5]).value is None
    assert rho([1, 2, 3, 4, 5], [2.0] * 5).shows() == "not known"


def test_the_first_column_is_held_against_each():
    costs = [float(place) for place in range(8)]
    found = rank_correlations({"good": costs, "bad": costs[::-1]}, costs, [0] * 8, within=True)
    assert found["good"][1].value == 0.0
    assert (found["bad"][1].value, found["bad"][1].low) == (2.0, 2.0)


# What is foretold


def intervals(rate, length=10, **given):
    """What an observed run of `NUM_STEPS` steps measures; `rate` takes how many steps are done."""
    measured = {"loss": 1.0, "num_bad_losses": 0, "frozen": 0, "iteration_wall_s": 0.1, "iteration_cpu_s": 0.1}
    found = []
    for number, step in enumerate(range(length, NUM_STEPS + 1, length), start=1):
        values = {name: value(step) for name, value in given.items()}
        event = IntervalMeasured(step=step, evaluation=number, num_steps=length, learning_rate=rate(step), **measured)
        found.append(replace(event, **values))
    return found


def observed(rate, readings=(), trainable=(True, True, True), **given):
    return Observed(intervals(rate, **given), readings, trainable, NUM_STEPS)


def linear(step):
    return 0.1 * (1 - step / NUM_STEPS)


def stepped(step):
    return 0.1 if step < 500 else 0.01


def early(*worths):
    return lambda step: list(worths) if step <= 50 else None


@pytest.mark.parametrize(
    ("rate", "step", "share"),
    [
        (linear, 50, 0.95**2),
        (linear, 250, 0.75**2),
        (linear, 900, 0.01),
        (linear, 1000, 0.0),
        (stepped, 250, (25 + 5) / (50 + 5)),
        (stepped, 500, 5 / 55),
        (stepped, 750, 2.5 / 55),
        (lambda step: 0.2, 600, 0.4),
    ],
)
def test_worth_is_the_share_of_the_modules_times_that_of_the_rate_sum_still_to_come(rate, step, share):
    run = observed(rate, worth=early(1.0, 2.0, 5.0))
    assert run.foretell(step, 2)[WORTH] == pytest.approx(3 / 8 * share, abs=0.004)
    assert run.foretell(step, 3)[WORTH] == pytest.approx(share, abs=0.01)
    assert run.foretell(step, 2)[DEPTH] == pytest.approx(2 * share, abs=0.02)


def test_the_rate_sum_is_that_of_the_schedule():
    exact = sum(linear(step) for step in range(300, NUM_STEPS))
    assert observed(linear).rate_sum(300, NUM_STEPS) == pytest.approx(exact, rel=0.01)
    assert observed(stepped).rate_sum(0, 400) == pytest.approx(40)


def test_what_harms_or_cannot_train_is_worth_nothing_and_what_is_not_known_stays_so():
    run = observed(linear, trainable=(False, True, True), worth=early(None, -1.0, 4.0))
    assert run.foretell(100, 2)[WORTH] == 0.0
    assert observed(linear, worth=early(None, 1.0, 4.0)).foretell(100, 2)[WORTH] is None
    assert observed(linear, worth=early(-1.0, -1.0, 1.0)).foretell(100, 1)[WORTH] is None  # together they bring nothing
    assert observed(linear).foretell(100, 1)[WORTH] is None  # begun untrained
    assert observed(linear, worth=early(1.0, 1.0, 1.0)).foretell(5, 1)[WORTH] is None  # before anything is measured


def test_weight_changes_count_for_the_rate_at_which_they_were_made():
    run = observed(linear, weight_changes=lambda step: [None] * 3 if step == 10 else [linear(step - 5), 0.0, 1.0])
    found = run.foretell(500, 2)
    assert found[CHANGE] == pytest.approx(0.1 * 0.525 / 2, rel=0.01)  # of the newest 5 %, mean of two modules
    assert found[CHANGE + TO_THE_END] == pytest.approx(0.1 * 50 / 2 / 2, rel=0.01)  # 50 intervals, half the rate
    assert run.foretell(10, 1)[CHANGE] is None


def test_gradients_count_for_a_step_and_add_up_over_modules():
    run = observed(stepped, gradients=lambda step: [10.0, 30.0, 1.0] if step <= 700 else [90.0, 90.0, 90.0])
    found = run.foretell(700, 2)
    assert found[GRADIENT] == pytest.approx(4.0)
    assert found[GRADIENT + TO_THE_END] == pytest.approx(4.0 * 0.01 * 300)


def test_plasticity_goes_on_by_the_law_of_its_newest_readings():
    def read(evaluation, module, age, value):
        shown = {"name": "", "smoothed": value, "slope": None, "tolerance": None, "stationary": 0}
        return PlasticityRead(
            step=10 * evaluation, evaluation=evaluation, module=module, value=value, age=age, wall_s=0, cpu_s=0, **shown
        )

    # At a rate of 0.2 an evaluation is a rate sum of 2; the first module is a random walk, the second moves as a root.
    ages = [(40, 1), (43, 4), (46, 1), (49, 4)]
    walk = [read(at, 0, age, 0.003 * age) for at, age in ages]
    root = [read(at, 1, age, 0.01 * age**0.5) for at, age in ages]
    stray = [read(10, 0, 4, 9.0), read(90, 0, 4, 9.0)]
    run = observed(lambda step: 0.2, [*stray[:1], *walk, *root, *stray[1:]])
    found = run.foretell(500, 2)
    assert found[PLASTICITY] == pytest.approx((0.003 * 2.5 + 0.01 * 1.5) / 2)
    assert found[PLASTICITY + TO_THE_END] == pytest.approx(0.003 * 50 + 0.01 * 50**0.5)
    assert run.foretell(420, 1)[PLASTICITY + TO_THE_END] == pytest.approx((9.0 / 4 + 0.003) / 2 * 58)  # two: no law yet
    assert run.foretell(500, 3)[PLASTICITY] is None


# Points


def point(seed, cost, workload="toy", **foretold):
    known = {WORTH: cost, PLASTICITY: -cost, OTHERS: None, **foretold}
    return Point(workload=workload, seed=seed, time=0.5, depth=int(10 * abs(cost)) + 1, cost=cost, foretold=known)


def test_points_are_compared_where_all_is_known_that_is_known_anywhere():
    points = [point(0, 0.1), point(0, 0.2), point(0, 0.3, **{WORTH: None}), point(0, 0.4, **{PLASTICITY: float("nan")})]
    kept, names = comparable(points)
    assert [it.cost for it in kept] == [0.1, 0.2]
    assert names == [WORTH, PLASTICITY]
    assert correlate(points, within=True)[WORTH][0].value == 1.0
    assert "2 of 4 points" in describe_findings(points, find_correlations(points))[0]


def test_the_words_say_what_worth_is_better_and_worse_than():
    costs = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    better = [point(seed, cost) for seed in (0, 1) for cost in costs]
    (told, table) = describe_findings(better, find_correlations(better))
    assert "rank correlation of +1.00 [+1.00, +1.00]. It foretells it better than: plasticity." in told
    assert "| plasticity | -1.00 [-1.00, -1.00] |" in table
    worse = [point(seed, cost, **{WORTH: -cost, PLASTICITY: cost}) for seed in (0, 1) for cost in costs]
    told, _ = describe_findings(worse, find_correlations(worse))
    assert "of -1.00 [-1.00, -1.00]. It foretells it worse than: plasticity." in told
    unknown = [point(0, cost, **{WORTH: None}) for cost in costs]
    assert "Worth is known at none" in "".join(describe_findings(unknown, find_correlations(unknown)))


def test_seeds_are_averaged_freeze_by_freeze():
    low, high = point(0, 0.3), replace(point(1, 0.5), depth=4)
    (found,) = average_seeds([low, high])
    assert (found.seed, found.depth, found.cost, found.foretold[WORTH]) == (None, 4, 0.4, 0.4)
    (partly,) = average_seeds([low, replace(high, foretold=high.foretold | {WORTH: None})])
    assert partly.foretold[WORTH] is None


def test_plain_runs_come_first_and_keep_what_trials_branch_off_from():
    known = Survey(weights=[0.2, 0.2], is_in_order=True, falls=[])
    begun, then = plan(wanted_run(), [0, 1], [0.06, 0.5], [1, 2, 3], known)
    assert [(run.policy.text, run.seed, run.keeps_epochs) for run in begun] == [("none", 0, True), ("none", 1, True)]
    tried = [run for run in then if run.purpose == runfile.ORACLE]
    assert {run.policy.text for run in tried} == {
        f"static:schedule={at}:{depth}" for at in (0.06, 0.5) for depth in (1, 2)
    }
    assert [run.policy.text for run in then if run not in tried] == [OBSERVED] * 2
    assert not any(run.keeps_epochs for run in then)
    begun, _ = plan(wanted_run(), [0], [0.5], [1], replace(known, is_in_order=False))
    assert not begun[0].keeps_epochs
    with pytest.raises(RefusedError, match="1 to 2 layer modules may freeze"):
        plan(wanted_run(), [0], [0.5], [3], known)


# The command


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The runs of two seeds. Each process takes seconds to import torch: these serve all tests."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert bench("trials", *ASKED, "--results", folder) == 0
    return folder


def end_with(outcome, accuracy):
    """Have a finished run end with another accuracy."""
    journal = outcome.directory / "journal.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    [event for event in events if event["event"] == "metric"][-1]["values"]["accuracy"] = accuracy
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_each_freeze_is_a_point_and_its_trial_branches_off_where_it_can(made):
    points = find_points(choose(read_results(made)))
    assert {(it.time, it.depth, it.seed) for it in points} == {
        (time, depth, seed) for time in (0.06, 0.6) for depth in (1, 3) for seed in (0, 1)
    }  # no more than three may freeze
    quality = {(out.run.policy.text, out.run.seed): out.quality for out in read_results(made)}
    for it in points:
        trial = quality[f"static:schedule={it.time:g}:{it.depth}", it.seed]
        assert it.cost == pytest.approx(quality["none", it.seed] - trial)
        assert it.foretold[OTHERS] == next(
            other.cost for other in points if (other.time, other.depth) == (it.time, it.depth) and other.seed != it.seed
        )
        assert all(value is not None and value >= 0 for name, value in it.foretold.items() if name != OTHERS)
        assert 0 < it.foretold[WORTH] < 1
        assert 0 < it.foretold[PLASTICITY] < 1
    pieces = {out.run.policy.text: out.run.made_with.get("pieces") for out in read_results(made)}
    assert (pieces["static:schedule=0.6:3"], pieces["static:schedule=0.06:3"]) == (2, None)


def test_watching_changes_nothing_and_reads_each_module_at_the_same_distances(made):
    quality = {(out.run.policy.text, out.run.seed): out.quality for out in read_results(made)}
    assert [quality[OBSERVED, seed] for seed in (0, 1)] == [quality["none", seed] for seed in (0, 1)]
    (directory,) = {out.directory for out in read_results(made) if out.run.policy.text == OBSERVED and not out.run.seed}
    readings = read_history(directory).of(PlasticityRead)
    assert {it.module for it in readings} == {0, 1, 2}
    for module in range(3):
        assert len({it.age for it in readings if it.module == module}) == ROUNDS
    measured = read_history(directory).of(IntervalMeasured)
    assert all(None not in it.gradients for it in measured)
    assert all(None not in it.weight_changes for it in measured[1:])
    assert [it.worth is not None for it in measured] == [it.step <= 32 for it in measured]  # of 160; 8 of them count


def test_goes_on_without_training_what_is_finished(made, capsys):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("journal.jsonl")}
    assert bench("trials", *ASKED, "--results", made) == 0
    said = capsys.readouterr().out
    assert "finished before: 10 of 10 runs" in said
    assert "8 of 8 points" in said
    assert {path: path.stat().st_mtime_ns for path in made.rglob("journal.jsonl")} == before


def test_a_cost_in_the_order_of_worth_is_foretold_with_one(made, tmp_path):
    results = Path(shutil.copytree(made, tmp_path / "results"))
    worth = {(f"static:schedule={it.time:g}:{it.depth}", it.seed): it.foretold[WORTH]
             for it in find_points(choose(read_results(results)))}  # fmt: skip
    for outcome in read_results(results):
        if (outcome.run.policy.text, outcome.run.seed) in worth:
            end_with(outcome, 70 - 40 * worth[outcome.run.policy.text, outcome.run.seed])
        elif outcome.run.policy.text == "none":
            end_with(outcome, 70)
    points = find_points(choose(read_results(results)))
    assert [it.cost for it in points] == pytest.approx([40 * it.foretold[WORTH] for it in points])
    for within in (True, False):
        found = correlate(points, within=within)[WORTH][0]
        assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)


def test_a_record_is_made_again_from_its_journals(made, tmp_path):
    assert bench("trials", *ASKED, "--results", made, "--out", tmp_path / "one") == 0
    assert bench("trials", "--results", tmp_path / "one" / "journals", "--out", tmp_path / "two") == 0
    found = files(tmp_path / "one")
    assert files(tmp_path / "two") == found
    assert set(found) == {"README.md", "results.json", "worth.svg", "journals.tar.xz"}
    with tarfile.open(tmp_path / "one" / "journals.tar.xz") as kept:
        assert sum(name.endswith("journal.jsonl") for name in kept.getnames()) == 12
    page, results = found["README.md"].decode(), json.loads(found["results.json"])
    assert str(tmp_path) not in page
    assert "--seeds 0,1 --times 0.06,0.6 --depths 1,3" in page
    assert "Observed runs ended with the quality of plain ones in 2 of 2 seeds." in page
    assert len(results["points"]) == 8
    within = results["correlations"]["within each workload and seed"]
    rho = within[WORTH]["rho"]
    assert f"| worth | {rho['value']:+.2f} [{rho['low']:+.2f}, {rho['high']:+.2f}] |" in page
    assert {PLASTICITY, CHANGE, GRADIENT, DEPTH, OTHERS} <= within.keys()


def test_trials_that_never_froze_are_told(made, tmp_path):
    results = Path(shutil.copytree(made, tmp_path / "results"))
    (place,) = (results / "toy-tuned" / "smoke").glob("static*0.6_3/seed1")
    journal = place / "journal.jsonl"
    lines = [line for line in journal.read_text().splitlines(keepends=True) if '"event":"frozen"' not in line]
    journal.write_text("".join(lines))
    assert bench("trials", *ASKED, "--results", results, "--out", tmp_path / "record") == 0
    assert "Of 8 trials 1 are no points" in (tmp_path / "record" / "README.md").read_text()


def test_only_what_is_asked_for_is_compared(made, capsys):
    asked = ["toy-tuned", *COMMON, "--seeds", "1", "--times", "0.6", "--depths", "1,3"]
    assert bench("trials", *asked, "--results", made) == 0
    assert "2 of 2 points, of 1 trainings" in capsys.readouterr().out


def test_trials_without_what_they_are_held_against_are_refused(made, tmp_path, capsys):
    results = Path(shutil.copytree(made, tmp_path / "results"))
    shutil.rmtree(results / "toy-tuned" / "smoke" / "none" / "seed1")
    assert bench("trials", "--results", results) == 2
    assert "no finished run of toy-tuned seed 1, none" in capsys.readouterr().err
    for path in (results / "toy-tuned" / "smoke").glob("observer*"):
        shutil.rmtree(path)
    assert bench("trials", "--results", results) == 2
    assert "no finished run of any trial" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--times", "0"], ["--times", "0.5,1"], ["--depths", "0"], ["--times", "early"]])
def test_times_and_depths_that_cannot_be_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        bench("trials", "toy-tuned", *COMMON, *wrong)
    assert wrong[0] in capsys.readouterr().err
