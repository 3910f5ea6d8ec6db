"""Trainings under Ray whose workers are killed, in a process of their own.

    python tests/ray_jobs.py FOLDER

The last line of its output is what came of them, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "cluster"
sys.path.insert(0, str(EXAMPLES))
from ray_train import train_in_worker  # noqa: E402

EPOCHS, FREEZE = 12, "0.2:1 0.5:3"
NUM_KILLS = 2
LONGEST_S = 240.0


def train(folder: Path, name: str) -> dict[str, Any]:
    """Train to the end; return the last metrics."""
    arguments = ["--epochs", str(EPOCHS), "--freeze", FREEZE, "--directory", str(folder / name / "egeria")]
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"folder": str(EXAMPLES), "arguments": arguments},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=5)),
    )
    result = trainer.fit()
    return {**result.metrics, "began": _count(folder / name, '"event":"run_started"')}


def wait_for(folder: Path, num_checkpoints: int) -> None:
    """Wait until so many checkpoints are there."""
    began = time.monotonic()
    while len(list(folder.glob("checkpoint_*/states.pt"))) < num_checkpoints:
        if time.monotonic() - began > LONGEST_S:
            raise TimeoutError(f"not {num_checkpoints} checkpoints in {folder}")
        time.sleep(0.05)


def beside(work: Callable[[], None]) -> threading.Thread:
    """Do this while a training goes on."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def kill(folder: Path) -> list[dict[str, Any]]:
    """Train once to the end, and some times with a worker killed at a random step."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": _environment()})
    found, draw = [train(folder, "whole")], random.Random(0)
    for attempt in range(NUM_KILLS):
        place = folder / f"killed-{attempt}"
        after, pause_s = draw.randrange(1, EPOCHS - 2), draw.random()

        def strike(place: Path = place, after: int = after, pause_s: float = pause_s) -> None:
            wait_for(place, after)
            time.sleep(pause_s)
            os.kill(draw.choice(_workers()), signal.SIGKILL)

        thread = beside(strike)
        found.append({**train(folder, place.name), "killed_after": after})
        thread.join()
    return found


def _count(folder: Path, text: str) -> int:
    return (folder / "egeria" / "journal.jsonl").read_text().count(text)


def _workers() -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any("RayTrainWorker" in part for part in process.info["cmdline"] or [])
    ]


def _environment() -> dict[str, str]:
    given = filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(given), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    outcome = kill(Path(sys.argv[1]))
    sys.stdout.write(json.dumps(outcome) + "\n")
