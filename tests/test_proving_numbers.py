"""What the bench computes, against examples worked by hand, and how it reads the names of policies."""

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.proving import RefusedError
from benchmarks.proving.comparing.comparison import compare
from benchmarks.proving.comparing.results import Evaluation, Outcome
from benchmarks.proving.comparing.skipping import Skipped, measure_skipped, spans
from benchmarks.proving.comparing.statistics import T_QUANTILES, spread, t_quantile
from benchmarks.proving.comparing.tables import overview
from benchmarks.proving.journal import JournalWriter, read_journal
from benchmarks.proving.policies import parse_policies, parse_policy
from benchmarks.proving.running.runfile import RunFile, WorkloadFacts
from benchmarks.proving.running.stopwatch import Stopwatch

pytestmark = pytest.mark.bench

ACCURACY = WorkloadFacts(name="made-up", metric="accuracy", higher_is_better=True, is_relative=False, paper="")
PERPLEXITY = WorkloadFacts(name="made-up", metric="perplexity", higher_is_better=False, is_relative=True, paper="")


def outcome(policy: str, seed: int, values: list[float], *, epoch_s: float = 10.0, **changes) -> Outcome:
    """A run with one evaluation every `epoch_s` seconds; CPU time is twice the wall-clock time."""
    run = RunFile(
        status="finished",
        workload=changes.pop("workload", ACCURACY),
        module="",
        tier="cpu",
        seed=seed,
        policy=parse_policy(policy),
        device="cpu",
        made_with=changes.pop("made_with", {}),
        recipe={"num_epochs": len(values), "lr": changes.pop("lr", 0.1)},
    )
    evaluations = tuple(
        Evaluation(epoch=place, step=place * 100, value=value, wall_s=place * epoch_s, cpu_s=2 * place * epoch_s)
        for place, value in enumerate(values, start=1)
    )
    skipped = Skipped(backward=changes.pop("skipped", 0.0), forward=0.0)
    return Outcome(
        run=run, directory=Path(), evaluations=evaluations, skipped=skipped, spans=(), num_modules=4, remarks=(),
    )  # fmt: skip


def test_quantiles_are_those_of_student():
    """Integrates the density up to each quantile: 97.5 % must lie below it."""
    for degrees, quantile in enumerate(T_QUANTILES, start=1):
        norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
        num_steps = 4000
        width = quantile / num_steps
        heights = [
            norm * (1 + (place * width) ** 2 / degrees) ** (-(degrees + 1) / 2) for place in range(num_steps + 1)
        ]
        below = 0.5 + width * (sum(heights) - (heights[0] + heights[-1]) / 2)
        assert below == pytest.approx(0.975, abs=5e-5), degrees


def test_an_interval_needs_two_seeds_and_many_have_the_last_quantile():
    found = spread([-1.0, 0.0, 1.0])
    assert (found.mean, found.sd) == (0.0, 1.0)
    assert found.high == pytest.approx(4.303 / math.sqrt(3))
    assert found.low == -found.high
    assert spread([2.0]).low is None and spread([]) is None
    assert t_quantile(500) == 2.042


def test_differences_are_paired_by_seed():
    runs = [
        *(outcome("none", seed, [70 + 10 * seed]) for seed in (0, 1)),
        *(outcome("egeria", seed, [69 + 10 * seed], epoch_s=8) for seed in (0, 1, 2)),
    ]
    (comparison,) = compare(runs, "none")
    found = comparison.find("egeria")
    assert found.difference.mean == -1
    assert found.difference.sd == 0
    assert found.lost == 1
    assert found.unpaired == (2,)
    assert found.saved["cpu"].mean == pytest.approx(20)
    assert found.final.mean == pytest.approx(79)
    assert not comparison.is_within(found)


def test_relative_metrics_are_judged_in_per_cent_of_plain():
    runs = [
        outcome("none", 0, [4.0], workload=PERPLEXITY),
        outcome("egeria", 0, [4.03], workload=PERPLEXITY),
        outcome("default", 0, [4.05], workload=PERPLEXITY),
    ]
    (comparison,) = compare(runs, "none")
    assert comparison.find("egeria").lost == pytest.approx(0.75)
    assert comparison.is_within(comparison.find("egeria"))
    assert not comparison.is_within(comparison.find("default"))


def test_a_run_that_diverged_is_never_within_and_shows():
    (comparison,) = compare([outcome("none", 0, [90.0]), outcome("egeria", 0, [math.nan])], "none")
    assert not comparison.is_within(comparison.find("egeria"))
    assert "nan" in overview([comparison])


def test_with_a_judge_loss_is_what_the_judge_found():
    plain = replace(outcome("none", 0, [90.0]), judged=80.0)
    better = replace(outcome("egeria", 0, [85.0]), judged=79.8)
    worse = replace(outcome("default", 0, [95.0]), judged=79.0)
    (comparison,) = compare([plain, better, worse], "none")
    assert comparison.find("egeria").lost == pytest.approx(0.2)
    assert comparison.is_within(comparison.find("egeria"))
    assert not comparison.is_within(comparison.find("default"))


