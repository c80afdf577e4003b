"""What one event moves, in bytes: the only place that knows how messages become traffic.

All transports but the loopback move data point to point in a full mesh, so their traffic is known from the
message and the inbox alone. `frames` adds what goes along with the payloads: a header each way for each
peer, and what gloo puts in front of every block (measured on interface counters).
"""

from __future__ import annotations

from lowtide.messages import Gather, Group, Inbox, Message, Scatter, Send
from lowtide.transport.frame import DIGEST_BYTES, FRAME_BYTES

# A block on a gloo connection is announced by its sender, asked for by its receiver, and led by a preamble: 48 bytes
# each. The announcement is left out where the receiver was first; a block of no bytes costs nothing. Both are ignored.
_GLOO_SENDER = 96
_GLOO_RECEIVER = 48


def chunk_bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Cut `numel` elements in `parts` nearly equal runs.

    >>> chunk_bounds(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return [(numel * part // parts, numel * (part + 1) // parts) for part in range(parts)]


def emitted(message: Message, rank: int) -> int:
    """Bytes of payload that this replica puts out, counted once however many peers get it."""
    if isinstance(message, Scatter):
        return sum(len(payload) for peer, payload in enumerate(message.payloads) if peer != rank)
    if isinstance(message, Gather | Group | Send):
        return len(message.payload)
    return message.tensor.numel() * message.tensor.element_size()


def moved(message: Message, inbox: Inbox, rank: int, size: int) -> tuple[int, int]:
    """Bytes of payload that this replica (sends, receives) for one event.

    With P the payload and N the replicas: Gather sends (N-1) P; Scatter what is meant for others; a Sum goes
    to the owners of its chunks and back, 2 (N-1)/N P each way.
    """
    if isinstance(message, Send):
        return len(message.payload), 0
    if isinstance(message, Scatter):
        return emitted(message, rank), _from_others(inbox, rank)
    if isinstance(message, Gather | Group):
        return len(message.payload) * (len(inbox.ranks) - 1), _from_others(inbox, rank)
    start, stop = chunk_bounds(message.tensor.numel(), size)[rank]
    # Out: the chunks of others, then the own result to each of them. In: the same, the other way round.
    both_ways = message.tensor.numel() - (stop - start) + (size - 1) * (stop - start)
    return both_ways * message.tensor.element_size(), both_ways * message.tensor.element_size()


def frames(message: Message | None, size: int) -> tuple[int, int]:
    """Bytes that one event (sends, receives) beyond its payloads on the mesh; None stands for a `receive`."""
    if isinstance(message, Send) or message is None:
        # A header and a payload go one way; only their announcements come back.
        ahead, back = 2 * _GLOO_SENDER + FRAME_BYTES, 2 * _GLOO_RECEIVER
        return (ahead, back) if message is not None else (back, ahead)
    if isinstance(message, Gather | Scatter | Group):
        blocks, extra = 2, FRAME_BYTES
    else:
        # A header, a chunk, a result and the digest of the result.
        blocks, extra = 4, FRAME_BYTES + DIGEST_BYTES
    peers = (len(message.members) if isinstance(message, Group) else size) - 1
    both_ways = peers * (blocks * (_GLOO_SENDER + _GLOO_RECEIVER) + extra)
    return both_ways, both_ways


def hops(message: Message) -> int:
    """How often one event crosses the link in turn: headers, then payloads; a Sum comes back once more."""
    if isinstance(message, Send):
        return 1
    return 2 if isinstance(message, Gather | Scatter | Group) else 3


def _from_others(inbox: Inbox, rank: int) -> int:
    pairs = zip(inbox.ranks, inbox.payloads, strict=True)
    return sum(len(payload) for source, payload in pairs if source != rank)
