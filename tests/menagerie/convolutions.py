"""Convolutional beasts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from menagerie.specimen import Specimen, images


class Block(nn.Module):
    """A residual block around two convolutions; `norm` makes what follows each."""

    def __init__(self, channels: int = 4, norm: Any = nn.BatchNorm2d, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = norm(channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.dropout(self.norm2(self.conv2(inner))))


class Net(nn.Module):
    """A stem, some blocks in a chain, and a head."""

    def __init__(self, *blocks: nn.Module, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def residual() -> nn.Module:
    """Blocks with batch normalisation."""
    return Net(*(Block() for _ in range(4)))


def with_dropout() -> nn.Module:
    """Blocks with dropout modules."""
    return Net(*(Block(dropout=0.5) for _ in range(4)))


class OpenBlock(Block):
    """Leaves the last activation to whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return x + self.conv2(functional.relu(self.norm1(self.conv1(x))))


class InPlace(Net):
    """Overwrites the output of every block."""

    def __init__(self) -> None:
        super().__init__(*(OpenBlock() for _ in range(3)))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = functional.relu_(block(x))
        return self.head(x.mean((2, 3)))


class SkipConnected(nn.Module):
    """Feeds the output of each encoder block to its decoder block as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.encoder1, self.encoder2 = Block(), Block()
        self.bottom = Block()
        self.decoder2, self.decoder1 = Block(8), Block(12)
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Any:
        first = self.encoder1(self.stem(x))
        second = self.encoder2(functional.max_pool2d(first, 2))
        deep = functional.interpolate(self.bottom(functional.max_pool2d(second, 2)), scale_factor=2)
        deep = self.decoder2(torch.cat([second, deep], dim=1))
        return self.head(self.decoder1(torch.cat([first, functional.interpolate(deep, scale_factor=2)], dim=1)))


class TwoHeads(Net):
    """Returns a dictionary with a main and an auxiliary score."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)))
        self.auxiliary = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        middle = self.blocks[:2](self.stem(x))
        return {"out": self.head(self.blocks[2](middle).mean((2, 3))), "aux": self.auxiliary(middle.mean((2, 3)))}


class StochasticDepth(Net):
    """Skips blocks at random while training."""

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            if not (self.training and torch.rand(()) < 0.3):
                x = block(x)
        return self.head(x.mean((2, 3)))


def stochastic_depth() -> nn.Module:
    """Skips blocks at random while training."""
    return StochasticDepth(*(Block() for _ in range(4)))


class NormsKeptInInference(Net):
    """Overrides `train` to keep every normalisation in inference mode, as fine-tuning recipes do."""

    def train(self, mode: bool = True) -> "NormsKeptInInference":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def norms_kept_in_inference() -> nn.Module:
    """Overrides `train` to keep every normalisation in inference mode."""
    return NormsKeptInInference(*(Block() for _ in range(3)))


def spectral_norm() -> nn.Module:
    """Computes weights from other parameters and from buffers that move in training mode."""
    net = residual()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.utils.parametrizations.spectral_norm(module)
    return net


SPECIMENS = tuple(
    Specimen(case=case, build=build, example=images)
    for build, case in (
        (residual, "blocks with batch normalisation and shortcuts"),
        (with_dropout, "dropout modules inside the blocks"),
        (InPlace, "the output of a block is overwritten behind it"),
        (SkipConnected, "front outputs are used again far behind the boundary"),
        (TwoHeads, "the output is a dictionary, and one head sits in the middle"),
        (stochastic_depth, "which blocks run differs from step to step"),
        (norms_kept_in_inference, "the user's own train() keeps normalisation in inference mode"),
        (spectral_norm, "weights are computed from parameters and buffers"),
    )
)
