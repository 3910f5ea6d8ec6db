"""Micro benchmarks on small models, and the archives of older records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.micro import accelerator, step_cost
from benchmarks.proving.comparing.archive import opened
from benchmarks.proving.comparing.comparison import compare
from benchmarks.proving.comparing.results import read_results

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"
pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]


def test_the_command_freezes_ever_more_and_keeps_what_it_found(tmp_path, capsys):
    pytest.importorskip("transformers")
    arguments = ["gpt2", "--device", "cpu", "--small", "--rounds", "3", "--steps", "2", "--record", str(tmp_path)]
    accelerator.main(arguments)
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["rounds"], found["steps_of_a_turn"]) == (3, 2)
    *rows, cached = found["rows"]
    assert [entry["frozen"] for entry in rows] == sorted({entry["frozen"] for entry in rows})
    assert [entry["cached"] for entry in found["rows"]] == [*[False] * len(rows), True]
    deepest = rows[-1]
    assert deepest["frozen"] < deepest["num_modules"] and deepest["plain_ms"] > 0
    assert deepest["plain_peak_bytes"] is None, "a CPU does not say"
    page = (tmp_path / "README.md").read_text()
    assert f"| gpt2 | {cached['frozen']} of {cached['num_modules']}, cached |" in page
    assert "not counted" in page
    output = capsys.readouterr().out
    assert "Worth a try" in output or "Not worth it" in output  # the model is small, and the machine may be busy


def test_archives_of_versions_that_were_never_released_are_compared_as_then():
    """Duty cycles and landing are gone from the library; what they skipped is not known any more."""
    with opened(RECORDS / "0017-duty-cycle") as journals:
        comparisons = compare(read_results(journals), "none")
    for comparison in comparisons:
        assert comparison.find("default").difference is not None
    runs = [run for found in comparisons for policy in found.policies for run in policy.outcomes]
    unknown = [run.run.policy.text for run in runs if run.skipped.total is None]
    assert unknown and len(unknown) < len(runs) and all("duty" in text or "/" in text for text in unknown)


def test_the_cost_of_a_step_is_told_for_each_policy_with_the_files_that_it_enters(tmp_path, capsys):
    found = tmp_path / "found.json"
    step_cost.main(["none", "plan:plan=0.9:1", "--rounds", "4", "--turn", "1", "--files", "--json", str(found)])
    loops = json.loads(found.read_text())["loops"]
    assert list(loops) == ["bare", "none", "plan:plan=0.9:1"]
    bare, none, _ = loops.values()
    assert bare["step_us"]["median"] > 0 and bare["over_bare_us"]["median"] == 0 and not bare["files"]
    assert none["files"] and len(capsys.readouterr().out.splitlines()) == 3


def test_pages_of_records_lead_somewhere_and_each_picture_is_shown_by_the_docs():
    for page in RECORDS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page} leads to {target}, which is not there"
    docs = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    assert [path.name for path in RECORDS.rglob("*.svg") if path.relative_to(ROOT).as_posix() not in docs] == []
