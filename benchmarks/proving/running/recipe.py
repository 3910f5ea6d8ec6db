"""What is trained and how, as plain values that can be compared; and what it was made with."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import egeria
from benchmarks.workloads.workload import Training

ROOT = Path(__file__).resolve().parents[3]


def describe(training: Training) -> dict[str, Any]:
    """Return the recipe of a run that has not started: two runs may be compared only where it is the same."""
    optimizer, scheduler = training.optimizer, training.scheduler
    found: dict[str, Any] = {
        "model": type(training.model).__name__,
        "num_parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "optimizer": type(optimizer).__name__,
        "groups": [
            {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
            for group in optimizer.param_groups
        ],
        "scheduler": type(scheduler).__name__,
        "schedule": {
            name: value
            for name, value in sorted(scheduler.state_dict().items())
            if _is_plain(value) and not name.startswith("_")
        },
        "num_epochs": training.num_epochs,
        "steps_per_epoch": len(training.loader),
        "batch_size": training.loader.batch_size,
        "clip_norm": training.clip_norm,
        "torch_threads": torch.get_num_threads(),
    }
    if training.evaluation_steps:  # what is left out elsewhere is not in older runs either
        found["evaluations_per_epoch"] = len(training.evaluation_steps) + 1
    if training.judge is not None:
        found["is_judged"] = True
    if training.number_format:
        found["number_format"] = training.number_format
    return json.loads(json.dumps(found))


def describe_circumstances(device: torch.device) -> dict[str, Any]:
    """Return the commit, the versions and the machine."""
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "egeria": egeria.__version__,
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "system": platform.system(),
    }


def commit() -> str:
    """Return the commit the numbers belong to; EGERIA_COMMIT names it where the code is a copy without its history."""
    if named := os.environ.get("EGERIA_COMMIT"):
        return named
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) or (
        isinstance(value, (list, tuple, dict))
        and all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    )
