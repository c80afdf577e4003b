"""Transport over torch.distributed: real processes, joined by gloo, with NCCL for tensors on a GPU if it is there.

The only file of lowtide that imports torch.distributed. gloo's collectives check nothing, abort the process
on a mismatch, and do not say which rank failed; so everything goes point to point in a full mesh
(`lowtide.transport.mesh`), headers first (`lowtide.transport.event`).

The device path (a default group on NCCL, or `device=`: payloads through device tensors, `Sum` by all_reduce,
headers still on gloo) is written for any device; it was run on the CPU, never with CUDA and NCCL.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from lowtide.errors import AgreementError, ConfigError, LowtideError, PeerLostError, TransportError
from lowtide.messages import Inbox, Message, Send, Sum, Tag
from lowtide.transport.cost import frames
from lowtide.transport.event import Events, check, check_peer
from lowtide.transport.fault import Fault
from lowtide.transport.frame import Notice, ranks_text
from lowtide.transport.lane import Deferred, Job, Lane, describe
from lowtide.transport.launcher import OURS, read_launch
from lowtide.transport.mesh import Blocks, Broken, Channel, Mesh

_MAX_BYTES = 1 << 33
T = TypeVar("T")


@dataclass(frozen=True)
class Channels:
    """Open connections of one rank to its peers, and how to give them back."""

    rank: int
    size: int
    data: Channel
    control: Channel
    device: DeviceGroup | None = None
    groups: tuple[dist.ProcessGroup, ...] = ()

    def release(self) -> None:
        """Destroy the groups that were made for us, and nothing else."""
        # A user may have destroyed everything before; then there is nothing to give back.
        for group in self.groups if dist.is_initialized() else ():
            dist.destroy_process_group(group)


class ProcessGroup:
    """Messages between processes; made from a running default group, or by `from_environment`.

    A rank may be silent for `timeout` seconds after another began to wait for it in `finish`; a
    killed one is noticed at once. A message's tensor or payload must not change before `finish` returns.
    Payloads over `max_bytes` are refused on both sides. All ranks of `group` must make their transport together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Channels | None = None,
        *,
        timeout: float = 60.0,
        device: torch.device | str | None = None,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout must be positive seconds: {timeout}\nhint: 60 suits machines of equal speed")
        channels = group if isinstance(group, Channels) else _channels_beside(group, timeout, device)
        self._timeout = timeout
        # How long the last words of peers are waited for, once it is known that something is wrong.
        self._grace = min(2.0, timeout / 2)
        self._max_bytes = max_bytes
        self._channels: Channels | None = channels
        self._mesh = Mesh(channels.rank, channels.size, channels.data, channels.control)
        faster = channels.device
        self._events = Events(
            self._mesh, max_bytes, swap=faster.swap if faster else None, reduce=faster.reduce if faster else None
        )
        self._lanes: dict[str, Lane] = {}
        self._open: list[Job] = []
        self._fault = Fault()
        # A thread that comes back from gloo while Python shuts down aborts the process: end them before, closed or not.
        self._forgotten = weakref.finalize(self, _abandon, self._mesh, self._lanes)

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return self._mesh.rank

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return self._mesh.size

    def start(self, message: Message, tag: Tag) -> Deferred:
        """Hand the message to the background thread; messages of all kinds but `Send` keep their order."""
        check(message, self.rank, self.size, self._max_bytes)
        # The background thread has a stream of its own, which knows nothing of the caller's.
        if isinstance(message, Sum) and message.tensor.is_cuda:
            torch.cuda.current_stream(message.tensor.device).synchronize()
        # Sends have lanes of their own, so that two ranks may send to each other before either receives.
        lane = f"to-{message.to}" if isinstance(message, Send) else "events"
        return self._put(lane, tag, lambda: self._events.run(message, tag))

    def receive(self, source: int, tag: Tag) -> Deferred:
        """Take what `source` sends, in the order it sends it."""
        check_peer("receive from", source, self.rank, self.size)
        return self._put(f"from-{source}", tag, lambda: self._events.receive(source, tag))

    def abort(self, reason: str) -> None:
        """Leave because of an error: tell the peers why, so that they end at once. `close` still has to be called."""
        if self._fault.keep(TransportError(f"the transport was aborted: {reason}")):
            self._mesh.tell(Notice(self.rank, "failed", reason))
            self._mesh.sever()

    def overhead(self, message: Message | None) -> tuple[int, int]:
        """Bytes (sent, received) that an event costs beyond its payloads; None stands for a `receive`."""
        return frames(message, self.size)

    def now(self) -> float:
        """Seconds on the clock that waiting is measured with."""
        return time.perf_counter()

    def close(self, timeout: float = 5.0) -> None:
        """Say goodbye and give everything back, within `timeout` seconds; an unfinished message is an error."""
        channels, self._channels = self._channels, None
        if channels is None:
            return
        self._forgotten.detach()
        names = "; ".join(describe(job.tag) for job in self._open)
        forgotten = bool(names) and self._fault.error is None
        if forgotten:
            # Peers would wait for the rest of it: to them it is an abort, and a lane that waits is woken.
            self.abort(f"closed with unfinished messages: {names}")
        self._mesh.tell(Notice(self.rank, "closed", "closed its transport"))
        deadline = time.monotonic() + timeout
        # All are told before any is waited for: the time-out is for all of them together.
        for lane in self._lanes.values():
            lane.stop()
        for lane in self._lanes.values():
            lane.join(max(deadline - time.monotonic(), 0.0))
        self._mesh.release()
        channels.release()
        if forgotten:
            raise TransportError(f"closed with unfinished messages: {names}\nhint: finish() each of them")

    def _put(self, lane: str, tag: Tag, work: Callable[[], Inbox]) -> Deferred:
        self._fault.check()
        if self._channels is None:
            raise TransportError("the transport is closed")
        if lane not in self._lanes:
            self._lanes[lane] = Lane(f"{self.rank}-{lane}")
        job = Job(lambda: self._carry(work, tag), tag)
        self._open.append(job)
        self._lanes[lane].put(job)
        return Deferred(lambda: self._finish(job))

    def _carry(self, work: Callable[[], Inbox], tag: Tag) -> Inbox:
        """Run one job in its lane; whatever goes wrong breaks the transport and is told to the peers."""
        # Jobs behind the one that failed fail with it.
        self._fault.check()
        try:
            return work()
        except Broken as broken:
            # An abort from outside has severed the mesh and is the reason already.
            self._fault.check("")
            error = self._mesh.diagnose(broken.suspects, describe(tag), self._grace)
        except LowtideError as refused:
            error = refused
        except Exception as unexpected:  # noqa: BLE001 - the peers must hear of every error
            error = TransportError(f"{describe(tag)} failed: {unexpected!r}")
            error.__cause__ = unexpected
        if self._fault.keep(error):
            cause = "disagreed" if isinstance(error, AgreementError) else "failed"
            self._mesh.tell(Notice(self.rank, cause, str(error)))
            self._mesh.sever()
        raise error

    def _finish(self, job: Job) -> Inbox:
        if job.taken:
            raise TransportError(f"{describe(job.tag)} was finished before")
        if not job.wait(self._timeout):
            # The time-out counts from here, where somebody waits. Severed, the lane finds out who was silent.
            self._mesh.sever()
            if not job.wait(2 * self._grace + 1.0):
                self._fault.keep(PeerLostError(f"no answer in {describe(job.tag)}", ranks=self._mesh.peers))
                self._fault.check("")
            # Usually it has failed by now and this does nothing.
            self.abort(f"{describe(job.tag)} ended only just after its time-out")
        job.taken = True
        self._open.remove(job)
        return job.result()


