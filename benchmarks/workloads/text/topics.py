"""Telling which article a question is about: fine-tuning MiniLM on the questions of SQuAD 1.1, without paragraphs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.workloads.text.classification import classify, label_rows
from benchmarks.workloads.text.corpora import Question, read_questions
from benchmarks.workloads.text.fine_tuning import Recipe
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
    recipe = recipes[setting.tier]
    train, others = split_by_paragraph(read_questions(setting.data, "train"), recipe.num_topics)
    return classify(
        setting,
        recipe,
        train=sample(train, recipe.num_train),
        held_out=sample(others, recipe.num_held_out),
        judged=sample(others, recipe.num_judged),
        num_labels=len({topic for _, topic in train}),
        make_rows=label_rows,
        schedule=cosine,
    )
