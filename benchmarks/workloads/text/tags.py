"""A label for each word, by fine-tuning MiniLM: parts of speech, and the case of words that come without it."""

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.workloads.text.batching import pad_rows
from benchmarks.workloads.text.classification import IGNORED, ClassificationAccuracy, ClassificationLoss
from benchmarks.workloads.text.corpora import TaggedSentence, read_pairs, read_tagged
from benchmarks.workloads.text.fine_tuning import Recipe, Rows, fine_tuning
from benchmarks.workloads.text.minilm import find_weights, load_config, load_tokenizer, load_weights
from benchmarks.workloads.text.sampling import sample
from benchmarks.workloads.text.schedules import Schedule, cosine
from benchmarks.workloads.workload import Setting, Training

if TYPE_CHECKING:
    from transformers import BertTokenizerFast

TAGS = (
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM",
    "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X",
)  # fmt: skip
"""Of Universal Dependencies; a label is the place of its tag."""
CASES = ("lower", "Title", "UPPER", "miXed", "none")
"""Of words: all letters small, the first alone large, all large (of two or more), another mixture, and no letters."""


class TaggedRows(Rows):
    """Rows with a label for each token: that of the word which begins there, `IGNORED` elsewhere.

    Args:
        tokens: numbers of each row [T].
        tags: labels of each row [T].
    """

    def __init__(self, tokens: Sequence[Tensor], tags: Sequence[Tensor]) -> None:
        super().__init__(tokens, [torch.zeros_like(row) for row in tokens], {})
        self.tags = tags

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        labels, _ = pad_rows([self.tags[index] for index in indices], IGNORED)
        return {**super().__getitems__(indices), "label": labels}


def case_of(word: str) -> str:
    """Return which of the `CASES` a word is written in."""
    letters = [letter for letter in word if letter.isalpha()]
    if not letters:
        return "none"
    large = [letter.isupper() for letter in letters]
    if not any(large):
        return "lower"
    if all(large) and len(large) > 1:
        return "UPPER"
    return "Title" if large[0] and not any(large[1:]) else "miXed"


def read_cased(root: Path, split: str) -> list[TaggedSentence]:
    """Return the English sentences of a translation corpus with the case of each word, which the network does not see.

    Args:
        root: holds a folder for each data set.
        split: 'train', 'dev' or 'test'.

    Raises:
        MissingDataError: the file is not there.
    """
    pairs = read_pairs(root, "wmt_ende_slice", "val" if split == "dev" else split)
    return [[(word, case_of(word)) for word in html.unescape(english).split(" ") if word] for english, _ in pairs]


def build(
    setting: Setting,
    *,
    recipes: Mapping[str, Recipe],
    read: Callable[[Path, str], list[TaggedSentence]] = read_tagged,
    tags: Sequence[str] = TAGS,
    schedule: Schedule = cosine,
) -> Training:
    """Make a training run. It is judged by the test sentences, all of them in most tiers.

    Args:
        setting: what is asked for.
        recipes: by tier.
        read: returns the sentences of 'train', 'dev' or 'test' of a data folder.
        tags: all that words are labelled with.
        schedule: of the learning rate.

    Raises:
        MissingDataError: the data or the weights are not there.
    """
    from transformers import BertForTokenClassification  # noqa: PLC0415 (as in `minilm`)

    recipe = recipes[setting.tier]
    splits = {"train": recipe.num_train, "dev": recipe.num_held_out, "test": recipe.num_judged}
    sentences = [sample(read(setting.data, split), count) for split, count in splits.items()]
    weights = find_weights(setting.data)
    tokenizer = load_tokenizer(weights)
    rows, held_out, judged = (tag_rows(part, tokenizer, recipe.longest, tags) for part in sentences)
    torch.manual_seed(setting.seed)
    model = BertForTokenClassification(load_config(weights, num_labels=len(tags)))
    load_weights(model.bert, weights)
    quality, judge = (
        ClassificationAccuracy(rows=part, device=setting.device, batch_size=2 * recipe.batch_size)
        for part in (held_out, judged)
    )
    return fine_tuning(
        setting,
        recipe,
        model=model,
        rows=rows,
        loss=ClassificationLoss(device=setting.device),
        evaluate=quality,
        judge=judge,
        schedule=schedule,
    )


def tag_rows(
    sentences: Sequence[TaggedSentence], tokenizer: "BertTokenizerFast", longest: int, tags: Sequence[str] = TAGS
) -> TaggedRows:
    """Return one row for each sentence; the first piece of a word has its label.

    Args:
        sentences: words with their tags.
        tokenizer: of the network.
        longest: tokens of a row; words beyond are left out.
        tags: all that there are; a label is the place of a tag among them.
    """
    words = [[word for word, _ in sentence] for sentence in sentences]
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=longest)
    labels = []
    for number, sentence in enumerate(sentences):
        places = encoded.word_ids(number)
        firsts = [place is not None and place not in places[:token] for token, place in enumerate(places)]
        labels.append(
            torch.tensor(
                [
                    tags.index(sentence[place][1]) if first else IGNORED
                    for place, first in zip(places, firsts, strict=True)
                ]
            )
        )
    return TaggedRows([torch.tensor(row) for row in encoded["input_ids"]], labels)
