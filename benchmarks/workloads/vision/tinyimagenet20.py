"""Twenty classes of Tiny ImageNet: JPEGs of 64 x 64 pixels, 500 of a class for training and 50 for validation."""

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from zipfile import ZipFile

import torch
from PIL import Image

from benchmarks.workloads.vision.archives import decoded, folder_with, spread
from benchmarks.workloads.vision.pictures import Pictures, Source
from benchmarks.workloads.vision.recipe import Recipe

NUM_CLASSES = 20


@lru_cache(maxsize=1)
def read_tinyimagenet20(root: Path, recipe: Recipe) -> Source:
    """Read as many images of each class.

    What is held out beyond the validation images comes from the training images that are not trained on: a
    thousand images would tell differences of a few tenths of a point from nothing too seldom. Where the recipe has
    a judge, that is what it gets, and evaluations take a part of it.

    Raises:
        MissingDataError: an archive or the list of classes is not there.
    """
    num_held_out = max(recipe.num_held_out, recipe.num_judged)
    folder = folder_with(root, "tinyimagenet20", ("classes.tsv", "train.zip", "val.zip"))
    labels = _labels(folder / "classes.tsv")
    with ZipFile(folder / "train.zip") as train, ZipFile(folder / "val.zip") as validation:
        trained, left = _split(train, recipe.num_train // NUM_CLASSES)
        judged = spread(sorted(validation.namelist()), num_held_out)
        extra = spread(left, num_held_out - len(judged))
        seen = _pictures(train, trained, labels, recipe)
        parts = [_pictures(validation, judged, labels, recipe), _pictures(train, extra, labels, recipe)]
    held_out = Pictures(torch.cat([part.images for part in parts]), torch.cat([part.targets for part in parts]))
    source = Source(seen, held_out, mean=(0.481, 0.456, 0.426), deviation=(0.272, 0.270, 0.287))
    if not recipe.num_judged:
        return source
    few = torch.arange(recipe.num_held_out) * len(held_out.targets) // recipe.num_held_out
    return replace(source, held_out=Pictures(held_out.images[few], held_out.targets[few]), judged=held_out)


def _labels(path: Path) -> dict[str, int]:
    """Return the class of each WordNet id, the name of its folder."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return {wordnet_id: int(label) for label, wordnet_id, *_ in rows}


def _split(archive: ZipFile, count: int) -> tuple[list[str], list[str]]:
    """Return the first `count` names of each class, and all others."""
    classes = defaultdict(list)
    for name in sorted(archive.namelist()):
        classes[name.split("/")[0]].append(name)
    first = [name for names in classes.values() for name in names[:count]]
    others = [name for names in classes.values() for name in names[count:]]
    return first, others


def _pictures(archive: ZipFile, names: list[str], labels: dict[str, int], recipe: Recipe) -> Pictures:
    images = torch.empty(len(names), *recipe.size, 3, dtype=torch.uint8)
    for image, name in zip(images, names, strict=True):
        image.copy_(decoded(archive, name, "RGB", recipe.size, Image.Resampling.BOX))
    targets = torch.tensor([labels[name.split("/")[0]] for name in names], dtype=torch.uint8)
    return Pictures(images, targets)
