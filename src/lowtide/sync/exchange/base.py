"""Exchanges: who gets what, in one leg or several, and what comes of it.

`open` makes the first message from the signal; `advance` takes what came back and makes the next message, or the
outcome, or says that the event stays without effect. Neither touches a model or a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lowtide.codec import Coefficients, Identity, Transform
from lowtide.messages import Inbox, Message
from lowtide.sync.combine import Combine, mean
from lowtide.tensors import Chunker, Grid


@dataclass
class Me:
    """Who we are in an event. `memory` is the exchange's own, a copy: it is kept only at commit.

    `rate` is the inner learning rate as a share of the first one; the `last` event of a run passes every gate.
    """

    # not frozen: an exchange puts its next memory into it
    rank: int = 0
    size: int = 1
    event: int = 0
    step: int = 0
    weight: float = 1.0
    rate: float = 1.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    memory: dict[str, Tensor] = field(default_factory=dict)
    last: bool = False


@dataclass(frozen=True)
class Leg:
    """A message, what has to be remembered until its answer comes, and why it is sent."""

    message: Message
    carry: dict[str, Tensor] = field(default_factory=dict)  # tensors only, so that a message in flight can be saved
    cause: str = "round"


@dataclass(frozen=True)
class Outcome:
    """What an event agreed on, and what of ours it holds; all in the exchange's basis.

    `parts` are combined only when they are needed, range by range.
    """

    parts: Sequence[Coefficients]
    sent: Coefficients
    ranks: tuple[int, ...]
    combine: Combine = field(default_factory=mean)

    @property
    def empty(self) -> bool:
        """Whether everybody abstained."""
        # a payload without weight is how abstaining looks once it has arrived
        return not any(part.weight > 0 for part in self.parts)

    def block(self, start: int, stop: int, out: Tensor) -> Tensor:
        """The combined values of a range."""
        return self.combine.block(self.parts, start, stop, out)

    def dense(self) -> Tensor:
        """The combined values of the whole buffer."""
        size, value = self.sent.size, self.parts[0].value
        return self.block(0, size, value.new_zeros(size))

    @classmethod
    def nothing(cls, size: int, device: torch.device) -> Outcome:
        """The outcome before anything was exchanged."""
        # the mean of no parts is zero, so a rule steps along what it adds by itself
        return cls((), Coefficients.nothing(size, device), ())


@dataclass(frozen=True)
class Closed:
    """The event ends without effect; `reason` is for the log."""

    reason: str


class Exchange(Protocol):
    """One way to agree."""

    @property
    def chunker(self) -> Chunker:
        """How the signal is laid out."""

    @property
    def transform(self) -> Transform:
        """The basis in which the signal is given and the outcome comes back."""

    @property
    def private(self) -> bool:
        """Whether replicas get different outcomes: then they drift."""

    @property
    def shared_memory(self) -> frozenset[str]:
        """Which parts of the memory are equal on all replicas."""

    def init(self, grid: Grid, device: torch.device) -> dict[str, Tensor]:
        """The memory before the first event."""

    def open(self, signal: Tensor | None, grid: Grid, me: Me) -> Leg:
        """The first message; a replica without a signal abstains. The signal stays as it is until commit."""

    def advance(
        self, signal: Tensor | None, grid: Grid, carry: dict[str, Tensor], inbox: Inbox, me: Me
    ) -> Leg | Outcome | Closed:
        """The next message, or the end."""


@dataclass(frozen=True)
class Plain:
    """What most exchanges have in common: no memory, no transform, one outcome for all."""

    chunker: Chunker
    transform: Transform = field(default_factory=Identity)
    private: bool = False
    shared_memory: frozenset[str] = frozenset()

    def init(self, grid: Grid, device: torch.device) -> dict[str, Tensor]:
        return {}
