"""Residuals: the private memory in front of the codec, kept in the codec's basis.

Before the codec   x = beta * e + s        (s the signal, e the residual)
after commit       e = x - sent            error feedback: what peers did not get is kept
                   e = x - sent + combined momentum: the agreed part is written back

In the tail feedback has beta = 1, so that its coarse steps lose nothing; a momentum fades there as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lowtide.errors import ConfigError
from lowtide.tensors import Grid


class Residual(Protocol):
    """What is remembered between events, and whether the agreed part goes back into it."""

    @property
    def keeps(self) -> bool:
        """Whether there is a memory at all."""

    @property
    def writes_back(self) -> bool:
        """Whether the combined signal is added to the memory, and the outer step sees the sum."""

    def add(self, memory: Tensor, signal: Tensor, grid: Grid) -> Tensor:
        """The signal with the memory added, in place of the signal."""


@dataclass(frozen=True)
class NoResidual:
    """Nothing is remembered."""

    keeps: bool = False
    writes_back: bool = False

    def add(self, memory: Tensor, signal: Tensor, grid: Grid) -> Tensor:
        return signal


@dataclass(frozen=True)
class Leaky:
    """A memory that decays by `beta` at every event."""

    beta: float
    writes_back: bool = False
    keeps: bool = True

    def add(self, memory: Tensor, signal: Tensor, grid: Grid) -> Tensor:
        # into the signal, which is only a proposal: the memory stays as it was until commit
        signal[: grid.body].add_(memory[: grid.body], alpha=self.beta)
        # a momentum has to fade in the tail as well, or it would grow without end
        signal[grid.body :].add_(memory[grid.body :], alpha=self.beta if self.writes_back else 1.0)
        return signal


def _checked(beta: float) -> float:
    if not 0 <= beta <= 1:
        raise ConfigError(f"feedback must be in [0, 1], not {beta!r}\nhint: 0.9 is the usual value; 1 forgets nothing")
    return float(beta)


def no_residual() -> Residual:
    """Send and forget."""
    return NoResidual()


def error_feedback(beta: float = 0.9) -> Residual:
    """Keep what was not sent, decayed by `beta` at every event."""
    return Leaky(_checked(beta))


def momentum(beta: float = 0.95) -> Residual:
    """A private momentum whose strong part is replaced by the agreed one."""
    return Leaky(_checked(beta), writes_back=True)