def test_times_of_two_machines_are_not_compared():
    here, there = {"processor": "a", "torch": "2.13.0"}, {"processor": "b", "torch": "2.13.0"}
    runs = [outcome("none", 0, [90.0], made_with=here), outcome("egeria", 0, [89.0], epoch_s=5.0, made_with=here)]
    assert compare(runs, "none")[0].find("egeria").saved["cpu"].mean == pytest.approx(50)
    runs[1] = outcome("egeria", 0, [89.0], epoch_s=5.0, made_with=there)
    found = compare(runs, "none")[0].find("egeria")
    assert found.saved == {"wall": None, "cpu": None} and found.difference.mean == pytest.approx(-1)


def test_runs_of_other_settings_or_recipes_are_not_compared():
    runs = [outcome("none", 0, [90.0]), outcome("egeria", 0, [89.0]), outcome("egeria", 1, [89.0])]
    policy = replace(runs[2].run.policy, settings={"policy": {"limit": 0.5}})
    runs[2] = replace(runs[2], run=replace(runs[2].run, policy=policy))
    with pytest.raises(RefusedError, match="Runs of one policy have the same settings"):
        compare(runs, "none")
    with pytest.raises(RefusedError, match="recipe"):
        compare([outcome("none", 0, [90.0]), outcome("egeria", 0, [90.0], lr=0.2)], "none")


def test_the_overview_has_means_over_the_workloads_and_the_most_that_is_lost():
    def workload(name, share, final, short):
        facts, options = replace(ACCURACY, name=name), {"epoch_s": 5.0, "skipped": 0.2}
        plain = outcome("none", 0, [90.0], workload=facts)
        default = outcome("default", 0, [final], workload=facts, **options)
        return [plain, default, outcome(f"short:share={share}", 0, [short], workload=facts, **options)]

    text = overview(compare([*workload("one", 0.8, 90.5, 88.0), *workload("two", 0.7, 89.1, 91.0)], "none"))
    header, _, one, two, mean, worst = ([cell.strip() for cell in line.split("|")] for line in text.splitlines())
    assert header[4] == "default: difference" and header[7] == "short: difference"
    assert one[4:8] == ["+0.50", "20.0", "+50.0", "-2.00"] and two[4] == "-0.90"
    assert mean[4:8] == ["-0.20", "20.0", "+50.0", "-0.50"] and (worst[4], worst[7]) == ("0.90", "2.00")


def journal(directory: Path, *events) -> None:
    writer = JournalWriter(directory)
    modules = [{"name": name, "num_parameters": 10} for name in "abc"]
    writer.write("run_started", 0, modules=modules, trainable=[True] * 3)
    for kind, step, values in events:
        writer.write(kind, step, **values)
    writer.write("metric", 100, values={})
    writer.close()


FROZEN = ("frozen", 40, {"module": 0, "frozen": 1})
PROFILE = ("compute_profiled", 10, {"forward_shares": [0.3, 0.3, 0.4]})


def stored(step: int):
    return "cache", step, {"boundary": "a", "generation": 1, "mode": "stored"}


def used(step: int, hits: int, misses: int):
    return "cache_used", step, {"generation": 1, "hits": hits, "misses": misses}


def thawed(step: int):
    return "thawed", step, {"frozen_before": 1}


SKIPPED = [  # as shares of the iterations: backward passes are two thirds of each, forward passes a third
    ([PROFILE, FROZEN, thawed(90)], 2 / 3 * 0.3 * 0.5, 0),  # half of the run
    ([PROFILE, FROZEN, stored(40), used(60, 10, 10), used(99, 45, 15)], 2 / 3 * 0.3 * 0.6, 1 / 3 * 0.3 * 0.6 * 45 / 60),
    ([PROFILE, FROZEN, stored(40), used(60, 20, 20), thawed(60)], 2 / 3 * 0.3 * 0.2, 1 / 3 * 0.3 * 0.2 * 0.5),
    ([FROZEN], None, None),  # without a profile
    ([PROFILE, FROZEN, ("periods", 20, {"periods": [4, 2, 1]})], None, None),  # with updates at some steps only
]


@pytest.mark.parametrize(("events", "backward", "forward"), SKIPPED)
def test_what_was_skipped_is_known_by_profile_depths_and_samples_served(events, backward, forward, tmp_path):
    journal(tmp_path, *events)
    found = measure_skipped(read_journal(tmp_path))
    if backward is None:
        assert found.backward is None and found.total is None
    else:
        assert (found.backward, found.forward) == pytest.approx((backward, forward))


