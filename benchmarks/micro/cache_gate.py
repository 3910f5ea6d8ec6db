"""What a cache costs that stays off because it would not pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.micro.frozen_training import Arm, Subject, cache_settings
from benchmarks.micro.interleaved import Comparison, compare
from egeria.layers.modules import LayerModule

SLOW_BYTES_PER_S = 20e6
"""A batch of 128 rows of 32 KB takes 0.2 s from such a disk."""
MOST_OVERHEAD = 0.01


def measure_gate(subject: Subject, directory: Path, *, rounds: int) -> dict[str, Any]:
    """Compare whole runs behind a frozen front, without the cache (first) and with one that stays off (second).

    Args:
        subject: a residual net.
        directory: for stores.
        rounds: epochs of each run.
    """
    found = {}
    for name, slow in (("slow disk", SLOW_BYTES_PER_S), ("tiny prefix", None)):
        settings = cache_settings()
        without = Arm(f"{name}, without", subject, 1, None, directory)
        gated = Arm(f"{name}, gated", subject, 1, settings, directory, slow_bytes_per_s=slow)
        front = None if slow else stem(gated.modules)
        for arm in (without, gated):
            arm.epoch()
            arm.freeze(front)
        result = compare(without.epoch, gated.epoch, rounds=rounds, warmup=0)
        gated.close()
        found[name] = summary(gated, result, rounds * len(gated.loader))
    return found


def stem(modules: Sequence[LayerModule]) -> LayerModule:
    """Return a layer module that holds the first convolution of a residual net alone."""
    own = ("conv1", "bn1")
    parameters = tuple(name for name in modules[0].parameters if name.startswith(own))
    return replace(modules[0], name="stem", submodules=own, parameters=parameters, tap="bn1")


def summary(gated: Arm, result: Comparison, num_iterations: int) -> dict[str, Any]:
    """Return the numbers of one comparison."""
    cpu, wall = result.total_ratio()
    low, high = result.spread()
    decided = gated.decided
    later_s = sum(result.second_cpu_s[1:]), sum(result.first_cpu_s[1:])
    return {
        "cpu_ratio": cpu,
        "wall_ratio": wall,
        "cpu_ratio_median": result.cpu_ratio(),
        "cpu_ratio_quartiles": [low, high],
        "cpu_ratio_after_deciding": later_s[0] / later_s[1] if later_s[1] else cpu,
        "iterations": num_iterations,
        "iteration_cpu_ms": 1e3 * sum(result.first_cpu_s) / num_iterations,
        "deciding_wall_ms": 1e3 * gated.deciding_s[0],
        "deciding_cpu_ms": 1e3 * gated.deciding_s[1],
        "mode": decided.mode if decided else "undecided",
        "reason": decided.reason if decided else "",
        "first_cpu_s": result.first_cpu_s,
        "second_cpu_s": result.second_cpu_s,
    }


def describe_gate(found: dict[str, Any]) -> list[str]:
    """Return the lines of a record."""
    lines = [
        "## A cache that stays off",
        "",
        "A run with the cache enabled against the same without, an epoch of each in turn; the ratio of the sums "
        f"holds what deciding cost. At most {1 + MOST_OVERHEAD:.2f} is wanted.",
        "",
        "| front | iterations | CPU ratio (median of epochs, quartiles) | wall ratio | deciding, CPU ms "
        "| as iterations | mode and reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in found.items():
        low, high = entry["cpu_ratio_quartiles"]
        lines.append(
            f"| {name} | {entry['iterations']} | {entry['cpu_ratio']:.4f} ({entry['cpu_ratio_median']:.4f}, "
            f"{low:.4f} - {high:.4f}) | {entry['wall_ratio']:.4f} | {entry['deciding_cpu_ms']:.0f} "
            f"| {entry['deciding_cpu_ms'] / entry['iteration_cpu_ms']:.1f} | {entry['mode']}: {entry['reason']} |"
        )
    return [*lines, ""]
