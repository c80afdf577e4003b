"""A multi-layer perceptron: linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from lowtide.errors import ConfigError


class MLP(nn.Module):
    """Layers of the given widths, from the flattened input to the logits.

    >>> import torch
    >>> MLP([12, 32, 4])(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ConfigError(f"widths {tuple(widths)}\nhint: give at least two, all of them positive")
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            layers += [nn.Linear(inner, outer), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `(B, widths[-1])` of inputs `(B, ...)`."""
        logits: Tensor = self.layers(inputs.flatten(1))
        return logits
