"""Foretelling the next character of SQuAD's paragraphs: a small GPT (Radford et al., 2019) from scratch.

Shapes: B texts, T characters, D width, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from benchmarks.workloads.mixed import in_place_of_bfloat16, mixed
from benchmarks.workloads.text.corpora import read_questions
from benchmarks.workloads.text.schedules import cosine
from benchmarks.workloads.workload import Setting, Training

PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(PRINTABLE)
"""Number of all other characters."""
VOCABULARY = UNKNOWN + 1


@dataclass(frozen=True, kw_only=True)
class GptRecipe:
    """How the network is trained in one tier."""

    width: int
    num_heads: int
    num_layers: int
    dropout: float
    length: int
    """Characters that are seen at once."""
    num_train: int
    """Characters from the beginning of the training text."""
    num_held_out: int
    num_judged: int = 0
    batch_size: int
    num_epochs: int
    peak_rate: float
    weight_decay: float = 0.1
    warmup_share: float = 0.05
    evaluations_per_epoch: int = 2


class Block(nn.Module):
    """Attention to what is before, and two layers at each place; normalised before each part."""

    def __init__(self, recipe: GptRecipe) -> None:
        super().__init__()
        width, self.num_heads, self.dropout = recipe.width, recipe.num_heads, recipe.dropout
        self.attention_norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.rest = nn.Dropout(recipe.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return [B, T, D]."""
        parts = self.query_key_value(self.attention_norm(x_BTD)).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x_BTD = x_BTD + self.rest(self.projection(seen.transpose(1, 2).flatten(2)))
        return x_BTD + self.rest(self.inner(self.inner_norm(x_BTD)))


class Embedding(nn.Module):
    """Characters, each with its place."""

    def __init__(self, recipe: GptRecipe) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(VOCABULARY, recipe.width), nn.Embedding(recipe.length, recipe.width)
        self.rest = nn.Dropout(recipe.dropout)

    def forward(self, text_BT: Tensor) -> Tensor:
        """Return [B, T, D]."""
        places = torch.arange(text_BT.shape[1], device=text_BT.device)
        embedded: Tensor = self.rest(self.characters(text_BT) + self.places(places))
        return embedded


class Gpt(nn.Module):
    """A GPT whose output has a table of its own: a shared one would never stop training."""

    def __init__(self, recipe: GptRecipe) -> None:
        super().__init__()
        self.embedding = Embedding(recipe)
        self.blocks = nn.Sequential(*(Block(recipe) for _ in range(recipe.num_layers)))
        self.head = nn.Sequential(nn.LayerNorm(recipe.width), nn.Linear(recipe.width, VOCABULARY))
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends_part = name.endswith((".projection", ".inner.2"))  # two for each block add up
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * recipe.num_layers) if ends_part else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, text_BT: Tensor) -> Tensor:
        """Return scores of the character behind each place [B, T, V]."""
        scores: Tensor = self.head(self.blocks(self.embedding(text_BT)))
        return scores


class Windows(Dataset[Tensor]):
    """Pieces of a text of equal length, each with the character behind it [T + 1]."""

    def __init__(self, text: Tensor, length: int) -> None:
        self._text, self._length = text, length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, place: int) -> Tensor:
        begin = place * self._length
        return self._text[begin : begin + self._length + 1]


@dataclass(frozen=True, kw_only=True)
class NextCharacter:
    """The cross entropy of each next character."""

    device: torch.device

    def __call__(self, network: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean over the characters of a batch [B, T + 1]."""
        text = batch.to(self.device, non_blocking=True)
        with mixed(self.device):
            scores = network(text[:, :-1])
        return functional.cross_entropy(scores.float().flatten(0, 1), text[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The exponential of the mean cross entropy on held-out text."""

    loss: NextCharacter
    windows: Windows
    batch_size: int

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Return 'perplexity'."""
        total = 0.0
        for batch in DataLoader(self.windows, batch_size=self.batch_size):
            total += float(self.loss(network, batch)) * len(batch)
        return {"perplexity": math.exp(total / len(self.windows))}


def build(setting: Setting, *, recipes: Mapping[str, GptRecipe]) -> Training:
    """Make a training run from scratch.

    Args:
        setting: what is asked for.
        recipes: by tier.

    Raises:
        MissingDataError: the data are not there.
    """
    recipe = recipes[setting.tier]
    train, held_out = (
        read_text(setting, *part) for part in (("train", recipe.num_train), ("dev", recipe.num_held_out))
    )
    torch.manual_seed(setting.seed)
    return make_training(setting, recipe, Gpt(recipe), train=train, held_out=held_out)


def make_training(
    setting: Setting, recipe: GptRecipe, network: Gpt, *, train: Tensor, held_out: Tensor, judged: Tensor | None = None
) -> Training:
    """Return the run that trains a network on a text: AdamW, a cosine with warmup, gradients clipped to norm 1.

    Args:
        setting: what is asked for.
        recipe: of the tier.
        network: new or trained.
        train: the text, as numbers.
        held_out: for each evaluation.
        judged: asked once at the end; without any there is no judge.
    """
    loader: DataLoader[Any] = DataLoader(
        Windows(train, recipe.length),
        batch_size=recipe.batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(setting.seed),
    )
    model = network.to(setting.device)
    optimizer = AdamW(model.parameters(), lr=recipe.peak_rate, betas=(0.9, 0.99), weight_decay=recipe.weight_decay)
    num_steps = recipe.num_epochs * len(loader)
    loss = NextCharacter(device=setting.device)

    def judge(text: Tensor) -> Perplexity:
        return Perplexity(windows=Windows(text, recipe.length), loss=loss, batch_size=4 * recipe.batch_size)

    return Training(
        model=model,
        loader=loader,
        optimizer=optimizer,
        scheduler=cosine(optimizer, round(recipe.warmup_share * num_steps), num_steps),
        num_epochs=recipe.num_epochs,
        loss=loss,
        evaluate=judge(held_out),
        judge=None if judged is None else judge(judged),
        clip_norm=1.0,
        number_format=in_place_of_bfloat16(setting.device),
        evaluations_per_epoch=recipe.evaluations_per_epoch,
    )


def read_text(setting: Setting, split: str, count: int) -> Tensor:
    """Return the first characters of the paragraphs of a split, as numbers.

    Raises:
        MissingDataError: the data are not there.
    """
    return encode("\n".join(dict.fromkeys(question.context for question in read_questions(setting.data, split))), count)


def encode(text: str, count: int) -> Tensor:
    """Return the first characters of a text as numbers."""
    numbers = {character: number for number, character in enumerate(PRINTABLE)}
    return torch.tensor([numbers.get(character, UNKNOWN) for character in text[:count]])