def test_a_run_is_parted_into_spans_of_one_depth(tmp_path):
    journal(tmp_path, PROFILE, FROZEN, thawed(90))
    found = spans(read_journal(tmp_path), 10)
    assert [(span.begin, span.end, span.frozen) for span in found] == [(0, 4, 0), (4, 9, 1), (9, 10, 0)]


def test_a_resumed_run_goes_back_on_what_came_after_its_state(tmp_path):
    start = ("run_started", 0, {"modules": [{"name": "a", "num_parameters": 10}] * 3, "trainable": [True] * 3})
    journal(
        tmp_path, PROFILE, FROZEN, start, ("resumed", 30, {"frozen": 0}), ("frozen", 70, {"module": 0, "frozen": 1})
    )
    found = read_journal(tmp_path)
    assert found.num_processes == 2 and [event["step"] for event in found.of("frozen")] == [70]
    assert measure_skipped(found).backward == pytest.approx(2 / 3 * 0.3 * 0.3)


def test_a_new_run_in_an_old_directory_owes_the_old_one_nothing_and_unknown_lines_are_passed_over(tmp_path):
    journal(tmp_path, PROFILE, FROZEN)
    journal(tmp_path, ("of a version to come", 5, {"value": math.nan}))
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"event": "frozen", "st')
    found = read_journal(tmp_path)
    assert not found.of("frozen") and found.last_step == 100
    assert [event["value"] for event in found.of("of a version to come")] == ["nan"]


CPU = torch.device("cpu")


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def wait_for_cpu(child: psutil.Process, seconds: float) -> None:
    while child.cpu_times().user < seconds:
        time.sleep(0.01)


def test_work_in_a_halt_is_not_counted():
    watch = Stopwatch(CPU)
    watch.go()
    spin(0.1)
    watch.halt()
    spin(0.5)
    watch.go()
    spin(0.1)
    watch.halt()
    assert 0.2 <= watch.cpu_s < 0.45
    assert watch.wall_s >= 0.2


def test_a_child_from_before_counts_also_in_a_halt_and_one_of_the_halt_does_not():
    spinning = [sys.executable, "-S", "-c", "while True: pass"]
    watch = Stopwatch(CPU)
    watch.go()
    with subprocess.Popen(spinning) as controller:
        try:
            wait_for_cpu(psutil.Process(controller.pid), 0.1)
            watch.halt()
            before_s = watch.cpu_s
            assert before_s >= 0.1
            with subprocess.Popen(spinning) as loader:  # the evaluation's own
                wait_for_cpu(psutil.Process(loader.pid), 0.5)
                wait_for_cpu(psutil.Process(controller.pid), 0.3)
                loader.kill()
            controller_s = psutil.Process(controller.pid).cpu_times().user
            watch.go()
            watch.halt()
        finally:
            controller.kill()
    assert watch.cpu_s - before_s >= 0.1
    assert watch.cpu_s < controller_s + 0.35


def test_commas_part_policies_but_not_their_settings():
    found = parse_policies(["none,static:schedule=0.5:1+0.75:3,start=0.25,egeria", "default"])
    assert [policy.name for policy in found] == ["none", "static", "egeria", "default"]
    assert found[1].settings == {"policy": {"schedule": "0.5:1 0.75:3", "start": 0.25}}
    assert [policy.is_plain for policy in found] == [True, False, False, False]


def test_a_plan_is_given_as_one():
    for text in ["plan:plan=0.5:1+0.75:2", "static:plan=0.5:1+0.75:2", "static:schedule=0.5:1+0.75:2"]:
        assert parse_policy(text).attach_arguments() == {"plan": "0.5:1 0.75:2", "config": {}}
        more = parse_policy(f"{text},cache.enabled=true").attach_arguments()
        assert more == {"plan": "0.5:1 0.75:2", "config": {"cache": {"enabled": True}}}


def test_a_file_gives_settings_as_they_are(tmp_path):
    path = tmp_path / "wide.toml"
    path.write_text("[plasticity]\nwindow = 20\n")
    policy = parse_policy(str(path))
    assert (policy.text, policy.settings) == ("wide", {"plasticity": {"window": 20}})
    assert policy.attach_arguments() == {"config": {"plasticity": {"window": 20}}}


def test_what_is_no_policy_is_refused():
    for text in [
        *("", "none:a=1", "head-only:a=1", "static:schedule", "../away", "egeria:a.b.c=1", "absent.toml"),
        *(f"short{share}" for share in ("", ":share=1.0", ":share=0", ":share=half", ":share=0.5,a.b=1")),
        "short:cache.share=0.5",
        *("static", "plan:start=0.5", "plan:plan=0.5", "hft:seed=1", "freezeout:start=1"),
        *("freezeout:shape=round", "freezeout:scaled=1", "autofreeze:percentile=101", "autofreeze:evaluations=1"),
    ]:
        with pytest.raises(RefusedError):
            parse_policy(text)
