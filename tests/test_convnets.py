"""The convolutional networks have the sizes and shapes of the literature."""

import pytest
import torch
from benchmarks.models.convnets import mobilenet_v2, resnet50
from benchmarks.models.segmentation import deeplabv3, unet
from examples.resnet import cifar_resnet
from torch import nn

from egeria.errors import ConfigError


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(8, 75_290), (20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)],
)
def test_cifar_resnets_have_the_sizes_of_the_paper(depth, expected):
    with torch.device("meta"):
        assert count(cifar_resnet(depth)) == expected


def test_large_networks_have_the_sizes_of_the_literature():
    with torch.device("meta"):
        assert count(resnet50()) == 25_557_032
        assert count(mobilenet_v2()) == 3_504_872
        assert count(deeplabv3(num_classes=21)) == 39_638_869


def test_projection_adds_one_convolution_to_each_later_stage():
    padded, projected = cifar_resnet(8), cifar_resnet(8, shortcut="project")
    added = {name for name, _ in projected.named_parameters()} - {name for name, _ in padded.named_parameters()}
    assert {name.split(".")[0] for name in added} == {"layer2", "layer3"}
    assert count(projected) - count(padded) == 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64


def test_padding_shortcut_keeps_every_other_pixel_and_centres_the_channels():
    block = cifar_resnet(8).layer2[0]
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (cifar_resnet(8, in_channels=1), (2, 1, 8, 8), (2, 10)),
        (cifar_resnet(8, shortcut="project"), (2, 3, 16, 16), (2, 10)),
        (resnet50(num_classes=7, width=4), (2, 3, 32, 32), (2, 7)),
        (mobilenet_v2(num_classes=5, width_multiplier=0.1), (2, 3, 32, 32), (2, 5)),
        (deeplabv3(num_classes=4, width=4), (2, 3, 24, 32), (2, 4, 24, 32)),
        (unet(num_classes=3, width=4), (2, 1, 16, 24), (2, 3, 16, 24)),
    ],
    ids=["pad", "project", "resnet50", "mobilenet_v2", "deeplabv3", "unet"],
)
def test_outputs_have_the_promised_shape_and_train(model, shape, expected):
    output = model(torch.randn(shape))
    assert output.shape == expected
    output.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_deeplabv3_keeps_an_eighth_of_the_resolution():
    with torch.device("meta"):
        assert deeplabv3().backbone(torch.randn(1, 3, 64, 64)).shape == (1, 2048, 8, 8)


@pytest.mark.parametrize(
    "build",
    [lambda: cifar_resnet(9), lambda: cifar_resnet(8, shortcut="none"), lambda: deeplabv3(backbone="vgg16")],
)
def test_unknown_variants_are_refused(build):
    with pytest.raises(ConfigError, match="found"):
        build()