def _abandon(mesh: Mesh, lanes: dict[str, Lane]) -> None:
    """End what a transport left running that was never closed."""
    mesh.tell(Notice(mesh.rank, "failed", "ended without closing its transport"))
    mesh.sever()
    for lane in lanes.values():
        lane.stop()
    for lane in lanes.values():
        lane.join(1.0)


@dataclass(frozen=True)
class DeviceGroup:
    """The data path of a device: blocks and sums through tensors that live there."""

    group: dist.ProcessGroup
    device: torch.device

    def swap(self, out: Blocks, into: Blocks) -> None:
        """As `Mesh.swap`, in one batch, as NCCL wants it."""
        outgoing = [(peer, block.to(self.device)) for peer, block in out if len(block)]
        incoming = [(peer, block, torch.empty_like(block, device=self.device)) for peer, block in into if len(block)]
        batch = [dist.P2POp(dist.isend, block, group=self.group, group_peer=peer) for peer, block in outgoing]
        batch += [dist.P2POp(dist.irecv, there, group=self.group, group_peer=peer) for peer, _, there in incoming]
        # One batch: NCCL would deadlock if two ranks posted their sends and receives in different order.
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()
        for _, block, there in incoming:
            block.copy_(there)

    def reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in the order of the backend's own choice."""
        there = tensor.to(self.device)
        dist.all_reduce(there, group=self.group)
        return there.to(tensor.device)


def available(environ: Mapping[str, str] = os.environ) -> Literal["group", "launcher"] | None:
    """What a transport can be made from: a running default group, a launcher's variables, or nothing.

    >>> available({}), available({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    (None, 'launcher')
    """
    if dist.is_available() and dist.is_initialized():
        return "group"
    return "launcher" if read_launch(environ) else None


