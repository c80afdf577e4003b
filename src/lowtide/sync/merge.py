"""Merge rules: what becomes of the inner steps that were taken while a message was on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lowtide.errors import ConfigError


class Merge(Protocol):
    """From the agreed value to the live one."""

    @property
    def needs(self) -> frozenset[str]:
        """Which of `current` and `snapshot` (the live value when the message left) are read."""

    def merge(self, agreed: Tensor, current: Tensor | None, snapshot: Tensor | None) -> Tensor:
        """The value that training goes on from; may be written into `current`."""


@dataclass(frozen=True)
class Replace:
    """Training goes on from what was agreed; steps taken meanwhile are lost.

    With `anchors` the other plans on the model take the result as their anchor too.
    """

    anchors: bool = False
    needs: frozenset[str] = frozenset()

    def merge(self, agreed: Tensor, current: Tensor | None, snapshot: Tensor | None) -> Tensor:
        return agreed


@dataclass(frozen=True)
class Mix:
    """`alpha * current + (1 - alpha) * agreed`."""

    alpha: float
    needs: frozenset[str] = frozenset({"current"})

    def merge(self, agreed: Tensor, current: Tensor | None, snapshot: Tensor | None) -> Tensor:
        assert current is not None
        # by name, since 0 times a live value that is not finite is no zero
        if self.alpha == 0:
            return agreed
        # into `current`: the agreed value is the anchor's own memory
        return current if self.alpha == 1 else current.mul_(self.alpha).add_(agreed, alpha=1 - self.alpha)


@dataclass(frozen=True)
class Rebase:
    """`current + (agreed - snapshot)`: the steps taken meanwhile are kept in full."""

    needs: frozenset[str] = frozenset({"current", "snapshot"})

    def merge(self, agreed: Tensor, current: Tensor | None, snapshot: Tensor | None) -> Tensor:
        assert current is not None and snapshot is not None
        # the small difference first: little is lost in rounding, and nothing where they are equal
        return current.add_(agreed - snapshot)


def replace(*, anchors: bool = False) -> Merge:
    """Drop what was done meanwhile; with `anchors`, move the other plans' anchors too."""
    return Replace(anchors)


def mix(alpha: float = 0.5) -> Merge:
    """Keep a share `alpha` of the live value."""
    if not 0 <= alpha <= 1:
        raise ConfigError(
            f"alpha must be in [0, 1], not {alpha!r}\nhint: 0 takes the agreed value, 1 ignores it, 0.5 is usual"
        )
    return Mix(float(alpha))


def rebase() -> Merge:
    """Keep what was done meanwhile on top of what was agreed."""
    return Rebase()
