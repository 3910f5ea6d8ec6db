"""Segmentation networks from the literature: DeepLabv3, DeepLabv3+ and U-Net."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from examples.resnet import initialise
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.convnets import ResNetTrunk
from egeria.errors import ConfigError


def conv_bn_relu(in_channels: int, channels: int, kernel: int, dilation: int = 1) -> nn.Sequential:
    """Build a convolution that keeps height and width, with batch norm and ReLU."""
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, padding=padding, dilation=dilation, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling: views of one feature map at several scales (figure 5)."""

    def __init__(self, in_channels: int, channels: int, rates: Sequence[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList([conv_bn_relu(in_channels, channels, 1)])
        self.branches.extend(conv_bn_relu(in_channels, channels, 3, rate) for rate in rates)
        self.image_branch = conv_bn_relu(in_channels, channels, 1)
        self.project = nn.Sequential(conv_bn_relu((len(rates) + 2) * channels, channels, 1), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H, W]."""
        image = self.image_branch(x.mean(dim=(2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        views = [branch(x) for branch in self.branches]
        projected: Tensor = self.project(torch.cat([*views, image], dim=1))
        return projected


class DeepLabV3(nn.Module):
    """A dilated ResNet-50 `backbone`, then pyramid pooling and a pixel classifier in `classifier`."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.backbone = ResNetTrunk(width, dilated=True)
        channels = 4 * width
        self.classifier = nn.Sequential(
            AtrousPyramid(self.backbone.out_channels, channels, rates=(12, 24, 36)),
            conv_bn_relu(channels, channels, 3),
            nn.Conv2d(channels, num_classes, 1),
        )
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, classes, H, W]."""
        logits = self.classifier(self.backbone(x))
        return functional.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


def deeplabv3(num_classes: int = 11, backbone: Literal["resnet50"] = "resnet50", width: int = 64) -> DeepLabV3:
    """Build DeepLabv3 with output stride 8 and without the auxiliary head.

    Source: Chen et al., "Rethinking Atrous Convolution for Semantic Image Segmentation", 2017.

    Args:
        num_classes: classes of a pixel; 11 are those of CamVid.
        backbone: "resnet50", with dilation instead of stride in layer3 and layer4.
        width: channels of the first convolution; 64 is the paper's.

    Raises:
        ConfigError: for another backbone.
    """
    if backbone != "resnet50":
        raise ConfigError(f"backbone must be 'resnet50', found {backbone!r}. No other one is defined here.")
    return DeepLabV3(num_classes, width)


class DeepLabV3Plus(nn.Module):
    """DeepLabv3 with a decoder that joins the pyramid with the output of the backbone's first stage."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.backbone = ResNetTrunk(width, dilated=True)
        channels = 4 * width
        self.pyramid = AtrousPyramid(self.backbone.out_channels, channels, rates=(12, 24, 36))
        self.reduce = conv_bn_relu(channels, 3 * width // 4, 1)
        self.decoder = nn.Sequential(
            conv_bn_relu(channels + 3 * width // 4, channels, 3),
            nn.Conv2d(channels, num_classes, 1),
        )
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, classes, H, W]."""
        trunk = self.backbone
        fine = trunk.layer1(trunk.maxpool(functional.relu(trunk.bn1(trunk.conv1(x)))))
        coarse = self.pyramid(trunk.layer4(trunk.layer3(trunk.layer2(fine))))
        coarse = functional.interpolate(coarse, size=fine.shape[2:], mode="bilinear", align_corners=False)
        logits = self.decoder(torch.cat([coarse, self.reduce(fine)], dim=1))
        return functional.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


def deeplabv3plus(num_classes: int = 11, width: int = 64) -> DeepLabV3Plus:
    """Build DeepLabv3+ on a dilated ResNet-50.

    Source: Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image
    Segmentation", ECCV 2018 (there: separable convolutions, on Xception).
    """
    return DeepLabV3Plus(num_classes, width)


class DoubleConv(nn.Module):
    """Two 3x3 convolutions with batch norm: what every level of a U-Net does."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.first = conv_bn_relu(in_channels, channels, 3)
        self.second = conv_bn_relu(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H, W]."""
        out: Tensor = self.second(self.first(x))
        return out


class UNet(nn.Module):
    """Contracting `encoders`, a `bottleneck`, and `decoders` that also see the encoders' outputs."""

    def __init__(self, in_channels: int, num_classes: int, width: int, num_levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(num_levels + 1)]
        downwards = pairwise([in_channels, *widths[:-1]])
        self.encoders = nn.ModuleList(DoubleConv(before, after) for before, after in downwards)
        self.bottleneck = DoubleConv(widths[-2], widths[-1])
        upwards = list(pairwise(reversed(widths)))
        self.upsamplers = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, stride=2) for before, after in upwards)
        self.decoders = nn.ModuleList(DoubleConv(2 * after, after) for _, after in upwards)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, classes, H, W]; sides divide by 2 ** levels."""
        seen: list[Tensor] = []
        for encoder in self.encoders:
            seen.append(encoder(x))
            x = functional.max_pool2d(seen[-1], 2)
        x = self.bottleneck(x)
        for upsampler, decoder in zip(self.upsamplers, self.decoders, strict=True):
            x = decoder(torch.cat([seen.pop(), upsampler(x)], dim=1))
        logits: Tensor = self.classifier(x)
        return logits


def unet(in_channels: int = 1, num_classes: int = 2, width: int = 16, num_levels: int = 3) -> UNet:
    """Build a small U-Net with batch norm and padded convolutions.

    Source: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image
    Segmentation", MICCAI 2015 (there: width 64, four levels, no padding).
    """
    return UNet(in_channels, num_classes, width, num_levels)
