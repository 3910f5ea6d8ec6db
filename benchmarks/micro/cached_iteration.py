"""CPU time of an epoch with the front of a model frozen: computed, and from the activation cache.

    python -m benchmarks.micro.cached_iteration [--data DIR] [--subjects resnet20,bert] [--samples 2048] [--rounds 12]
                                                [--precision bf16] [--layout nhwc] [--warm]
                                                [--record RECORD]
    python -m benchmarks.micro.cached_iteration --gate-overhead [--rounds 40]

Each way trains a model of its own in this process, an epoch at a time, in turn; 'for nothing' has a front that always
gives the same answer, which no cache can beat. CPU time is of all threads, reader and writer included. Each epoch
is compared with the plain one of its round. The store's pages are dropped before each epoch, so that activations
come from the disk, unless `--warm` is given; the epoch that fills the store, finding out included, is told apart.
BERT-size: `--bert-samples` of 128 tokens in batches of 8.

`--gate-overhead` sets the gate before a disk that is too slow and before a front too small to gain by:
a run with the cache enabled, which stays off, against the same with `cache.enabled = false`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import egeria
from benchmarks.micro.cache_gate import describe_gate, measure_gate
from benchmarks.micro.frozen_training import Arm, Lap, Subject, bert, cache_settings, in_turn, residual_net
from benchmarks.proving.running.recipe import commit

PLAIN = "plain"
FLOOR = "for nothing"
"""The front gives the same answer to every batch: no cache can be faster."""
TARGETS = {"resnet20": {"depth 1, cache": 0.50, "depth 2, cache": 0.25}, "bert": {"depth 3, cache": 0.35}}
MOST_STALLS = 0.02
LAYOUTS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
HEADINGS = (
    "way",
    "CPU % of plain (quartiles)",
    "wall % of plain (quartiles)",
    "stalls % of time",
    "hits %",
    "MB read",
    "CPU % of it in threads",
    "CPU of the first epoch",
    "target %",
)


def ways(subject: Subject, depths: Sequence[int], directory: Path) -> list[Arm]:
    """Return the arms to compare; the first trains plainly."""
    found = [Arm(PLAIN, subject, 0, None, directory)]
    for depth in depths:
        kinds = {
            "computed": None,
            "cache": cache_settings(gate="open", verify_batches=10**9),
            FLOOR: None,
        }
        found += [Arm(f"depth {depth}, {kind}", subject, depth, chosen, directory) for kind, chosen in kinds.items()]
    return found


def measure(subject: Subject, depths: Sequence[int], options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train all ways in turn; return their laps, and what the cache decided."""
    arms = ways(subject, depths, directory)
    try:
        for arm in arms:
            arm.lap()
            if arm.depth:
                arm.freeze()
            if arm.name.endswith(FLOOR):
                arm.answer_for_nothing()
        rounds = list(in_turn(arms, 1 + options.rounds, cold=not options.warm))
        found: dict[str, Any] = {
            arm.name: {
                "laps": [asdict(entry[arm.name]) for entry in rounds],
                "mode": arm.decided.mode if arm.decided else "",
                "reason": arm.decided.reason if arm.decided else "",
                "frozen": [module.name for module in arm.modules[: arm.depth]],
            }
            for arm in arms
        }
        for depth in depths:
            computed, cached = (next(a for a in arms if a.name == f"depth {depth}, {k}") for k in ("computed", "cache"))
            found[cached.name]["same_weights"] = same_weights(computed, cached)
        return found
    finally:
        for arm in arms:
            arm.close()
        gc.collect()


def same_weights(first: Arm, second: Arm) -> bool:
    """Tell whether two arms have come to the same weights, bit for bit."""
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def row(name: str, entry: dict[str, Any], plain: dict[str, Any], target: float | None) -> list[str]:
    """Return a row of the table: the filling epoch apart from the others."""
    laps, plain_laps = ([Lap(**lap) for lap in which["laps"]] for which in (entry, plain))
    filling, *rest = laps
    pairs = list(zip(rest, plain_laps[1:], strict=True))
    used, missed = sum(lap.hits for lap in rest), sum(lap.misses for lap in rest)
    from_store = used + missed > 0
    return [
        name,
        quartiles([lap.cpu_s / base.cpu_s for lap, base in pairs]),
        quartiles([lap.wall_s / base.wall_s for lap, base in pairs]),
        f"{100 * sum(lap.stall_s for lap in rest) / sum(lap.wall_s for lap in rest):.2f}" if from_store else "",
        f"{100 * used / (used + missed):.1f}" if from_store else "",
        f"{statistics.fmean(lap.bytes_read for lap in rest) / 1e6:.0f}" if from_store else "",
        f"{100 * sum(lap.thread_cpu_s for lap in rest) / sum(lap.cpu_s for lap in rest):.1f}" if from_store else "",
        f"{100 * filling.cpu_s / plain_laps[0].cpu_s:.0f} %" if entry["mode"] else "",
        f"{100 * target:.0f}" if target else "",
    ]


def quartiles(values: Sequence[float]) -> str:
    """Return median and quartiles in per cent."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{100 * middle:.1f} ({100 * low:.1f} - {100 * high:.1f})"


def rows(subject: str, found: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a subject."""
    targets = TARGETS.get(subject.split(maxsplit=1)[0], {})
    return [row(name, entry, found[PLAIN], targets.get(name)) for name, entry in found.items()]


