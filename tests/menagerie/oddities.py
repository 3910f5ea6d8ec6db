"""Beasts that break an assumption."""

import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from menagerie.specimen import Specimen, vectors


class Part(nn.Module):
    """Two linear layers, residual."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.outer(torch.relu(self.inner(x)))


def chain() -> nn.Module:
    """Plain layers in a plain container."""
    return nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


class Backwards(nn.Module):
    """Defines its parts in the reverse order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.third, self.second, self.first = nn.Linear(8, 3), Part(), Part(), Part()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.third(self.second(self.first(x))))


class Parts(nn.Module):
    """Parts in a chain, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part() for _ in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = part(x)
        return self.head(x)


def front_frozen_before() -> nn.Module:
    """The user froze the first part."""
    model = Parts()
    model.parts[0].requires_grad_(False)
    return model


class Replacing(Parts):
    """Puts a new buffer in the place of the old in every forward pass, and uses it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        self.scale = self.scale * 0.99
        return super().forward(x * self.scale)


class OverwritingItsInput(Parts):
    """Changes the tensor it is given."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(0.5).add_(1))


class PartsByName(Parts):
    """Keeps its parts in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Part() for name in "abcd"})  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        for part in self.parts.values():  # type: ignore[operator]
            x = part(x)
        return self.head(x)


@dataclass
class Parcel:
    """A tensor in a wrapping that nobody knows."""

    content: Tensor


class Wrapped(nn.Module):
    """Passes parcels from part to part: there is no tensor to judge a part by."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([WrappedPart() for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        parcel = Parcel(x)
        for part in self.parts:
            parcel = part(parcel)
        return parcel


class WrappedPart(Part):
    """Opens a parcel and packs another."""

    def forward(self, x: Any) -> Any:
        return Parcel(super().forward(x.content))


class Remembering(Parts):
    """Keeps its last output, a computed tensor."""

    def forward(self, x: Tensor) -> Any:
        self.last = super().forward(x)
        return self.last


class KeepingAll(Parts):
    """Keeps what published models keep outside of buffers: a momentum encoder, a queue, losses, generators."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.key = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.queue, self.losses, self.counts, self.tags = torch.zeros(8), list[Tensor](), {"calls": 0}, {"new"}
        self.random, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.register_buffer("average", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.key.weight.data = 0.9 * self.key.weight.data + 0.1 * self.encoder.weight.data
        self.queue.mul_(0.9).add_(0.1 * x.detach().mean(dim=0))
        self.average.mul_(0.9).add_(x.detach().mean(dim=0))
        y = self.encoder(x) + self.key(x) + torch.rand(8, generator=self.random) + torch.rand(8) + self.average
        y = y + self.numpy.random() + self.python.random() + self.queue + 0.01 * len(self.tags)
        self.losses.append(y.square().mean())
        self.counts["calls"] += 1
        self.tags.add(str(self.counts["calls"]))
        return super().forward(y + 0.001 * len(self.losses))


class BreakingInInference(Parts):
    """Cannot be run in evaluation mode."""

    def forward(self, x: Tensor) -> Any:
        x = x + torch.rand(x.shape)
        if not self.training:
            raise RuntimeError("broken on purpose")
        return super().forward(x)


class Uncopyable(Parts):
    """Holds a lock, which no deep copy is possible of."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def one_layer() -> nn.Module:
    """Has nothing in front of its last layer."""
    return nn.Linear(8, 3)


def traced() -> nn.Module:
    """Is written by torch.fx: its `forward` is of no file, and its class copies its attributes one by one.

    Made from a model without annotations: torch.fx cannot pickle what has some that are strings.
    """
    return torch.fx.symbolic_trace(chain())


SPECIMENS = (
    *(
        Specimen(case=case, build=build, example=vectors)
        for build, case in (
            (chain, "no blocks: every layer is one"),
            (Backwards, "defined in the reverse order of execution"),
            (front_frozen_before, "the first part has nothing to train"),
            (Replacing, "every forward pass replaces a buffer that the next one reads"),
            (OverwritingItsInput, "the input is overwritten"),
            (Remembering, "a computed tensor among the attributes"),
            (PartsByName, "the parts live in a dictionary"),
            (traced, "its code was written by torch.fx"),
            (KeepingAll, "what a pass leaves behind is everywhere"),
        )
    ),
    *(
        Specimen(case=case, build=build, example=vectors, unsupported=reason)
        for build, case, reason in (
            (Wrapped, "activations travel in objects of the user's own", "gives no tensor to judge it by"),
            (Uncopyable, "an attribute that cannot be copied", "deep copy"),
            (one_layer, "a single layer", "two layers"),
            (BreakingInInference, "it raises in evaluation mode", "broken on purpose"),
        )
    ),
)
