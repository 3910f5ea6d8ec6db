"""Beasts that read sequences."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from menagerie.specimen import Arguments, Specimen, tokens


class Layer(nn.Module):
    """Attention and a feed-forward part, both residual."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = self.norm(x)
        x = x + functional.scaled_dot_product_attention(
            self.query(y), self.key(y), self.value(y), attn_mask=mask, dropout_p=0.1 if self.training else 0.0
        )
        return x + self.outer(functional.gelu(self.inner(x)))


class Reader(nn.Module):
    """Words with positions as a loose parameter, a chain of layers, scores over words."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])
        self.output = nn.Linear(8, 20, bias=False)

    def forward(self, words: Tensor) -> Any:
        x = self.embed(words) + self.position
        for layer in self.layers:
            x = self.run(layer, x)
        return self.output(x)

    def run(self, layer: nn.Module, x: Tensor) -> Any:
        return layer(x)


class Tied(Reader):
    """Uses the embedding as the output weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.output.weight = self.embed.weight


class Checkpointed(Reader):
    """Recomputes each layer in the backward pass."""

    use_reentrant = False

    def run(self, layer: nn.Module, x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)


class ReentrantlyCheckpointed(Checkpointed):
    """Recomputes each layer in the backward pass, the old way."""

    use_reentrant = True


class TupleLayer(Layer):
    """Returns a tuple, the hidden state first."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x, mask), None, torch.tensor(3)


class Tuples(Reader):
    """Layers that return tuples with things that are no activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TupleLayer() for _ in range(4)])

    def forward(self, words: Tensor) -> Any:
        return (super().forward(words),)

    def run(self, layer: nn.Module, x: Tensor) -> Any:
        return layer(x)[0]


class ByKeyword(Reader):
    """Is called with keywords, among them a mask shared by the batch."""

    def forward(self, *, words: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        x = self.embed(words) + self.position
        for layer in self.layers:
            x = layer(x, mask=mask)
        return {"logits": self.output(x)}


def _keywords(generator: torch.Generator) -> Arguments:
    (words,), _ = tokens(generator)
    return (), {"words": words, "mask": torch.ones(5, 5, dtype=torch.bool).tril()}


class TorchEncoder(nn.Module):
    """torch's own encoder layers, which have a fused path for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.output = nn.Linear(8, 20)

    def forward(self, words: Tensor) -> Any:
        return self.output(self.encoder(self.embed(words)))


class Translator(nn.Module):
    """An encoder and a decoder, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its fused path needs the batch first
            self.core = nn.Transformer(8, 2, 2, 2, 16)
        self.output = nn.Linear(8, 20)

    def forward(self, words: Tensor) -> Any:
        x = self.embed(words).transpose(0, 1)
        return self.output(self.core(x, x))


SPECIMENS = (
    *(
        Specimen(case=case, build=build, example=tokens)
        for build, case in (
            (Reader, "a loose position parameter feeds the first layer"),
            (Tied, "the embedding is the output matrix too"),
            (Checkpointed, "layers are recomputed in the backward pass"),
            (Tuples, "layers return tuples that hold more than the activation"),
            (TorchEncoder, "in inference torch would fuse each layer and call no submodule"),
            (Translator, "batch second, two inputs, encoder before decoder"),
        )
    ),
    Specimen(
        case="reentrant checkpointing, which finds no gradient to pass on behind a frozen layer",
        build=ReentrantlyCheckpointed,
        example=tokens,
        unsupported="reentrant",
    ),
    Specimen(case="keyword arguments, one of them without a batch dimension", build=ByKeyword, example=_keywords),
)
