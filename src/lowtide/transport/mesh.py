"""A full mesh of connections: swap blocks with every peer at once, and find out whom to blame when it fails.

Two channels join each pair of ranks. `data` moves headers and payloads. `control` stays silent until a rank
leaves; then it brings that rank's last word (a `Notice`). Both offer gloo's point-to-point calls and nothing
else is asked of them, so this file knows no library of collectives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from lowtide.errors import AgreementError, LowtideError, PeerLostError, TransportError
from lowtide.transport.frame import FRAME_BYTES, Notice, ranks_text, unpack_notice

Blocks = Iterable[tuple[int, Tensor]]

# Tags keep streams apart that run at the same time between the same two ranks.
EVENTS, RETURNS, SENDS = 0, 1, 2
_NOTICES, _NOBODY = 8, 9
# The caller of `finish` has the time-out, not gloo: a message that is early and unwaited for is not late.
_FOREVER = timedelta(days=30)


class Work(Protocol):
    """A block on its way, as gloo hands it out."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait until it is there; raises RuntimeError when that fails."""


class Channel(Protocol):
    """Connections to all peers: what `torch.distributed` calls a process group, of which only this is used."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        """Begin to send one block."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Work:
        """Begin to fill one block."""


class Broken(Exception):  # noqa: N818 - an internal signal, made an error by `Mesh.diagnose`
    """A swap ended early; `suspects` have not delivered, for certain where the connection told so."""

    def __init__(self, suspects: Iterable[int]) -> None:
        super().__init__()
        self.suspects = tuple(sorted(suspects))


@dataclass
class _Post:
    """One block that was handed to a channel, or the error of trying."""

    peer: int
    tensor: Tensor  # alive until the block has left or arrived
    work: Work | None


class Mesh:
    """The connections of one rank. All swaps wait without limit; `sever` is how they are ended from outside."""

    def __init__(self, rank: int, size: int, data: Channel, control: Channel) -> None:
        self.rank, self.size = rank, size
        self.severed = threading.Event()
        self._data: Channel | None = data
        self._control: Channel | None = control
        self._said = threading.Lock()
        # Asked for now and filled, if ever, when the peer leaves: a notice needs no answer to get through.
        frames = {peer: torch.zeros(FRAME_BYTES, dtype=torch.uint8) for peer in self.peers}
        self._notices = {
            peer: _Post(peer, frame, _try_recv(control, frame, peer, _NOTICES)) for peer, frame in frames.items()
        }

    @property
    def peers(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in range(self.size) if rank != self.rank)

    def swap(self, out: Blocks, into: Blocks, lane: int = EVENTS) -> None:
        """Send the blocks of `out` to their peers and fill those of `into` from theirs, in order for each peer.

        Blocks of no bytes do not travel.
        """
        data = self._data
        if data is None:
            raise Broken(())
        # All receives before all sends: gloo moves a block at once if its receiver has asked for it.
        posts = [_Post(peer, block, _try_recv(data, block, peer, lane)) for peer, block in into if len(block)]
        posts += [_Post(peer, block, _try_send(data, block, peer, lane)) for peer, block in out if len(block)]
        missing: set[int] = set()
        for post in posts:
            # In turn, without a limit. Once severed, every wait ends at once and tells whether its block had made it.
            if not _arrived(post.work, _FOREVER):
                missing.add(post.peer)
                if not self.severed.is_set():
                    # The connection itself has failed: this peer is the one. The others only wait for us to go on.
                    self.sever()
                    break
        if missing:
            raise Broken(missing)

    def sever(self) -> None:
        """Break all data connections at once, here and at the peers: waiting swaps end, on both sides.

        gloo closes the connections of a channel when any wait on it times out, which is the one way to wake
        waiting threads; so wait a millisecond for what nobody sends.
        """
        self.severed.set()
        data = self._data
        if data is None:
            return
        for peer in self.peers:
            # A connection that is closed already cannot time out: so try them all, until none is left.
            _arrived(_try_recv(data, torch.empty(1), peer, _NOBODY), timedelta(milliseconds=1))

    def tell(self, notice: Notice, seconds: float = 0.5) -> None:
        """Give all peers our last word, as far as they can be reached; only the first one is said."""
        control = self._control
        if control is None or not self._said.acquire(blocking=False):
            return
        frame = torch.frombuffer(bytearray(notice.pack()), dtype=torch.uint8)
        # All are posted before any is waited for: a peer that is gone must not keep the word from the others.
        works = [_try_send(control, frame, peer, _NOTICES) for peer in self.peers]
        deadline = time.monotonic() + seconds
        for work in works:
            _arrived(work, _until(deadline))

    def diagnose(self, suspects: Iterable[int], doing: str, grace: float) -> LowtideError:
        """Say goodbye, then name the ranks that are to blame, from what the suspects say within `grace` seconds.

        A suspect that answers is alive and was stopped by another: follow what it says. One that
        does not is lost.
        """
        pending = sorted(suspects)
        text = f"missed {ranks_text(pending)} in {doing}"
        self.tell(Notice(self.rank, "lost", text, tuple(pending)), grace)
        deadline = time.monotonic() + grace
        lost: list[int] = []
        heard: dict[int, Notice] = {}
        while pending:
            # A time-out here closes the control channel, but words that have arrived can still be read.
            suspect = pending.pop(0)
            notice = self._last_word(suspect, deadline)
            if notice is None:
                lost.append(suspect)
                continue
            heard[suspect] = notice
            known = {self.rank, *lost, *heard, *pending}
            pending += [rank for rank in notice.suspects if rank not in known and rank < self.size]
        return _judge(lost, list(heard.values()), doing)

    def release(self) -> None:
        """Drop the channels; their sockets close with them."""
        # gloo closes its sockets when nothing refers to them any more, pending receives included.
        self._notices.clear()
        self._data = self._control = None

    def _last_word(self, suspect: int, deadline: float) -> Notice | None:
        post = self._notices.get(suspect)
        if post is None or not _arrived(post.work, _until(deadline)):
            return None
        # A word that cannot be read counts as none.
        with contextlib.suppress(TransportError):
            return unpack_notice(post.tensor.numpy().tobytes(), suspect)
        return None


