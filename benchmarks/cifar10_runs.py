"""Running `examples/cifar10.py` as a user would, in a process of its own, and reading what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_example(
    arguments: list[str], *, threads: int = 1, started: Callable[[subprocess.Popen[str]], object] = lambda process: None
) -> dict[str, object]:
    """Run the example once; return the final accuracy in %, the seconds of training and the accuracy of each epoch.

    Args:
        arguments: of the example.
        threads: of torch.
        started: called with the process as soon as it runs.
    """
    command = [sys.executable, "-u", str(ROOT / "examples" / "cifar10.py"), *arguments]
    print("$", *command[2:], flush=True)
    # Waiting threads that spin would count as CPU time and slow a busy machine down.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        started(process)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.split())
    if process.returncode:
        raise SystemExit(f"the run failed with status {process.returncode}")
    curve = [float(line[5].rstrip("%")) for line in lines if line[0] == "epoch"]
    last = lines[-1]
    return {"accuracy": float(last[1].rstrip("%")), "wall_s": float(last[3]), "cpu_s": float(last[6]), "curve": curve}
