"""A training run whose controller is killed again and again, beside the same run left in peace.

    python -m benchmarks.killed_controller --data DIR --record RECORD [--every 20] [--epochs 40]

Both are `examples/cifar10.py` with the controller in a process of its own, same seed, at the same time,
one thread each. In one of them the controller process gets a SIGKILL every `--every` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import threading
from pathlib import Path

import psutil
import torch

import egeria
from benchmarks.cifar10_runs import run_example
from benchmarks.proving.comparing import archive
from benchmarks.proving.running.recipe import commit
from egeria.events import ControllerRestarted, ModuleFrozen, PlasticityRead, ReadingDropped, Thawed

CONFIG = """[policy]
name = "egeria"

[controller]
kind = "process"
load_limit = 1.0
restarts = 100000
"""
KINDS = ("undisturbed", "killed")


def main() -> None:
    """Run both at the same time, then write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--samples", type=int, default=25000)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    with archive.unpacked(options.record) as options.journals:
        make_record(options)


def make_record(options: argparse.Namespace) -> None:
    """Train twice at the same time, and describe both."""
    (options.record / "config.toml").write_text(CONFIG)
    results: dict[str, dict] = {}
    threads = [threading.Thread(target=lambda kind=kind: results.update({kind: run(options, kind)})) for kind in KINDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = {kind: {**results[kind], **facts(options.journals / kind)} for kind in KINDS}
    (options.record / "results.json").write_text(json.dumps({"commit": commit(), **results}, indent=1) + "\n")
    (options.record / "README.md").write_text(describe(options, results))


def run(options: argparse.Namespace, kind: str) -> dict:
    """Train once; return what it gave and how often the controller was killed."""
    directory = options.journals / kind
    shutil.rmtree(directory, ignore_errors=True)
    kills: list[int] = []
    over = threading.Event()

    def start_killing(process: subprocess.Popen[str]) -> None:
        if kind == "killed":
            threading.Thread(target=kill_controllers, args=(process.pid, options.every, over, kills)).start()

    arguments = ["--data", options.data, "--model", options.model, "--samples", options.samples]
    arguments += ["--epochs", options.epochs, "--config", options.record / "config.toml", "--directory", directory]
    try:
        return {**run_example([str(part) for part in arguments], started=start_killing), "kills": kills}
    finally:
        over.set()


def kill_controllers(pid: int, every_s: float, over: threading.Event, kills: list[int]) -> None:
    """Kill the controller process of a training process every so many seconds."""
    while not over.wait(every_s):
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children():
                if any("egeria.controller.worker" in part for part in child.cmdline()):
                    child.kill()
                    kills.append(child.pid)


def facts(directory: Path) -> dict:
    """Return what the journal says of a run."""
    journal = egeria.read_journal(directory)
    kinds = {"readings": PlasticityRead, "dropped": ReadingDropped, "restarts": ControllerRestarted}
    counts = {name: len(journal.of(kind)) for name, kind in kinds.items()}
    course = [f"{event.kind} at {event.step}" for event in journal if isinstance(event, (ModuleFrozen, Thawed))]
    return {**counts, "course": course}


def describe(options: argparse.Namespace, results: dict[str, dict]) -> str:
    """Return the text of the record."""
    difference = results["killed"]["accuracy"] - results["undisturbed"]["accuracy"]
    rows = ["| run | accuracy % | minutes | kills | restarts | readings | dropped |", "|---|---|---|---|---|---|---|"]
    for kind, entry in results.items():
        rows.append(
            f"| {kind} | {entry['accuracy']:.2f} | {entry['wall_s'] / 60:.1f} | {len(entry['kills'])} "
            f"| {entry['restarts']} | {entry['readings']} | {entry['dropped']} |"
        )
    return "\n".join(
        [
            f"# A controller killed every {options.every:g} s: {options.model} on CIFAR-10",
            "",
            f"{options.samples:,} images, {options.epochs} epochs, seed 0; both runs at the same time on one machine, "
            f"one thread each. Accuracy of the killed run minus the other: {difference:+.2f} points.",
            "",
            *rows,
            "",
            *(f"{kind}: {', '.join(entry['course']) or 'nothing froze'}.\n" for kind, entry in results.items()),
            f"Machine: {os.cpu_count()} cores, no accelerator; python {platform.python_version()}, "
            f"torch {torch.__version__}, egeria {egeria.__version__} at commit {commit()}.",
            "",
            "```",
            f"python -m benchmarks.killed_controller --data DIR --record RECORD --every {options.every:g} "
            f"--model {options.model} --samples {options.samples} --epochs {options.epochs}",
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
