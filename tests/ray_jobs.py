"""Trainings under Ray whose workers are killed, or that get less room and more, in a process of their own.

    python tests/ray_jobs.py kill|elastic FOLDER

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
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "cluster"
sys.path.insert(0, str(EXAMPLES))
from ray_train import train_in_worker  # noqa: E402

EPOCHS, FREEZE = 12, "0.2:1 0.5:3"
NUM_KILLS = 5
LONGEST_S = 240.0


def train(folder: Path, name: str, workers: int | tuple[int, int] = 2, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train to the end; return the last metrics, and in how many processes each epoch was that Ray kept."""
    arguments = ["--epochs", str(epochs), "--freeze", FREEZE, "--directory", str(folder / name / "egeria")]
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"folder": str(EXAMPLES), "arguments": arguments},
        scaling_config=ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=5)),
    )
    result = trainer.fit()
    kept = sorted((metrics["epoch"], metrics["processes"]) for _, metrics in result.best_checkpoints)
    return {**result.metrics, "kept": kept, "began": _count(folder / name, '"event":"run_started"')}


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


def elastic(folder: Path) -> list[dict[str, Any]]:
    """Train on two hosts, of which one goes away and comes back."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, runtime_env={"env_vars": _environment()})
    found: list[dict[str, Any]] = []
    thread = beside(lambda: found.append(train(folder, "elastic", (1, 2), 5 * EPOCHS)))
    wait_for(folder / "elastic", 3)
    cluster.remove_node(second, allow_graceful=False)
    wait_for(folder / "elastic", 10)
    cluster.add_node(num_cpus=1)  # only the main thread can
    thread.join()
    ray.shutdown()
    cluster.shutdown()
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
    outcome = {"kill": kill, "elastic": elastic}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.write(json.dumps(outcome) + "\n")
