"""Measures what freezing saves two processes, on one host and on two joined by a slow network.

python -m benchmarks.distributed [--subjects resnet56,bert] [--rounds 4] [--rate 200] [--record RECORD]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.distributed.hosts import LOCAL, Host, two_hosts, why_not
from benchmarks.proving.comparing.tables import markdown
from benchmarks.proving.running.recipe import describe_circumstances

ITERATIONS = {"resnet56": 8, "bert": 3}
DEPTHS = {"resnet56": "0,1,2,3", "bert": "0,1,2,3"}
LONGEST_S = 1800
PORT = 29517


def run_ranks(hosts: Sequence[Host], *arguments: str) -> Any:
    """Run a measurement, one process on each host, and return what it prints.

    Raises:
        RuntimeError: a process failed.
    """
    processes = []
    for rank, host in enumerate(hosts):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if host is LOCAL else 0),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": host.interface,
            "OMP_NUM_THREADS": "1",
        }
        command = [*host.prefix, sys.executable, "-m", "benchmarks.distributed.replica", *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    outputs = [process.communicate(timeout=LONGEST_S)[0] for process in processes]
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise RuntimeError(f"Rank {failed[0]} of {' '.join(arguments)} failed; its output is above.")
    return json.loads(outputs[0].splitlines()[-1])


def measure(subject: str, rounds: int, rate_mbit: int) -> dict[str, Any]:
    """Return all that is measured of a subject."""
    depths = ("--depths", DEPTHS[subject])
    timed = (subject, *depths, "--rounds", str(rounds), "--iterations", str(ITERATIONS[subject]))
    found = {"bytes": run_ranks((LOCAL, LOCAL), subject, *depths, "--bytes")}
    found["one host"] = run_ranks((LOCAL, LOCAL), *timed)
    refusal = why_not()
    if refusal:
        print(f"left out: {refusal}", file=sys.stderr)
        return found
    for name, rate in (("two hosts", None), (f"two hosts, {rate_mbit} Mbit/s", rate_mbit)):
        with two_hosts(rate) as hosts:
            found[name] = run_ranks(hosts, *timed)
    return found


def describe(results: dict[str, dict[str, Any]]) -> str:
    """Return the tables of a record."""
    parts = []
    for subject, found in results.items():
        parts += [f"## {subject}", bytes_table(found["bytes"])]
        parts += [f"### {place}\n\n{time_table(rows)}" for place, rows in found.items() if place != "bytes"]
    return "\n\n".join(parts)


def bytes_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return what an iteration reduces at each depth."""
    header = ["modules frozen", "the last of them", "bytes reduced", "bytes that train"]
    lines = [
        [str(row["depth"]), (row["frozen"] or ["none"])[-1], f"{row['reduced']:,}", f"{row['trainable']:,}"]
        for row in rows
    ]
    return markdown(header, lines)


def time_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return times of an iteration by depth, as shares of the same round's with nothing frozen."""
    header = ["modules frozen", "iteration ms", "of unfrozen %", "CPU ms", "of unfrozen %", "samples/s", "re-wrap ms"]
    lines = []
    for depth in sorted({row["depth"] for row in rows}):
        own = [row for row in rows if row["depth"] == depth]
        cells = [str(depth)]
        for clock in ("wall_s", "cpu_s"):
            ratios = [row[clock] / _unfrozen(rows, row["round"])[clock] for row in own]
            spread = f" ({min(ratios):.1%} to {max(ratios):.1%})" if depth else ""
            cells += [
                f"{1e3 * statistics.median(row[clock] for row in own):.1f}",
                f"{statistics.median(ratios):.1%}{spread}",
            ]
        rate = statistics.median(2 * row["batch_size"] / row["wall_s"] for row in own)
        rewrap = [row["rewrap_s"] for row in own if row["rewrap_s"] > 1e-4] or [0.0]
        lines.append([*cells, f"{rate:.1f}", f"{1e3 * statistics.median(rewrap):.1f}"])
    return markdown(header, lines)


def _unfrozen(rows: Sequence[dict[str, Any]], index: int) -> dict[str, Any]:
    return next(row for row in rows if row["round"] == index and row["depth"] == 0)


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", default="resnet56,bert")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rate", type=int, default=200, help="of the network between two hosts, in Mbit/s")
    parser.add_argument("--record", type=Path, metavar="RECORD")
    options = parser.parse_args()
    results = {subject: measure(subject, options.rounds, options.rate) for subject in options.subjects.split(",")}
    print(describe(results))
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        kept = {"circumstances": describe_circumstances(torch.device("cpu")), "results": results}
        (options.record / "results.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        (options.record / "tables.md").write_text(describe(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
