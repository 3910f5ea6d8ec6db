"""What people do by hand to train less, as rivals of the policies: a part of the network, or fewer steps."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from benchmarks.proving.policies import HEAD_ONLY, Policy
from benchmarks.workloads.workload import Training
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
        self._modules = parse_modules(
            model, **settings_of_cut(dataclasses.asdict(ModulesConfig()), is_pretrained=is_pretrained)
        )
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


def shortened(training: Training, policy: Policy) -> Training:
    """Return the training as a policy shortens it: 'short' to a `share` of its steps, others not at all.

    Each epoch ends after that share of its batches, drawn in the same order, and the whole schedule of the learning
    rate is gone through in the steps that are left.
    """
    if not policy.shortens:
        return training
    loader, num_full = training.loader, len(training.loader)
    num_kept = max(1, round(policy.settings["policy"]["share"] * num_full))
    fewer: Any = FewerBatches(cast(Any, loader.batch_sampler), num_kept)
    return dataclasses.replace(
        training,
        loader=DataLoader(
            loader.dataset,
            batch_sampler=fewer,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
        ),
        scheduler=cast(LRScheduler, FasterScheduler(training.scheduler, num_full, num_kept)),
    )


class FewerBatches(Sampler[list[int]]):
    """The first batches of each epoch."""

    def __init__(self, batch_sampler: Sampler[list[int]], count: int) -> None:
        self.batch_sampler, self._count = batch_sampler, count

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self._count)

    def __len__(self) -> int:
        return self._count


class FasterScheduler:
    """Steps another scheduler `num_full` times in `num_kept` steps of its own, spread evenly."""

    def __init__(self, scheduler: LRScheduler, num_full: int, num_kept: int) -> None:
        self._scheduler, self._num_full, self._num_kept = scheduler, num_full, num_kept
        self._done = 0

    def step(self) -> None:
        """Go on with the schedule after an optimizer step."""
        before, self._done = self._done, self._done + 1
        for _ in range(self._done * self._num_full // self._num_kept - before * self._num_full // self._num_kept):
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        return {"done": self._done, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._done = state["done"]
        self._scheduler.load_state_dict(state["scheduler"])
