"""N replicas in one process, in lockstep: a thread for each, of which exactly one runs at any time.

The baton passes only when a replica has to wait in `finish`, and when it ends. Then the lowest rank that can go
on does; when none can, the messages that all have started are matched, checked and delivered as real
processes would, and rank 0 goes on first. The order is the same in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from lowtide.errors import AgreementError, ConfigError, LowtideError, PeerLostError, TransportError
from lowtide.messages import Inbox, Message, Tag
from lowtide.transport.baton import Baton, Switch
from lowtide.transport.clock import Clock
from lowtide.transport.cost import frames
from lowtide.transport.event import check, check_peer
from lowtide.transport.fault import Fault
from lowtide.transport.frame import ranks_text
from lowtide.transport.lane import Deferred, describe
from lowtide.transport.link import Link
from lowtide.transport.post import PostOffice, Started

T = TypeVar("T")
_LAST_STEP = 2.0  # seconds for what still computes when the simulation is stopped


class Lockstep:
    r"""A world of `size` simulated replicas; `run` runs one worker for each.

    `link` joins every replica to the others; without one all messages take no time. `speeds` are relative
    (0.5 takes twice as long). Compute is measured thread time, or `step_seconds` for each inner step.

    >>> from lowtide.messages import Gather
    >>> def worker(transport):
    ...     return transport.start(Gather(bytes([transport.rank])), Tag("delta", event=0)).finish().payloads
    >>> Lockstep(2).run(worker)
    ((b'\x00', b'\x01'), (b'\x00', b'\x01'))
    """

    def __init__(
        self,
        size: int,
        link: Link | str | None = None,
        *,
        seed: int = 0,
        speeds: Sequence[float] | None = None,
        step_seconds: float | None = None,
        on_switch: Switch | None = None,
    ) -> None:
        if size < 1:
            raise ConfigError(f"replicas must be at least 1: {size}\nhint: 4 is a good number to start with")
        if speeds is not None and len(speeds) != size:
            raise ConfigError(f"one speed per replica is needed: {len(speeds)} for {size}\nhint: {[1.0] * size}")
        self.size = size
        self.fault = Fault()
        self.clocks = tuple(Clock(speed, step_seconds) for speed in speeds or [1.0] * size)
        self._post = PostOffice(size, Link.parse(link) if isinstance(link, str) else link, seed)
        self._waiting: dict[int, Started] = {}
        self._gone: dict[int, str] = {}
        self._baton = Baton(size, self._settle, on_switch)
        self._failure: tuple[int, BaseException] | None = None

    def transport(self, rank: int) -> Simulated:
        """The transport of one replica; to be used in its own thread only."""
        return Simulated(self, rank)

    def run(self, worker: Callable[[Simulated], T]) -> tuple[T, ...]:
        """Run `worker` once per replica, each in a thread of its own, and return what they return.

        The first error that any of them raises stops all and is raised here, with the rank noted.
        """
        # Exactly one thread runs at any time, so none of this needs a lock.
        results: dict[int, T] = {}

        def replica(rank: int) -> None:
            self._baton.enter(rank)
            self.clocks[rank].resume()
            error: BaseException | None = None
            try:
                results[rank] = worker(self.transport(rank))
            except BaseException as raised:  # noqa: BLE001 - it is raised again in the caller's thread
                error = raised
            self.clocks[rank].pause()
            self._leave(rank, error)

        threads = [
            threading.Thread(target=replica, args=(rank,), name=f"lowtide-replica-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        self._watch(threads)
        if self._failure is not None:
            rank, error = self._failure
            error.add_note(f"raised by replica {rank} of {self.size}")
            raise error
        return tuple(results[rank] for rank in range(self.size))

    def _watch(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)  # in short turns, so that Ctrl-C is obeyed at once
        except BaseException as interrupt:
            # Threads cannot be ended from outside: they find the fault at their next message.
            self.fail(TransportError(f"the simulation was stopped: {interrupt!r}"))
            for thread in threads:
                thread.join(_LAST_STEP / self.size)
            raise

    def fail(self, error: LowtideError) -> None:
        """Break the world: all that wait now, or start anything later, get this error; the first one counts."""
        self.fault.keep(error)

    def begin(self, rank: int, item: Started) -> None:
        """Take a message that a replica has started."""
        self.fault.check()
        self._post.take(item)

    def wait(self, rank: int, item: Started) -> Inbox:
        """Let others run until the inbox of `item` is there; then its arrival is the replica's time."""
        clock = self.clocks[rank]
        # What has arrived is given out without a pass, even in a world that is broken since.
        if item.inbox is None and self.fault.error is None:
            self._waiting[rank] = item
            clock.pause()
            self._baton.wait(rank)
            clock.resume()
            del self._waiting[rank]
        if item.inbox is None:
            self.fault.check("")
            raise TransportError(f"{describe(item.tag)} is not finished")
        clock.wait_until(item.arrives)
        return item.inbox

    def part(self, rank: int, how: str) -> None:
        """A replica takes no part any more, for the reason `how`."""
        self._gone.setdefault(rank, how)

    def _leave(self, rank: int, error: BaseException | None) -> None:
        self.part(rank, "ended")
        if error is not None:
            # The first in time is the cause; what others raise after it are its echoes.
            self._failure = self._failure or (rank, error)
            self.fail(PeerLostError(f"rank {rank} stopped: {error!r}", ranks=[rank]))
        self._baton.leave(rank)

    def _settle(self) -> Collection[int]:
        """Deliver what can be delivered, now that nobody can go on; the ranks that then can."""
        served = self._deliver() if self.fault.error is None else []
        return served if self.fault.error is None else set(self._waiting)

    def _deliver(self) -> list[int]:
        try:
            self._post.deliver()
        except LowtideError as error:
            self.fail(error)
            return []
        # Some may have to wait on, for a message that others have not started.
        served = [rank for rank, item in self._waiting.items() if item.inbox is not None]
        if self._waiting and not served:
            # Nothing is left but replicas that wait: between processes, a time-out.
            self.fail(self._tangle())
        return served

    def _tangle(self) -> LowtideError:
        """Why nobody can go on: somebody needed is gone, or all wait for each other."""
        missing = {rank for item in self._waiting.values() for rank in self._post.missing(item)}
        gone = sorted(missing & self._gone.keys())
        waits = "\n".join(f"  {item}" for _, item in sorted(self._waiting.items()))
        if gone:
            how = " and ".join(sorted({self._gone[rank] for rank in gone}))
            return PeerLostError(
                f"{ranks_text(gone)} {how}, but others still wait:\n{waits}\n"
                "hint: give every replica the same number of steps",
                ranks=gone,
            )
        return AgreementError(
            f"replicas wait for each other:\n{waits}\nhint: run the same code and configuration on every rank"
        )


