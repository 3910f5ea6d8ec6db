"""Telling positive from negative sentences: fine-tuning MiniLM on SST-2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads.text.batching import sorted_batches
from benchmarks.workloads.text.corpora import read_sentiments
from benchmarks.workloads.text.fine_tuning import Recipe, Rows, fine_tuning, run_network
from benchmarks.workloads.text.minilm import find_weights, load_config, load_tokenizer, load_weights
from benchmarks.workloads.text.sampling import hold_out, sample
from benchmarks.workloads.workload import Setting, Training

if TYPE_CHECKING:
    from transformers import BertTokenizerFast


@dataclass(frozen=True, kw_only=True)
class SentimentLoss:
    """The cross entropy of a batch."""

    device: torch.device

    def __call__(self, network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean over the sentences."""
        scores, labels = _scores(network, batch, self.device)
        return functional.cross_entropy(scores, labels)


@dataclass(frozen=True, kw_only=True)
class SentimentAccuracy:
    """The share of held-out sentences that are told right, in per cent."""

    rows: Rows
    device: torch.device
    batch_size: int

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Return 'accuracy'."""
        num_right = 0
        for indices in sorted_batches(self.rows.lengths, self.batch_size):
            scores, labels = _scores(network, self.rows.__getitems__(indices), self.device)
            num_right += int((scores.argmax(1) == labels).sum())
        return {"accuracy": 100.0 * num_right / len(self.rows)}


def build(setting: Setting, *, recipes: Mapping[str, Recipe]) -> Training:
    """Make a training run.

    Args:
        setting: what is asked for.
        recipes: by tier.

    Raises:
        MissingDataError: the data or the weights are not there.
    """
    from transformers import BertForSequenceClassification  # noqa: PLC0415 (as in `minilm`)

    recipe = recipes[setting.tier]
    train, judged = hold_out(read_sentiments(setting.data, "train"), recipe.num_train, recipe.num_judged)
    held_out = sample(read_sentiments(setting.data, "dev"), recipe.num_held_out)
    weights = find_weights(setting.data)
    tokenizer = load_tokenizer(weights)
    torch.manual_seed(setting.seed)
    model = BertForSequenceClassification(load_config(weights, num_labels=2))
    load_weights(model.bert, weights)
    quality, judge = (
        SentimentAccuracy(
            rows=_rows(sentences, tokenizer, recipe.longest), device=setting.device, batch_size=2 * recipe.batch_size
        )
        for sentences in (held_out, judged)
    )
    return fine_tuning(
        setting,
        recipe,
        model=model,
        rows=_rows(train, tokenizer, recipe.longest),
        loss=SentimentLoss(device=setting.device),
        evaluate=quality,
        judge=judge if judged else None,
    )


def _scores(network: nn.Module, batch: dict[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    found, inputs = run_network(network, batch, device)
    return found.logits.float(), inputs["label"]


def _rows(sentences: Sequence[tuple[str, int]], tokenizer: BertTokenizerFast, longest: int) -> Rows:
    texts = [sentence.strip() for sentence, _ in sentences]
    encoded = tokenizer(texts, truncation=True, max_length=longest, return_attention_mask=False)
    tokens = [torch.tensor(row) for row in encoded["input_ids"]]
    labels = torch.tensor([label for _, label in sentences])
    return Rows(tokens, [torch.zeros_like(row) for row in tokens], {"label": labels})
