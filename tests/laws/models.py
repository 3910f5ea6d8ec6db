"""The eight models, each small and each chosen for one property, and what the laws have to know of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu
from torch.optim import Optimizer

NUM_ROWS, BATCH = 24, 6
CLASSES, WIDTH, LENGTH, WORDS = 3, 8, 5, 12


class Residual(nn.Module):
    """Two convolutions with batch normalisation, around a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = (nn.BatchNorm2d(4, momentum=0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return relu(x + self.norm2(self.conv2(relu(self.norm1(self.conv1(x))))))


class ResidualNet(nn.Module):
    """Stem, four residual blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=0.5)
        self.blocks, self.head = nn.Sequential(*(Residual() for _ in range(4))), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(relu(self.norm(self.stem(x)))).mean((2, 3)))


class Embeddings(nn.Module):
    """Words and their places."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.words(ids) + self.places)


class Block(nn.Module):
    """A transformer block, normalised ahead of each half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        weights = (self.query(y) @ self.key(y).transpose(1, 2) / WIDTH**0.5).softmax(-1)
        x = x + self.dropout(weights) @ self.value(y)
        return x + self.dropout(self.outer(gelu(self.inner(self.norm2(x)))))


class Transformer(nn.Module):
    """Embeddings, four blocks, and a head that may share the table of words; returns scores [B, words, T]."""

    def __init__(self, *, is_tied: bool = False, dropout: float = 0.2) -> None:
        super().__init__()
        self.embeddings, self.blocks = Embeddings(dropout), nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embeddings.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class LowRank(nn.Module):
    """A layer as PEFT has it: its weights do not train, an adapter of low rank with a dropout of its own does."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base, self.dropout = layer.requires_grad_(False), nn.Dropout(0.2)
        self.down, self.up = (nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, 2), (2, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(self.dropout(x)))


def with_lora() -> nn.Module:
    """Return a transformer that trains its adapters alone."""
    model = Transformer(dropout=0.0).requires_grad_(False)
    for block in model.blocks:
        block.query, block.value = LowRank(block.query), LowRank(block.value)
    return model


class Part(nn.Module):
    """Two linear layers with normalisation and dropout, around a skip connection."""

    def __init__(self, dropout: nn.Dropout | None = None) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout or nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(relu(self.inner(self.norm(x)))))


class Backwards(nn.Module):
    """Defines its parts in the reverse order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.fourth, self.third, self.second, self.first = (Part() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fourth(self.third(self.second(self.first(x)))))


class Parts(nn.Module):
    """Parts and a head."""

    def __init__(self, dropout: nn.Dropout | None = None) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList(Part(dropout) for _ in range(4)), nn.Linear(WIDTH, CLASSES)


class Sharing(Parts):
    """Runs its second part twice, and has one dropout for all."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1, 2, 3):
            x = self.parts[index](x)
        return self.head(x)


class Branching(Parts):
    """Has a part near its front that rows with a large first number go through; the first batch has none."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = Part()

    def forward(self, x: Tensor) -> Tensor:
        takes_branch = x[:, :1] > 1
        x = self.parts[0](x)
        if takes_branch.any():
            x = torch.where(takes_branch, self.branch(x), x)
        for part in self.parts[1:]:
            x = part(x)
        return self.head(x)


class Remembering(nn.Module):
    """One recurrent cell whose state goes from batch to batch: nothing is in front of its only layer."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(BATCH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x, self.state)
        self.state = state.detach()
        return state


def images(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pictures [N, 3, 6, 6] and their classes."""
    x = torch.randn(NUM_ROWS, 3, 6, 6, generator=random)
    return x, x.mean((2, 3)).argmax(1)


def sentences(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return words [N, T] and for each the next one."""
    ids = torch.randint(WORDS, (NUM_ROWS, LENGTH + 1), generator=random)
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def vectors(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return vectors [N, D] and their classes; the first number of those of the first batch is small."""
    x = torch.randn(NUM_ROWS, WIDTH, generator=random)
    x[:BATCH, 0].clamp_(max=0.0)
    x[BATCH::3, 0] = 2.0
    return x, x[:, :CLASSES].argmax(1)


def sgd(parameters: Any) -> Optimizer:
    """Return an optimizer whose momentum and decay move whatever keeps a gradient, be it zero."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> Optimizer:
    """Return the optimizer of the transformers."""
    return torch.optim.AdamW(parameters, lr=3e-3)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A way to build a model, its data and its optimizer."""

    build: Callable[[], nn.Module]
    rows: Callable[[torch.Generator], tuple[Tensor, Tensor]] = vectors
    """Inputs and targets of the data set, which is gone through in order, `BATCH` rows at a step."""
    optimizer: Callable[[Any], Optimizer] = sgd
    tied: tuple[str, ...] = ()
    """Parameters at the front that the last layer uses too: they train on, through that alone."""
    shared: tuple[str, ...] = ()
    """Submodules without parameters that all blocks use: as long as one block trains they keep their mode."""
    is_refused: bool = False
    is_cached: bool = False
    """Whether rows must come from the cache where there is one; with others it may be declined."""
    uses_all: bool = True
    """Whether each batch uses every parameter, as DistributedDataParallel asks unless it is told otherwise."""


TIED = ("embeddings.words.weight",)
MODELS = {
    "residual": Model(build=ResidualNet, rows=images, is_cached=True),
    "transformer": Model(build=Transformer, rows=sentences, optimizer=adamw, is_cached=True),
    "tied": Model(build=lambda: Transformer(is_tied=True), rows=sentences, optimizer=adamw, tied=TIED),
    "lora": Model(build=with_lora, rows=sentences, optimizer=adamw, is_cached=True),
    "backwards": Model(build=Backwards, is_cached=True),
    "sharing": Model(build=Sharing, shared=("parts.0.dropout",)),
    "branching": Model(build=Branching, uses_all=False),
    "remembering": Model(build=Remembering, is_refused=True),
}
each_model = pytest.mark.parametrize("name", MODELS)
IN_GATE = ("residual", "lora")  # of laws that take long; the other models are slow tests
each_model_in_time = pytest.mark.parametrize(
    "name", [name if name in IN_GATE else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
each_that_freezes = pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.is_refused])
