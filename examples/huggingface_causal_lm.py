"""Learn to continue a text: a small GPT-2 with random weights, trained with Hugging Face's Trainer.

    python examples/huggingface_causal_lm.py [--data FILE] [--limit N] [--max_steps N] [--bf16] ...

FILE is any text, plain or packed by xz; `--limit` counts its lines, of which every twentieth is held out. All options
of `transformers.TrainingArguments` are taken. The lines that end with "# egeria" are all that egeria needs.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from egeria.integrations.transformers import EgeriaCallback  # egeria
from text_models import load_tokenizer, parse, read_text

BLOCK = 64  # tokens of a row
HELD_OUT = 20  # one of so many lines is held out


def load_lines(data: Path | None, limit: int | None) -> list[str]:
    """Return the lines of a text, without the empty ones."""
    if data is not None:
        return [line for line in read_text(data).splitlines()[:limit] if line.strip()]
    who, does = ("the sun", "the rain", "a cold wind", "the old clock"), ("comes", "goes", "waits", "sings")
    made = itertools.product(who, does, ("at night", "all day", "in spring"), ("again", "alone", "at last"), range(4))
    return [f"{a} {b} {c} , and {who[kind]} {does[kind]} {d} ." for a, b, c, d, kind in made]


def blocks(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[dict[str, list[int]]]:
    """Return rows of `BLOCK` tokens, one after the other, across the ends of lines; of a short text one shorter row."""
    tokens = [token for line in lines for token in tokenizer(line, truncation=False)["input_ids"][1:]]
    return [{"input_ids": tokens[at : at + BLOCK]} for at in range(0, max(1, len(tokens) - BLOCK + 1), BLOCK)]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, and return the metrics of the held-out lines."""
    options, training = parse(arguments, "causal_lm", learning_rate=1e-3, eval_strategy="epoch")
    set_seed(training.seed)
    lines = load_lines(options.data, options.limit)
    tokenizer = load_tokenizer(lines)
    train = [line for index, line in enumerate(lines) if index % HELD_OUT]
    size = {"n_positions": BLOCK, "n_embd": 64, "n_layer": 4, "n_head": 2}
    end = tokenizer.sep_token_id
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, bos_token_id=end, eos_token_id=end)),
        args=training,
        train_dataset=blocks(tokenizer, train),
        eval_dataset=blocks(tokenizer, lines[::HELD_OUT]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[EgeriaCallback()],  # egeria
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    return trainer.evaluate()


if __name__ == "__main__":
    print(f"perplexity {math.exp(main()['eval_loss']):.2f}")
