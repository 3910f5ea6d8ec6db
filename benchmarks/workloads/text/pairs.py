"""Telling whether a paragraph answers a question: fine-tuning MiniLM on pairs made of SQuAD 1.1."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.workloads.text.classification import classify
from benchmarks.workloads.text.corpora import Question, read_questions
from benchmarks.workloads.text.fine_tuning import Recipe, Rows
from benchmarks.workloads.text.sampling import sample
from benchmarks.workloads.workload import Setting, Training

if TYPE_CHECKING:
    from transformers import BertTokenizerFast


@dataclass(frozen=True, kw_only=True)
class PairRecipe(Recipe):
    """How pairs are fine-tuned in one tier; samples are pairs."""

    longest_paragraph: int
    """Characters; questions on longer ones are left out, and no pair is made with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A question with the paragraph that it was asked on, or with another one of the same article."""

    question: str
    paragraph: str
    is_answered: bool


def make_pairs(questions: Sequence[Question], count: int | None) -> list[Pair]:
    """Return one pair for each of some questions, always the same; half of them are answered.

    Args:
        questions: those whose article has one paragraph only are left out.
        count: how many; None takes all.
    """
    paragraphs: dict[str, dict[str, None]] = {}
    for question in questions:
        paragraphs.setdefault(question.article, {})[question.context] = None
    usable = [question for question in questions if len(paragraphs[question.article]) > 1]
    drawing = random.Random(0)
    pairs = []
    for question in sample(usable, count):
        others = [paragraph for paragraph in paragraphs[question.article] if paragraph != question.context]
        is_answered = drawing.random() < 0.5
        paragraph = question.context if is_answered else drawing.choice(others)
        pairs.append(Pair(question=question.question, paragraph=paragraph, is_answered=is_answered))
    return pairs


def build(setting: Setting, *, recipes: Mapping[str, PairRecipe]) -> Training:
    """Make a training run. It is judged by articles that it is not trained on.

    Args:
        setting: what is asked for.
        recipes: by tier.

    Raises:
        MissingDataError: the data or the weights are not there.
    """
    recipe = recipes[setting.tier]
    train, others = (_on_short_paragraphs(setting, split, recipe) for split in ("train", "dev"))
    return classify(
        setting,
        recipe,
        train=make_pairs(train, recipe.num_train),
        held_out=make_pairs(others, recipe.num_held_out),
        judged=make_pairs(others, recipe.num_judged),
        num_labels=2,
        make_rows=_rows,
    )


def _on_short_paragraphs(setting: Setting, split: str, recipe: PairRecipe) -> list[Question]:
    return [
        question
        for question in read_questions(setting.data, split)
        if len(question.context) <= recipe.longest_paragraph
    ]


def _rows(pairs: Sequence[Pair], tokenizer: "BertTokenizerFast", longest: int) -> Rows:
    encoded = tokenizer(
        [pair.question for pair in pairs],
        [pair.paragraph for pair in pairs],
        truncation="only_second",
        max_length=longest,
    )
    tokens, types = ([torch.tensor(row) for row in encoded[name]] for name in ("input_ids", "token_type_ids"))
    return Rows(tokens, types, {"label": torch.tensor([int(pair.is_answered) for pair in pairs])})
