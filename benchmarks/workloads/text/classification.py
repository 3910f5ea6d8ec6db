"""Telling classes apart: of sentences, of pairs of sentences, of words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads.text.batching import sorted_batches
from benchmarks.workloads.text.fine_tuning import Recipe, Rows, fine_tuning, run_network
from benchmarks.workloads.text.minilm import classifier
from benchmarks.workloads.text.schedules import Schedule, linear
from benchmarks.workloads.workload import Setting, Training

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
Load = Callable[[Path, int], "tuple[nn.Module, PreTrainedTokenizerFast]"]
"""Takes the data folder and a number of classes; returns a pretrained network for them, and its tokenizer.

Raises: MissingDataError.
"""
IGNORED = -100
"""Label of what has none; the number that `cross_entropy` leaves out."""


@dataclass(frozen=True, kw_only=True)
class ClassificationLoss:
    """The cross entropy of a batch."""

    device: torch.device

    def __call__(self, network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean over what has a label."""
        scores, labels = _scores(network, batch, self.device)
        return functional.cross_entropy(scores, labels, ignore_index=IGNORED)


@dataclass(frozen=True, kw_only=True)
class ClassificationAccuracy:
    """The share of held-out labels that are told right, in per cent."""

    rows: Rows
    device: torch.device
    batch_size: int

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Return 'accuracy'."""
        num_right, num_labels = 0, 0
        for indices in sorted_batches(self.rows.lengths, self.batch_size):
            scores, labels = _scores(network, self.rows.__getitems__(indices), self.device)
            num_right += int((scores.argmax(1) == labels).sum())
            num_labels += int((labels != IGNORED).sum())
        return {"accuracy": 100.0 * num_right / num_labels}


def classify(
    setting: Setting,
    recipe: Recipe,
    *,
    train: Sequence[T],
    held_out: Sequence[T],
    judged: Sequence[T],
    num_labels: int,
    make_rows: "Callable[[Sequence[T], PreTrainedTokenizerFast, int], Rows]",
    load: Load = classifier,
    adapt: Callable[[nn.Module], nn.Module] = lambda model: model,
    schedule: Schedule = linear,
) -> Training:
    """Make a run that trains MiniLM, or another network, to tell classes of texts apart.

    Args:
        setting: what is asked for.
        recipe: of the tier.
        train: texts to train on.
        held_out: for each evaluation.
        judged: asked once at the end; without any there is no judge.
        num_labels: classes.
        make_rows: returns the rows of such texts, of so many tokens at most.
        load: returns the pretrained network with its tokenizer.
        adapt: takes the network with pretrained values, and returns what is trained.
        schedule: of the learning rate.

    Raises:
        MissingDataError: the weights or a package are not there.
    """
    torch.manual_seed(setting.seed)
    model, tokenizer = load(setting.data, num_labels)
    quality, judge = (
        ClassificationAccuracy(
            rows=make_rows(texts, tokenizer, recipe.longest), device=setting.device, batch_size=2 * recipe.batch_size
        )
        for texts in (held_out, judged)
    )
    return fine_tuning(
        setting,
        recipe,
        model=adapt(model),
        rows=make_rows(train, tokenizer, recipe.longest),
        loss=ClassificationLoss(device=setting.device),
        evaluate=quality,
        judge=judge if judged else None,
        schedule=schedule,
    )


def label_rows(sentences: Sequence[tuple[str, int]], tokenizer: "PreTrainedTokenizerFast", longest: int) -> Rows:
    """Return one row for each sentence, with its label.

    Args:
        sentences: with the number of the class of each.
        tokenizer: of the network.
        longest: tokens of a row; what is beyond is cut.
    """
    texts = [sentence.strip() for sentence, _ in sentences]
    encoded = tokenizer(texts, truncation=True, max_length=longest, return_attention_mask=False)
    tokens = [torch.tensor(row) for row in encoded["input_ids"]]
    labels = torch.tensor([label for _, label in sentences])
    return Rows(tokens, [torch.zeros_like(row) for row in tokens], {"label": labels})


def _scores(network: nn.Module, batch: dict[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the scores [N, K] of N sentences or words in full precision, and their labels [N]."""
    found, inputs = run_network(network, batch, device)
    return found.logits.float().flatten(0, -2), inputs["label"].flatten()
