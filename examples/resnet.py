"""The residual network for small images (He et al. 2016) that the examples train; nothing has to be downloaded."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from egeria.errors import ConfigError

CifarDepth = Literal[8, 20, 32, 44, 56, 110]
Shortcut = Literal["pad", "project"]


def initialise(model: nn.Module) -> None:
    """Draw the weights of every convolution as He et al. (2015) do: normal, scaled by the fan-out."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2016, figure 2)."""

    def __init__(self, in_channels: int, channels: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.extra_channels = channels - in_channels
        self.shortcut: nn.Sequential | None = None
        if shortcut == "project" and (stride != 1 or self.extra_channels):
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H / stride, W / stride]."""
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return functional.relu(out + self._skip(x))

    def _skip(self, x: Tensor) -> Tensor:
        if self.shortcut is not None:
            projected: Tensor = self.shortcut(x)
            return projected
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.extra_channels:
            front = self.extra_channels // 2
            x = functional.pad(x, (0, 0, 0, 0, front, self.extra_channels - front))
        return x


class CifarResNet(nn.Module):
    """The residual network for 32x32 images of He et al. (2016), section 4.2."""

    def __init__(self, num_blocks: int, num_classes: int, in_channels: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(num_blocks, 16, 16, 1, shortcut)
        self.layer2 = self._stage(num_blocks, 16, 32, 2, shortcut)
        self.layer3 = self._stage(num_blocks, 32, 64, 2, shortcut)
        self.linear = nn.Linear(64, num_classes)
        initialise(self)

    @staticmethod
    def _stage(num_blocks: int, in_channels: int, channels: int, stride: int, shortcut: Shortcut) -> nn.Sequential:
        first = BasicBlock(in_channels, channels, stride, shortcut)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1, shortcut) for _ in range(num_blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, classes]."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


def cifar_resnet(
    depth: CifarDepth, num_classes: int = 10, in_channels: int = 3, shortcut: Shortcut = "pad"
) -> CifarResNet:
    """Build ResNet-20, -32, -44, -56 or -110 for small images, or the tiny ResNet-8.

    Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.

    Args:
        depth: number of layers with weights, 6n + 2 with n blocks in each of three stages.
        num_classes: width of the classifier.
        in_channels: channels of the images.
        shortcut: where a stage begins, "pad" is option A of the paper (every other pixel, channels
            padded with zeros) and "project" a 1x1 convolution with batch norm.

    Raises:
        ConfigError: for another depth or shortcut.
    """
    for setting, value, choices in (
        ("depth", depth, get_args(CifarDepth)),
        ("shortcut", shortcut, get_args(Shortcut)),
    ):
        if value not in choices:
            raise ConfigError(f"{setting} must be one of {choices}, found {value!r}. Choose one of them.")
    return CifarResNet((depth - 2) // 6, num_classes, in_channels, shortcut)
