"""Ray Train: workers that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="Ray Train is what this is for")
pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")
HERE = Path(__file__).resolve().parent


def in_ray(folder):
    command = [sys.executable, str(HERE / "ray_jobs.py"), str(folder)]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[{")))


SAME = ("loss", "accuracy", "epoch", "frozen")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_worker_that_is_killed_costs_nothing_but_time(tmp_path):
    """To the bit: the run goes on from the last checkpoint, which is that of the run that was never stopped."""
    whole, *killed = in_ray(tmp_path)
    assert whole["began"] == 1 and whole["frozen"] == 3 and len(killed) == 2
    for run in killed:
        assert run["began"] >= 2, "a worker was killed, and Ray began again"
        assert [run[name] for name in SAME] == [whole[name] for name in SAME]
