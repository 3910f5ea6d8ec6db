"""Find the answers to questions in paragraphs by fine-tuning a small BERT with Hugging Face's Trainer.

    python examples/huggingface_question_answering.py [--data DIR] [--limit N] [--max_steps N] [--bf16] ...

DIR holds SQuAD 1.1 as train-v1.1.json and dev-v1.1.json, plain or packed by xz. A paragraph is read as far as it fits;
questions whose answer lies behind are left out. All options of `transformers.TrainingArguments` are taken. The lines
that end with "# egeria" are all that egeria needs.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import (
    BertForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from egeria.integrations.transformers import EgeriaCallback  # egeria
from text_models import load_model, load_tokenizer, parse, read_text

LONGEST = 192


class Question(NamedTuple):
    """A question on a paragraph, and the characters from `start` to `end` that answer it."""

    text: str
    paragraph: str
    start: int
    end: int


def load_questions(data: Path | None, split: str, limit: int | None) -> list[Question]:
    """Return the questions of a split, 'train' or 'dev', each with its first answer."""
    if data is None:
        return _made_up()[:: 1 if split == "train" else 7]
    articles = json.loads(read_text(data / f"{split}-v1.1.json"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    found = (
        (entry["question"], paragraph["context"], entry["answers"][0])
        for paragraph in paragraphs
        for entry in paragraph["qas"]
    )
    return [
        Question(text, context, answer["answer_start"], answer["answer_start"] + len(answer["text"]))
        for text, context, answer in itertools.islice(found, limit)
    ]


def _made_up() -> list[Question]:
    names, places = ("Ann", "Ben", "Cleo", "Dan"), ("Rome", "Oslo", "Lima", "Cairo")
    rows = []
    for name, place, other in itertools.product(names, places, places):
        paragraph = f"{name} lives in {place} and works in {other}."
        for verb, answer in (("live", place), ("work", other)):
            start = paragraph.rindex(answer) if verb == "work" else paragraph.index(answer)
            rows.append(Question(f"Where does {name} {verb}?", paragraph, start, start + len(answer)))
    return rows


def encode(tokenizer: PreTrainedTokenizerBase, question: Question) -> dict[str, Any] | None:
    """Return the inputs of a question with the first and last token of its answer; None where that was cut off."""
    row = tokenizer(
        question.text,
        question.paragraph,
        truncation="only_second",
        max_length=LONGEST,
        return_offsets_mapping=True,
    )
    spans = row.pop("offset_mapping")
    inside = [index for index, part in enumerate(row.sequence_ids()) if part == 1]
    first = [index for index in inside if spans[index][0] <= question.start < spans[index][1]]
    last = [index for index in inside if spans[index][0] < question.end <= spans[index][1]]
    if not first or not last:
        return None
    return {**row, "start_positions": first[0], "end_positions": last[0]}


def spans_right(found: EvalPrediction) -> dict[str, float]:
    """Return the share of questions whose answer begins and ends where it should."""
    right = [scores.argmax(1) == labels for scores, labels in zip(found.predictions, found.label_ids, strict=True)]
    return {"exact": float((right[0] & right[1]).mean())}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, and return the metrics of the held-out questions."""
    options, training = parse(arguments, "question_answering", eval_strategy="epoch")
    set_seed(training.seed)
    train, held_out = (load_questions(options.data, split, options.limit) for split in ("train", "dev"))
    tokenizer = load_tokenizer(f"{question.text} {question.paragraph}" for question in train)
    rows = [
        [row for row in (encode(tokenizer, question) for question in questions) if row is not None]
        for questions in (train, held_out)
    ]
    trainer = Trainer(
        model=load_model(BertForQuestionAnswering, tokenizer),
        args=training,
        train_dataset=rows[0],
        eval_dataset=rows[1],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=spans_right,
        callbacks=[EgeriaCallback()],  # egeria
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    return trainer.evaluate()


if __name__ == "__main__":
    print(f"exact {main()['eval_exact']:.2%}")
