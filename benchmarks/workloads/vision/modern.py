"""Networks with layer normalisation on CIFAR-10: a small ViT and a small ConvNeXt of `transformers`, from scratch."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks.workloads.vision import cifar10
from benchmarks.workloads.vision.recipe import Recipe
from benchmarks.workloads.vision.recipes import MODERN_RECIPES
from benchmarks.workloads.vision.task import Task

PATCH = 4
"""Side of the pixels that are a token of the ViT; ConvNeXt begins with half of it."""


class Classifier(nn.Module):
    """A classifier of `transformers`, called with pictures alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] of pictures [B, 3, H, W]."""
        logits: Tensor = self.network(pixel_values=images).logits
        return logits


def vision_transformer(recipe: Recipe) -> nn.Module:
    """Return a ViT of six layers; at full width 192 wide, with six heads."""
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415 (slow to import)

    heads = round(6 * recipe.width) or 1
    config = ViTConfig(
        image_size=recipe.crop[0],
        patch_size=PATCH,
        hidden_size=32 * heads,
        num_hidden_layers=6,
        num_attention_heads=heads,
        intermediate_size=64 * heads,
        num_labels=cifar10.NUM_CLASSES,
    )
    return Classifier(ViTForImageClassification(config))


def convnext(recipe: Recipe) -> nn.Module:
    """Return a ConvNeXt of ten blocks in four stages; at full width 48 to 384 channels."""
    from transformers import ConvNextConfig, ConvNextForImageClassification  # noqa: PLC0415

    first = round(48 * recipe.width)
    config = ConvNextConfig(
        patch_size=PATCH // 2,
        hidden_sizes=[first, 2 * first, 4 * first, 8 * first],
        depths=[2, 2, 4, 2],
        num_labels=cifar10.NUM_CLASSES,
    )
    return Classifier(ConvNextForImageClassification(config))


MODERN = tuple(
    Task(
        name=name,
        measures=("accuracy",),
        paper="",
        read=cifar10.read_cifar10,
        num_classes=cifar10.NUM_CLASSES,
        network=network,
        recipes=MODERN_RECIPES[name],
    )
    for name, network in (("vit-cifar10", vision_transformer), ("convnext-cifar10", convnext))
)
