"""The toy workload, to whose process something happens: its time is over, or it is killed.

What happens when is in the environment: TOY_LATE_AFTER and TOY_KILLED_AFTER count the evaluations of one process.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal

from benchmarks.proving.running import limit
from benchmarks.workloads.workload import Setting, Training, Workload
from tests import toy_workloads
from torch import Tensor, nn


def build(setting: Setting) -> Training:
    """Tiny in each tier."""
    assert setting.tier == "gpu"
    training = toy_workloads.build_clusters(setting)
    num_evaluations = num_steps = 0

    def loss(network: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal num_steps
        num_steps += 1
        in_midst = num_steps % len(training.loader) == len(training.loader) // 2
        if in_midst and num_evaluations == int(os.environ.get("TOY_KILLED_AFTER", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return training.loss(network, batch)

    def evaluate(network: nn.Module) -> dict[str, float]:
        nonlocal num_evaluations
        num_evaluations += 1
        if num_evaluations == int(os.environ.get("TOY_LATE_AFTER", "-1")):
            limit.now_s = lambda: math.inf
        return training.evaluate(network)

    return dataclasses.replace(training, loss=loss, evaluate=evaluate)


WORKLOADS = (
    Workload(name="stops", metric="accuracy", higher_is_better=True, is_relative=False, paper="", build=build),
)
