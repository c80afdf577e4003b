"""Counts what a transport moves: payload, bytes sent and received, seconds waited, by cause and by tensor group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lowtide.messages import Inbox, Message, Tag
from lowtide.transport.base import Pending, Transport
from lowtide.transport.cost import emitted, moved
from lowtide.transport.ledger import Entry, Ledger, Totals


@runtime_checkable
class Costed(Protocol):
    """What a transport may add to the protocol: all of ours do."""

    def overhead(self, message: Message | None) -> tuple[int, int]:
        """Bytes (sent, received) of an event beyond its payloads; None stands for a `receive`."""

    def now(self) -> float:
        """Seconds on the clock that waiting is measured with."""

    def abort(self, reason: str) -> None:
        """Leave because of an error, and tell the peers."""


class Meter:
    """A transport that counts what the one it wraps moves.

    `ledger` is the frozen sum of all events, `last` the latest event, `events` the latest `history` of them.

    >>> from lowtide.messages import Gather
    >>> from lowtide.transport.loopback import Loopback
    >>> meter = Meter(Loopback())
    >>> _ = meter.start(Gather(b"12345678"), Tag("delta", event=0, groups=(("2-D", 0.75), ("tail", 0.25)))).finish()
    >>> meter.ledger.total.payload, meter.ledger.by_group["tail"].payload, meter.ledger.total.sent
    (8, 2, 0)
    """

    def __init__(self, transport: Transport, history: int = 256) -> None:
        self.transport = transport
        self.ledger = Ledger()
        self.last: Entry | None = None
        self.events: deque[Entry] = deque(maxlen=history)
        # Asked once, here: what a transport can tell does not change.
        self._costed = transport if isinstance(transport, Costed) else None
        self.now = self._costed.now if self._costed is not None else time.perf_counter

    @property
    def rank(self) -> int:
        """The rank of the wrapped transport."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """The size of the wrapped transport."""
        return self.transport.size

    def start(self, message: Message, tag: Tag) -> Pending:
        """As the wrapped transport; counted when it is finished."""
        return _Metered(self, self.transport.start(message, tag), message, tag)

    def receive(self, source: int, tag: Tag) -> Pending:
        """As the wrapped transport; counted when it is finished."""
        return _Metered(self, self.transport.receive(source, tag), None, tag)

    def note_dense(self, nbytes: int, cause: str = "round") -> None:
        """Add what a ring all-reduce of `nbytes` (4 for each parameter) would have sent: 2 (N-1)/N of it."""
        self.ledger = self.ledger.plus_reference(2 * (self.size - 1) * nbytes // self.size, cause)

    def abort(self, reason: str) -> None:
        """Leave because of an error; a transport that cannot say so is closed by `close` alone."""
        if self._costed is not None:
            self._costed.abort(reason)

    def close(self) -> None:
        """Close the wrapped transport."""
        self.transport.close()

    def state_dict(self) -> dict[str, Any]:
        """What was counted, for a checkpoint."""
        return self.ledger.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        self.ledger = Ledger.from_dict(state)

    def count(self, message: Message | None, tag: Tag, inbox: Inbox, seconds: float) -> None:
        """Enter one finished event; None stands for a `receive`."""
        payload = emitted(message, self.rank) if message is not None else 0
        if message is not None:
            sent, received = moved(message, inbox, self.rank, self.size)
        else:
            sent, received = 0, sum(map(len, inbox.payloads))
        # A transport that does not say what goes around its payloads is counted by the payloads alone.
        around = self._costed.overhead(message) if self._costed is not None else (0, 0)
        kind = type(message).__name__ if message is not None else "Receive"
        self.last = Entry(kind, tag, Totals(1, payload, sent + around[0], received + around[1], 0, seconds))
        self.events.append(self.last)
        self.ledger = self.ledger.plus(self.last)


@dataclass(frozen=True)
class _Metered:
    """A message on its way, counted when it is back."""

    meter: Meter
    pending: Pending
    message: Message | None
    tag: Tag

    def finish(self) -> Inbox:
        """Wait for the inbox and count it."""
        began = self.meter.now()
        # An event that fails is not counted: nobody knows how much of it has moved.
        inbox = self.pending.finish()
        self.meter.count(self.message, self.tag, inbox, self.meter.now() - began)
        return inbox
