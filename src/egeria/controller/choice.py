"""Where evaluations are made: in a process of their own, or in the training process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egeria.config import ControllerConfig
from egeria.controller.inline import EvaluationPlan, InlineController
from egeria.controller.process import ProcessController
from egeria.controller.protocol import Controller

SPARE_CORES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerChoice:
    """A kind of controller, where its reference runs, and why."""

    kind: str
    """'process' or 'inline'."""
    device: str
    """'cpu' or 'cuda'."""
    reason: str


def choose(kind: str, device: str, model: nn.Module, loader: Any = None) -> ControllerChoice:
    """Choose a kind of controller.

    Args:
        kind: 'auto', 'process' or 'inline'; what is not 'auto' is taken.
        device: 'auto', 'cpu' or 'cuda': where the reference runs.
        model: the model in training.
        loader: its loader, whose workers need cores too.
    """
    on_accelerator = any(parameter.device.type == "cuda" for parameter in model.parameters())
    cores, spare = usable_cores(), spare_cores(loader)
    found = f"{cores:g} cores can be used and {max(spare, 0):g} of them are spare"
    if device == "cuda" and not on_accelerator:
        device, found = "cpu", f"{found}; reference.device is 'cuda', but the model is not on one"
    if device == "auto":
        device = "cuda" if on_accelerator and kind != "process" and spare < 1 else "cpu"
    if device == "cuda":
        return ControllerChoice(
            kind="inline", device=device, reason=f"the reference runs beside the training on its device; {found}"
        )
    if os.name != "posix":
        return ControllerChoice(kind="inline", device=device, reason="the controller process needs a POSIX system")
    if kind != "auto":
        return ControllerChoice(kind=kind, device=device, reason=f"set in controller.kind; {found}")
    if on_accelerator:
        return ControllerChoice(kind="process", device=device, reason=f"training is on an accelerator; {found}")
    roomy = spare >= SPARE_CORES
    return ControllerChoice(
        kind="process" if roomy else "inline", device=device, reason=f"training is on the CPU, {found}"
    )


def make_controller(choice: ControllerChoice, plan: EvaluationPlan, config: ControllerConfig) -> Controller:
    """Return a controller of the chosen kind.

    Args:
        choice: of the kind.
        plan: how to evaluate.
        config: what a controller process may take.
    """
    return InlineController(plan) if choice.kind == "inline" else ProcessController(plan, config)


def spare_cores(loader: Any = None, environment: Mapping[str, str] | None = None) -> float:
    """Return how many cores neither training threads nor data workers of this job need."""
    environment = os.environ if environment is None else environment
    workers = getattr(loader, "num_workers", 0)
    each = torch.get_num_threads() + (workers if isinstance(workers, int) else 0)
    ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    return usable_cores() - each * (int(ranks) if ranks.isdigit() else 1)


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    try:
        granted, _, period = quota.read_text(encoding="ascii").partition(" ")
        return min(cores, int(granted) / int(period))
    except (OSError, ValueError):
        return cores
