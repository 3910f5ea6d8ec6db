"""Convolutional classifiers from the literature, defined here so that nothing has to be downloaded.

Attribute names follow common practice (`conv1`, `bn1`, `layer1`, …, `features`), so that what a
test or an example says about them carries over to other definitions of the same networks.
"""

import math

from examples.resnet import initialise
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the stride is in the 3x3 one (ResNet v1.5)."""

    def __init__(self, in_channels: int, channels: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        out_channels = 4 * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=dilation, dilation=dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, 4 C', H / stride, W / stride]."""
        out = functional.relu(self.bn1(self.conv1(x)))
        out = functional.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return functional.relu(out + (x if self.downsample is None else self.downsample(x)))


def bottleneck_stage(
    in_channels: int, channels: int, num_blocks: int, stride: int = 1, dilations: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """Build a stage of bottlenecks.

    Args:
        in_channels: channels of what comes in.
        channels: channels of the 3x3 convolutions; four times as many go out.
        num_blocks: number of bottlenecks.
        stride: stride of the first bottleneck.
        dilations: dilation of the first bottleneck and of all others.
    """
    first, others = dilations
    blocks = [Bottleneck(in_channels, channels, stride, first)]
    blocks += [Bottleneck(4 * channels, channels, dilation=others) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)


class ResNetTrunk(nn.Module):
    """Everything of ResNet-50 but its classifier; the last two stages stride, or dilate instead."""

    def __init__(self, width: int = 64, dilated: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = bottleneck_stage(width, width, 3)
        self.layer2 = bottleneck_stage(4 * width, 2 * width, 4, stride=2)
        if dilated:
            self.layer3 = bottleneck_stage(8 * width, 4 * width, 6, dilations=(1, 2))
            self.layer4 = bottleneck_stage(16 * width, 8 * width, 3, dilations=(2, 4))
        else:
            self.layer3 = bottleneck_stage(8 * width, 4 * width, 6, stride=2)
            self.layer4 = bottleneck_stage(16 * width, 8 * width, 3, stride=2)
        self.out_channels = 32 * width

    def features(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the feature map of the last stage."""
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        features: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the feature map of the last stage."""
        return self.features(x)


class ResNet50(ResNetTrunk):
    """ResNet-50 with its classifier `fc`."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__(width)
        self.fc = nn.Linear(self.out_channels, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, classes]."""
        logits: Tensor = self.fc(self.features(x).mean(dim=(2, 3)))
        return logits


def resnet50(num_classes: int = 1000, width: int = 64) -> ResNet50:
    """Build ResNet-50 (He et al. 2016, table 1) in its v1.5 form; `width` 64 is the paper's."""
    return ResNet50(num_classes, width)


def conv_bn_relu6(in_channels: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Build a convolution with batch norm and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; with a shortcut where shapes allow (figure 4b)."""

    def __init__(self, in_channels: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [conv_bn_relu6(in_channels, hidden, 1)]
        layers += [
            conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        ]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and in_channels == channels

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H / stride, W / stride]."""
        out: Tensor = self.conv(x)
        return x + out if self.has_shortcut else out


class MobileNetV2(nn.Module):
    """Stem, 17 inverted residuals and a 1x1 convolution in `features`, then `classifier`."""

    # expansion, channels, number of blocks, stride of the first (table 2)
    stages = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, num_classes: int, width_multiplier: float) -> None:
        super().__init__()
        in_channels = _multiple_of_eight(32 * width_multiplier)
        layers: list[nn.Module] = [conv_bn_relu6(3, in_channels, 3, stride=2)]
        for expansion, base_channels, num_blocks, stride in self.stages:
            channels = _multiple_of_eight(base_channels * width_multiplier)
            for block in range(num_blocks):
                layers.append(InvertedResidual(in_channels, channels, 1 if block else stride, expansion))
                in_channels = channels
        out_channels = _multiple_of_eight(1280 * max(1.0, width_multiplier))
        layers.append(conv_bn_relu6(in_channels, out_channels, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(out_channels, num_classes))
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, classes]."""
        logits: Tensor = self.classifier(self.features(x).mean(dim=(2, 3)))
        return logits


def _multiple_of_eight(channels: float) -> int:
    """Round to the nearest multiple of eight, never under eight nor under 90 % of the value."""
    rounded = max(8, math.floor(channels / 8 + 0.5) * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def mobilenet_v2(num_classes: int = 1000, width_multiplier: float = 1.0) -> MobileNetV2:
    """Build MobileNetV2.

    Source: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018.
    """
    return MobileNetV2(num_classes, width_multiplier)
