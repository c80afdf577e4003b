"""Chunkers: how a tensor is cut into the tiles of a buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from lowtide.errors import ConfigError

SMALL = 4096  # tensors below this many elements, and all 0-d and 1-d ones, go into the tail
SKINNY = 16  # a matrix narrower than this is cut along its flat order: square tiles would be mostly padding


@dataclass(frozen=True)
class Cut:
    """A tensor as a `rows x cols` matrix of `tile_rows x tile_cols` tiles.

    A flat cut ignores the matrix: consecutive elements fill tile after tile, and only the last is padded.
    """

    rows: int
    cols: int
    tile_rows: int
    tile_cols: int
    flat: bool = False


class Chunker(Protocol):
    """Decides how a tensor of some shape is cut; `None` puts it into the tail."""

    @property
    def name(self) -> str:
        """What it is called; a part of the layout's digest."""

    @property
    def most(self) -> int:
        """Elements of its largest tiles; 0 where nothing limits them."""

    def cut(self, shape: tuple[int, ...]) -> Cut | None:
        """The cut of one tensor."""


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The 2-D view of a shape: the first axis against all others.

    >>> matrix((64, 3, 7, 7)), matrix((10,)), matrix(())
    ((64, 147), (1, 10), (1, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def is_small(shape: tuple[int, ...], limit: int) -> bool:
    """Whether a tensor belongs into the tail."""
    return len(shape) < 2 or math.prod(shape) < limit


@dataclass(frozen=True)
class Tile:
    """Square tiles of every 2-D view, edges padded; the layout of all codecs that select per tile."""

    edge: int = 64
    small: int = SMALL

    @property
    def name(self) -> str:
        return f"tile({self.edge}, small={self.small})"

    @property
    def most(self) -> int:
        return self.edge * self.edge

    def cut(self, shape: tuple[int, ...]) -> Cut | None:
        if is_small(shape, self.small):
            return None
        rows, cols = matrix(shape)
        # a 2 x 100,000 matrix in square tiles would be 97 % padding
        flat = min(rows, cols) < min(SKINNY, self.edge)
        return Cut(rows, cols, self.edge, self.edge, flat)


@dataclass(frozen=True)
class Flat:
    """Runs of `size` consecutive elements."""

    size: int = 4096
    small: int = SMALL

    @property
    def name(self) -> str:
        return f"flat({self.size}, small={self.small})"

    @property
    def most(self) -> int:
        return self.size

    def cut(self, shape: tuple[int, ...]) -> Cut | None:
        if is_small(shape, self.small):
            return None
        rows, cols = matrix(shape)
        return Cut(rows, cols, 1, self.size, flat=True)


@dataclass(frozen=True)
class Divisor:
    """Tiles whose edges are the largest divisors up to `edge`, as the first published optimizers cut: never padded.

    Awkward sizes give tiny tiles (a prime gives 1), so this is for comparison with published results only.
    """

    edge: int = 64

    @property
    def name(self) -> str:
        return f"divisor({self.edge})"

    @property
    def most(self) -> int:
        return self.edge * self.edge

    def cut(self, shape: tuple[int, ...]) -> Cut | None:
        rows, cols = matrix(shape)
        return Cut(rows, cols, largest_divisor(rows, self.edge), largest_divisor(cols, self.edge))


@dataclass(frozen=True)
class Whole:
    """Each matrix is one tile: no padding, equal shapes stacked. For dense and low-rank codecs."""

    small: int = SMALL

    @property
    def name(self) -> str:
        return f"whole(small={self.small})"

    @property
    def most(self) -> int:
        return 0

    def cut(self, shape: tuple[int, ...]) -> Cut | None:
        if is_small(shape, self.small):
            return None
        rows, cols = matrix(shape)
        return Cut(rows, cols, rows, cols)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`.

    >>> [largest_divisor(n, 64) for n in (768, 50257, 1000, 147, 97)]
    [64, 29, 50, 49, 1]
    """
    return next(edge for edge in range(min(number, limit), 0, -1) if number % edge == 0)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(
            f"{name} must be at least 1, not {value}\nhint: 64 is the usual tile edge, 4096 the flat size"
        )
    return value


def tile(edge: int = 64, *, small: int = SMALL) -> Chunker:
    """Square tiles of `edge x edge`."""
    return Tile(_positive("tile edge", edge), small)


def flat(size: int = 4096, *, small: int = SMALL) -> Chunker:
    """Runs of `size` consecutive elements."""
    return Flat(_positive("flat size", size), small)


def divisor(edge: int = 64) -> Chunker:
    """Unpadded tiles with edges that divide the axes."""
    return Divisor(_positive("divisor edge", edge))


def whole(*, small: int = SMALL) -> Chunker:
    """One unpadded tile a matrix."""
    return Whole(small)
