"""Reading the text data sets: translation pairs, SQuAD 1.1, SST-2, tagged words."""

import json
import lzma
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.workloads.workload import MissingDataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question on a paragraph."""

    identifier: str
    question: str
    context: str
    answers: tuple[str, ...]
    """What people answered, each a part of the context."""
    start: int
    """Character of the context at which the first answer begins."""
    article: str
    """Title of the article that the paragraph is from."""


TaggedSentence = list[tuple[str, str]]
"""Words, each with its part of speech."""


def read_pairs(root: Path, folder: str, split: str, limit: int | None = None) -> list[tuple[str, str]]:
    """Return pairs of an English and a German sentence.

    Args:
        root: holds a folder for each data set.
        folder: of the data set.
        split: such as 'train' or 'val'.
        limit: how many to read from the beginning; None reads all.

    Raises:
        MissingDataError: the file is not there.
    """
    with lzma.open(_find(root / folder / f"{split}.tsv.xz"), "rt", encoding="utf8", newline="\n") as lines:
        split_lines = (line.rstrip("\n").split("\t") for line in islice(lines, limit))
        return [(english, german) for english, german in split_lines]


def read_sentiments(root: Path, split: str, limit: int | None = None) -> list[tuple[str, int]]:
    """Return sentences of SST-2, each with 1 where it is positive and 0 where it is negative.

    Raises:
        MissingDataError: the file is not there.
    """
    with lzma.open(_find(root / "sst2" / f"{split}.tsv.xz"), "rt", encoding="utf8", newline="\n") as lines:
        split_lines = (line.rstrip("\n").split("\t", maxsplit=1) for line in islice(lines, limit))
        return [(sentence, int(label)) for label, sentence in split_lines]


def read_questions(root: Path, split: str) -> list[Question]:
    """Return the questions of SQuAD 1.1 in the official order.

    Raises:
        MissingDataError: the file is not there.
    """
    with lzma.open(_find(root / "squad" / f"{split}-v1.1.json.xz"), "rt", encoding="utf8") as file:
        articles = json.load(file)["data"]
    paragraphs = [(article["title"], paragraph) for article in articles for paragraph in article["paragraphs"]]
    return [
        _question(entry, paragraph["context"], title) for title, paragraph in paragraphs for entry in paragraph["qas"]
    ]


def read_tagged(root: Path, split: str) -> list[TaggedSentence]:
    """Return the sentences of the English Web Treebank.

    Args:
        root: holds a folder for each data set.
        split: 'train', 'dev' or 'test'.

    Raises:
        MissingDataError: the file is not there.
    """
    with lzma.open(_find(root / "ud_english_ewt" / f"{split}.tsv.xz"), "rt", encoding="utf8", newline="\n") as file:
        sentences = file.read().strip("\n").split("\n\n")
    pairs = ([line.split("\t") for line in sentence.split("\n")] for sentence in sentences)
    return [[(word, tag) for word, tag in sentence] for sentence in pairs]


def _question(entry: dict[str, Any], context: str, article: str) -> Question:
    return Question(
        identifier=entry["id"],
        question=entry["question"].strip(),
        context=context,
        answers=tuple(answer["text"] for answer in entry["answers"]),
        start=entry["answers"][0]["answer_start"],
        article=article,
    )


def _find(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(
            f"The data set {path.parent.name!r} must have the file {path.name}, not found at {path}. "
            f"Give the folder that holds {path.parent.name}/ as the data folder."
        )
    return path
