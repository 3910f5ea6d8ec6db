"""The layer modules of a model in a plain loop: the cut of the library, and freezing a front of them by hand."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.workloads.workload import Training
from egeria.config import ModulesConfig
from egeria.model.cut import Cut, is_mostly_trained, make_modules, settings_of_cut
from egeria.model.freeze import Freezer
from egeria.model.group import find_pieces
from egeria.model.watch import Watch


class Layers:
    """The layer modules that egeria would cut, in the order of definition; the last one always trains.

    Args:
        model: at its start.
    """

    def __init__(self, model: nn.Module) -> None:
        is_pretrained = is_mostly_trained(model)
        self._settings = settings_of_cut(ModulesConfig(), is_pretrained=is_pretrained)
        names = {name for name, _ in model.named_parameters()}
        self.modules = make_modules(model, seen=names, **self._settings)
        self.parameters = [[model.get_parameter(name) for name in module.parameters] for module in self.modules]
        """Of each layer module, also those that never train."""
        self.num_trainable = [sum(entry.numel() for entry in own if entry.requires_grad) for own in self.parameters]
        self._freezer = Freezer(model, self._cut())

    def _cut(self) -> Cut:
        """Return the cut as it is without the graph of a pass: nothing is detached."""
        return Cut(
            modules=self.modules,
            detaches=(False,) * len(self.modules),
            deepest=self.deepest,
            reason="",
        )

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
        self._freezer.freeze_to(depth)

    def describe(self) -> dict[str, Any]:
        """Return the cut, as journals have it."""
        modules = [
            {**dataclasses.asdict(module), "num_trainable": count}
            for module, count in zip(self.modules, self.num_trainable, strict=True)
        ]
        return {"modules": modules, "trainable": self.trainable, "deepest_freeze": self.deepest}

    def forward_shares(self, training: Training) -> list[float]:
        """Return the share of each layer module in a forward pass, by the measure that egeria journals its own with.

        Takes one more batch of the loader. The model must not be in the midst of its training: batches and random
        numbers are drawn.
        """
        model = training.model
        pieces = find_pieces(model)
        watch = Watch(model, pieces)
        watch.open()
        try:
            with inference(model), torch.enable_grad():
                training.loss(model, next(iter(training.loader)))
        finally:
            watch.close()
        order = [piece.name for piece in pieces]
        return [module.share for module in make_modules(model, watch=watch, order=order, **self._settings)]


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
