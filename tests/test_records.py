"""The record of an accelerator on small models, and the archives of older records."""

from __future__ import annotations

import json
<<<<<<< HEAD
import re
import statistics
=======
>>>>>>> bench
from pathlib import Path

import pytest
from benchmarks.micro import accelerator
from benchmarks.proving.comparing.archive import opened
from benchmarks.proving.comparing.comparison import compare
from benchmarks.proving.comparing.results import read_results
<<<<<<< HEAD
from benchmarks.proving.errors import RefusedError
from egeria.report.price import freezes, worth_shares

from egeria.config import Config
from egeria.events import IntervalMeasured
from egeria.report.history import read_history
=======
>>>>>>> bench

RECORDS = Path(__file__).resolve().parent.parent / "benchmarks" / "records"
pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent


def test_the_command_freezes_ever_more_and_keeps_what_it_found(tmp_path, capsys):
    pytest.importorskip("transformers")
    arguments = ["gpt2", "--device", "cpu", "--small", "--rounds", "3", "--steps", "2", "--record", str(tmp_path)]
    accelerator.main(arguments)
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["rounds"], found["steps_of_a_turn"]) == (3, 2)
    *rows, cached = found["rows"]
    assert [entry["frozen"] for entry in rows] == sorted({entry["frozen"] for entry in rows})
    assert [entry["cached"] for entry in found["rows"]] == [*[False] * len(rows), True]
    assert cached["foretold"] > next(entry["foretold"] for entry in rows if entry["frozen"] == cached["frozen"])
    deepest = rows[-1]
    assert deepest["frozen"] < deepest["num_modules"] and deepest["plain_ms"] > 0
    assert deepest["plain_peak_bytes"] is None, "a CPU does not say"
    page = (tmp_path / "README.md").read_text()
    assert f"| gpt2 | {cached['frozen']} of {cached['num_modules']}, cached |" in page
    assert "not counted" in page
    assert "Worth a try" in capsys.readouterr().out


<<<<<<< HEAD
def known(shares=(0.1, 0.3, 0.6), final_loss=0.25):
    rates = [(step / 100, 1 - step / 100) for step in range(1, 101)]
    return schedule_costs.Known(shares=list(shares), rates=rates, final_loss=final_loss)


def test_a_schedule_gives_up_what_its_modules_bring_from_their_freeze_on():
    assert known().part("0.5:3") == pytest.approx(0.5**2)
    assert known().part("0.2:1 0.5:2 0.9:3") == pytest.approx(0.1 * 0.8**2 + 0.3 * 0.5**2 + 0.6 * 0.1**2)
    assert known().part("0.5:1", power=3.0) == pytest.approx(0.1 * 0.5**3)


def test_the_command_finds_the_cost_of_each_part_again(tmp_path, monkeypatch, capsys):
    schedules = ("0.2:1", "0.5:2", "0.3:1+0.6:3")
    policies = ",".join(["none", "default", "head-only", *(f"static:schedule={schedule}" for schedule in schedules)])
    arguments = ["--workloads", "tests.toy_workloads", "--tier", "smoke", "--seeds", "0", "--data", "nowhere"]
    results = tmp_path / "results"
    assert main(["run", "toy-tuned", "--policy", policies, *arguments, "--results", str(results)]) == 0
    (shares,) = {
        tuple(worth_shares(read_history(outcome.directory).of(IntervalMeasured)))
        for outcome in read_results(results)
        if outcome.run.policy.text == "default"
    }
    assert sum(shares) == pytest.approx(1) and len(shares) == 3
    own = schedule_costs._know(*schedule_costs.compare(read_results(results), "none"))
    for outcome in read_results(results):
        schedule = outcome.run.policy.settings.get("policy", {}).get("schedule")
        journal = outcome.directory / "journal.jsonl"
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        lost = 8.0 * own.part(schedule) if schedule else 0.0
        [event for event in events if event["event"] == "metric"][-1]["values"]["accuracy"] = 70.0 - lost
        journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    for source, target in ((results, tmp_path / "one"), (tmp_path / "one", tmp_path / "two")):
        arguments = ["--results", str(source), "--replays", str(source), "--out", str(target), "--tier", "smoke"]
        schedule_costs.main(arguments)
    found = json.loads((tmp_path / "one" / "results.json").read_text())
    assert found == json.loads((tmp_path / "two" / "results.json").read_text())
    (default,) = (outcome for outcome in read_results(results) if outcome.run.policy.text == "default")
    (replayed,) = found["replayed"]
    assert replayed["seeds"] == 1 and replayed["time"] > 0
    assert replayed["compute"] == pytest.approx(100 * default.skipped.backward, abs=3)
    (slope,) = found["slopes"]
    assert slope["lost_per_part"] == pytest.approx(8.0) and slope["unexplained"]["2"] == pytest.approx(0, abs=1e-9)
    assert slope["unexplained"]["1"] > 0.001 < slope["unexplained"]["3"]
    assert slope["lost_per_part_by_loss"] == pytest.approx(8.0 / own.final_loss**0.5)
    assert {point["schedule"] for point in found["points"]} == {it.replace("+", " ") for it in schedules}
    skipped = [point["skipped"] for point in found["points"]]
    assert skipped == sorted(skipped, reverse=True) and skipped[-1] > 0
    more = [
        "--rivals",
        "--limits",
        f"0.001,{Config().policy.worth_limit},1",
        "--out",
        str(tmp_path / "three"),
        "--tier",
        "smoke",
    ]
    schedule_costs.main(["--results", str(results), *more])
    beside = json.loads((tmp_path / "three" / "results.json").read_text())
    parts = {point["schedule"]: point["part"] for point in beside["points"]}
    strict, usual, lax = (own_limit["compute"] for own_limit in beside["limited"])
    assert 0 <= strict < usual < lax and usual == pytest.approx(replayed["compute"])
    assert beside["limited"][0]["by_loss"] < beside["limited"][1]["by_loss"] and found["limited"] == []
    assert parts.keys() == {point["schedule"] for point in found["points"]} | {"default", "head-only"}
    assert parts["head-only"] is None and parts["default"] == own.part_of(freezes(read_history(default.directory)))
    static = next(outcome for outcome in read_results(results) if outcome.run.policy.schedule == schedules[1])
    frozen = freezes(read_history(static.directory))
    assert frozen == {0: pytest.approx(0.5, abs=0.1), 1: pytest.approx(0.5, abs=0.1)} and not beside["slopes"]
    with opened(tmp_path / "one") as journals:
        assert len(list(journals.rglob("journal.jsonl"))) == 6
    assert "| toy-tuned | no |" in capsys.readouterr().out


