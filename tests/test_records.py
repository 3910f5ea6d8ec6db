"""The records of advice and of an accelerator: what their tables say, and the command on small models."""

from __future__ import annotations

import json

import pytest
from benchmarks import advice_record
from benchmarks.micro import accelerator

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]


def row(foretold, measured, verdict="Worth a try: it is."):
    return advice_record.Row(
        workload="one",
        schedule="0.5:2",
        foretold=foretold,
        measured_cpu=measured,
        measured_wall=measured,
        scatter_cpu=0.0,
        seeds=1,
        verdict=verdict,
    )


def test_what_is_foretold_within_a_tenth_counts_and_nothing_for_nothing_is_told_apart():
    no = "Not worth it: nothing can freeze."
    rows = [row(21.0, 20.0), row(15.1, 13.6), row(20.0, 21.5), row(1.0, 1.8, no), row(1.0, 9.0, no)]
    page = advice_record.describe(rows, {"one": {"verdict": no}})
    assert "2 of 4 savings were foretold within 10% of what was measured" in page, "a no that was wrong is a miss"
    assert "of 1 it was rightly said" in page and "none was there" in page
    assert "| +11 % |" in page and "| -89 % |" in page


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
    assert deepest["energy_saved"] is None and deepest["plain_peak_bytes"] is None, "a CPU tells neither"
    page = (tmp_path / "README.md").read_text()
    assert f"| gpt2 | {cached['frozen']} of {cached['num_modules']}, cached |" in page
    assert "not told" in page and "not counted" in page
    assert "Worth a try" in capsys.readouterr().out
