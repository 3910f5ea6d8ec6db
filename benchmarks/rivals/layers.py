"""The layer modules of a model in a plain loop: the cut of the library, and freezing a front of them by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workloads.workload import Training
from egeria.config import ModulesConfig
from egeria.layers.freezing import Freezer
from egeria.layers.modules import parse_modules
from egeria.layers.pretrained import find_trained_norms, is_mostly_trained, settings_of_cut


class Layers:
    """The layer modules that egeria would cut; the last one always trains.

    Args:
        model: at its start.
    """

    def __init__(self, model: nn.Module) -> None:
        is_pretrained = is_mostly_trained(find_trained_norms(model))
        settings = settings_of_cut(dataclasses.asdict(ModulesConfig()), is_pretrained=is_pretrained)
        self.modules = parse_modules(model, **settings)
        self.parameters = [[model.get_parameter(name) for name in module.parameters] for module in self.modules]
        """Of each layer module."""
        self.num_trainable = [sum(entry.numel() for entry in own if entry.requires_grad) for own in self.parameters]
        self._freezer = Freezer(model, self.modules)

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return self._freezer.depth

    @property
    def deepest(self) -> int:
        """How many may be frozen."""
        return len(self.modules) - 1

    @property
    def trainable(self) -> list[bool]:
        """For each layer module, whether it had anything to train at the start."""
        return [count > 0 for count in self.num_trainable]

    def freeze_to(self, depth: int) -> None:
        """Freeze the first layer modules and no others: without gradients, their normalisation in inference mode."""
        if depth < self.depth:
            self.thaw()
        self._freezer.freeze_to(depth)

    def thaw(self) -> None:
        """Leave the model as it was found."""
        self._freezer.thaw()

    def describe(self) -> dict[str, Any]:
        """Return the cut, as journals have it."""
        modules = [
            {**module.to_dict(), "num_trainable": count}
            for module, count in zip(self.modules, self.num_trainable, strict=True)
        ]
        return {"modules": modules, "trainable": self.trainable, "deepest_freeze": self.deepest}

    def forward_shares(self, training: Training) -> list[float]:
        """Return the share of each layer module in the operations of a forward pass, of one more batch of the loader.

        What no layer module has counts for the last one. The model must not be in the midst of its training: batches
        and random numbers are drawn.
        """
        model, counter = training.model, FlopCounterMode(display=False)
        needed = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in needed:  # the counter follows gradients, and fails at views without any
            parameter.requires_grad_(False)
        try:
            with inference(model), counter:
                training.loss(model, next(iter(training.loader)))
        finally:
            for parameter in needed:
                parameter.requires_grad_(True)
        counts, total = counter.get_flop_counts(), counter.get_total_flops() or 1
        own = [[f"{type(model).__name__}.{name}" for name in module.submodules] for module in self.modules]
        shares = [sum(sum(counts[name].values()) for name in names if name in counts) / total for names in own]
        return [*shares[:-1], shares[-1] + max(0.0, 1 - sum(shares))]


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put a model in inference mode for the block, without gradients."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
