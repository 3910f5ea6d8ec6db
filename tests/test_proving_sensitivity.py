"""What a parameter does to quality and saving: from the command line to the record, on a toy."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.proving.comparing.comparison import compare
from benchmarks.proving.comparing.results import Evaluation, Outcome
from benchmarks.proving.comparing.skipping import Skipped
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.running.runfile import RunFile, WorkloadFacts
from benchmarks.proving.running.runs import Made
from benchmarks.proving.studies.sensitivity import draw, sweep_table
from benchmarks.proving.studies.sweeps import Study, load_study, parse_sweeps
from tests.pieces import COMMON, ROOT, bench, files

EAGER = (
    "egeria:plasticity.interval_steps=2,bootstrapping.change_threshold=0.99,controller.kind=inline,"
    "controller.budget_share=1.0,freezing.tolerance_share=0.9"
)
SWEEP = f"{EAGER},plasticity.window=2,10"
# Processes that import torch take long on machines that do other things too.
pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


def journals(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("journal.jsonl")}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The runs of one sweep and one seed. Each process takes seconds to import torch: these serve all tests."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert bench("sensitivity", "toy", "--sweep", SWEEP, "--seeds", "0", *COMMON, "--results", folder) == 0
    return folder


@pytest.fixture
def two_seeds(made, tmp_path) -> Path:
    """These runs, and the same once more as another seed, all with final metrics and times that are easy to reckon."""
    folder = Path(shutil.copytree(made, tmp_path / "results"))
    finals = {"none": ((90.0, 10.0), (80.0, 20.0)), "window_2": ((89.0, 8.0), (77.0, 14.0)), "": ((90.0, 9.0),) * 2}
    for directory in list(folder.rglob("seed0")):
        shutil.copytree(directory, directory.with_name("seed1"))
        run = json.loads((directory / "run.json").read_text())
        (directory.with_name("seed1") / "run.json").write_text(json.dumps({**run, "seed": 1}))
        kind = next(kind for kind in finals if kind in run["policy"]["text"].replace("=", "_"))
        for seed, (accuracy, cpu_s) in enumerate(finals[kind]):
            journal = directory.with_name(f"seed{seed}") / "journal.jsonl"
            events = [json.loads(line) for line in journal.read_text().splitlines()]
            last = [event for event in events if event["event"] == "metric"][-1]
            last["values"] |= {"accuracy": accuracy, "train_cpu_s": cpu_s, "train_wall_s": 2 * cpu_s}
            journal.write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_trains_plainly_and_each_value_once_the_default_under_its_plain_name(made):
    texts = [json.loads(path.read_text())["policy"]["text"] for path in made.rglob("run.json")]
    assert sorted(texts) == sorted(["none", EAGER, f"{EAGER},plasticity.window=2"])


def test_goes_on_without_training_what_is_finished(made, capsys):
    before = journals(made)
    assert bench("sensitivity", "toy", "--sweep", SWEEP, "--seeds", "0", *COMMON, "--results", made) == 0
    assert "finished before: 3 of 3 runs" in capsys.readouterr().out
    assert bench("run", "toy", "--policy", f"none,{EAGER}", "--seeds", "0", *COMMON, "--results", made) == 0
    assert "finished before: 2 of 2 runs" in capsys.readouterr().out  # they are ordinary results
    assert journals(made) == before


def test_tells_paired_differences_and_savings_of_each_value(two_seeds, tmp_path, capsys):
    record = tmp_path / "record"
    arguments = ["--seeds", "0,1", *COMMON, "--results", two_seeds, "--out", record]
    assert bench("sensitivity", "toy", "--sweep", SWEEP, *arguments) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("| 2 |"))
    # Accuracy 89 and 77 against 90 and 80; CPU time 8 and 14 s against 10 and 20.
    assert "| 83.00 ± 8.49 | -2.00 ± 1.41 |" in line
    assert line.endswith("| +25.0 ± 7.1 | +25.0 ± 7.1 |")
    assert "| 10 (default) | 0, 1 | 90.00 ± 0.00 | +5.00 ± 7.07 |" in said
    assert line in (record / "README.md").read_text()
    (sweep,) = json.loads((record / "results.json").read_text())["sweeps"]
    assert (sweep["parameter"], sweep["default"], sweep["base"]) == ("plasticity.window", 10, EAGER)
    assert [point["value"] for point in sweep["points"]] == [2, 10]
    assert [point["is_default"] for point in sweep["points"]] == [False, True]
    assert sweep["points"][0]["difference"]["mean"] == -2.0
    assert sweep["points"][0]["saved"]["cpu"]["mean"] == pytest.approx(25.0)
    assert sweep["points"][0]["skipped"]["mean"] > 10  # an eager toy: it froze, and this was measured


def test_a_record_is_made_again_from_its_journals(two_seeds, tmp_path, capsys):
    arguments = ["--seeds", "0,1", *COMMON, "--results", two_seeds, "--out", tmp_path / "one"]
    assert bench("sensitivity", "toy", "--sweep", SWEEP, *arguments) == 0
    assert bench("sensitivity", "--results", tmp_path / "one" / "journals", "--out", tmp_path / "two") == 0
    found = files(tmp_path / "one")
    assert files(tmp_path / "two") == found
    assert {"README.md", "results.json"} <= set(found)
    assert [name for name in found if name.endswith(".svg")] == ["sensitivity.svg"]
    with tarfile.open(tmp_path / "one" / "journals.tar.xz") as kept:
        assert sum(name.endswith("journal.jsonl") for name in kept.getnames()) == 6
    page = found["README.md"].decode()
    assert str(tmp_path) not in page
    assert f"--sweep '{SWEEP}'" in page
    assert re.findall(r"\]\(([^)]+)\)", page) == ["sensitivity.svg"]


def test_a_record_without_one_of_its_runs_is_refused(two_seeds, tmp_path, capsys):
    arguments = ["--seeds", "0,1", *COMMON, "--results", two_seeds, "--out", tmp_path / "one"]
    assert bench("sensitivity", "toy", "--sweep", SWEEP, *arguments) == 0
    kept = tmp_path / "unpacked"
    shutil.unpack_archive(tmp_path / "one" / "journals.tar.xz", kept, filter="data")
    shutil.rmtree(kept / "toy" / "smoke" / "none" / "seed1")
    assert bench("sensitivity", "--results", kept) == 2
    assert "no finished run of toy, none, seed 1" in capsys.readouterr().err


def test_no_record_where_a_run_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.proving.commands.make", lambda missing, *_: Made(failed=missing[1:], num_epochs=0))
    arguments = ["--sweep", SWEEP, "--seeds", "0", *COMMON, "--results", tmp_path / "results"]
    assert bench("sensitivity", "toy", *arguments, "--out", tmp_path / "record") == 1
    assert "plasticity.window=2, seed 0" in capsys.readouterr().out
    assert not (tmp_path / "record").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["toy", "--sweep", "egeria:plasticity.windo=5,10"], "windo"),
        (["toy", "--sweep", "egeria:plasticity.windo=default,10"], "windo"),
        (["toy", "--sweep", "egeria:elasticity.window=5"], "elasticity"),
        (["toy", "--sweep", "forecast:limits=1e-5"], "limits"),
        (["toy", "--sweep", "egeria:plasticity.window=5,many"], "found 'many'"),
        (["toy", "--sweep", "forecast:limit=-1"], "policy.limit must be"),
        (["toy", "--sweep", "fortune:limit=1e-5"], "found 'fortune'"),
        (["toy", "--sweep", "none:limit=1e-5"], "has no settings"),
        (["toy", "--sweep", "egeria:plasticity.window"], "A sweep is"),
        (["toy", "--sweep", "egeria:plasticity.window=5,,10"], "A sweep is"),
        (["mars", "--sweep", "egeria:plasticity.window=5"], "There is no workload 'mars'"),
        (["toy"], "Give both"),
        (["--sweep", "egeria:plasticity.window=5"], "Give both"),
        ([], "study.json"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_trains(arguments, reason, tmp_path, capsys):
    assert bench("sensitivity", *arguments, *COMMON, "--results", tmp_path / "results") == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_values_that_come_to_the_same_settings_are_one_run():
    (sweep,) = parse_sweeps(["forecast:limit=0.01,default,1e-2,1e-4"])
    assert [point.policy for point in sweep.points] == ["forecast", "forecast:limit=1e-4"]
    (own,) = parse_sweeps(["egeria:plasticity.window=5,plasticity.window=5,10"])  # here 5 is what it has without
    assert [(point.value, point.is_default) for point in own.points] == [(5, True), (10, False)]
    assert own.points[0].policy == "egeria:plasticity.window=5"


def test_a_parameter_that_a_policy_cannot_do_without_has_no_default():
    (sweep,) = parse_sweeps(["static:schedule=0.5:1,0.75:2"])
    assert [point.policy for point in sweep.points] == ["static:schedule=0.5:1", "static:schedule=0.75:2"]
    assert not any(point.is_default for point in sweep.points)


def test_a_study_is_read_back_as_it_was(tmp_path):
    sweeps = parse_sweeps(["egeria:plasticity.metric=sp,cka", "egeria:plasticity.interval_steps=default,10"])
    study = Study(workloads=("toy",), tier="cpu", seeds=(0, 2), sweeps=sweeps)
    study.save(tmp_path)
    assert load_study(tmp_path) == study
    (tmp_path / "study.json").write_text('{"sweeps": [{}]}')
    with pytest.raises(RefusedError, match=r"study\.json"):
        load_study(tmp_path)


FACTS = WorkloadFacts(name="made-up", metric="perplexity", higher_is_better=False, is_relative=True, paper="")


def made_up(study: Study, *, interval_steps: int = 7):
    """A comparison in which every policy but plain training is worse by 10 % and skips a fifth."""
    outcomes = []
    for policy in study.policies:
        for seed in study.seeds:
            run = RunFile(
                status="finished", workload=FACTS, module="", tier="cpu", seed=seed, policy=policy, device="cpu"
            )
            value = 100.0 if policy.is_plain else 110.0
            outcomes.append(
                Outcome(
                    run=run, directory=Path(), spans=(), num_modules=4, remarks=(), interval_steps=interval_steps,
                    evaluations=(Evaluation(epoch=1, step=100, value=value, wall_s=10.0, cpu_s=10.0),),
                    skipped=Skipped(backward=0.0 if policy.is_plain else 0.2, forward=0.0),
                )
            )  # fmt: skip
    (comparison,) = compare(outcomes, "none")
    return comparison


def study_of(*sweeps: str) -> Study:
    return Study(workloads=("made-up",), tier="cpu", seeds=(0, 1), sweeps=parse_sweeps(sweeps))


def texts(path: Path) -> list[tuple[str, float]]:
    """The texts of a picture and where they stand, in its own units from the left."""
    found = []
    for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"):
        style = element.get("transform", "") + f" translate({element.get('x', '0')}"
        found.append(("".join(element.itertext()), float(re.search(r"translate\((-?[\d.]+)", style).group(1))))
    return found


def test_picture_has_a_panel_for_each_sweep_with_its_default_marked(tmp_path):
    study = study_of("egeria:plasticity.window=5,10,20", "forecast:limit=1e-4,1e-3,1e-1")
    draw(study, [made_up(study)], tmp_path / "picture.svg")
    found = texts(tmp_path / "picture.svg")
    names = [text for text, _ in found]
    assert [name for name in names if name.startswith("made-up, ")] == ["made-up, egeria", "made-up, forecast"]
    assert {"plasticity.window", "limit", "perplexity, % better than none", "compute skipped, %"} <= set(names)
    first, second = (place for text, place in found if text == "default")
    at = dict(found)
    assert first == pytest.approx(at["10"], abs=0.5)
    assert at["1e-3"] < second < at["1e-1"]  # 0.01 is not among the values; it is marked all the same
    left = [float(text) for text, place in found if re.fullmatch(r"-?\d+\.?\d*", text) and place < at["5"]]
    assert min(left) <= -7.5  # a perplexity 10 % above is drawn below the line
    assert max(left) <= 2.5


def test_many_sweeps_stand_in_rows_and_tell_what_stays_as_it_is(tmp_path):
    windows = "egeria:plasticity.interval_steps=22,plasticity.window=13,26"
    study = study_of("egeria:plasticity.window=3,4", *["forecast:limit=1e-4,1e-3"] * 3, windows)
    draw(study, [made_up(study)], tmp_path / "picture.svg")
    found = texts(tmp_path / "picture.svg")
    at = dict(found)
    assert "plasticity.interval_steps=22" in at
    assert at["26"] < min(place for text, place in found if text == "limit")  # the fifth stands below the first
    names = [text for text, _ in found]
    assert names.count("compute skipped, %") == names.count("perplexity, % better than none") == 2
    assert names.count("plasticity.window") == 2


def test_values_that_span_a_decade_stand_on_a_logarithmic_scale(tmp_path):
    study = study_of("egeria:freezing.tolerance_share=0.1,0.2,0.3", "forecast:limit=1e-4,1e-3,1e-2")
    draw(study, [made_up(study)], tmp_path / "picture.svg")
    found = texts(tmp_path / "picture.svg")
    for labels in (("0.1", "0.2", "0.3"), ("1e-4", "1e-3", "1e-2")):
        low, middle, high = (place for text, place in found if text in labels)
        assert middle - low == pytest.approx(high - middle, abs=0.5), labels


def test_values_that_are_no_numbers_stand_side_by_side(tmp_path):
    study = study_of("egeria:plasticity.metric=l2,sp,cka")
    draw(study, [made_up(study)], tmp_path / "picture.svg")
    at = dict(texts(tmp_path / "picture.svg"))
    assert at["l2"] < at["sp"] < at["cka"]
    assert at["default"] == pytest.approx(at["sp"], abs=0.5)


def test_a_value_that_egeria_derives_is_shown_as_it_was(tmp_path):
    study = study_of("egeria:plasticity.interval_steps=default,40")
    comparison = made_up(study, interval_steps=12)
    assert "| 12 (default) | 0, 1 |" in sweep_table(comparison, study.sweeps[0])
    draw(study, [comparison], tmp_path / "picture.svg")
    at = dict(texts(tmp_path / "picture.svg"))
    assert at["default"] == pytest.approx(at["12"], abs=0.5)
    assert at["12"] < at["40"]
