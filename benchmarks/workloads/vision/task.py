"""A network on a data set, and how one run of it is put together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.workloads.mixed import in_place_of_bfloat16, mixed
from benchmarks.workloads.vision.metrics import MEASURES, confusion
from benchmarks.workloads.vision.pictures import VOID, CroppedBatches, PictureBatches, Pictures, Reader, Source
from benchmarks.workloads.vision.recipe import Recipe, Schedule, make_optimizer
from benchmarks.workloads.workload import Setting, Training

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the step and the cosine workload of a network have in common."""

    name: str
    measures: tuple[str, ...]
    """Names of `MEASURES`; the first one decides."""
    paper: str
    read: Reader
    num_classes: int
    network: Callable[[Recipe], nn.Module]
    load_weights: Callable[[nn.Module, Path], None] | None = None
    """Puts pretrained values into the network, from the folder with all data sets. Raises: MissingDataError."""
    recipes: dict[str, Recipe]
    """By tier."""


def build(task: Task, schedule: Schedule, setting: Setting) -> Training:
    """Make a run: same setting, same weights, same batches.

    Seeds torch's global generators, from which initial weights and dropout are drawn.

    Raises:
        MissingDataError: the data are not there.
    """
    recipe = task.recipes[setting.tier]
    source = task.read(setting.data, recipe)
    torch.manual_seed(setting.seed)
    network = task.network(recipe)
    if task.load_weights is not None:
        task.load_weights(network, setting.data)
    model = network.to(setting.device, memory_format=torch.channels_last)
    optimizer = make_optimizer(model, recipe)
    forward = Forward(setting.device, recipe.is_mixed)
    loader = training_loader(source, recipe, setting)

    def judge(pictures: Pictures) -> Callable[[nn.Module], dict[str, float]]:
        return partial(evaluate, task, held_out_loader(pictures, source, recipe, setting), forward)

    return Training(
        model=model,
        loader=loader,
        optimizer=optimizer,
        scheduler=schedule(optimizer, recipe, recipe.num_epochs * len(loader)),
        num_epochs=recipe.num_epochs,
        loss=partial(loss_of, forward),
        evaluate=judge(source.held_out),
        judge=None if source.judged is None else judge(source.judged),
        number_format=in_place_of_bfloat16(setting.device) if recipe.is_mixed else "",
    )


def whole(batch: Batch) -> Batch:
    """Leave a batch as the data set gathered it."""
    return batch


def training_loader(source: Source, recipe: Recipe, setting: Setting) -> DataLoader[Any]:
    """Return shuffled batches of crops; order and crops come from generators of their own."""
    shuffling = torch.Generator().manual_seed(setting.seed)
    cropping = torch.Generator().manual_seed(setting.seed + 1)
    return DataLoader(
        CroppedBatches(source, recipe, cropping),
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        generator=shuffling,
        collate_fn=whole,
        pin_memory=setting.device.type == "cuda",
    )


def held_out_loader(pictures: Pictures, source: Source, recipe: Recipe, setting: Setting) -> DataLoader[Any]:
    """Return batches of whole pictures in their order, larger because no gradients are kept."""
    return DataLoader(
        PictureBatches(pictures, source),
        batch_size=4 * recipe.batch_size,
        collate_fn=whole,
        pin_memory=setting.device.type == "cuda",
    )


@dataclass(frozen=True)
class Forward:
    """Runs a network on a batch, which comes from the loader as it is."""

    device: torch.device
    is_mixed: bool
    """Whether in bfloat16 where autocast allows it and the device is fast at it."""

    def __call__(self, network: nn.Module, batch: Batch) -> Batch:
        """Return logits and targets, the logits in float32: in bfloat16 a loss has no more than three digits."""
        images, targets = (part.to(self.device, non_blocking=True) for part in batch)
        with mixed(self.device, enabled=self.is_mixed):
            logits = network(images)
        return logits.float(), targets


def loss_of(forward: Forward, network: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy over all pictures or all pixels that are not void."""
    logits, targets = forward(network, batch)
    return functional.cross_entropy(logits, targets, ignore_index=VOID)


def evaluate(task: Task, loader: DataLoader[Any], forward: Forward, network: nn.Module) -> dict[str, float]:
    """Return the task's measures on all held-out pictures, in %."""
    counts = torch.zeros(task.num_classes, task.num_classes, dtype=torch.long, device=forward.device)
    for batch in loader:
        logits, targets = forward(network, batch)
        counts += confusion(logits.argmax(1), targets, task.num_classes)
    return {name: MEASURES[name](counts.cpu()) for name in task.measures}
