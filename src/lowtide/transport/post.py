"""Messages between the replicas of one process: matched, checked, delivered, and timed by a link."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, replace

from torch import Tensor

from lowtide.messages import Gather, Group, Inbox, Message, Scatter, Send, Sum, Tag
from lowtide.transport.cost import frames, hops, moved
from lowtide.transport.event import involved, sum_in_order
from lowtide.transport.frame import Header, header_of, verdict
from lowtide.transport.lane import describe
from lowtide.transport.link import Link


@dataclass(eq=False)
class Started:
    """A message, or a `receive` (no message), that a replica has started."""

    rank: int
    tag: Tag
    began: float
    message: Message | None = None
    source: int = -1
    arrives: float = 0.0
    inbox: Inbox | None = None
    taken: bool = False

    def header(self, size: int) -> Header:
        """What a real process would announce; a receive expects just what its sender announces."""
        return header_of(self.message or Send(b"", self.rank), self.tag, rank=self.rank, size=size)

    def __str__(self) -> str:
        verb = type(self.message).__name__ if self.message is not None else f"receive from rank {self.source}"
        return f"rank {self.rank} in {verb}, {describe(self.tag)}"


class PostOffice:
    """Matches the messages of all replicas and works out when they arrive."""

    def __init__(self, size: int, link: Link | None, seed: int) -> None:
        self._size = size
        self._link = link
        self._rng = random.Random(seed)
        self._events: list[deque[Started]] = [deque() for _ in range(size)]
        self._sends: defaultdict[tuple[int, int], deque[Started]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], deque[Started]] = defaultdict(deque)
        self._free = [0.0] * size  # when each replica's earlier events have left its link
        self._lines: defaultdict[tuple[int, int], float] = defaultdict(float)

    def take(self, item: Started) -> None:
        """Put a started message in its queue; a `Send` is as good as done."""
        if item.message is None:
            self._receives[item.source, item.rank].append(item)
        elif isinstance(item.message, Send):
            # The post keeps it, so the sender need not wait until the receiver is there.
            self._sends[item.rank, item.message.to].append(item)
            item.inbox, item.arrives = Inbox((item.rank,)), item.began
        else:
            self._events[item.rank].append(item)

    def missing(self, item: Started) -> list[int]:
        """The ranks that `item` waits for."""
        if item.message is None:
            return [item.source]
        return [rank for rank in involved(item.message, self._size) if not self._events[rank]]

    def deliver(self) -> None:
        """Fill the inbox of everything that is complete; raise if what belongs together does not agree."""
        # Event by event, in the order of starting, which is the same on all replicas.
        while all(self._events):
            self._deliver_event([queue.popleft() for queue in self._events])
        for pair, receives in self._receives.items():
            while receives and self._sends[pair]:
                self._deliver_send(self._sends[pair].popleft(), receives.popleft())

    def _deliver_event(self, items: list[Started]) -> None:
        headers = [item.header(self._size) for item in items]
        # Groups of one event differ between replicas, but must be the same within each group.
        verdict([replace(header, members=b"") for header in headers])
        for item in items:
            if isinstance(item.message, Group):
                verdict([headers[member] for member in item.message.members])
        totals = _totals(items)
        for item, total in zip(items, totals, strict=True):
            message = _event(item)
            ranks = involved(message, self._size)
            payloads = tuple(_payload(_event(items[source]), item.rank) for source in ranks) if total is None else ()
            item.inbox = Inbox(ranks, payloads, total)
        starts = [max(item.began, self._free[item.rank]) for item in items]
        for item in items:
            # The last one to come starts the transfer for all that take part.
            start = max(starts[rank] for rank in involved(_event(item), self._size))
            item.arrives = self._free[item.rank] = start + self._seconds(item)

    def _deliver_send(self, send: Started, receive: Started) -> None:
        verdict([send.header(self._size), receive.header(self._size)])
        assert isinstance(send.message, Send)
        receive.inbox = Inbox((send.rank,), (send.message.payload,))
        if self._link is not None:
            pair = (send.rank, receive.rank)
            nbytes = len(send.message.payload) + frames(send.message, self._size)[0]
            leaves = max(send.began, self._lines[pair])
            # The line is busy for the bytes, not for the delay: the next message follows close behind.
            self._lines[pair] = leaves + self._link.wire_seconds(nbytes, nbytes)
            receive.arrives = leaves + self._link.transfer_seconds(nbytes, nbytes, self._rng)
        else:
            receive.arrives = send.began

    def _seconds(self, item: Started) -> float:
        if self._link is None or item.inbox is None or self._size == 1:
            return 0.0
        message = _event(item)
        sent, received = moved(message, item.inbox, item.rank, self._size)
        sent_around, received_around = frames(message, self._size)
        return self._link.transfer_seconds(
            sent + sent_around, received + received_around, self._rng, hops=hops(message)
        )


def _event(item: Started) -> Message:
    assert item.message is not None
    return item.message


def _payload(message: Message, destination: int) -> bytes:
    """What one replica has for another, in an event of payloads."""
    if isinstance(message, Scatter):
        return message.payloads[destination]
    assert isinstance(message, Gather | Group)
    return message.payload


def _totals(items: list[Started]) -> list[Tensor] | list[None]:
    """The sum for each replica, every one a tensor of its own; None for messages of payloads."""
    tensors = [item.message.tensor for item in items if isinstance(item.message, Sum)]
    if not tensors:
        return [None] * len(items)
    # Added once, in rank order, as the process group does chunk by chunk: bit-equal.
    total = sum_in_order(tensors)
    return [total, *(total.clone() for _ in tensors[1:])]
