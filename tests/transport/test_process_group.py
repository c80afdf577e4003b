"""Faults of the mesh, in threads of one process; tests/distributed has the same between real processes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lowtide.errors import AgreementError, ConfigError, LowtideError, PeerLostError, TransportError
from lowtide.messages import Gather, Scatter, Send, Sum, Tag
from lowtide.transport.frame import Notice, header_of
from lowtide.transport.mesh import Mesh, _judge
from lowtide.transport.process_group import ProcessGroup, available, connect, from_environment


def tag(event: int = 0) -> Tag:
    return Tag("plan", event)


def world(size: int, worker: Callable, **options) -> list:
    """What the worker returned, or raised, on each rank."""
    store, results = dist.HashStore(), [None] * size

    def rank_main(rank: int) -> None:
        own = {key: value[rank] if isinstance(value, list) else value for key, value in options.items()}
        transport = connect(store, rank, size, **{"timeout": 20.0, "startup": 20.0, **own})
        try:
            results[rank] = worker(transport)
        except LowtideError as error:
            results[rank] = error
        finally:
            transport.close()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return results


def vanish(transport: ProcessGroup) -> None:
    """Close the connections as a killed process would: without a word."""
    transport._mesh._said.acquire()
    transport._mesh.release()
    transport._channels = None


def test_a_rank_that_dies_ends_the_event_at_once_and_is_named():
    def worker(t):
        t.start(Gather(b""), tag(0)).finish()
        if t.rank == 2:
            return vanish(t)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 2 died or fell silent during plan 'plan', event 1") as error:
            t.start(Gather(bytes(1000)), tag(1)).finish()
        return error.value.ranks, time.monotonic() - began < 3.0

    assert world(3, worker) == [((2,), True), ((2,), True), None]


@pytest.mark.parametrize("message", [Gather(bytes(100)), Sum(torch.ones(100)), Scatter((b"1", b"2", b"3"))], ids=type)
def test_a_silent_rank_costs_the_time_out_and_is_named_by_all(message):
    done = threading.Barrier(3)

    def worker(t):
        t.start(message, tag(0)).finish()
        if t.rank == 1:
            return done.wait(20.0) * 0
        began = time.monotonic()
        try:
            t.start(message, tag(1)).finish()
        except PeerLostError as error:
            done.wait(20.0)
            return error.ranks, 0.3 <= time.monotonic() - began < 3.0

    assert world(3, worker, timeout=0.3) == [((1,), True), 0, ((1,), True)]


def test_a_rank_that_stops_in_the_middle_of_an_event_is_the_one_that_is_named():
    """Rank 2 gives its header to rank 0 only: rank 0 then waits for rank 1, which waits for rank 2."""
    done = threading.Barrier(3)

    def worker(t):
        if t.rank == 2:
            frame = header_of(Gather(b"1"), tag(), rank=2, size=3).announcing(b"1").pack()
            block = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
            t._mesh.swap([(0, block)], [(0, torch.empty(256, dtype=torch.uint8))])
            return done.wait(20.0) * 0
        try:
            t.start(Gather(b"1"), tag()).finish()
        except LowtideError as error:
            done.wait(20.0)
            return error

    for error in world(3, worker, timeout=0.4)[:2]:
        assert isinstance(error, PeerLostError), error
        assert error.ranks == (2,)


def test_a_lost_receiver_ends_a_send():
    done = threading.Barrier(2)

    def worker(t):
        if t.rank == 1:
            return done.wait(20.0) * 0
        try:
            t.start(Send(bytes(10), 1), tag()).finish()
        except PeerLostError as error:
            done.wait(20.0)
            return error.ranks

    assert world(2, worker, timeout=0.3) == [(1,), 0]


class Flipping:
    """A wire that flips one bit of every block of one length."""

    def __init__(self, channel, length: int) -> None:
        self.channel, self.length = channel, length

    def send(self, tensors, peer, tag):
        if tensors[0].numel() == self.length:
            tensors = [tensors[0].clone()]
            tensors[0][self.length // 2] ^= 1
        return self.channel.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self.channel.recv(tensors, peer, tag)


@pytest.mark.parametrize(
    ("message", "length", "words"),
    [
        (Gather(bytes(1000)), 1000, "the payload of rank 1 was damaged on the way in plan 'plan', event 0"),
        (Gather(bytes(1000)), 256, "the frame of rank 1 is damaged"),
        (Sum(torch.ones(300)), 400, "the payload of rank 1 was damaged"),
        (Sum(torch.ones(300)), 16, "the payload of rank 1 was damaged"),
    ],
    ids=["payload", "header", "chunk", "digest of a chunk"],
)
def test_damage_on_the_wire_names_its_source_on_every_rank(message, length, words):
    def worker(t):
        if t.rank == 1:
            t._mesh._data = Flipping(t._mesh._data, length)
        # The damaged rank itself may get through, and then hears of it.
        t.start(message, tag(0)).finish()
        return t.start(Gather(b""), tag(1)).finish()

    errors = world(3, worker)
    assert all(isinstance(error, TransportError) for error in errors)
    assert all(words in str(error) or "rank 1" in str(error) for error in errors)
    assert any(words in str(errors[rank]) for rank in (0, 2))


def test_a_send_that_is_damaged_is_refused_by_its_receiver():
    def worker(t):
        if t.rank == 0:
            t._mesh._data = Flipping(t._mesh._data, 1000)
            return t.start(Send(bytes(1000), 1), tag()).finish().ranks
        return t.receive(0, tag()).finish()

    results = world(2, worker)
    assert "the payload of rank 0 was damaged" in str(results[1])


def test_an_announced_size_over_the_limit_is_refused():
    def worker(t):
        return t.start(Gather(bytes(1000) if t.rank == 1 else b""), tag()).finish()

    errors = world(2, worker, max_bytes=[999, 1000])
    assert "rank 1 announced 1000 bytes; at most 999 are taken" in str(errors[0])
    assert isinstance(errors[1], PeerLostError)
    assert errors[1].ranks == (0,)


def test_an_own_payload_over_the_limit_is_refused_before_it_leaves():
    def worker(t):
        with pytest.raises(ConfigError, match="a payload of 11 bytes is over max_bytes=10"):
            t.start(Gather(bytes(11)), tag())
        return t.start(Gather(bytes(10)), tag()).finish().ranks

    assert world(2, worker, max_bytes=10) == [(0, 1), (0, 1)]


def no_room(*_: object) -> None:
    raise MemoryError("no room")


def test_an_error_of_the_machine_ends_the_event_for_all():
    def worker(t):
        if t.rank == 1:
            t._events._swap = no_room
        return t.start(Gather(b"1"), tag()).finish()

    errors = world(3, worker)
    assert "plan 'plan', event 0, leg 0 failed: MemoryError('no room')" in str(errors[1])
    assert isinstance(errors[1].__cause__, MemoryError)
    assert [errors[rank].ranks for rank in (0, 2)] == [(1,), (1,)]
    assert "MemoryError('no room')" in str(errors[0])


def test_the_caller_computes_while_a_message_is_on_its_way():
    release = threading.Event()

    def worker(t):
        if t.rank == 1:
            release.wait(20.0)
        pending = t.start(Gather(b"x"), tag())
        if t.rank == 0:
            release.set()  # only reached because start has not waited for rank 1
        return pending.finish().payloads

    assert world(2, worker) == [(b"x", b"x")] * 2


def test_closing_is_quick_even_in_the_middle_of_an_event():
    closed = threading.Event()

    def worker(t):
        if t.rank == 1:
            return closed.wait(20.0)
        t.start(Gather(b""), tag())
        began = time.monotonic()
        with pytest.raises(TransportError, match="unfinished"):
            t.close()
        closed.set()
        return time.monotonic() - began < 3.0

    assert world(2, worker) == [True, True]


def test_several_transports_live_on_one_store():
    store, results = dist.HashStore(), [None, None]

    def rank_main(rank):
        first, second = (connect(store, rank, 2, startup=20.0) for _ in range(2))
        both = [first.start(Gather(b"1"), tag(0)), second.start(Gather(b"2"), tag(7))]
        results[rank] = [pending.finish().payloads[0] for pending in reversed(both)]
        first.close()
        second.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert results == [[b"2", b"1"]] * 2


def test_a_rank_that_never_comes_is_named():
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"ranks 1, 2 did not come within 0\.5 s") as error:
        connect(dist.HashStore(), 0, 3, startup=0.5)
    assert error.value.ranks == (1, 2)
    assert time.monotonic() - began < 5.0


def test_nobody_at_the_address_is_an_error_in_time():
    environ = {"LOWTIDE_RANK": "1", "LOWTIDE_WORLD_SIZE": "2", "LOWTIDE_ADDRESS": "127.0.0.1:9"}
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"cannot meet at 127\.0\.0\.1:9"):
        from_environment(startup=0.5, environ=environ)
    assert time.monotonic() - began < 6.0


def test_without_a_launcher_or_a_group_there_is_nothing_to_join():
    assert available({}) is None
    with pytest.raises(ConfigError, match="no launcher's variables"):
        from_environment(environ={})
    with pytest.raises(ConfigError, match="no default process group"):
        ProcessGroup()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_time_out_must_be_positive(timeout):
    with pytest.raises(ConfigError, match="timeout must be positive"):
        connect(dist.HashStore(), 0, 1, timeout=timeout)


def test_overhead_and_clock_are_those_of_the_mesh():
    def worker(t):
        return t.overhead(Gather(b""))[0] > 256, t.overhead(None)[1] > 256, t.now() <= t.now()

    assert world(2, worker) == [(True, True, True)] * 2


NOTICES = {
    "closed": Notice(1, "closed", "closed its transport"),
    "lost": Notice(2, "lost", "missed rank 1 in plan 'p'", (1,)),
    "disagreed": Notice(3, "disagreed", "the event is 1 on rank 0"),
    "failed": Notice(4, "failed", "the loss is nan"),
}


@pytest.mark.parametrize(
    ("lost", "heard", "kind", "ranks", "words"),
    [
        ([5], ["lost"], PeerLostError, (5,), "rank 5 died or fell silent"),
        ([6, 5], [], PeerLostError, (5, 6), "ranks 6, 5 died"),
        ([5], ["failed"], PeerLostError, (4,), "rank 4 stopped during x: the loss is nan"),
        ([], ["closed", "lost"], PeerLostError, (1,), "rank 1 had closed before x"),
        ([], ["lost", "disagreed"], AgreementError, None, "rank 3 stopped: the event is 1"),
        ([], ["lost"], AgreementError, None, "this rank in x, but\n  rank 2 missed rank 1"),
        ([], [], TransportError, None, "severed during x"),
    ],
    ids=["silent", "two", "a cause before silence", "closed", "disagreed", "tangle", "nothing"],
)
def test_the_blame_goes_to_a_cause_then_to_silence_then_to_a_tangle(lost, heard, kind, ranks, words):
    error = _judge(lost, [NOTICES[name] for name in heard], "x")
    assert type(error) is kind
    assert getattr(error, "ranks", None) == ranks
    assert words in str(error)


def test_a_released_mesh_stays_quiet():
    mesh = Mesh(0, 1, None, None)
    mesh.release()
    mesh.sever()
    mesh.tell(Notice(0, "closed"))
    assert mesh.severed.is_set()
    assert mesh.peers == ()


def test_a_transport_that_is_dropped_unclosed_lets_its_peers_go():
    def worker(t):
        t.start(Gather(b""), tag(0)).finish()
        if t.rank == 1:
            connections, lanes = t._mesh, list(t._lanes.values())
            t._forgotten()
            assert connections.severed.is_set()
            return [lane._thread.is_alive() for lane in lanes]
        with pytest.raises(PeerLostError, match=r"rank 1 stopped .* ended without closing its transport") as error:
            t.start(Gather(b""), tag(1)).finish()
        return error.value.ranks

    assert world(2, worker) == [(1,), [False]]


def test_nothing_keeps_an_unused_transport_alive():
    transport = connect(dist.HashStore(), 0, 1)
    transport.start(Gather(b""), tag()).finish()
    lane, gone = transport._lanes["events"], weakref.ref(transport)
    del transport
    gc.collect()
    assert gone() is None
    lane.join(10.0)
    assert not lane._thread.is_alive()
