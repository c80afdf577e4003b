"""The five kinds of message and the inbox: all that algorithms and transports share.

An exchange (`lowtide.sync`) says *what* has to reach *whom* by building one of these; a transport
(`lowtide.transport`) carries it and answers with an `Inbox`. Neither knows more of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Gather:
    """Everybody gets every replica's payload, ordered by rank."""

    payload: bytes


@dataclass(frozen=True)
class Scatter:
    """Replica `j` gets `payloads[j]` of every replica, ordered by source."""

    payloads: tuple[bytes, ...]


@dataclass(frozen=True)
class Sum:
    """Everybody gets the sum of every replica's tensor, added in rank order."""

    tensor: Tensor


@dataclass(frozen=True)
class Group:
    """Every member gets the members' payloads; `members` are ascending and hold the sender.

    All replicas start a group message for the same event, each naming its own group.
    """

    payload: bytes
    members: tuple[int, ...]


@dataclass(frozen=True)
class Send:
    """One payload for one replica, which takes it with `Transport.receive`."""

    payload: bytes
    to: int


Message = Gather | Scatter | Sum | Group | Send


@dataclass(frozen=True)
class Tag:
    """What a message belongs to; all replicas must agree on it before data flows.

    `identity` is a digest of everything the replicas must share (layout, plan); `cause` and `groups` are
    for the ledger only: why the bytes were sent, and how they split over groups of tensors (fractions).
    """

    plan: str
    event: int
    leg: int = 0
    identity: bytes = b""
    cause: str = "round"
    groups: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Inbox:
    """What came back: who took part, and one payload for each of them, or the sum."""

    ranks: tuple[int, ...]
    payloads: tuple[bytes, ...] = ()
    total: Tensor | None = None
