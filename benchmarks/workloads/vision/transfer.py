"""Networks that begin with what they learned on CIFAR-10: their weights, and what is fine-tuned from them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from examples.resnet import CifarDepth, cifar_resnet
from torch import nn

from benchmarks.workloads.vision import camvid, tinyimagenet20
from benchmarks.workloads.vision.archives import folder_with
from benchmarks.workloads.vision.pictures import Reader, Source
from benchmarks.workloads.vision.recipe import Recipe
from benchmarks.workloads.vision.recipes import TRANSFER_RECIPES
from benchmarks.workloads.vision.small_deeplab import ResidualFeatures, SmallDeepLab
from benchmarks.workloads.vision.task import Task

FOLDER = "weights_cifar10_resnet"
FILES: dict[CifarDepth, str] = {20: "resnet20-12fca82f.npz", 56: "resnet56-4bfd9763.npz"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet: the weights were trained on pictures normalised by these."""


def load_weights(depth: CifarDepth, network: nn.Module, root: Path) -> None:
    """Put in what was learned on CIFAR-10, all but the classifier; its network may be the whole or the `backbone`.

    Raises:
        MissingDataError: the weights are not there.
    """
    file = FILES[depth]
    trunk = getattr(network, "backbone", network)
    with np.load(folder_with(root, FOLDER, (file,)) / file) as weights:
        values = {name: torch.from_numpy(weights[name]) for name in weights.files if not name.startswith("linear.")}
    found = trunk.load_state_dict(values, strict=False)
    missing = [name for name in found.missing_keys if not name.endswith("num_batches_tracked")]
    if found.unexpected_keys or set(missing) - {"linear.weight", "linear.bias"}:
        raise ValueError(f"{file} must fit the network; found {found}")


def _classifier(depth: CifarDepth, num_classes: int, recipe: Recipe) -> nn.Module:
    return cifar_resnet(depth, num_classes)


def _segmenter(recipe: Recipe) -> nn.Module:
    return SmallDeepLab(camvid.NUM_CLASSES, ResidualFeatures(num_blocks=3))


def _read_normalised(read: Reader, root: Path, recipe: Recipe) -> Source:
    return replace(read(root, recipe), mean=MEAN, deviation=DEVIATION)


CLASSES = Task(
    name="resnet56-tinyimagenet20-transfer",
    measures=("accuracy",),
    paper="",
    read=partial(_read_normalised, tinyimagenet20.read_tinyimagenet20),
    num_classes=tinyimagenet20.NUM_CLASSES,
    network=partial(_classifier, 56, tinyimagenet20.NUM_CLASSES),
    load_weights=partial(load_weights, 56),
    recipes=TRANSFER_RECIPES["resnet56-tinyimagenet20-transfer"],
)
SMALLER = replace(
    CLASSES,
    name="resnet20-tinyimagenet20-transfer",
    network=partial(_classifier, 20, tinyimagenet20.NUM_CLASSES),
    load_weights=partial(load_weights, 20),
    recipes=TRANSFER_RECIPES["resnet20-tinyimagenet20-transfer"],
)
"""The same from a smaller network, for a workload that takes part in no tuning."""
SCENES = Task(
    name="resnet20-camvid-transfer",
    measures=("miou", "accuracy"),
    paper="",
    read=partial(_read_normalised, camvid.read_camvid),
    num_classes=camvid.NUM_CLASSES,
    network=_segmenter,
    load_weights=partial(load_weights, 20),
    recipes=TRANSFER_RECIPES["resnet20-camvid-transfer"],
)
