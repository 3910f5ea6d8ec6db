"""Answering questions: fine-tuning MiniLM on SQuAD 1.1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads.text.answers import score
from benchmarks.workloads.text.batching import sorted_batches
from benchmarks.workloads.text.corpora import Question, read_questions
from benchmarks.workloads.text.fine_tuning import Recipe, Rows, fine_tuning, run_network
from benchmarks.workloads.text.minilm import find_weights, load_config, load_tokenizer, load_weights
from benchmarks.workloads.text.sampling import sample
from benchmarks.workloads.text.windows import Window, asking_rows, best_spans, cut_windows, training_rows
from benchmarks.workloads.workload import Setting, Training

if TYPE_CHECKING:
    from transformers import BertTokenizerFast


@dataclass(frozen=True, kw_only=True)
class QuestionRecipe(Recipe):
    """How questions are fine-tuned in one tier; samples are questions."""

    overlap: int
    """Tokens of a paragraph that a window shares with the next."""
    longest_paragraph: int | None = None
    """Characters; questions on longer ones are left out, of training and of evaluation. None keeps all.

    Judging needs more questions than the development set has on paragraphs so short, and takes the next longer ones.
    """


@dataclass(frozen=True, kw_only=True)
class SpanLoss:
    """The cross entropy of the first and of the last token of the answers, and the mean of both."""

    device: torch.device

    def __call__(self, network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean over the questions."""
        found, inputs = run_network(network, batch, self.device)
        start = functional.cross_entropy(_scores(found.start_logits, inputs), inputs["start_label"])
        end = functional.cross_entropy(_scores(found.end_logits, inputs), inputs["end_label"])
        return (start + end) / 2


@dataclass(frozen=True, kw_only=True)
class AnswerQuality:
    """F1 and exact match on held-out questions, in per cent."""

    questions: Sequence[Question]
    windows: Sequence[Window]
    rows: Rows
    device: torch.device
    batch_size: int

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Return 'f1' and 'exact_match'."""
        truths = {question.identifier: question.answers for question in self.questions}
        return score(self.answers(network), truths)

    def answers(self, network: nn.Module) -> dict[str, str]:
        """Return the answer to each question, by its identifier: the best span of all its windows."""
        best: dict[int, tuple[float, str]] = {}
        for indices in sorted_batches(self.rows.lengths, self.batch_size):
            found, inputs = run_network(network, self.rows.__getitems__(indices), self.device)
            starts, ends = found.start_logits.float(), found.end_logits.float()
            scores, firsts, lasts = best_spans(starts, ends, inputs["first"], inputs["last"])
            for index, value, first, last in zip(
                indices, scores.tolist(), firsts.tolist(), lasts.tolist(), strict=True
            ):
                window = self.windows[index]
                if window.question not in best or value > best[window.question][0]:
                    best[window.question] = (value, self._text(window, first, last))
        return {self.questions[number].identifier: text for number, (_, text) in best.items()}

    def _text(self, window: Window, first: int, last: int) -> str:
        start, end = window.spans[first], window.spans[last]
        assert start is not None and end is not None, "a span lies inside the paragraph"
        return self.questions[window.question].context[start[0] : end[1]]


def build(setting: Setting, *, recipes: Mapping[str, QuestionRecipe]) -> Training:
    """Make a training run.

    Args:
        setting: what is asked for.
        recipes: by tier.

    Raises:
        MissingDataError: the data or the weights are not there.
    """
    from transformers import BertForQuestionAnswering  # noqa: PLC0415 (as in `minilm`)

    recipe = recipes[setting.tier]
    train = _questions(setting, "train", recipe, recipe.num_train)
    held_out = _questions(setting, "dev", recipe, recipe.num_held_out)
    judged = _judged_questions(setting, recipe)
    weights = find_weights(setting.data)
    tokenizer = load_tokenizer(weights)
    torch.manual_seed(setting.seed)
    model = BertForQuestionAnswering(load_config(weights))
    load_weights(model.bert, weights)
    return fine_tuning(
        setting,
        recipe,
        model=model,
        rows=training_rows(train, cut_windows(train, tokenizer, recipe.longest, recipe.overlap)),
        loss=SpanLoss(device=setting.device),
        evaluate=_quality(held_out, tokenizer, setting, recipe),
        judge=_quality(judged, tokenizer, setting, recipe) if judged else None,
    )


def _quality(
    questions: Sequence[Question], tokenizer: "BertTokenizerFast", setting: Setting, recipe: QuestionRecipe
) -> AnswerQuality:
    windows = cut_windows(questions, tokenizer, recipe.longest, recipe.overlap)
    return AnswerQuality(
        questions=questions,
        windows=windows,
        rows=asking_rows(windows),
        device=setting.device,
        batch_size=2 * recipe.batch_size,
    )


def _questions(setting: Setting, split: str, recipe: QuestionRecipe, count: int | None) -> list[Question]:
    return sample(_on_short_paragraphs(read_questions(setting.data, split), recipe), count)


def _judged_questions(setting: Setting, recipe: QuestionRecipe) -> list[Question]:
    """Return questions on articles that nobody trains on; where those on short paragraphs are too few, longer ones."""
    found = read_questions(setting.data, "dev")
    short = _on_short_paragraphs(found, recipe)
    if recipe.num_judged is None or len(short) >= recipe.num_judged:
        return sample(short, recipe.num_judged)
    return sorted(found, key=lambda question: len(question.context))[: recipe.num_judged]


def _on_short_paragraphs(questions: Sequence[Question], recipe: QuestionRecipe) -> list[Question]:
    longest = recipe.longest_paragraph
    return [question for question in questions if longest is None or len(question.context) <= longest]


def _scores(scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return the scores [B, T] in full precision; none for padding."""
    return scores.float().masked_fill(inputs["attention_mask"] == 0, -torch.inf)