def end_at(accuracy, outcome):
    """Let a run's journal tell of another accuracy at its end."""
    journal = outcome.directory / "journal.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    [event for event in events if event["event"] == "metric"][-1]["values"]["accuracy"] = accuracy
    journal.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_the_best_schedule_is_the_one_that_saves_most_of_those_that_lose_nothing(tmp_path, capsys):
    own, other = tmp_path / "own", tmp_path / "other"
    kept, lossy, known_by_one = "0.3:1 0.6:3", "0.2:3", "0.25:3"
    where = ["--workloads", "tests.toy_workloads", "--tier", "smoke", "--data", "nowhere"]
    for results, policies, seeds in (
        (own, "none,default", "0,1"),
        (other, f"static:schedule={kept.replace(' ', '+')},static:schedule={lossy}", "0,1"),
        (other, f"static:schedule={known_by_one}", "0"),
    ):
        run = ["run", "toy-tuned", "--policy", policies, "--seeds", seeds, *where, "--results", str(results)]
        assert main(run) == 0
    saves = {}
    for outcome in (*read_results(own), *read_results(other)):
        end_at({lossy: 65.0, kept: 69.8}.get(outcome.run.policy.schedule, 70.0), outcome)
        saves.setdefault(outcome.run.policy.schedule or outcome.run.policy.text, []).append(outcome.skipped.total)
    page = tmp_path / "page.md"
    arguments = ["--default", str(own), "--others", str(other), str(other), "--tier", "smoke", "--out", str(page)]
    best_known.main([*arguments, "--seeds", "2"])
    default, best = (100 * statistics.fmean(saves[name]) for name in ("default", kept))
    assert 0 < default < best < 100 * saves[known_by_one][0] < 100 * saves[lossy][0]
    row = f"| toy-tuned | {default:.1f} (default: +0.00, 2 runs) | {best:.1f} ({kept}: -0.20, 2 runs) | "
    assert f"{row}{100 * default / best:.0f} |" in page.read_text() and page.read_text() in capsys.readouterr().out
    assert f"the best without loss saves {best:.1f} % on average" in page.read_text()
    best_known.main([*arguments, "--seeds", "1"])
    assert f"({known_by_one}: +0.00, 1 runs)" in page.read_text()
    with pytest.raises(RefusedError, match="runs of the default beside plain ones"):
        best_known.main(["--default", str(other), "--tier", "smoke"])


def test_of_several_workloads_the_order_of_what_was_lost_is_compared():
    def point(workload, lost, part, by_loss):
        return schedule_costs.Point(
            workload=workload,
            is_held_out=False,
            schedule="0.5:2",
            seeds=3,
            lost=lost,
            scatter=0.1,
            is_within=lost < 0.31,
            skipped=10 * part,
            part=part,
            by_loss=by_loss,
        )

    parts = (0.1, 0.2, 0.3)
    points = [
        point(name, 5 * part * root, part, part * root) for name, root in (("a", 1), ("b", 0.2)) for part in parts
    ]
    page = schedule_costs.describe(points, [])
    assert "over all 6 schedules" in page
    assert "| the part given up · √loss | +1.00" in page and "| the part given up | +0." in page
    assert page.count("| yes |") == 3


def test_pages_of_records_lead_somewhere_and_each_picture_is_shown_by_the_docs():
    records = ROOT / "benchmarks" / "records"
    for page in records.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page} leads to {target}, which is not there"
    docs = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    assert [path.name for path in records.rglob("*.svg") if path.relative_to(ROOT).as_posix() not in docs] == []
=======
def test_archives_of_versions_that_were_never_released_are_compared_as_then():
    """Duty cycles and landing are gone from the library; what they skipped is not known any more."""
    with opened(RECORDS / "0017-duty-cycle") as journals:
        comparisons = compare(read_results(journals), "none")
    for comparison in comparisons:
        assert comparison.find("default").difference is not None
    runs = [run for found in comparisons for policy in found.policies for run in policy.outcomes]
    unknown = [run.run.policy.text for run in runs if run.skipped.total is None]
    assert unknown and len(unknown) < len(runs) and all("duty" in text or "/" in text for text in unknown)
>>>>>>> bench
