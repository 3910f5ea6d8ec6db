"""Tell positive from negative sentences by fine-tuning a small BERT with Hugging Face's Trainer.

    python examples/huggingface_text_classification.py [--data DIR] [--max_steps N] [--bf16] ...
    torchrun --nproc-per-node 2 examples/huggingface_text_classification.py --data DIR

DIR holds SST-2 as train.tsv and dev.tsv, plain or packed by xz: in each line a label, 0 or 1, a tab, and the sentence.
All options of `transformers.TrainingArguments` are taken. The lines that end with "# egeria" are all that egeria needs.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from transformers import BertForSequenceClassification, DataCollatorWithPadding, EvalPrediction, Trainer, set_seed

from egeria.integrations.transformers import EgeriaCallback  # egeria
from text_models import load_model, load_tokenizer, parse, read_text

Sentences = list[tuple[int, str]]
LONGEST = 64


def load_sentences(data: Path | None, split: str, limit: int | None) -> Sentences:
    """Return labels and sentences of a split, 'train' or 'dev'."""
    if data is not None:
        lines = read_text(data / f"{split}.tsv").splitlines()
        return [(int(line[0]), line[2:].strip()) for line in lines[:limit]]
    opinions = (("bad", "poor", "awful", "dull"), ("good", "fine", "lovely", "bright"))
    nouns, extras = ("film", "story", "cast", "score"), ("", "very ", "rather ", "quite ")
    made = itertools.product((0, 1), nouns, ("is", "was", "felt"), extras, range(4))
    rows = [(label, f"the {noun} {verb} {extra}{opinions[label][kind]}") for label, noun, verb, extra, kind in made]
    return rows if split == "train" else rows[::7]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Return the share of sentences told right."""
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, and return the metrics of the held-out sentences."""
    options, training = parse(arguments, "text_classification", eval_strategy="epoch")
    set_seed(training.seed)
    train, held_out = (load_sentences(options.data, split, options.limit) for split in ("train", "dev"))
    tokenizer = load_tokenizer(text for _, text in train)
    rows = [
        [{**tokenizer(text, truncation=True, max_length=LONGEST), "labels": label} for label, text in sentences]
        for sentences in (train, held_out)
    ]
    trainer = Trainer(
        model=load_model(BertForSequenceClassification, tokenizer, num_labels=2),
        args=training,
        train_dataset=rows[0],
        eval_dataset=rows[1],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        callbacks=[EgeriaCallback()],  # egeria
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    return trainer.evaluate()


if __name__ == "__main__":
    print(f"accuracy {main()['eval_accuracy']:.2%}")