def _judge(lost: list[int], heard: list[Notice], doing: str) -> LowtideError:
    """The error for what is known of the suspects: a stated cause first, then silence, then a tangle."""
    for notice in heard:
        if notice.cause == "disagreed":
            return AgreementError(f"rank {notice.rank} stopped: {notice.reason}")
        if notice.cause == "failed":
            return PeerLostError(f"rank {notice.rank} stopped during {doing}: {notice.reason}", ranks=[notice.rank])
    if lost:
        return PeerLostError(
            f"{ranks_text(lost)} died or fell silent during {doing}\n"
            "hint: look for their own errors; if they are only slow, raise the time-out",
            ranks=sorted(lost),
        )
    closed = [notice.rank for notice in heard if notice.cause == "closed"]
    if closed:
        return PeerLostError(
            f"{ranks_text(closed)} had closed before {doing}\nhint: give every rank the same number of steps",
            ranks=sorted(closed),
        )
    if not heard:
        return TransportError(f"the transport was severed during {doing}")
    others = "\n".join(f"  rank {notice.rank} {notice.reason}" for notice in heard)
    return AgreementError(
        f"replicas wait for each other: this rank in {doing}, but\n{others}\n"
        "hint: run the same code and configuration on every rank"
    )


def _until(deadline: float) -> timedelta:
    """The time left, at least a millisecond: gloo takes zero for its default."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _arrived(work: Work | None, timeout: timedelta) -> bool:
    if work is None:
        return False
    try:
        return work.wait(timeout) is not False
    except RuntimeError:  # all that gloo ever raises
        return False


def _try_send(channel: Channel, block: Tensor, peer: int, tag: int) -> Work | None:
    try:
        return channel.send([block], peer, tag)
    except RuntimeError:  # the connection is closed already
        return None


def _try_recv(channel: Channel, block: Tensor, peer: int, tag: int) -> Work | None:
    try:
        return channel.recv([block], peer, tag)
    except RuntimeError:  # the connection is closed already
        return None
