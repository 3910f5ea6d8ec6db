"""Fine-tuning a part of a network without egeria: what people do by hand, as rivals of the policies."""

from __future__ import annotations

import random
from dataclasses import asdict

import torch
from torch import nn

from benchmarks.proving.policies import HEAD_ONLY, Policy
from egeria.config import ModulesConfig
from egeria.layers.freezing import Freezer
from egeria.layers.modules import parse_modules
from egeria.layers.pretrained import find_trained_norms, is_mostly_trained, settings_of_cut


class Resting:
    """Lets layer modules rest, those that egeria would cut; the last one always trains.

    'head-only' freezes all others from the start, as egeria freezes: they also stay in inference mode. 'hft' lets a
    random half of them rest in each epoch, wherever they are: like Half Fine-Tuning (Hui et al., 2024), with layer
    modules and epochs for their matrices and rounds; they only keep their weights.

    Args:
        model: at its start.
        policy: one that `rests`.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        is_pretrained = is_mostly_trained(find_trained_norms(model))
        self._modules = parse_modules(model, **settings_of_cut(asdict(ModulesConfig()), is_pretrained=is_pretrained))
        self._freezer = Freezer(model, self._modules)
        self._is_head_only = policy.name == HEAD_ONLY
        self._parameters = [
            [parameter for name in module.parameters if (parameter := model.get_parameter(name)).requires_grad]
            for module in self._modules[:-1]
        ]

    def begin_epoch(self, epoch: int) -> None:
        """Choose what rests in an epoch, by its number and the seed of the run alone."""
        if self._is_head_only:
            self._freezer.freeze_to(len(self._modules) - 1)
            return
        count = len(self._parameters) // 2
        resting = random.Random(f"{torch.initial_seed()} {epoch}").sample(range(len(self._parameters)), count)
        for number, parameters in enumerate(self._parameters):
            for parameter in parameters:
                parameter.requires_grad_(number not in resting)
                if number in resting:
                    parameter.grad = None

    def end(self) -> None:
        """Leave the model as it was found."""
        self._freezer.thaw()
        for parameter in (parameter for parameters in self._parameters for parameter in parameters):
            parameter.requires_grad_(True)