def from_environment(
    *,
    timeout: float = 60.0,
    startup: float = 300.0,
    max_bytes: int = _MAX_BYTES,
    environ: Mapping[str, str] = os.environ,
) -> ProcessGroup:
    """Join the processes of this launch, by our variables (LOWTIDE_RANK, ...) or else torchrun's.

    The default process group is neither used nor made. All ranks must come within `startup` seconds.
    Whoever reaches the address can disturb the launch: trusted networks only.
    """
    launch = read_launch(environ)
    if launch is None:
        raise ConfigError(
            "no launcher's variables in the environment\n"
            f"hint: start with torchrun, or set {', '.join(OURS)} (host:port of rank 0)"
        )
    store = _within(
        startup + 5.0,
        f"cannot meet at {launch.host}:{launch.port}",
        lambda: _meeting_point(launch.host, launch.port, launch.size, launch.hosts, startup),
    )
    return connect(store, launch.rank, launch.size, timeout=timeout, startup=startup, max_bytes=max_bytes)


@lru_cache(maxsize=8)
def _meeting_point(host: str, port: int, size: int, hosts: bool, startup: float) -> Store:  # noqa: FBT001
    """The launch's store, one for the life of the process: its server must outlive the first transport made from it."""
    # multi_tenant: a later init_process_group of the user's own finds the same port and shares the server.
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it
        host, port, size, hosts, timedelta(seconds=startup), wait_for_workers=False, multi_tenant=True
    )


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: float = 60.0,
    startup: float = 300.0,
    max_bytes: int = _MAX_BYTES,
) -> ProcessGroup:
    """Join `size` ranks that meet in `store`, without any process group of torch around it."""
    try:
        channels = _within(
            startup + 5.0, f"rank {rank} cannot connect to its peers", lambda: _gloo(store, rank, size, startup)
        )
    except TransportError as error:
        keys = {peer: f"lowtide/here/{peer}" for peer in range(size)}
        absent = _within(5.0, str(error), lambda: [peer for peer, key in keys.items() if not store.check([key])])
        if absent:
            raise PeerLostError(f"{ranks_text(absent)} did not come within {startup:g} s", ranks=absent) from error
        raise
    return ProcessGroup(channels, timeout=timeout, max_bytes=max_bytes)


def _gloo(store: Store, rank: int, size: int, startup: float) -> Channels:
    """Connections of our own through a store, with no process group of torch around them."""
    # Counted per rank, so that several transports can be opened on one store, in the same order everywhere.
    number = store.add(f"lowtide/opened/{rank}", 1)
    # Only read if the connections fail, to say who has not come.
    store.set(f"lowtide/here/{rank}", "1")
    wait = timedelta(seconds=startup)
    data, control = (
        cast("Channel", ProcessGroupGloo(PrefixStore(f"lowtide/{number}/{name}", store), rank, size, wait))
        for name in ("data", "control")
    )
    return Channels(rank, size, data, control)


def _channels_beside(group: dist.ProcessGroup | None, timeout: float, device: torch.device | str | None) -> Channels:
    """New groups of the same ranks as a running one, for us alone."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "torch.distributed has no default process group\nhint: use from_environment() under a launcher"
        )
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise ConfigError(f"rank {dist.get_rank()} is not in the group of ranks {ranks}\nhint: attach on members only")
    wait = timedelta(seconds=timeout)

    def new_group(backend: str) -> dist.ProcessGroup:
        # Only the members take part, so that a subgroup's transport needs no help of the others.
        local = len(ranks) < dist.get_world_size()
        made = dist.new_group(ranks, timeout=wait, backend=backend, use_local_synchronization=local)
        assert isinstance(made, dist.ProcessGroup)  # we are a member
        return made

    backend = dist.get_backend(group)
    # gloo for headers and notices whatever the user's backend; theirs is used for the data, if that is NCCL.
    # Not torch's new_group: made again for the same ranks it finds the addresses of the group that was destroyed.
    store = PrefixStore(f"lowtide/{'-'.join(map(str, ranks))}", dist.distributed_c10d._get_default_store())  # noqa: SLF001
    channels = _within(
        timeout + 5.0,
        f"rank {dist.get_rank(group)} cannot connect to its peers",
        lambda: _gloo(store, ranks.index(dist.get_rank()), len(ranks), timeout),
    )
    if device is None and backend != "nccl":
        return channels
    made = new_group(backend)
    # The index is looked up here: the background thread has a current device of its own.
    faster = DeviceGroup(made, torch.device(device or f"cuda:{torch.cuda.current_device()}"))
    return replace(channels, device=faster, groups=(made,))


def _within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """Do what may hang for good, such as a call to a store, in a thread that can be left behind."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="lowtide-connect", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    # In short turns, so that Ctrl-C is obeyed.
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.1)
    if results:
        return results[0]
    reason = str(errors[0]).splitlines()[0] if errors else f"no answer within {seconds:g} s"
    error = TransportError(f"{what}: {reason}\nhint: check address, port, firewall and that every rank is started")
    raise error from (errors[0] if errors else None)
