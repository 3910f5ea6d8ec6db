"""Ray Train: a worker that is killed costs nothing but time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="Ray Train is what this is for")
pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "cluster"
SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path
import psutil, ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

examples, folder = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, examples)
from ray_train import train_in_worker

def train(name):
    arguments = ["--epochs", "12", "--freeze", "0.2:1 0.5:3", "--directory", str(folder / name / "egeria")]
    config = RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=5))
    settings = {"folder": examples, "arguments": arguments}
    trainer = TorchTrainer(
        train_in_worker, train_loop_config=settings, scaling_config=ScalingConfig(num_workers=2), run_config=config
    )
    found = trainer.fit().metrics
    journal = (folder / name / "egeria" / "journal.jsonl").read_text()
    return {**found, "began": journal.count('"event":"run_started"')}

def kill():
    while len(list((folder / "killed").glob("checkpoint_*/states.pt"))) < 4:
        time.sleep(0.05)
    lines = [(process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    os.kill(next(pid for pid, line in lines if any("RayTrainWorker" in part for part in line)), signal.SIGKILL)

ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": examples}})
whole = train("whole")
threading.Thread(target=kill, daemon=True).start()
print(json.dumps([whole, train("killed")]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_worker_that_is_killed_costs_nothing_but_time(tmp_path):
    """To the bit: the run goes on from the last checkpoint, which is that of the run that was never stopped."""
    (tmp_path / "job.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "job.py"), str(EXAMPLES), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "10"
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    whole, killed = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[{")))
    assert whole["began"] == 1 and whole["frozen"] == 3
    assert killed["began"] >= 2, "a worker was killed, and Ray began again"
    for name in ("loss", "accuracy", "epoch", "frozen"):
        assert killed[name] == whole[name]
