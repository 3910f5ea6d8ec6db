"""The networks of the vision workloads, with their recipes."""

from functools import partial

from examples.resnet import CifarDepth, cifar_resnet
from torch import nn

from benchmarks.models.convnets import mobilenet_v2, resnet50
from benchmarks.models.segmentation import deeplabv3
from benchmarks.workloads.vision import camvid, cifar10, tinyimagenet20
from benchmarks.workloads.vision.recipe import Recipe
from benchmarks.workloads.vision.recipes import RECIPES
from benchmarks.workloads.vision.small_deeplab import SmallBackbone, SmallDeepLab
from benchmarks.workloads.vision.task import Task


def residual_net(depth: CifarDepth, recipe: Recipe) -> nn.Module:
    """Return the ResNet of a depth for small images; its width is fixed."""
    return cifar_resnet(depth)


def mobile_net(recipe: Recipe) -> nn.Module:
    """Return a MobileNetV2."""
    return mobilenet_v2(tinyimagenet20.NUM_CLASSES, recipe.width)


def residual_net_50(recipe: Recipe) -> nn.Module:
    """Return a ResNet-50."""
    return resnet50(tinyimagenet20.NUM_CLASSES, round(64 * recipe.width))


def deeplab(recipe: Recipe) -> nn.Module:
    """Return a DeepLabv3: on ResNet-50 at full width, else on the small backbone."""
    if recipe.width == 1:
        return deeplabv3(camvid.NUM_CLASSES)
    return SmallDeepLab(camvid.NUM_CLASSES, SmallBackbone(round(64 * recipe.width)))


def _cifar10(depth: CifarDepth, paper: str = "") -> Task:
    return Task(
        name=f"resnet{depth}-cifar10",
        measures=("accuracy",),
        paper=paper,
        read=cifar10.read_cifar10,
        num_classes=cifar10.NUM_CLASSES,
        network=partial(residual_net, depth),
        recipes=RECIPES[f"resnet{depth}-cifar10"],
    )


TASKS = (
    _cifar10(8),
    _cifar10(20),
    _cifar10(56, paper="+23 % (ResNet-56, CIFAR-10)"),
    Task(
        name="mobilenetv2-tinyimagenet20",
        measures=("accuracy",),
        paper="+22 % (MobileNetV2, ImageNet)",
        read=tinyimagenet20.read_tinyimagenet20,
        num_classes=tinyimagenet20.NUM_CLASSES,
        network=mobile_net,
        recipes=RECIPES["mobilenetv2-tinyimagenet20"],
    ),
    Task(
        name="resnet50-tinyimagenet20",
        measures=("accuracy",),
        paper="+28 % (ResNet-50, ImageNet)",
        read=tinyimagenet20.read_tinyimagenet20,
        num_classes=tinyimagenet20.NUM_CLASSES,
        network=residual_net_50,
        recipes=RECIPES["resnet50-tinyimagenet20"],
    ),
    Task(
        name="deeplabv3-camvid",
        measures=("miou", "accuracy"),
        paper="+21 % (DeepLabv3, VOC)",
        read=camvid.read_camvid,
        num_classes=camvid.NUM_CLASSES,
        network=deeplab,
        recipes=RECIPES["deeplabv3-camvid"],
    ),
)
