"""Tuning without a new head: a GPT of characters that has learned Wikipedia, on the news and debates of WMT.

Its body is trained once, on SQuAD's paragraphs, and kept for all later runs.
"""

import hashlib
import html
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.workloads.mixed import in_place_of_bfloat16
from benchmarks.workloads.text import characters
from benchmarks.workloads.text.characters import Gpt, GptRecipe
from benchmarks.workloads.text.corpora import read_pairs
from benchmarks.workloads.workload import Setting, Training

KEPT = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "egeria-benchmarks"
"""Folder of trained bodies."""


def build(setting: Setting, *, recipes: Mapping[str, GptRecipe], bodies: Mapping[str, GptRecipe]) -> Training:
    """Make a training run; the first one trains the body before.

    Args:
        setting: what is asked for.
        recipes: by tier.
        bodies: how the body is trained, by tier.

    Raises:
        MissingDataError: the data are not there.
    """
    recipe = recipes[setting.tier]
    splits = {"train": recipe.num_train, "val": recipe.num_held_out, "test": recipe.num_judged}
    train, held_out, judged = (read_news(setting, split, count) for split, count in splits.items())
    network = Gpt(recipe)
    network.load_state_dict(trained_body(setting, bodies[setting.tier]))
    torch.manual_seed(setting.seed)
    return characters.make_training(setting, recipe, network, train=train, held_out=held_out, judged=judged)


def read_news(setting: Setting, split: str, count: int) -> Tensor:
    """Return the first characters of the English sentences of a split, as numbers.

    Raises:
        MissingDataError: the data are not there.
    """
    pairs = read_pairs(setting.data, "wmt_ende_slice", split)
    return characters.encode("\n".join(html.unescape(english) for english, _ in pairs), count)


def trained_body(setting: Setting, recipe: GptRecipe) -> dict[str, Tensor]:
    """Return the weights of a network that was trained by a recipe, always with seed 0.

    Raises:
        MissingDataError: the data are not there.
    """
    made_by = f"{recipe} {in_place_of_bfloat16(setting.device)} {setting.device.type}"
    path = KEPT / f"gpt-{hashlib.sha256(made_by.encode()).hexdigest()[:12]}.pt"
    if not path.is_file():
        training = characters.build(replace(setting, seed=0), recipes={setting.tier: recipe})
        for _ in range(training.num_epochs):
            for batch in training.loader:
                training.loss(training.model, batch).backward()
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip_norm)
                training.optimizer.step()
                training.scheduler.step()
                training.optimizer.zero_grad()
        KEPT.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")  # others may want the same one now
        torch.save(training.model.state_dict(), unfinished)
        unfinished.replace(path)
    return torch.load(path, map_location=setting.device, weights_only=True)
