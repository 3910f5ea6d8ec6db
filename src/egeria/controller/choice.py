"""Where evaluations are made: in a process of their own, or in the training process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egeria.controller.assessor import Assessor, Plan
from egeria.controller.fallback import FallbackController
from egeria.controller.inline import InlineController
from egeria.controller.process import ProcessController
from egeria.controller.protocol import Controller
from egeria.controller.trust import Limits

SPARE_CORES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A kind of controller, where its reference runs, and why."""

    kind: str
    """'process' or 'inline'."""
    device: str
    """'cpu' or 'cuda'."""
    reason: str


def choose(kind: str, device: str, model: nn.Module, loader: Any = None) -> Choice:
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
        return Choice(
            kind="inline", device=device, reason=f"the reference runs beside the training on its device; {found}"
        )
    if os.name != "posix":
        return Choice(kind="inline", device=device, reason="the controller process needs a POSIX system")
    if kind != "auto":
        return Choice(kind=kind, device=device, reason=f"set in controller.kind; {found}")
    if on_accelerator:
        return Choice(kind="process", device=device, reason=f"training is on an accelerator; {found}")
    roomy = spare >= SPARE_CORES
    return Choice(kind="process" if roomy else "inline", device=device, reason=f"training is on the CPU, {found}")


def controller_maker(
    choice: Choice, plan: Callable[[tuple[str, ...]], Plan], limits: Limits
) -> Callable[[tuple[str, ...]], Controller]:
    """Return what makes the chosen controller for the taps of a cut."""

    def make_inline(taps: tuple[str, ...]) -> InlineController:
        return InlineController(Assessor(plan(taps)))

    def make(taps: tuple[str, ...]) -> Controller:
        if choice.kind == "inline":
            return make_inline(taps)
        return FallbackController(ProcessController(plan(taps), limits), lambda: make_inline(taps))

    return make


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
