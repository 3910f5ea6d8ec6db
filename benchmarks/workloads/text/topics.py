"""Telling which article a question is about: fine-tuning MiniLM on the questions of SQuAD 1.1, without paragraphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.workloads.text.classification import ClassificationAccuracy, ClassificationLoss, label_rows
from benchmarks.workloads.text.corpora import Question, read_questions
from benchmarks.workloads.text.fine_tuning import Recipe, fine_tuning
from benchmarks.workloads.text.minilm import find_weights, load_config, load_tokenizer, load_weights
from benchmarks.workloads.text.sampling import sample
from benchmarks.workloads.text.schedules import cosine
from benchmarks.workloads.workload import Setting, Training

JUDGED_PARAGRAPHS = 5
"""One of so many paragraphs of an article is not trained on."""


@dataclass(frozen=True, kw_only=True)
class TopicRecipe(Recipe):
    """How articles are told apart in one tier; samples are questions."""

    num_topics: int | None
    """Articles; None takes all."""


def split_by_paragraph(
    questions: Iterable[Question], num_topics: int | None
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return questions to train on and others to judge by, each with the number of its article, always the same.

    No paragraph has questions in both: those on the same one share words.

    Args:
        questions: in the order of their paragraphs.
        num_topics: articles to tell apart; None takes all.
    """
    paragraphs: dict[str, dict[str, list[str]]] = {}
    for question in questions:
        paragraphs.setdefault(question.article, {}).setdefault(question.context, []).append(question.question)
    parts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    for topic, article in enumerate(sample(list(paragraphs), num_topics)):
        for number, asked in enumerate(paragraphs[article].values(), 1):
            is_judged = number % JUDGED_PARAGRAPHS == 0
            parts[is_judged].extend((text, topic) for text in asked)
    return parts


def build(setting: Setting, *, recipes: Mapping[str, TopicRecipe]) -> Training:
    """Make a training run. It is judged by questions on paragraphs that it is not trained on.

    Args:
        setting: what is asked for.
        recipes: by tier.

    Raises:
        MissingDataError: the data or the weights are not there.
    """
    from transformers import BertForSequenceClassification  # noqa: PLC0415 (as in `minilm`)

    recipe = recipes[setting.tier]
    train, others = split_by_paragraph(read_questions(setting.data, "train"), recipe.num_topics)
    weights = find_weights(setting.data)
    tokenizer = load_tokenizer(weights)
    torch.manual_seed(setting.seed)
    model = BertForSequenceClassification(load_config(weights, num_labels=_number(train)))
    load_weights(model.bert, weights)
    quality, judge = (
        ClassificationAccuracy(
            rows=label_rows(sample(others, count), tokenizer, recipe.longest),
            device=setting.device,
            batch_size=2 * recipe.batch_size,
        )
        for count in (recipe.num_held_out, recipe.num_judged)
    )
    return fine_tuning(
        setting,
        recipe,
        model=model,
        rows=label_rows(sample(train, recipe.num_train), tokenizer, recipe.longest),
        loss=ClassificationLoss(device=setting.device),
        evaluate=quality,
        judge=judge,
        schedule=cosine,
    )


def _number(labelled: Sequence[tuple[str, int]]) -> int:
    return len({label for _, label in labelled})
