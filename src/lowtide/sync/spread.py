"""How far replicas have spread, from a few numbers each.

With drifts u_k since the last agreement, Var = mean ||u_k||^2 - ||mean u_k||^2. The first term is one number a
replica; the second would take a whole exchange, so each estimator replaces it by something that is not larger:
then the estimate is not smaller than Var.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import ConfigError, unknown


class Estimator(Protocol):
    """Numbers from a drift, and the spread from everybody's numbers."""

    @property
    def directed(self) -> bool:
        """Whether it needs the direction of the last common move."""

    def numbers(self, size: int) -> int:
        """How many numbers a replica sends, for a drift of `size` elements."""

    def state(self, drift: Tensor, direction: Tensor | None) -> Tensor:
        """A replica's numbers, in double precision."""

    def spread(self, states: Tensor) -> float:
        """The estimate from the states of all replicas, `[replicas, numbers]`."""


@dataclass(frozen=True)
class Norm:
    """mean ||u||^2: one number. Over by N/(N-1) when drifts are orthogonal, as they nearly are early in training.

    With `largest` it is max ||u||^2 instead: nothing is under the mean, so it is never under Var either.
    """

    largest: bool = False
    directed: bool = False

    def numbers(self, size: int) -> int:
        return 1

    def state(self, drift: Tensor, direction: Tensor | None) -> Tensor:
        return square(drift)[None]

    def spread(self, states: Tensor) -> float:
        return float(states.max() if self.largest else states.mean())


@dataclass(frozen=True)
class Linear:
    """mean ||u||^2 - (mean <xi, u>)^2 with xi the unit direction of the last common move: two numbers."""

    directed: bool = True

    def numbers(self, size: int) -> int:
        return 2

    def state(self, drift: Tensor, direction: Tensor | None) -> Tensor:
        assert direction is not None
        return torch.stack([square(drift), (drift * direction).sum(dtype=torch.float64)])

    def spread(self, states: Tensor) -> float:
        mean = states.mean(0)
        # below zero by rounding only: the numbers travelled in single precision
        return max(0.0, float(mean[0] - mean[1] ** 2))


@dataclass(frozen=True)
class Sketch:
    """mean ||u||^2 - M2 / (1 + eps), M2 from `rows` random foldings of u into `columns` numbers; eps = 1/sqrt(columns).

    A row multiplies u by random signs and adds up every `columns`-th element; no scatter, so it is deterministic on
    every device. M2 is the median over the rows of the squared norms; it stays under (1 + eps) ||u||^2 in about nine
    of ten draws, so the estimate is a bound about as often.
    """

    rows: int = 5
    columns: int = 250
    seed: int = 0  # the same for all: sketches of different foldings could not be averaged
    directed: bool = False

    def numbers(self, size: int) -> int:
        return 1 + self.rows * self.columns

    def state(self, drift: Tensor, direction: Tensor | None) -> Tensor:
        folded = [self._fold(drift, row) for row in range(self.rows)]
        return torch.cat([square(drift)[None], *folded])

    def spread(self, states: Tensor) -> float:
        mean = states.mean(0)
        energy = mean[1:].view(self.rows, self.columns).square().sum(1).median()
        return max(0.0, float(mean[0] - energy / (1 + 1 / math.sqrt(self.columns))))

    def _fold(self, drift: Tensor, row: int) -> Tensor:
        """One row: random signs, then a sum over a matrix with `columns` columns."""
        # named, since the generator that numpy prefers may change
        random = np.random.Generator(np.random.PCG64([self.seed, row]))
        # else elements that meet in one column would meet in all rows, and the median would not help
        offset = int(random.integers(self.columns))
        bits = np.unpackbits(np.frombuffer(random.bytes(-(-drift.numel() // 8)), np.uint8), count=drift.numel())
        signs = torch.from_numpy(bits.view(np.int8)).to(drift.device).mul(2).sub_(1)
        pad = -(drift.numel() + offset) % self.columns
        signed = torch.nn.functional.pad(drift * signs, (offset, pad))
        return signed.view(-1, self.columns).sum(0, dtype=torch.float64)


@dataclass(frozen=True)
class Exact:
    """Var itself, from whole drifts: for tests and simulation."""

    directed: bool = False

    def numbers(self, size: int) -> int:
        return 1 + size

    def state(self, drift: Tensor, direction: Tensor | None) -> Tensor:
        return torch.cat([square(drift)[None], drift.double()])

    def spread(self, states: Tensor) -> float:
        return max(0.0, float(states[:, 0].mean() - states[:, 1:].mean(0).square().sum()))


def square(drift: Tensor) -> Tensor:
    """||u||^2 in double precision."""
    # in double: the spread is a small difference of two such numbers
    return drift.square().sum(dtype=torch.float64)


def sketch(rows: int = 5, columns: int = 250, *, seed: int = 0) -> Estimator:
    """Random foldings; `rows` is odd, so that the median is one of them."""
    if rows < 1 or rows % 2 == 0 or columns < 1:
        raise ConfigError(
            f"a sketch has an odd number of rows and at least one column, not {rows} x {columns}\nhint: sketch(5, 250)"
        )
    return Sketch(rows, columns, seed)


def estimator(name: str) -> Estimator:
    """`linear`, `norm`, `sketch`, `max_norm` or `exact`."""
    known: dict[str, Estimator] = {
        "linear": Linear(), "norm": Norm(), "sketch": Sketch(), "max_norm": Norm(largest=True), "exact": Exact(),
    }  # fmt: skip
    if name not in known:
        raise unknown("estimator", name, known)
    return known[name]
