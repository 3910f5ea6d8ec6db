"""Micro benchmarks on small models, and the archives of older records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.micro import accelerator

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]


def test_the_script_for_gpus_runs_tiny_on_a_cpu_and_keeps_what_it_found(tmp_path):
    pytest.importorskip("transformers")
    command = [ROOT / "scripts" / "gpu", tmp_path, "--device", "cpu", "--tiny"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["way"] for row in rows[:6]] == ["plain", "attached", *accelerator.SHARES]
    assert [row["way"] for row in rows[6:]] == ["plain", "attached", *accelerator.COMPILED_SHARES]
    depths = [row["frozen"] for row in rows]
    assert depths[:2] == [0, 0] and depths[2:6] == sorted(depths[2:6]) and depths[5] == rows[0]["num_modules"] - 1
    assert all(row["iteration_ms"] > 0 and row["peak_bytes"] == 0 for row in rows), "a CPU does not say"
    page = (tmp_path / "README.md").read_text()
    assert "| gpt2, compiled | half |" in page and "not told" in page
