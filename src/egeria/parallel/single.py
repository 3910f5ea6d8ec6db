"""The seam for data-parallel training, and its twin for one process."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import nn

from egeria import dist

Decisions = TypeVar("Decisions")

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine")


class ParallelStrategy(Protocol):
    """What changes when several processes train one model."""

    def refusal(self, model: nn.Module) -> str | None:
        """Return why this model cannot be trained under the strategy; None if it can."""
        ...

    def agree(self, decisions: Decisions) -> Decisions:
        """Return the decisions that every process applies at this step."""
        ...

    def rewrap(self, model: nn.Module) -> nn.Module:
        """Return what the loop should call after gradients were switched on or off."""
        ...


class SingleProcess:
    """One process decides for itself and calls the model as it is."""

    def refusal(self, model: nn.Module) -> str | None:
        """Refuse wrapped models and jobs of several processes, which would fall out of step."""
        if type(model).__name__ in _WRAPPERS:
            return f"the model is wrapped in {type(model).__name__}, which this version cannot freeze safely"
        if isinstance(model, torch.jit.ScriptModule):
            return "the model is a TorchScript module, whose layers cannot be read. Attach the module it was made from"
        if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
            return "the model is compiled, and watching it would break its graphs. Attach it without torch.compile"
        if dist.world_size() > 1:
            return f"this job has {dist.world_size()} processes, and this version cannot make them agree"
        return None

    def agree(self, decisions: Decisions) -> Decisions:
        """Return the decisions as they are."""
        return decisions

    def rewrap(self, model: nn.Module) -> nn.Module:
        """Return the model as it is."""
        return model
