"""What fixed augmentation costs in accuracy: free, and 1, 2 and 4 stored views of each sample.

    python -m benchmarks.cache_views --data DIR --record RECORD [--samples 25000] [--epochs 24] [--freeze-epoch 8]
                                     [--seeds 3] [--jobs 2]

The recipe of `examples/cifar10.py`, with the front layer modules frozen at the same epoch in every arm, until the
end: arms of one seed do the same up to there, and differ in the augmentation alone from there. 'free' computes
the frozen front (`cache.views = 0`); the others store it, each sample coming in K variants in turn. 'unfrozen'
freezes nothing. Each run is a process of its own with one thread; finished runs are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from examples.cifar10 import evaluate, loaders
from examples.resnet import cifar_resnet
from torch.nn import functional

import egeria
from benchmarks.micro.frozen_training import Arm, Lap, Subject, cache_settings
from benchmarks.proving.comparing import archive
from benchmarks.proving.running.recipe import commit
from egeria.config import CacheConfig

FREE, UNFROZEN = "free", "unfrozen"
SHAPING = ("model", "samples", "epochs", "freeze_epoch", "depth")
"""Options that a run must share with the others of its record."""


def main() -> None:
    """Make the runs that are missing, then write the record; or make one run."""
    options = parse()
    if options.only:
        arm, seed = options.only.split(":")
        result = train(options, arm, int(seed))
        path(options, arm, int(seed)).write_text(json.dumps(result, indent=1) + "\n")
        return
    wanted = [(arm, seed) for seed in range(options.seeds) for arm in options.arms.split(",")]
    with archive.unpacked(options.record), ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: make(options, *run), wanted))
        results = [json.loads(path(options, *run).read_text()) for run in wanted]
    (options.record / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.record / "README.md").write_text(describe(options, results))
    print((options.record / "README.md").read_text())


def path(options: argparse.Namespace, arm: str, seed: int) -> Path:
    """Return where the result of a run goes; there only while the record is unpacked."""
    return Path(options.record) / archive.JOURNALS / f"{arm}-seed{seed}.json"


def make(options: argparse.Namespace, arm: str, seed: int) -> None:
    """Make a run in a process of its own, unless it is there.

    Raises:
        SystemExit: it failed, or one is there that was made with other options.
    """
    found = path(options, arm, seed)
    if found.exists():
        others = [name for name in SHAPING if json.loads(found.read_text())["options"][name] != getattr(options, name)]
        if others:
            raise SystemExit(f"{found} was made with other values of {', '.join(others)}; take another --record")
        return
    command = [sys.executable, "-m", "benchmarks.cache_views", *sys.argv[1:], "--only", f"{arm}:{seed}"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit(f"the run {arm}, seed {seed}, failed")


def settings_of(arm: str) -> CacheConfig | None:
    """Return the settings of the cache of an arm."""
    if arm == UNFROZEN:
        return None
    if arm == FREE:
        return cache_settings(views=0)
    return cache_settings(views=int(arm), gate="open")


def train(options: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train once; return the accuracy and what each epoch took, evaluation on the test set excluded."""
    torch.set_num_threads(1)
    options.seed = seed
    loader, test_loader = loaders(options)
    subject = Subject(
        name=options.model,
        build=lambda: cifar_resnet(int(options.model.removeprefix("resnet"))).to(memory_format=torch.channels_last),
        loader=lambda: loader,
        loss=lambda network, batch: functional.cross_entropy(network(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4),
        autocast=True,
    )
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    milestones = [options.epochs // 2, options.epochs * 3 // 4]
    laps, curve = [], []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        arm = Arm(name, subject, options.depth, settings_of(name), Path(directory), seed=seed)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(arm.optimizer, milestones)
        for epoch in range(options.epochs):
            if epoch == options.freeze_epoch and name != UNFROZEN:
                arm.freeze()
            laps.append(arm.lap())
            scheduler.step()
            curve.append(100 * evaluate(arm.network, test_loader, torch.device("cpu"), autocast))
            print(
                f"{name} seed {seed} epoch {epoch + 1:2} accuracy {curve[-1]:.2f} % cpu {laps[-1].cpu_s:.1f} s",
                flush=True,
            )
        decided = arm.decided
        arm.close()
    return {
        "arm": name,
        "seed": seed,
        "options": {key: getattr(options, key) for key in SHAPING},
        "commit": commit(),
        "finished": time.strftime("%Y-%m-%d %H:%M"),
        "accuracy": curve[-1],
        "curve": curve,
        "laps": [asdict(lap) for lap in laps],
        "mode": decided.mode if decided else "",
        "reason": decided.reason if decided else "",
    }


def describe(options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """Return the text of the record."""
    base = {entry["seed"]: entry for entry in results if entry["arm"] == FREE}
    rows = [
        "| augmentation | accuracy % | minus free, points | CPU s behind the freeze | of free | hits % | mode |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in options.arms.split(","):
        entries = [entry for entry in results if entry["arm"] == arm]
        pairs = [(entry, base[entry["seed"]]) for entry in entries if entry["seed"] in base and arm != FREE]
        costs = [cost_s(options, entry) for entry in entries]
        shares = [cost_s(options, entry) / cost_s(options, free) for entry, free in pairs]
        cells = [
            arm if not arm.isdigit() else f"K = {arm}",
            spread([entry["accuracy"] for entry in entries]),
            spread([entry["accuracy"] - free["accuracy"] for entry, free in pairs], signed=True),
            spread(costs, digits=0),
            f"{100 * statistics.fmean(shares):.0f} %" if shares else "",
            hit_share(options, entries),
            "; ".join(sorted({entry["mode"] for entry in entries})),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            f"# What fixed augmentation costs: {options.model} on CIFAR-10",
            "",
            f"{options.samples:,} images, {options.epochs} epochs, step schedule; the front ({options.depth} layer "
            f"module(s)) is frozen from epoch {options.freeze_epoch} to the end in every arm, so that runs of one "
            "seed differ in the augmentation alone, and only from there on. "
            f"{options.seeds} seeds, mean ± sd; differences are paired by seed.",
            "",
            *rows,
            "",
            "CPU seconds: of all threads of the process, the test set excluded. The store was opened whatever the gate "
            "would have said. The scatter of the difference tells how small an effect these seeds can show.",
            "",
            f"Machine: {os.cpu_count()} cores, {options.jobs} run(s) at a time, one thread each, no accelerator; "
            f"python {platform.python_version()}, torch {torch.__version__}, egeria {egeria.__version__} "
            f"at commit {', '.join(sorted({entry['commit'] for entry in results}))}.",
            "",
            "```",
            f"python -m benchmarks.cache_views --data DIR --record RECORD --model {options.model} "
            f"--samples {options.samples} --epochs {options.epochs} --freeze-epoch {options.freeze_epoch} "
            f"--depth {options.depth} --seeds {options.seeds} --arms {options.arms} --jobs {options.jobs}",
            "```",
            "",
        ]
    )


def behind(options: argparse.Namespace, entry: dict[str, Any]) -> list[Lap]:
    """Return the epochs of a run behind the freeze."""
    return [Lap(**lap) for lap in entry["laps"][options.freeze_epoch :]]


def cost_s(options: argparse.Namespace, entry: dict[str, Any]) -> float:
    """Return the CPU seconds of a run behind the freeze."""
    return sum(lap.cpu_s for lap in behind(options, entry))


def hit_share(options: argparse.Namespace, entries: list[dict[str, Any]]) -> str:
    """Return how many samples came from the store, in per cent of those behind the freeze."""
    laps = [lap for entry in entries for lap in behind(options, entry)]
    total = sum(lap.hits + lap.misses for lap in laps)
    return f"{100 * sum(lap.hits for lap in laps) / total:.0f}" if total else ""


def spread(values: list[float], *, digits: int = 2, signed: bool = False) -> str:
    """Return mean and standard deviation as text; nothing for no values."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):{'+' if signed else ''}.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else f"{mean} (one seed)"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--samples", type=int, default=25000)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--freeze-epoch", type=int, default=8, help="epochs before the freeze, at least 2")
    parser.add_argument("--depth", type=int, default=1, help="front layer modules that freeze")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default="free,1,2,4", help="of free, unfrozen, and numbers of views")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--directory", type=Path, help="for the stores (default: a temporary one)")
    parser.add_argument("--only", metavar="ARM:SEED", help="make this run alone")
    options = parser.parse_args()
    if not 2 <= options.freeze_epoch < options.epochs:
        parser.error("--freeze-epoch must be at least 2, so that inputs are known to be random, and below --epochs")
    return options


if __name__ == "__main__":
    main()
