"""Linear exchanges: the network adds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.codec import Coefficients, strata
from lowtide.codec.select import checked_density
from lowtide.messages import Inbox, Sum
from lowtide.sync.exchange.base import Closed, Exchange, Leg, Me, Outcome, Plain
from lowtide.tensors import Grid, whole


@dataclass(frozen=True)
class Summed(Plain):
    """The sum of all signals and of all weights, in one message."""

    def open(self, signal: Tensor | None, grid: Grid, me: Me) -> Leg:
        return Leg(Sum(with_weight(signal, grid.size, me)))

    def advance(
        self, signal: Tensor | None, grid: Grid, carry: dict[str, Tensor], inbox: Inbox, me: Me
    ) -> Leg | Outcome | Closed:
        total, weight = without_weight(inbox)
        part = Coefficients(total, None, grid.size, weight)
        return Outcome((part,), own(signal, None, grid, me), inbox.ranks)


@dataclass(frozen=True)
class Masked(Plain):
    """The same on a random share of the positions, which all replicas draw from one seed."""

    density: float = 0.005
    seed: int = 0
    private: bool = True  # agreed on at the drawn positions only

    def open(self, signal: Tensor | None, grid: Grid, me: Me) -> Leg:
        index = self._positions(grid, me)
        chosen = None if signal is None else signal[index.to(signal.device)]
        return Leg(Sum(with_weight(chosen, index.numel(), me)))

    def advance(
        self, signal: Tensor | None, grid: Grid, carry: dict[str, Tensor], inbox: Inbox, me: Me
    ) -> Leg | Outcome | Closed:
        total, weight = without_weight(inbox)
        index = self._positions(grid, me).to(total.device)
        part = Coefficients(total, index, grid.size, weight)
        return Outcome((part,), own(signal, index, grid, me), inbox.ranks)

    def _positions(self, grid: Grid, me: Me) -> Tensor:
        # drawn again for every leg rather than carried: a saved message needs no positions
        return strata(grid.size, self.density, seed=self.seed, event=me.event)


def with_weight(signal: Tensor | None, size: int, me: Me) -> Tensor:
    """`[w * signal, w]`: a weighted sum and its weights travel together; `size` zeros from a replica that abstains."""
    if signal is None:
        return torch.zeros(size + 1, device=me.device)
    # a new tensor: the signal has to stay as it is until commit
    out = signal.new_empty(size + 1)
    torch.mul(signal, me.weight, out=out[:-1])
    out[-1] = me.weight
    return out


def without_weight(inbox: Inbox) -> tuple[Tensor, float]:
    """The weighted mean, and 1; or zeros and 0 if all abstained."""
    assert inbox.total is not None
    total, weight = inbox.total[:-1], float(inbox.total[-1])
    # in place, since a transport makes the sum for us alone
    return (total.div_(weight), 1.0) if weight else (total, 0.0)


def own(signal: Tensor | None, index: Tensor | None, grid: Grid, me: Me) -> Coefficients:
    """What of a signal went out, exactly."""
    if signal is None:
        return Coefficients.nothing(grid.size, me.device)
    # a sum loses nothing: what went out is the signal itself
    return Coefficients(signal if index is None else signal[index], index, grid.size)


def summed() -> Exchange:
    """All-reduce of the signal as it is."""
    return Summed(whole())


def masked(density: float = 0.005, *, seed: int = 0) -> Exchange:
    """All-reduce of a random share of the signal."""
    return Masked(whole(small=0), density=checked_density(density), seed=seed)
