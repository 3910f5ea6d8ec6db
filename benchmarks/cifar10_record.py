"""The first record: ResNet-8 on CIFAR-10, plainly and with egeria, several seeds in turn.

    python -m benchmarks.cifar10_record --data DIR --record benchmarks/records/NAME

Runs `examples/cifar10.py` as a user would, one process a run, plain and egeria next to each other,
skips what is there already, and writes results.json, the journals and README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
from pathlib import Path

import torch

import egeria
from benchmarks.cifar10_runs import commit, run_example
from benchmarks.proving import archive
from egeria.events import ModuleFrozen, StageChanged, Thawed

KINDS = ("plain", "egeria")


def main() -> None:
    """Run what is missing, then write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--samples", type=int, default=25000)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with archive.unpacked(options.record) as options.journals:
        make_record(options)


def make_record(options: argparse.Namespace) -> None:
    """Train what the record lacks, and describe all of it."""
    path = options.record / "results.json"
    results = json.loads(path.read_text()) if path.exists() else []
    for seed in range(options.seeds):
        for kind in KINDS:
            if not any(entry["seed"] == seed and entry["kind"] == kind for entry in results):
                results.append({"seed": seed, "kind": kind, "commit": commit(), **run_once(options, seed, kind)})
                path.write_text(json.dumps(results, indent=1) + "\n")
    (options.record / "README.md").write_text(describe(options, results))


def run_once(options: argparse.Namespace, seed: int, kind: str) -> dict[str, object]:
    """Run the example once and read what it printed."""
    command = arguments(options, seed)
    directory = options.journals / f"seed{seed}"
    if kind == "egeria":
        shutil.rmtree(directory, ignore_errors=True)  # of a run that was broken off: this record's own folder
    command += ["--plain"] if kind == "plain" else ["--directory", str(directory)]
    return run_example(command, threads=options.threads)


def arguments(options: argparse.Namespace, seed: int) -> list[str]:
    """Return the arguments of the example."""
    chosen = {"data": options.data, "model": options.model, "samples": options.samples, "epochs": options.epochs}
    return [part for name, value in {**chosen, "seed": seed}.items() for part in (f"--{name}", str(value))]


def timeline(directory: Path, epochs: int) -> str:
    """Return what a run decided, by epoch."""
    journal = egeria.read_journal(directory)
    steps = journal.events[0].total_steps / epochs
    said = []
    for event in journal:
        if isinstance(event, StageChanged):
            said.append(f"bootstrapping ends {event.step / steps:.1f}")
        elif isinstance(event, ModuleFrozen):
            said.append(f"{event.name} {event.step / steps:.1f}")
        elif isinstance(event, Thawed):
            said.append(f"thaw {event.step / steps:.1f}")
    return ", ".join(said) or "nothing"


def describe(options: argparse.Namespace, results: list[dict]) -> str:
    """Return the text of the record: numbers first, then how to repeat them."""
    rows = ["| run | seed | accuracy % | CPU s | wall s | decided, by epoch |", "|---|---|---|---|---|---|"]
    for entry in results:
        directory = options.journals / f"seed{entry['seed']}"
        decided = timeline(directory, options.epochs) if entry["kind"] == "egeria" else ""
        rows.append(
            f"| {entry['kind']} | {entry['seed']} | {entry['accuracy']:.2f} | {entry['cpu_s']:.0f} "
            f"| {entry['wall_s']:.0f} | {decided} |"
        )
    pairs = [
        {entry["kind"]: entry for entry in results if entry["seed"] == seed}
        for seed in sorted({entry["seed"] for entry in results})
    ]
    differences = [pair["egeria"]["accuracy"] - pair["plain"]["accuracy"] for pair in pairs]
    claims = [f"- accuracy, egeria minus plain: {spread(differences)} points"]
    for name, unit in (("CPU time", "cpu_s"), ("wall-clock time", "wall_s")):
        saved = [100 * (1 - pair["egeria"][unit] / pair["plain"][unit]) for pair in pairs]
        claims.append(f"- {name} saved: {spread(saved)} %")
    return "\n".join(
        [
            f"# {options.model} on CIFAR-10, {options.samples:,} images, {options.epochs} epochs, step schedule",
            "",
            f"The default configuration (the paper's rule as written) against plain training, {len(pairs)} seeds; "
            "same seed = same initialisation, data order and augmentation. Paired, mean ± sd:",
            "",
            *claims,
            "",
            *rows,
            "",
            "Time: seconds of the training loop (loading, augmentation, forward, backward, optimizer, and what egeria "
            "does in it; attaching takes some milliseconds before it), evaluation on the test set after each epoch "
            "excluded. "
            "CPU seconds are of the whole process. The machine is shared: CPU time says more than wall-clock time.",
            f"Machine: {os.cpu_count()} cores, {options.threads} torch thread(s), no accelerator; "
            f"python {platform.python_version()}, torch {torch.__version__}, egeria {egeria.__version__} "
            f"at commit {', '.join(sorted({entry['commit'] for entry in results}))}.",
            "",
            "```",
            f"python -m benchmarks.cifar10_record --data DIR --record RECORD --seeds {len(pairs)} "
            f"--model {options.model} --samples {options.samples} --epochs {options.epochs} "
            f"--threads {options.threads}",
            "```",
            "",
        ]
    )


def spread(values: list[float]) -> str:
    """Return mean and standard deviation as text."""
    if len(values) == 1:
        return f"{values[0]:+.2f} (one seed)"
    return f"{statistics.fmean(values):+.2f} ± {statistics.stdev(values):.2f}"


if __name__ == "__main__":
    main()
