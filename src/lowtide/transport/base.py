"""The transport protocol: `start` a message, `finish` it later, and nothing about training."""

from __future__ import annotations

from typing import Protocol

from lowtide.messages import Inbox, Message, Tag


class Pending(Protocol):
    """A message on its way; the network works while the caller trains."""

    def finish(self) -> Inbox:
        """Wait for the inbox. Called exactly once."""


class Transport(Protocol):
    """Carries messages between replicas 0 .. size-1.

    Contract, tested for every implementation: all replicas start the same messages in the same order (a
    `Send` is matched by a `receive`); the inbox is the same for all where the kind says so; a disagreement
    raises `AgreementError` on every replica, a dead or silent peer `PeerLostError` naming it; after an error
    the transport is unusable and every later call raises.
    """

    @property
    def rank(self) -> int:
        """The number of this replica."""

    @property
    def size(self) -> int:
        """The number of replicas."""

    def start(self, message: Message, tag: Tag) -> Pending:
        """Begin to move `message`; returns at once."""

    def receive(self, source: int, tag: Tag) -> Pending:
        """Begin to take what `source` sends to us with `Send` under the same tag."""

    def close(self) -> None:
        """Release what the transport holds. Safe to call twice."""
