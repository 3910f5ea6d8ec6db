"""Pieces of a toy run for tests, what is wanted of a run, and what a journal tells of it."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from benchmarks.__main__ import main
from benchmarks.proving.journal import read_journal
from benchmarks.proving.policies import parse_policy
from benchmarks.proving.running.execution import build
from benchmarks.proving.running.runfile import WAITING, RunFile, WorkloadFacts
from benchmarks.workloads.workload import Training, Workload
from tests import toy_workloads

ROOT = Path(__file__).resolve().parent.parent
(TOY, *_) = toy_workloads.WORKLOADS
TOYS = "tests.toy_workloads"
COMMON = ["--workloads", TOYS, "--tier", "smoke"]
CPU = torch.device("cpu")
STATIC = parse_policy("static:schedule=0.3:1+0.7:2")


def bench(*arguments: object) -> int:
    """Run `python -m benchmarks` with these arguments, here; return its exit status."""
    return main([str(argument) for argument in arguments])


def files(folder: Path) -> dict[str, bytes]:
    """Return what all files of a folder hold."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def new_training() -> Training:
    return build(TOY, Path("nowhere"), "smoke", 0, CPU)


def wanted_run(policy: str = "none", workload: Workload = TOY, module: str = TOYS, **given: Any) -> RunFile:
    """Return a run that is still to be made, of the toy unless another workload is given."""
    facts = {field.name: getattr(workload, field.name) for field in dataclasses.fields(WorkloadFacts)}
    wanted = {"status": WAITING, "tier": "gpu", "seed": 0, "device": "cpu", **given}
    return RunFile(workload=WorkloadFacts(**facts), module=module, policy=parse_policy(policy), **wanted)


def told(directory: Path) -> list[dict]:
    """Return what the journal says of metrics, losses, readings and decisions, without times and ids."""
    records = read_journal(directory).of("metric", "interval", "plasticity", "stage", "frozen", "thawed")
    for record in records:
        record["values"] = {name: value for name, value in record.get("values", {}).items() if name[-2:] != "_s"}
    own = ("time", "run")  # of each process
    return [{name: e for name, e in record.items() if name[-2:] != "_s" and name not in own} for record in records]
