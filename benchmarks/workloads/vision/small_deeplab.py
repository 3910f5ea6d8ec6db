"""A small DeepLabv3 for one core: a residual backbone of basic blocks, and a pyramid that fits its map."""

from examples.resnet import CifarResNet, initialise
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.segmentation import AtrousPyramid, conv_bn_relu


class ResidualFeatures(CifarResNet):
    """A residual network for small images that ends with its feature map."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, num_classes=1, in_channels=3, shortcut="pad")
        del self.linear
        self.out_channels = 64

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the feature map [B, 64, H / 4, W / 4]."""
        x = functional.relu(self.bn1(self.conv1(x)))
        features: Tensor = self.layer3(self.layer2(self.layer1(x)))
        return features


class DilatedBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; with a dilation they see further at the same resolution."""

    def __init__(self, in_channels: int, channels: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=dilation, dilation=dilation, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H / stride, W / stride]."""
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return functional.relu(out + (x if self.downsample is None else self.downsample(x)))


class SmallBackbone(nn.Module):
    """A stem and four stages of two blocks; the last stage dilates instead of striding: output stride 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(DilatedBlock(width, width), DilatedBlock(width, width))
        self.layer2 = nn.Sequential(DilatedBlock(width, 2 * width, stride=2), DilatedBlock(2 * width, 2 * width))
        self.layer3 = nn.Sequential(DilatedBlock(2 * width, 4 * width, stride=2), DilatedBlock(4 * width, 4 * width))
        self.layer4 = nn.Sequential(*(DilatedBlock(4 * width, 4 * width, dilation=2) for _ in range(2)))
        self.out_channels = 4 * width

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to the feature map [B, C, H / 8, W / 8]."""
        x = functional.relu(self.bn1(self.conv1(x)))
        features: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return features


class SmallDeepLab(nn.Module):
    """DeepLabv3 on a small backbone: the parts, and their names, are those of the full network.

    Args:
        num_classes: of the pixels.
        backbone: maps images [B, 3, H, W] to a smaller feature map with `out_channels` channels.
    """

    def __init__(self, num_classes: int, backbone: SmallBackbone | ResidualFeatures) -> None:
        super().__init__()
        self.backbone = backbone
        channels = backbone.out_channels
        # The map of a 128 x 96 crop has 16 x 12 positions: the rates of the full network would see its border alone.
        self.classifier = nn.Sequential(
            AtrousPyramid(channels, channels, rates=(2, 4, 6)),
            conv_bn_relu(channels, channels, 3),
            nn.Conv2d(channels, num_classes, 1),
        )
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, classes, H, W]."""
        logits = self.classifier(self.backbone(x))
        return functional.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)
