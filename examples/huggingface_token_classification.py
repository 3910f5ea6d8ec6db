"""Tag the words of sentences by fine-tuning a small BERT with Hugging Face's Trainer.

    python examples/huggingface_token_classification.py [--data DIR] [--max_steps N] [--bf16] ...

DIR holds train.tsv and dev.tsv, plain or packed by xz: in each line a word, a tab and its tag, and an empty line after
each sentence, as in the English Web Treebank with universal tags. All options of `transformers.TrainingArguments` are
taken. The lines that end with "# egeria" are all that egeria needs.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from transformers import (
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from egeria.integrations.transformers import EgeriaCallback  # egeria
from text_models import load_model, load_tokenizer, parse, read_text

Sentence = list[tuple[str, str]]
LONGEST = 64
IGNORED = -100  # the label of what the loss leaves out


def load_sentences(data: Path | None, split: str, limit: int | None) -> list[Sentence]:
    """Return the words of each sentence of a split, 'train' or 'dev', with their tags."""
    if data is not None:
        blocks = read_text(data / f"{split}.tsv").strip().split("\n\n")[:limit]
        return [[(word, tag) for word, tag in (line.split("\t") for line in block.split("\n"))] for block in blocks]
    nouns, verbs = ("dog", "cat", "bird", "child", "play"), ("sees", "play", "hears", "likes")
    made = itertools.product(nouns, verbs, ("big", "small", "quick"), nouns)
    rows = [
        [("the", "DET"), (subject, "NOUN"), (verb, "VERB"), ("a", "DET"), (kind, "ADJ"), (thing, "NOUN")]
        for subject, verb, kind, thing in made
    ]
    return rows if split == "train" else rows[::7]


def encode(tokenizer: PreTrainedTokenizerBase, sentence: Sentence, tags: list[str]) -> dict[str, Any]:
    """Return the inputs of a sentence; the first piece of each word has the label of the word."""
    words = [word for word, _ in sentence]
    row = tokenizer(words, is_split_into_words=True, truncation=True, max_length=LONGEST)
    places = row.word_ids()
    begins = [place is not None and place != before for before, place in zip([None, *places], places, strict=False)]
    labels = [tags.index(sentence[place][1]) if begin else IGNORED for begin, place in zip(begins, places, strict=True)]
    return {**row, "labels": labels}


def tags_right(found: EvalPrediction) -> dict[str, float]:
    """Return the share of words that are tagged right."""
    counted = found.label_ids != IGNORED
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids)[counted].mean())}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, and return the metrics of the held-out sentences."""
    options, training = parse(arguments, "token_classification", eval_strategy="epoch")
    set_seed(training.seed)
    train, held_out = (load_sentences(options.data, split, options.limit) for split in ("train", "dev"))
    tags = sorted({tag for sentence in [*train, *held_out] for _, tag in sentence})
    tokenizer = load_tokenizer(word for sentence in train for word, _ in sentence)
    trainer = Trainer(
        model=load_model(BertForTokenClassification, tokenizer, num_labels=len(tags)),
        args=training,
        train_dataset=[encode(tokenizer, sentence, tags) for sentence in train],
        eval_dataset=[encode(tokenizer, sentence, tags) for sentence in held_out],
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=tags_right,
        callbacks=[EgeriaCallback()],  # egeria
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    return trainer.evaluate()


if __name__ == "__main__":
    print(f"accuracy {main()['eval_accuracy']:.2%}")
