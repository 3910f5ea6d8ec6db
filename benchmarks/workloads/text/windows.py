"""Questions and paragraphs as rows of tokens, and spans of tokens as answers.

A paragraph that is too long is cut into windows that overlap. Training takes, for each question, the one
window that shows most around its answer; answering looks at all windows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.workloads.text.corpora import Question
from benchmarks.workloads.text.fine_tuning import Rows

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

LONGEST_ANSWER = 30
"""Tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A question with a part of its paragraph."""

    question: int
    """Number of the question."""
    tokens: Tensor
    """Numbers [T]."""
    types: Tensor
    """0 for the question, 1 for the paragraph [T]."""
    spans: tuple[tuple[int, int] | None, ...]
    """Characters of the paragraph that each token covers; None for tokens that are none of it."""

    @property
    def first(self) -> int:
        """Return the first token of the paragraph."""
        return next(index for index, span in enumerate(self.spans) if span is not None)

    @property
    def last(self) -> int:
        """Return the last token of the paragraph; a special one closes the row."""
        return len(self.spans) - 2

    def find(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first and the last token of some characters of the paragraph, or None where they are not here."""
        covers = [i for i, span in enumerate(self.spans) if span is not None and span[0] < end and start < span[1]]
        if not covers:
            return None
        first, last = self.spans[covers[0]], self.spans[covers[-1]]
        is_whole = first is not None and last is not None and first[0] <= start and end <= last[1]
        return (covers[0], covers[-1]) if is_whole else None


def cut_windows(
    questions: Sequence[Question], tokenizer: "BertTokenizerFast", longest: int, overlap: int
) -> list[Window]:
    """Return the windows of all questions, those of a question one after the other.

    Args:
        questions: to be asked.
        tokenizer: of the network.
        longest: tokens of a window, the question's and the special ones among them.
        overlap: tokens of the paragraph that a window shares with the next.
    """
    encoded = tokenizer(
        [question.question for question in questions],
        [question.context for question in questions],
        truncation="only_second",
        max_length=longest,
        stride=overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    return [
        Window(
            question=question,
            tokens=torch.tensor(encoded["input_ids"][row]),
            types=torch.tensor(encoded["token_type_ids"][row]),
            spans=_paragraph_spans(encoded["offset_mapping"][row], encoded.sequence_ids(row)),
        )
        for row, question in enumerate(encoded["overflow_to_sample_mapping"])
    ]


def training_rows(questions: Sequence[Question], windows: Iterable[Window]) -> Rows:
    """Return one row for each question whose answer lies in a window, with its first and last token as labels."""
    best: dict[int, tuple[int, Window, tuple[int, int]]] = {}
    for window in windows:
        question = questions[window.question]
        span = window.find(question.start, question.start + len(question.answers[0]))
        if span is None:
            continue
        margin = min(span[0] - window.first, window.last - span[1])
        if window.question not in best or margin > best[window.question][0]:
            best[window.question] = (margin, window, span)
    chosen = [(window, span) for _, window, span in best.values()]
    starts, ends = torch.tensor([span for _, span in chosen]).unbind(1)
    return _rows((window for window, _ in chosen), {"start_label": starts, "end_label": ends})


def asking_rows(windows: Sequence[Window]) -> Rows:
    """Return one row for each window; its label is the window's number, and where its paragraph begins and ends."""
    labels = {
        "window": torch.arange(len(windows)),
        "first": torch.tensor([window.first for window in windows]),
        "last": torch.tensor([window.last for window in windows]),
    }
    return _rows(windows, labels)


def best_spans(starts_BT: Tensor, ends_BT: Tensor, first_B: Tensor, last_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the score of the best span of each row, and its first and last token, each [B].

    Args:
        starts_BT: score of each token as the first of the answer.
        ends_BT: the same as the last.
        first_B: first token of the paragraph.
        last_B: last token of the paragraph.
    """
    length = starts_BT.shape[1]
    position_T = torch.arange(length, device=starts_BT.device)
    is_paragraph_BT = (first_B[:, None] <= position_T) & (position_T <= last_B[:, None])
    distance_TT = position_T[None, :] - position_T[:, None]
    is_span_BTT = is_paragraph_BT[:, :, None] & is_paragraph_BT[:, None, :]
    is_span_BTT &= (distance_TT >= 0) & (distance_TT < LONGEST_ANSWER)
    scores_BTT = (starts_BT[:, :, None] + ends_BT[:, None, :]).masked_fill(~is_span_BTT, -torch.inf)
    best, place = scores_BTT.flatten(1).max(1)
    return best, place // length, place % length


def _rows(windows: Iterable[Window], labels: dict[str, Tensor]) -> Rows:
    taken = list(windows)
    return Rows([window.tokens for window in taken], [window.types for window in taken], labels)


def _paragraph_spans(
    offsets: Iterable[tuple[int, int]], sentences: Iterable[int | None]
) -> tuple[tuple[int, int] | None, ...]:
    return tuple(
        (offset[0], offset[1]) if sentence == 1 else None for offset, sentence in zip(offsets, sentences, strict=True)
    )
