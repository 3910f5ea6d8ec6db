"""Translation from English to German: Transformer-Tiny on Multi30k, Transformer-Base on a slice of WMT."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.utils.data import Dataset

from benchmarks.workloads.mixed import in_place_of_bfloat16, mixed
from benchmarks.workloads.text.batching import moved, pad_rows, shuffled_loader, sorted_batches
from benchmarks.workloads.text.corpora import read_pairs
from benchmarks.workloads.text.decoding import bleu, translate
from benchmarks.workloads.text.schedules import inverse_square_root
from benchmarks.workloads.text.subwords import BEGIN, PADDING, Subwords
from benchmarks.workloads.text.transformer import Size, Transformer
from benchmarks.workloads.workload import Setting, Training

IGNORED = -100
"""Label of what is no token; the number that `cross_entropy` leaves out."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where the sentences come from."""

    folder: str
    bleu_tokenization: str
    """'13a' for plain text, 'none' for text that is split into words."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a transformer is trained in one tier."""

    width: int
    inner_width: int
    num_heads: int
    num_layers: int
    dropout: float
    vocabulary: int
    """Pieces that both languages share."""
    longest: int
    """Tokens; training leaves out pairs with a longer sentence."""
    num_train: int | None
    """Pairs from the beginning of the split; None takes all."""
    num_validation: int | None
    num_translated: int
    """Validation sentences that are translated for BLEU."""
    batch_size: int
    """Pairs."""
    num_epochs: int
    peak_rate: float
    warmup_steps: int
    label_smoothing: float = 0.1
    evaluations_per_epoch: int = 1


class Pairs(Dataset[Any]):
    """Numbered pairs; batches are the arguments of `Transformer`, and its `labels` [B, T]."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.sources = sources
        self.targets = targets

    @property
    def lengths(self) -> list[int]:
        """Tokens of each pair, both sides together."""
        return [len(source) + len(target) for source, target in zip(self.sources, self.targets, strict=True)]

    def shorter(self, longest: int) -> "Pairs":
        """Return the pairs neither side of which has more tokens."""
        kept = [pair for pair in zip(self.sources, self.targets, strict=True) if max(map(len, pair)) <= longest]
        return Pairs([source for source, _ in kept], [target for _, target in kept])

    def __len__(self) -> int:
        return len(self.sources)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        source, source_mask = pad_rows([self.sources[index] for index in indices], PADDING)
        targets = [self.targets[index] for index in indices]
        begin = torch.tensor([BEGIN])
        known, known_mask = pad_rows([torch.cat([begin, target[:-1]]) for target in targets], PADDING)
        labels, _ = pad_rows(targets, IGNORED)
        return {
            "source": source,
            "attention_mask": source_mask,
            "target": known,
            "decoder_attention_mask": known_mask,
            "labels": labels,
        }


@dataclass(frozen=True, kw_only=True)
class TranslationLoss:
    """The smoothed cross entropy of a batch, per token."""

    device: torch.device
    label_smoothing: float

    def __call__(self, network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean over the tokens of the batch."""
        scores, labels = _scores(network, batch, self.device)
        return functional.cross_entropy(scores, labels, ignore_index=IGNORED, label_smoothing=self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class TranslationQuality:
    """Perplexity of held-out translations, and BLEU of the network's own."""

    pairs: Pairs
    references: Sequence[str]
    """Of the first of the pairs: those that are translated."""
    subwords: Subwords
    corpus: Corpus
    device: torch.device
    batch_size: int

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Return 'perplexity', and 'bleu' where it can be computed."""
        metrics = {"perplexity": self.perplexity(network)}
        score = self._bleu(network)
        return metrics if score is None else {**metrics, "bleu": score}

    def perplexity(self, network: nn.Module) -> float:
        """Return the exponential of the mean cross entropy of all tokens, `END` among them."""
        total, num_tokens = 0.0, 0
        for indices in sorted_batches(self.pairs.lengths, self.batch_size):
            scores, labels = _scores(network, self.pairs.__getitems__(indices), self.device)
            total += float(functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum"))
            num_tokens += int((labels != IGNORED).sum())
        return math.exp(total / num_tokens)

    def _bleu(self, network: nn.Module) -> float | None:
        sources = self.pairs.sources[: len(self.references)]
        if not sources or bleu([""], [""], "none") is None:
            return None
        with mixed(self.device):
            rows = translate(network, sources, self.device)
        return bleu(self.subwords.decode(rows), self.references, self.corpus.bleu_tokenization)


def build(setting: Setting, *, corpus: Corpus, recipes: Mapping[str, Recipe]) -> Training:
    """Make a training run.

    Args:
        setting: what is asked for.
        corpus: the data.
        recipes: by tier.

    Raises:
        MissingDataError: the data are not there.
    """
    recipe = recipes[setting.tier]
    train = read_pairs(setting.data, corpus.folder, "train", recipe.num_train)
    held_out = read_pairs(setting.data, corpus.folder, "val", recipe.num_validation)
    subwords = Subwords.learned((sentence for pair in train for sentence in pair), recipe.vocabulary)
    pairs = _numbered(train, subwords).shorter(recipe.longest)
    loader = shuffled_loader(pairs, pairs.lengths, recipe.batch_size, setting.seed)
    torch.manual_seed(setting.seed)
    model = Transformer(_size(recipe, subwords.size)).to(setting.device)
    optimizer = Adam(model.parameters(), lr=recipe.peak_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)
    return Training(
        model=model,
        loader=loader,
        optimizer=optimizer,
        scheduler=inverse_square_root(optimizer, recipe.warmup_steps),
        num_epochs=recipe.num_epochs,
        loss=TranslationLoss(device=setting.device, label_smoothing=recipe.label_smoothing),
        evaluate=TranslationQuality(
            pairs=_numbered(held_out, subwords),
            references=[german for _, german in held_out[: recipe.num_translated]],
            subwords=subwords,
            corpus=corpus,
            device=setting.device,
            batch_size=recipe.batch_size,
        ),
        number_format=in_place_of_bfloat16(setting.device),
        evaluations_per_epoch=recipe.evaluations_per_epoch,
    )


def _scores(network: nn.Module, batch: dict[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the scores of all positions [B T, V] in full precision, and their labels [B T]."""
    inputs = moved(batch, device)
    labels = inputs.pop("labels")
    with mixed(device):
        scores = network(**inputs)
    return scores.float().flatten(0, 1), labels.flatten()


def _numbered(pairs: Sequence[tuple[str, str]], subwords: Subwords) -> Pairs:
    return Pairs(subwords.encode([english for english, _ in pairs]), subwords.encode([german for _, german in pairs]))


def _size(recipe: Recipe, vocabulary: int) -> Size:
    return Size(
        vocabulary=vocabulary,
        width=recipe.width,
        inner_width=recipe.inner_width,
        num_heads=recipe.num_heads,
        num_layers=recipe.num_layers,
        dropout=recipe.dropout,
    )
