"""What the bench trains: a model, its data, its recipe, and how the result is judged."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

TIERS = ("smoke", "cpu", "long", "gpu")
"""'smoke' ends within a minute; on one core a run of 'cpu' ends within ten, one of 'long' within 75; 'gpu' has the
paper's scale."""


class MissingDataError(Exception):
    """The data of a workload are not there; the message says what is missing, and where it was looked for."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is asked for."""

    data: Path
    """Holds a folder for each data set."""
    tier: str
    seed: int
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run, ready to start; everything in it is new, and the same again for the same `Setting`."""

    model: nn.Module
    """On the device, in the memory layout it trains in."""
    loader: DataLoader[Any]
    """Batches as `loss` takes them; with a `len`. Shuffled by a generator of its own, from the seed.

    Whatever else it draws from is a `torch.Generator` that it, its samplers or its data set have as an
    attribute, or a global one: a run in pieces finds these, and only these, to go on from where it stopped.
    """
    optimizer: Optimizer
    scheduler: LRScheduler
    """Stepped once after each optimizer step."""
    num_epochs: int
    loss: Callable[[nn.Module, Any], Tensor]
    """Takes the network and a batch; moves the batch to the device and sets autocast itself."""
    evaluate: Callable[[nn.Module], dict[str, float]]
    """Takes the network, in inference mode and without gradients; returns metrics on held-out data by name."""
    judge: Callable[[nn.Module], dict[str, float]] | None = None
    """The same on more held-out data, where `evaluate` has too few to see small differences: asked once, at the end.

    What it says decides on final quality; on the time to reach one, the evaluations do.
    """
    clip_norm: float | None = None
    """Norm that gradients are clipped to."""
    number_format: str = ""
    """What it computes in where the device lacks what its recipe asks for, such as 'float32'; else empty."""
    evaluations_per_epoch: int = 1
    """Spread evenly, the last at its end: few long epochs would tell little of when a quality was reached."""

    @property
    def evaluation_steps(self) -> frozenset[int]:
        """Steps of an epoch after which the model is evaluated; its end comes besides."""
        length, count = len(self.loader), self.evaluations_per_epoch
        return frozenset(length * number // count for number in range(1, count)) - {0, length}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training task in one recipe, in all tiers."""

    name: str
    """As the command line takes it, such as 'resnet8-cifar10' or 'resnet8-cifar10-cosine'."""
    metric: str
    """The name in `Training.evaluate`, and in `Training.judge`, that decides."""
    higher_is_better: bool
    is_relative: bool
    """Whether a loss of quality is judged in per cent of the plain value (perplexity, F1), or in points."""
    paper: str
    """What the paper reports for its kind, such as '+23 % (ResNet-56, CIFAR-10)'; empty where it has none."""
    is_held_out: bool = False
    """Whether nothing in egeria may be chosen by its results: no default, limit or constant is tuned on it."""
    tiers: tuple[str, ...] = TIERS
    """That it has a recipe for."""
    build: Callable[[Setting], Training]
    """Makes a run. Raises: MissingDataError."""
