"""A world of one: every message comes straight back."""

from __future__ import annotations

import time

from lowtide.errors import TransportError
from lowtide.messages import Gather, Group, Inbox, Message, Scatter, Sum, Tag
from lowtide.transport.event import check, check_peer, sum_in_order
from lowtide.transport.lane import Deferred, describe


class Loopback:
    """The transport of a replica that trains alone.

    >>> alone = Loopback()
    >>> alone.start(Gather(b"mine"), Tag("delta", event=0)).finish()
    Inbox(ranks=(0,), payloads=(b'mine',), total=None)
    """

    def __init__(self) -> None:
        self._closed = ""
        self._started = 0
        self._open: dict[int, Tag] = {}

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def start(self, message: Message, tag: Tag) -> Deferred:
        """Take the message back; a summed tensor as a copy."""
        if self._closed:
            raise TransportError(self._closed)
        check(message, 0, 1)
        if isinstance(message, Sum):
            return self._keep(Inbox((0,), total=sum_in_order([message.tensor])), tag)
        if isinstance(message, Scatter):
            return self._keep(Inbox((0,), message.payloads), tag)
        # All that is left.
        assert isinstance(message, Gather | Group)  # `check` refuses a Send to oneself
        return self._keep(Inbox((0,), (message.payload,)), tag)

    def receive(self, source: int, tag: Tag) -> Deferred:
        """Always refused: there is nobody to receive from."""
        check_peer("receive from", source, 0, 1)
        raise AssertionError(tag)

    def abort(self, reason: str) -> None:
        """Drop what is unfinished, without a word."""
        self._open.clear()
        self._closed = f"the transport was aborted: {reason}"

    def overhead(self, message: Message | None) -> tuple[int, int]:
        """Nothing moves."""
        del message
        return 0, 0

    def now(self) -> float:
        """Seconds on the clock that waiting is measured with."""
        return time.perf_counter()

    def close(self) -> None:
        """Refuse further messages; one that is unfinished is an error."""
        if not self._closed:
            self._closed = "the transport is closed"
            if self._open:
                names = "; ".join(describe(tag) for tag in self._open.values())
                raise TransportError(f"closed with unfinished messages: {names}\nhint: finish() each of them")

    def _keep(self, inbox: Inbox, tag: Tag) -> Deferred:
        # By number, since two messages may carry the same tag.
        place = self._started = self._started + 1
        self._open[place] = tag

        def take() -> Inbox:
            if self._open.pop(place, None) is None:
                raise TransportError(self._closed or f"{describe(tag)} was finished before")
            return inbox

        return Deferred(take)
