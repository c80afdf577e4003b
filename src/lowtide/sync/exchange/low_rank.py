"""Low-rank averaging by one power iteration: two sums of thin factors instead of one of full matrices.

For every matrix D (m x n), with Q (n x q) remembered:  P = mean(D Q);  P = orth(P);  Q = mean(D^T P);  result P Q^T.
What is sent is the result, the same for all, so a residual keeps D - P Q^T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.codec import Coefficients, generator
from lowtide.errors import ConfigError
from lowtide.messages import Inbox, Sum
from lowtide.sync.exchange.base import Closed, Exchange, Leg, Me, Outcome, Plain
from lowtide.sync.exchange.summed import with_weight, without_weight
from lowtide.tensors import Grid, Tiles, whole


@dataclass(frozen=True)
class LowRank(Plain):
    """Rank `rank` factors of every matrix; the tail goes dense with the first."""

    rank: int = 4
    seed: int = 0
    shared_memory: frozenset[str] = frozenset({"right"})

    def init(self, grid: Grid, device: torch.device) -> dict[str, Tensor]:
        # one seed for all: factors that started apart could not be added
        size = sum(group.count * group.cols * self._width(group) for group in grid.groups)
        return {"right": torch.randn(size, generator=generator(self.seed, 0)).to(device)}

    def open(self, signal: Tensor | None, grid: Grid, me: Me) -> Leg:
        rights = self._split(me.memory["right"], grid, left=False)
        # a sum needs tensors of one length from everybody, those without a signal included
        if signal is None:
            length = sum(group.count * group.rows * self._width(group) for group in grid.groups) + sum(grid.tail)
            return Leg(Sum(with_weight(None, length, me)))
        lefts = [
            torch.bmm(matrices(group, signal), right).flatten()
            for group, right in zip(grid.groups, rights, strict=True)
        ]
        # the tail rides along: a message of its own would cost another latency
        factors = torch.cat([*lefts, grid.tail_view(signal)])
        return Leg(Sum(with_weight(factors, factors.numel(), me)))

    def advance(
        self, signal: Tensor | None, grid: Grid, carry: dict[str, Tensor], inbox: Inbox, me: Me
    ) -> Leg | Outcome | Closed:
        total, weight = without_weight(inbox)
        if "left" not in carry:
            return self._second(signal, grid, total, weight, me)
        # the next event starts from here, and so one iteration at a time is enough
        me.memory["right"] = total
        rights = self._split(total, grid, left=False)
        lefts = self._split(carry["left"], grid, left=True)
        products = [torch.bmm(left, right.mT).flatten() for left, right in zip(lefts, rights, strict=True)]
        result = Coefficients(torch.cat([*products, carry["tail"]]), None, grid.size, weight)
        return Outcome((result,), Coefficients.nothing(grid.size, me.device) if signal is None else result, inbox.ranks)

    def _second(self, signal: Tensor | None, grid: Grid, total: Tensor, weight: float, me: Me) -> Leg | Closed:
        # all see the same weight, so all stop here and nobody waits for a second sum
        if not weight:
            return Closed("no replica had a finite signal")
        length = total.numel() - sum(grid.tail)
        # each orthogonalises the same sum by itself: equal on machines that round alike
        lefts = [torch.linalg.qr(left).Q for left in self._split(total[:length], grid, left=True)]
        # cloned, since a view would keep the first sum alive through the second leg
        carry = {"left": _flat(lefts, me), "tail": total[length:].clone()}
        if signal is None:
            return Leg(Sum(with_weight(None, me.memory["right"].numel(), me)), carry)
        rights = [torch.bmm(matrices(group, signal).mT, left) for group, left in zip(grid.groups, lefts, strict=True)]
        return Leg(Sum(with_weight(_flat(rights, me), me.memory["right"].numel(), me)), carry)

    def _width(self, group: Tiles) -> int:
        # wider factors would hold more numbers than the matrix itself
        return min(self.rank, group.rows, group.cols)

    def _split(self, flat: Tensor, grid: Grid, *, left: bool) -> list[Tensor]:
        """One stack of factors a group, out of one buffer."""
        shapes = [(group.count, group.rows if left else group.cols, self._width(group)) for group in grid.groups]
        pieces = torch.split(flat, [count * edge * width for count, edge, width in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def matrices(group: Tiles, buffer: Tensor) -> Tensor:
    """The matrices of one shape, stacked."""
    return group.view(buffer).view(group.count, group.rows, group.cols)


def _flat(factors: list[Tensor], me: Me) -> Tensor:
    return torch.cat([factor.flatten() for factor in factors]) if factors else torch.zeros(0, device=me.device)


def low_rank(rank: int = 4, *, seed: int = 0) -> Exchange:
    """Two all-reduces of rank-`rank` factors."""
    if rank < 1:
        raise ConfigError(
            f"rank must be at least 1, not {rank}\nhint: 1 to 4 are usual at every step, 32 or more per round"
        )
    return LowRank(whole(), rank=rank, seed=seed)
