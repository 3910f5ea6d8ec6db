"""Memory of a fine-tuning's first steps, plain and while the last layer module trains alone.

    python -m benchmarks.micro.first_phase [WORKLOAD] --data DIR [--plan "0:99 0.25:0"] [--steps 12]

Each of the two trains in a process of its own. Told are the bytes of weights, gradients and optimizer state, and the
most memory of the process beyond what it held before, in the first step and behind it. (The first step still makes all
gradients, since layer modules are only known behind its backward pass.) Needs Linux.
"""

import argparse
import gc
import itertools
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch

import egeria
from benchmarks.proving.catalogue import find_workloads
from benchmarks.proving.running.execution import build

MIB = 2**20


def measure(name: str, data: Path, plan: str | None, steps: int) -> dict[str, float]:
    """Train a few steps, and return what they held, in MiB."""
    torch.set_num_threads(1)
    ((_, workload),) = find_workloads([name], [])
    training = build(workload, data, "cpu", 0, torch.device("cpu"))
    model, optimizer = training.model.train(), training.optimizer
    found: dict[str, float] = {"weights": sum(entry.nbytes for entry in model.parameters()) / MIB}
    total_steps = training.num_epochs * len(training.loader)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"policy": "none"} if plan is None else {"plan": plan}
        options["config"] = {"cache": {"enabled": False}}
        run = egeria.attach(model, optimizer, training.loader, total_steps=total_steps, directory=folder, **options)
        gc.collect()
        before = _reset_peak()
        for step, batch in enumerate(itertools.islice(training.loader, steps)):
            loss = training.loss(model, batch)
            loss.backward()
            if step in (0, steps - 1):
                gradients = sum(entry.grad.nbytes for entry in model.parameters() if entry.grad is not None)
                found["gradients of step 1" if step == 0 else "gradients"] = gradients / MIB
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            if step == 0:
                found["most in step 1"] = _peak() - before
                _reset_peak()
        found["most behind it"] = _peak() - before
        tensors = (value for state in optimizer.state.values() for value in state.values())
        found["optimizer state"] = sum(value.nbytes for value in tensors if torch.is_tensor(value)) / MIB
        run.close()
    return found


def _peak() -> float:
    """Return the most memory of the process since the last reset, in MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def _reset_peak() -> float:
    """Have the most memory counted from now on; return what is held now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _peak()


def main() -> None:
    """Measure both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="mpnet-sst2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--plan", default="0:99 0.25:0")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    found = []
    for plan in (None, options.plan):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(measure, (options.workload, options.data, plan, options.steps)))
    print(f"| {options.workload}, MiB | plain | {options.plan} |\n|---|---|---|")
    for name, plain in found[0].items():
        print(f"| {name} | {plain:,.0f} | {found[1][name]:,.0f} |")


if __name__ == "__main__":
    main()
