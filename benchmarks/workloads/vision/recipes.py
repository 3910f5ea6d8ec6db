"""The recipes of the vision workloads, by network and tier.

Tier 'cpu' is sized to a few minutes on one core. MobileNetV2 is not settled there when its rate first falls:
in its plain run the loss still fell from epoch to epoch, and it ended at 30 %.
"""

from dataclasses import replace

from benchmarks.workloads.vision.recipe import Recipe

# The paper's ResNet-56: 200 epochs, decays at 100 and 150; the rest as in He et al. (2016), section 4.2.
_CIFAR10 = Recipe(
    num_train=50_000,
    num_held_out=10_000,
    size=(32, 32),
    crop=(32, 32),
    padding=4,
    num_epochs=200,
    batch_size=128,
    lr=0.1,
    weight_decay=1e-4,
)
_CIFAR10_ONE_CORE = replace(_CIFAR10, num_train=12_500, num_epochs=24, lr=0.2, weight_decay=5e-4)
_CIFAR10_HALVED = replace(
    _CIFAR10,
    num_train=15_000,
    num_held_out=5_000,
    size=(16, 16),
    crop=(16, 16),
    padding=2,
    num_epochs=20,
    batch_size=64,
    weight_decay=5e-4,
)
_CIFAR10_SMOKE = replace(_CIFAR10, num_train=256, num_held_out=128, num_epochs=2, batch_size=64)

# The paper's ResNet-50: 90 epochs; decays, learning rate per sample and weight decay as He et al. on ImageNet.
_TINYIMAGENET20 = Recipe(
    num_train=10_000,
    num_held_out=1_000,
    size=(64, 64),
    crop=(64, 64),
    padding=8,
    num_epochs=90,
    batch_size=128,
    lr=0.05,
    weight_decay=1e-4,
    decays=(1 / 3, 2 / 3),
)
_TINYIMAGENET20_ONE_CORE = replace(
    _TINYIMAGENET20,
    num_train=5_000,
    num_held_out=3_000,
    size=(48, 48),
    crop=(48, 48),
    padding=6,
    num_epochs=20,
    batch_size=64,
    decays=(1 / 2, 3 / 4),
)
_TINYIMAGENET20_SMOKE = replace(
    _TINYIMAGENET20, num_train=160, num_held_out=100, width=0.25, num_epochs=2, batch_size=40
)

_CAMVID = Recipe(
    num_train=367,
    num_held_out=233,
    size=(360, 480),
    crop=(320, 416),
    num_epochs=200,
    batch_size=8,
    lr=0.02,
    weight_decay=1e-4,
)
_CAMVID_ONE_CORE = replace(_CAMVID, size=(120, 160), crop=(96, 128), width=0.25, num_epochs=36, lr=0.05)
_CAMVID_SMOKE = replace(_CAMVID_ONE_CORE, num_train=24, num_held_out=16, num_epochs=2)

RECIPES: dict[str, dict[str, Recipe]] = {
    "resnet8-cifar10": {"gpu": _CIFAR10, "cpu": _CIFAR10_ONE_CORE, "smoke": _CIFAR10_SMOKE},
    "resnet20-cifar10": {
        "gpu": _CIFAR10,
        "long": replace(_CIFAR10, num_epochs=30, lr=0.2, weight_decay=5e-4),
        "cpu": _CIFAR10_HALVED,
        "smoke": _CIFAR10_SMOKE,
    },
    "resnet56-cifar10": {"gpu": _CIFAR10, "cpu": replace(_CIFAR10_HALVED, num_train=8_000), "smoke": _CIFAR10_SMOKE},
    "mobilenetv2-tinyimagenet20": {
        "gpu": replace(_TINYIMAGENET20, weight_decay=4e-5),
        # The backward pass of depthwise convolutions takes three times as long in bfloat16 on a CPU.
        "cpu": replace(_TINYIMAGENET20_ONE_CORE, width=0.5, is_mixed=False),
        "smoke": replace(_TINYIMAGENET20_SMOKE, is_mixed=False),
    },
    "resnet50-tinyimagenet20": {
        "gpu": _TINYIMAGENET20,
        "cpu": replace(_TINYIMAGENET20_ONE_CORE, width=0.25),
        "smoke": _TINYIMAGENET20_SMOKE,
    },
    "deeplabv3-camvid": {"gpu": _CAMVID, "cpu": _CAMVID_ONE_CORE, "smoke": _CAMVID_SMOKE},
}

# Of the 10,000 training pictures, 2,000 are for judging.
_TINYIMAGENET20_TRANSFER = Recipe(
    num_train=8_000,
    num_held_out=1_000,
    num_judged=3_000,
    size=(32, 32),
    crop=(32, 32),
    padding=4,
    num_epochs=20,
    batch_size=64,
    lr=0.02,
    weight_decay=5e-4,
)
_CAMVID_TRANSFER = Recipe(
    num_train=367,
    num_held_out=101,
    num_judged=233,
    size=(120, 160),
    crop=(96, 128),
    num_epochs=30,
    batch_size=8,
    lr=0.02,
    weight_decay=1e-4,
)

_CLASSES = {
    "gpu": replace(_TINYIMAGENET20_TRANSFER, num_epochs=50),
    "long": replace(_TINYIMAGENET20_TRANSFER, num_epochs=50),
    "cpu": replace(_TINYIMAGENET20_TRANSFER, num_train=5_000, num_epochs=12),
    "smoke": replace(
        _TINYIMAGENET20_TRANSFER, num_train=160, num_held_out=40, num_judged=100, num_epochs=2, batch_size=40
    ),
}

TRANSFER_RECIPES: dict[str, dict[str, Recipe]] = {
    "resnet56-tinyimagenet20-transfer": _CLASSES,
    "resnet20-tinyimagenet20-transfer": _CLASSES,
    "resnet20-camvid-transfer": {
        "gpu": replace(_CAMVID_TRANSFER, size=(360, 480), crop=(320, 416), num_epochs=100),
        "long": replace(_CAMVID_TRANSFER, size=(180, 240), crop=(144, 192), num_epochs=100),
        "cpu": _CAMVID_TRANSFER,
        "smoke": replace(_CAMVID_TRANSFER, num_train=24, num_held_out=8, num_judged=16, num_epochs=2),
    },
}
"""Of networks that begin with what they learned on CIFAR-10."""

_IMAGENET_TRANSFER = replace(
    _TINYIMAGENET20_TRANSFER,
    size=(64, 64),
    crop=(64, 64),
    padding=8,
    num_epochs=3,
    lr=1e-3,
    weight_decay=0.01,
    is_adamw=True,
    warmup=0.1,
)
_WITH_ADAMW = {
    "gpu": replace(_IMAGENET_TRANSFER, num_epochs=20),
    "cpu": replace(
        _IMAGENET_TRANSFER, is_mixed=False
    ),  # as for MobileNetV2; a step takes 1.7 times as long in bfloat16
    "smoke": replace(
        _IMAGENET_TRANSFER,
        num_train=160,
        num_held_out=40,
        num_judged=100,
        num_epochs=2,
        batch_size=40,
        is_mixed=False,
    ),
}
EFFICIENT_RECIPES: dict[str, dict[str, Recipe]] = {
    "efficientnet-tinyimagenet20-transfer": _WITH_ADAMW,
    "efficientnet-tinyimagenet20-transfer-sgd": {
        tier: replace(recipe, is_adamw=False, lr=0.02, weight_decay=1e-4) for tier, recipe in _WITH_ADAMW.items()
    },
}
"""Of a network that begins with what it learned on ImageNet."""