class Simulated:
    """The transport of one replica of a `Lockstep`."""

    def __init__(self, world: Lockstep, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._closed = False
        self._open: list[Started] = []

    @property
    def rank(self) -> int:
        """The number of this replica."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self._world.size

    @property
    def clock(self) -> Clock:
        """The virtual clock of this replica."""
        return self._world.clocks[self._rank]

    def start(self, message: Message, tag: Tag) -> Deferred:
        """Begin to move `message`, which must not change before `finish`; the replica keeps the baton."""
        check(message, self.rank, self.size)
        return self._begin(Started(self.rank, tag, self.clock.seconds, message))

    def receive(self, source: int, tag: Tag) -> Deferred:
        """Begin to take what `source` sends; the replica keeps the baton."""
        check_peer("receive from", source, self.rank, self.size)
        return self._begin(Started(self.rank, tag, self.clock.seconds, source=source))

    def abort(self, reason: str) -> None:
        """Leave because of an error: the others end with it at their next call."""
        self._world.fail(PeerLostError(f"rank {self.rank} stopped: {reason}", ranks=[self.rank]))

    def overhead(self, message: Message | None) -> tuple[int, int]:
        """Bytes (sent, received) that an event costs beyond its payloads, as between processes."""
        return frames(message, self.size)

    def now(self) -> float:
        """Virtual seconds, the clock that waiting is measured with."""
        return self.clock.seconds

    def close(self) -> None:
        """Take no part any more; an unfinished message is an error."""
        if self._closed:
            return
        self._closed = True
        self._world.part(self.rank, "closed its transport")
        if self._open and self._world.fault.error is None:
            names = "; ".join(describe(item.tag) for item in self._open)
            self.abort(f"closed with unfinished messages: {names}")
            raise TransportError(f"closed with unfinished messages: {names}\nhint: finish() each of them")

    def _begin(self, item: Started) -> Deferred:
        if self._closed:
            raise TransportError("the transport is closed")
        self._world.begin(self.rank, item)
        self._open.append(item)
        return Deferred(lambda: self._finish(item))

    def _finish(self, item: Started) -> Inbox:
        if item.taken:
            raise TransportError(f"{describe(item.tag)} was finished before")
        item.taken = True
        self._open.remove(item)
        return self._world.wait(self.rank, item)
