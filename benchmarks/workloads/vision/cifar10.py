"""CIFAR-10, from lossless WebP sheets of 100 x 100 tiles, one for each official batch."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.workloads.vision.archives import folder_with
from benchmarks.workloads.vision.pictures import Pictures, Source
from benchmarks.workloads.vision.recipe import Recipe

SHEET_IMAGES = 10_000
NUM_CLASSES = 10


@lru_cache(maxsize=1)
def read_cifar10(root: Path, recipe: Recipe) -> Source:
    """Read the first training and test images in the official order, which is mixed; no more sheets than needed.

    Raises:
        MissingDataError: a sheet or the labels are not there.
    """
    sheets = [f"data_batch_{index + 1}" for index in range(-(-recipe.num_train // SHEET_IMAGES))]
    files = ("labels.npz", *(f"{sheet}.webp" for sheet in [*sheets, "test_batch"]))
    folder = folder_with(root, "cifar10", files)
    return Source(
        train=_pictures(folder, sheets, recipe.num_train, recipe.size),
        held_out=_pictures(folder, ["test_batch"], recipe.num_held_out, recipe.size),
        mean=(0.4914, 0.4822, 0.4465),
        deviation=(0.2470, 0.2435, 0.2616),
    )


def _pictures(folder: Path, sheets: list[str], count: int, size: tuple[int, int]) -> Pictures:
    with np.load(folder / "labels.npz") as labels:
        targets = torch.cat([torch.from_numpy(labels[sheet]) for sheet in sheets])
    images = torch.cat([_tiles(folder / f"{sheet}.webp", size) for sheet in sheets])
    return Pictures(images[:count].contiguous(), targets[:count])


def _tiles(path: Path, size: tuple[int, int]) -> Tensor:
    """Return the images of a sheet, [10000, H, W, 3]."""
    height, width = size
    with Image.open(path) as sheet:
        # A pixel is the mean of those it covers, and the edge of a tile is the edge of a pixel at every size.
        resized = sheet.convert("RGB").resize((100 * width, 100 * height), Image.Resampling.BOX)
    pixels = torch.from_numpy(np.array(resized))
    return pixels.reshape(100, height, 100, width, 3).transpose(1, 2).reshape(SHEET_IMAGES, height, width, 3)
