"""Pieces of a toy run for tests, and what a journal tells of it."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.proving.execution import build
from benchmarks.proving.policies import parse_policy
from benchmarks.workloads.workload import Training
from tests import toy_workloads

from egeria.events import IntervalMeasured, MetricLogged, ModuleFrozen, PlasticityRead, StageChanged, Thawed
from egeria.report.history import read_history

CPU = torch.device("cpu")
STATIC = parse_policy("static:schedule=0.3:1+0.7:2")


def new_training() -> Training:
    (toy, *_) = toy_workloads.WORKLOADS
    return build(toy, Path("nowhere"), "smoke", 0, CPU)


def told(directory: Path) -> list[dict]:
    """Return what the journal says of metrics, losses, readings and decisions, without times."""
    kinds = (MetricLogged, IntervalMeasured, PlasticityRead, StageChanged, ModuleFrozen, Thawed)
    records = [event.to_dict() for event in read_history(directory).events if isinstance(event, kinds)]
    for record in records:
        record["values"] = {name: value for name, value in record.get("values", {}).items() if name[-2:] != "_s"}
    return [{name: value for name, value in record.items() if name[-2:] != "_s"} for record in records]
