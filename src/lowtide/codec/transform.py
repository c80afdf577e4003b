"""Transforms of tiles: the identity, and the orthonormal discrete cosine transform.

DCT-II of length n as a matrix: A[k, j] = s_k cos(pi (j + 1/2) k / n), s_0 = sqrt(1/n), s_k = sqrt(2/n); A A^T = I.
A tile X becomes (A_rows X A_cols^T)^T: coefficient (i, j) lies at position j * rows + i of the tile, since two products
with a transpose between them are faster than a product from each side. The transform runs over positions inside a
weight matrix, not over time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowtide.codec.base import Transform
from lowtide.errors import ConfigError, unknown
from lowtide.tensors import Grid


# a constant of its arguments, so the cache cannot go stale
@lru_cache(maxsize=64)
def basis(length: int, device: torch.device) -> Tensor:
    """The matrix A of the orthonormal DCT-II, computed in double precision, kept in single.

    >>> A = basis(8, torch.device("cpu"))
    >>> torch.allclose(A @ A.T, torch.eye(8), atol=1e-6)
    True
    """
    # on the CPU whatever the device, so that all devices hold the same numbers
    k = torch.arange(length, dtype=torch.float64)[:, None]
    j = torch.arange(length, dtype=torch.float64)[None, :]
    matrix = torch.cos(math.pi * (j + 0.5) * k / length) * math.sqrt(2 / length)
    # the constant row has no cosine that halves its norm, hence its own scale
    matrix[0] = math.sqrt(1 / length)
    return matrix.float().to(device)


@dataclass(frozen=True)
class Identity:
    """Coefficients are the parameters themselves."""

    code: int = 0
    mixes: bool = False

    def forward_(self, buffer: Tensor, grid: Grid) -> Tensor:
        return buffer

    def inverse_(self, buffer: Tensor, grid: Grid) -> Tensor:
        return buffer

    def inverse_block_(self, block: Tensor, rows: int, cols: int) -> Tensor:
        return block


@dataclass(frozen=True)
class DCT:
    """The cosine transform of every tile."""

    edge: int = 64
    code: int = 1
    mixes: bool = True

    def forward_(self, buffer: Tensor, grid: Grid) -> Tensor:
        for start, stop, group in grid.blocks():
            # the tail is left alone: its tensors have no two axes
            if group is not None:
                rows, cols = basis(group.rows, buffer.device), basis(group.cols, buffer.device)
                _both_sides_(buffer[..., start:stop], group.rows, group.cols, cols, rows)
        return buffer

    def inverse_(self, buffer: Tensor, grid: Grid) -> Tensor:
        for start, stop, group in grid.blocks():
            if group is not None:
                self.inverse_block_(buffer[..., start:stop], group.rows, group.cols)
        return buffer

    def inverse_block_(self, block: Tensor, rows: int, cols: int) -> Tensor:
        # the inverse of an orthonormal matrix is its transpose
        left, right = basis(rows, block.device).T.contiguous(), basis(cols, block.device).T.contiguous()
        # coefficients lie as cols x rows, so the edges change places on the way back
        return _both_sides_(block, cols, rows, left, right)


def _both_sides_(block: Tensor, rows: int, cols: int, first: Tensor, second: Tensor) -> Tensor:
    """`(X first^T)^T second^T` for every tile X of `rows x cols`, in place; the tiles come out as `cols x rows`."""
    half = times(block.reshape(-1, cols), first).view(-1, rows, cols).transpose(1, 2)
    # back into the caller's buffer, which is still in cache
    block.copy_(times(half.reshape(-1, rows), second).view(block.shape))
    return block


def times(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for a tall x and a small square weight.

    The BLAS behind `torch.matmul` does not use the widest instructions on every CPU; oneDNN does, and is twice as
    fast where it differs.
    """
    if x.device.type == "cpu" and _has_onednn():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # noqa: SLF001
        return product
    return x @ weight.T


@lru_cache(maxsize=1)
def _has_onednn() -> bool:
    """Whether oneDNN's product can be called here and is exact; it is no public function of torch."""
    # tried on numbers: a private call may exist and still mean something else
    x, weight = torch.linspace(-1, 1, 96).view(24, 4), torch.linspace(0, 1, 16).view(4, 4)
    try:
        product = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # noqa: SLF001
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.allclose(product, x @ weight.T, rtol=1e-6, atol=1e-6)


def identity() -> Transform:
    """No transform."""
    return Identity()


def dct(edge: int = 64) -> Transform:
    """The orthonormal DCT of tiles with this edge."""
    if edge < 2:
        raise ConfigError(f"dct needs tiles of at least 2 x 2, not {edge}\nhint: dct(64)")
    return DCT(edge)


def transform_named(name: str) -> Transform:
    """`dct` or `none`."""
    known = {"dct": dct(), "none": identity()}
    if name not in known:
        raise unknown("transform", name, known)
    return known[name]
