"""Residual networks for pictures, with batch or group norm, at any width."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import ConfigError, unknown

NORMS = ("batch", "group")
GROUP = 16  # channels a group


@dataclass(frozen=True)
class ResNetConfig:
    """Blocks per stage, their kind, and the channels of the first stage.

    `bottleneck` takes the blocks of three convolutions; `small_images` starts with one 3 x 3 convolution instead of
    a 7 x 7 of stride 2 and a pool. `norm="group"` has no running statistics, so replicas share all there is.
    """

    depths: tuple[int, ...] = (2, 2, 2, 2)
    bottleneck: bool = False
    width: int = 64
    classes: int = 1000
    norm: str = "batch"
    small_images: bool = False

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise unknown("norm", self.norm, NORMS)
        if min(*self.depths, self.width, self.classes) < 1:
            raise ConfigError(f"sizes must be positive: {self}")


def resnet18(*, width: int = 64, classes: int = 1000, norm: str = "batch", small_images: bool = False) -> ResNet:
    """18 layers, 11.7M parameters; 0.7M at width 16 with 10 classes."""
    return ResNet(ResNetConfig((2, 2, 2, 2), False, width, classes, norm, small_images))


def resnet50(*, width: int = 64, classes: int = 1000, norm: str = "batch", small_images: bool = False) -> ResNet:
    """50 layers, 25.6M parameters."""
    return ResNet(ResNetConfig((3, 4, 6, 3), True, width, classes, norm, small_images))


class ResNet(nn.Module):
    """Stages of residual blocks; each stage after the first halves the picture and doubles the channels.

    >>> resnet18(width=8, classes=10, norm="group", small_images=True)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        kernel, stride = (3, 1) if config.small_images else (7, 2)
        self.conv1 = nn.Conv2d(3, config.width, kernel, stride, kernel // 2, bias=False)
        self.norm1 = norm_of(config, config.width)
        stages, inner = [], config.width
        for stage, depth in enumerate(config.depths):
            blocks = []
            for index in range(depth):
                # the first block of a later stage halves the picture
                blocks.append(ResidualBlock(config, inner, stage, 2 if stage and not index else 1))
                inner = blocks[-1].outer
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inner, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(B, classes)` of images `(B, 3, height, width)`."""
        x = F.relu(self.norm1(self.conv1(images)))
        if not self.config.small_images:
            x = F.max_pool2d(x, 3, 2, 1)
        logits: Tensor = self.head(self.stages(x).mean((-2, -1)))
        return logits


class ResidualBlock(nn.Module):
    """`relu(shortcut(x) + branch(x))`; the branch is two 3 x 3 convolutions, or 1 x 1, 3 x 3, 1 x 1."""

    def __init__(self, config: ResNetConfig, inner: int, stage: int, stride: int) -> None:
        super().__init__()
        width = config.width << stage
        self.outer = 4 * width if config.bottleneck else width
        # (channels out, kernel, stride) of each convolution
        first = [(width, 1, 1), (width, 3, stride)] if config.bottleneck else [(width, 3, stride)]
        steps = [*first, (self.outer, 1 if config.bottleneck else 3, 1)]
        # the last ReLU comes after the sum, so the branch ends with a norm
        layers: list[nn.Module] = []
        channels = inner
        for outer, kernel, step in steps:
            layers += [
                nn.Conv2d(channels, outer, kernel, step, kernel // 2, bias=False),
                norm_of(config, outer),
                nn.ReLU(),
            ]
            channels = outer
        self.branch = nn.Sequential(*layers[:-1])
        # a shortcut that changes nothing wherever the shapes allow it
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != self.outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, self.outer, 1, stride, bias=False), norm_of(config, self.outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block on `(B, channels, height, width)`."""
        return F.relu(self.shortcut(x) + self.branch(x))


def norm_of(config: ResNetConfig, channels: int) -> nn.Module:
    """The norm layer the configuration asks for."""
    if config.norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(channels // math.gcd(channels, GROUP), channels)


def resnet50_shapes() -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of ResNet-50's 25.6M parameters, for byte tables without the memory.

    >>> sum(math.prod(shape) for _, shape in resnet50_shapes())
    25557032
    """
    with torch.device("meta"):  # shapes without memory
        return [(name, tuple(parameter.shape)) for name, parameter in resnet50().named_parameters()]