def show(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading)
    for line in lines:
        table.add_row(*line)
    Console(width=150).print(table)


def facts(subject: str, found: dict[str, Any]) -> list[str]:
    """Return what else is to be said of a subject, a line each."""
    plain = [lap["cpu_s"] for lap in found[PLAIN]["laps"]]
    seconds, rounds = statistics.median(plain), len(plain) - 1
    said = [f"{subject}: {rounds} rounds, in which an epoch of plain training takes {seconds:.2f} s of CPU time."]
    for name, entry in found.items():
        if entry["frozen"] and entry["mode"]:
            said.append(f"{subject}, {name} ({' + '.join(entry['frozen'])}): {entry['mode']}, {entry['reason']}.")
        if entry.get("same_weights") is not None:
            said.append(f"{subject}, {name}: weights bit for bit as computed: {entry['same_weights']}.")
    return said


def describe(options: argparse.Namespace, results: dict[str, Any]) -> str:
    """Return the text of the record."""
    lines = [
        "# Skipping the frozen forward pass: CPU time of an epoch",
        "",
        "A model with its front frozen, trained in one process in turn with a plain one, by epoch; CPU time of all "
        "threads, reader and writer included, against the plain epoch of the same round: median and quartiles. bf16 "
        f"and channels_last where nothing else is said, {options.threads} torch thread(s). Stored activations come "
        "from the disk, not from the page cache, unless the command says `--warm`. "
        "The first epoch behind the freeze, which fills the store, is told apart; it holds everything done to find out "
        "what can be stored.",
        "",
        f"Judged by: the targets in the last column, and stalls of at most {100 * MOST_STALLS:.0f} % of time. "
        f"'{FLOOR}' is a front that gives the same answer to every batch: what is left is the rest of the iteration.",
        "",
    ]
    for subject, found in results["subjects"].items():
        table = ["| " + " | ".join(line) + " |" for line in rows(subject, found)]
        lines += [
            f"## {subject}",
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|" + "---|" * len(HEADINGS),
            *table,
            "",
        ]
        lines += [f"- {fact}" for fact in facts(subject, found)] + [""]
    lines += describe_gate(results["gate"]) if results["gate"] else []
    lines += [
        f"Machine: {os.cpu_count()} cores, load {results['load']:.1f} at the end, no accelerator; "
        f"python {platform.python_version()}, torch {torch.__version__}, egeria {egeria.__version__} "
        f"at commit {', '.join(results['commits'])}.",
        "",
        "```",
        *results["commands"],
        "```",
        "",
    ]
    return "\n".join(lines)


def record(options: argparse.Namespace, subjects: dict[str, Any], gate: dict[str, Any]) -> None:
    """Write results.json and README.md; what an earlier command found of other things stays."""
    path = options.record / "results.json"
    options.record.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text()) if path.exists() else {}
    command = f"python -m benchmarks.micro.cached_iteration {' '.join(sys.argv[1:])}"
    for place, name in ((options.data, "DIR"), (options.record, "RECORD"), (options.directory, "DISK")):
        command = command.replace(str(place), name) if place else command
    results = {
        "subjects": {**old.get("subjects", {}), **subjects},
        "gate": {**old.get("gate", {}), **gate},
        "commits": sorted({*old.get("commits", []), commit()}),
        "commands": list(dict.fromkeys([*old.get("commands", []), command])),
        "load": os.getloadavg()[0],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    (options.record / "README.md").write_text(describe(options, results))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="CIFAR-10, as examples/cifar10.py reads it (default: noise)")
    parser.add_argument("--subjects", default="resnet20,bert")
    parser.add_argument("--samples", type=int, default=2048, help="of an epoch of the residual net")
    parser.add_argument("--bert-samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="nhwc", help="of images: channels last, or first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="for the stores, on the disk to measure (default: a temporary)")
    parser.add_argument("--warm", action="store_true", help="leave what is stored in the page cache")
    parser.add_argument("--gate-overhead", action="store_true", help="measure a cache that stays off instead")
    parser.add_argument("--record", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the record."""
    options = parse()
    torch.set_num_threads(options.threads)
    autocast = options.precision == "bf16"
    subjects: dict[str, Any] = {}
    gate: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        if options.gate_overhead:
            subject = residual_net(20, options.data, options.samples, autocast=autocast)
            gate = measure_gate(subject, Path(place), rounds=options.rounds)
            print("\n".join(describe_gate(gate)))
        for name in [] if options.gate_overhead else options.subjects.split(","):
            depths = (3,) if name == "bert" else (1, 2)
            if name == "bert":
                subject = bert(options.bert_samples, autocast=autocast)
            else:
                subject = residual_net(
                    20, options.data, options.samples, autocast=autocast, layout=LAYOUTS[options.layout]
                )
            label = " ".join([name, *([] if autocast else ["fp32"]), *(["nchw"] if options.layout == "nchw" else [])])
            subjects[label] = measure(subject, depths, options, Path(place))
            show(f"{label}, CPU time of an epoch", HEADINGS, rows(label, subjects[label]))
            print("\n".join(facts(label, subjects[label])), flush=True)
    if options.record:
        record(options, subjects, gate)


if __name__ == "__main__":
    main()
