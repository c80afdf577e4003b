"""One round the way public optimizers write it: tensor by tensor, einsum DCT, topk, int64 indices, scatter.

It neither quantises nor packs, so it does less than lowtide's round does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Sent = tuple[Tensor, Tensor]


def divisor(length: int, limit: int = 64) -> int:
    """The largest divisor up to `limit`."""
    return next(edge for edge in range(min(length, limit), 0, -1) if length % edge == 0)


def basis(length: int) -> Tensor:
    """The orthonormal DCT-II."""
    k, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    matrix = torch.cos(math.pi * (j + 0.5) * k / length) * math.sqrt(2 / length)
    matrix[0] = math.sqrt(1 / length)
    return matrix


@dataclass
class Tensorwise:
    """Anchor, residual and parameters of one tensor, and its way through a round."""

    parameter: Tensor
    density: float
    beta: float = 0.9
    lr: float = 0.8

    def __post_init__(self) -> None:
        self.anchor = self.parameter.clone()
        self.residual = torch.zeros_like(self.parameter)
        self.rows, self.cols = (divisor(edge) for edge in self.parameter.shape)
        self.left, self.right = basis(self.rows), basis(self.cols)
        self.k = max(1, math.ceil(self.rows * self.cols * self.density))

    def forward(self, x: Tensor) -> Tensor:
        tiles = x.view(x.shape[0] // self.rows, self.rows, x.shape[1] // self.cols, self.cols)
        return torch.einsum("yhxw,ih,jw->yxij", tiles, self.left, self.right).flatten(2)

    def inverse(self, tiles: Tensor) -> Tensor:
        tiles = tiles.view(*tiles.shape[:2], self.rows, self.cols)
        return torch.einsum("yxij,ih,jw->yhxw", tiles, self.left, self.right).reshape(self.parameter.shape)

    def encode(self) -> Sent:
        """Delta into the residual, the strongest coefficients out of it."""
        self.residual.mul_(self.beta).add_(self.anchor - self.parameter)
        tiles = self.forward(self.residual)
        index = tiles.abs().topk(self.k, dim=-1, sorted=False).indices
        value = tiles.gather(-1, index)
        sent = torch.zeros_like(tiles).scatter_(-1, index, value)
        self.residual.sub_(self.inverse(sent))
        return index, value

    def decode(self, parts: list[Sent]) -> None:
        """The mean over those who sent a coefficient, then the outer step."""
        index = torch.cat([part[0] for part in parts], dim=-1)
        value = torch.cat([part[1] for part in parts], dim=-1)
        tiles = value.new_zeros(*index.shape[:2], self.rows * self.cols)
        tiles.scatter_reduce_(-1, index, value, reduce="mean", include_self=False)
        self.anchor.sub_(self.inverse(tiles), alpha=self.lr)
        self.parameter.copy_(self.anchor)
