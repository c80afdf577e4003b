from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from lowtide.errors import AgreementError, ConfigError, PeerLostError, TransportError
from lowtide.messages import Gather, Group, Send, Sum, Tag
from lowtide.transport.cost import frames
from lowtide.transport.link import Link
from lowtide.transport.simulated import Lockstep


def tag(event: int = 0) -> Tag:
    return Tag("plan", event)


def test_the_baton_passes_only_where_a_replica_waits():
    order = []

    def worker(t):
        order.append((t.rank, "in"))
        pending = t.start(Gather(b""), tag())
        order.append((t.rank, "started"))
        pending.finish()
        order.append((t.rank, "out"))

    Lockstep(2).run(worker)
    assert order == [(0, "in"), (0, "started"), (1, "in"), (1, "started"), (0, "out"), (1, "out")]


def test_a_message_that_is_there_is_finished_without_a_pass():
    order = []

    def worker(t):
        first, second = t.start(Gather(b""), tag(0)), t.start(Gather(b""), tag(1))
        first.finish()
        order.append(t.rank)
        second.finish()
        order.append(t.rank)

    Lockstep(3).run(worker)
    assert order == [0, 0, 1, 1, 2, 2]


def test_the_switches_are_told_from_first_to_last():
    switches = []
    world = Lockstep(2, on_switch=lambda holder, following: switches.append((holder, following)))
    world.run(lambda t: t.start(Gather(b""), tag()).finish())
    assert switches == [(None, 0), (0, 1), (1, 0), (0, 1), (1, None)]


def test_two_runs_are_the_same_in_every_turn():
    def trace():
        seen = []

        def worker(t):
            for event in range(4):
                seen.append((t.rank, event))
                if t.rank % 2:
                    t.start(Send(b"x", t.rank - 1), tag(event)).finish()
                else:
                    t.receive(t.rank + 1, tag(event)).finish()
                t.start(Sum(torch.ones(3)), tag(event)).finish()
            return t.clock.seconds

        return seen, Lockstep(4, "1mbit/10ms/jitter=5ms", seed=3, step_seconds=0.1).run(worker)

    assert trace() == trace()


def test_results_come_by_rank_and_the_transport_can_be_had_by_rank():
    world = Lockstep(3)
    assert [world.transport(rank).rank for rank in range(3)] == [0, 1, 2]
    assert world.run(lambda t: (t.rank, t.size)) == ((0, 3), (1, 3), (2, 3))


def test_the_first_error_is_raised_with_its_rank_and_ends_the_others():
    ends = {}

    def worker(t):
        t.start(Gather(b""), tag(0)).finish()
        if t.rank == 1:
            raise ZeroDivisionError("batch 7")
        try:
            t.start(Gather(b""), tag(1)).finish()
        except PeerLostError as error:
            ends[t.rank] = error
            raise

    with pytest.raises(ZeroDivisionError, match="batch 7") as error:
        Lockstep(3).run(worker)
    assert error.value.__notes__ == ["raised by replica 1 of 3"]
    assert {rank: end.ranks for rank, end in ends.items()} == {0: (1,), 2: (1,)}
    assert "rank 1 stopped: ZeroDivisionError('batch 7')" in str(ends[0])


def test_one_that_ends_while_others_wait_is_named():
    def worker(t):
        return None if t.rank == 2 else t.start(Gather(b""), tag(4)).finish()

    with pytest.raises(PeerLostError, match="rank 2 ended, but others still wait") as error:
        Lockstep(3).run(worker)
    assert error.value.ranks == (2,)
    assert "rank 0 in Gather, plan 'plan', event 4" in str(error.value)


def test_a_receive_that_nobody_serves_is_named():
    def worker(t):
        return t.receive(0, tag(2)).finish() if t.rank == 1 else None

    with pytest.raises(PeerLostError, match=r"rank 1 in receive from rank 0, plan 'plan', event 2"):
        Lockstep(2).run(worker)


def test_all_replicas_waiting_for_each_other_is_a_disagreement():
    with pytest.raises(AgreementError, match="replicas wait for each other") as error:
        Lockstep(2).run(lambda t: t.receive(1 - t.rank, tag()).finish())
    assert error.value.__notes__ == ["raised by replica 0 of 2"]


def test_an_interrupt_stops_the_simulation_at_once():
    pressed = []

    def press():
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def worker(t):
        if t.rank == 0:
            threading.Timer(0.05, press).start()
        for event in range(1_000_000):
            t.start(Gather(b""), tag(event)).finish()

    with pytest.raises(KeyboardInterrupt):
        Lockstep(2).run(worker)
    assert time.monotonic() - pressed[0] < 0.5


def test_even_an_exit_of_a_worker_is_raised_by_the_caller():
    with pytest.raises(SystemExit) as error:
        Lockstep(2).run(lambda t: exit(3) if t.rank else None)  # noqa: PLR1722 - what a script would do
    assert error.value.code == 3


def test_without_a_link_messages_take_no_time():
    def worker(t):
        t.clock.advance(1.0 + t.rank)
        t.start(Gather(bytes(1000)), tag()).finish()
        return t.now(), t.clock.wait

    assert Lockstep(2, step_seconds=0.0).run(worker) == ((2.0, 1.0), (2.0, 0.0))


LINK = Link(up=8e6, down=16e6, delay=0.25)


def expected_seconds(message, nbytes: int, size: int, turns: int) -> float:
    return LINK.transfer_seconds(nbytes + frames(message, size)[0], nbytes + frames(message, size)[1], hops=turns)


def test_a_transfer_starts_with_the_last_to_come_and_lasts_as_the_link_says():
    message = Gather(bytes(1_000_000))

    def worker(t):
        t.clock.advance(1.0 + t.rank)
        t.start(message, tag()).finish()
        return t.clock.seconds

    end = 3.0 + expected_seconds(message, 2_000_000, 3, 2)
    assert Lockstep(3, LINK, step_seconds=0.0).run(worker) == (pytest.approx(end),) * 3


def test_compute_hides_a_message_that_was_started_early():
    message = Gather(bytes(1_000_000))

    def worker(t):
        pending = t.start(message, tag())
        t.clock.advance(10.0)
        pending.finish()
        return t.clock.seconds, t.clock.wait

    assert Lockstep(2, LINK, step_seconds=0.0).run(worker) == ((10.0, 0.0),) * 2


def test_messages_share_the_link_one_after_the_other():
    message = Gather(bytes(1_000_000))

    def worker(t):
        both = [t.start(message, tag(event)) for event in range(2)]
        return [(pending.finish(), t.clock.seconds)[1] for pending in both]

    one = expected_seconds(message, 1_000_000, 2, 2)
    for ends in Lockstep(2, LINK, step_seconds=0.0).run(worker):
        assert ends == [pytest.approx(one), pytest.approx(2 * one)]


def test_a_sum_takes_its_two_ways():
    message = Sum(torch.ones(250_000))

    def worker(t):
        t.start(message, tag()).finish()
        return t.clock.seconds

    end = expected_seconds(message, 1_000_000, 2, 3)
    assert Lockstep(2, LINK, step_seconds=0.0).run(worker) == (pytest.approx(end),) * 2


def test_groups_do_not_wait_for_each_other_on_the_clock():
    def worker(t):
        t.clock.advance(100.0 if t.rank >= 2 else 1.0)
        t.start(Group(b"", (t.rank // 2 * 2, t.rank // 2 * 2 + 1)), tag()).finish()
        return t.clock.seconds

    seconds = Lockstep(4, LINK, step_seconds=0.0).run(worker)
    assert max(seconds[:2]) < 10.0 < min(seconds[2:])


def test_sends_queue_on_the_line_but_share_the_delay():
    message = Send(bytes(1_000_000), 1)

    def worker(t):
        if t.rank == 0:
            for event in range(3):
                t.start(message, tag(event)).finish()
            return [t.clock.seconds]
        return [(t.receive(0, tag(event)).finish(), t.clock.seconds)[1] for event in range(3)]

    sender, receiver = Lockstep(2, LINK, step_seconds=0.0).run(worker)
    wire = LINK.wire_seconds(*[1_000_000 + frames(message, 2)[0]] * 2)
    assert sender == [0.0]
    assert receiver == [pytest.approx(0.25 + count * wire) for count in (1, 2, 3)]


def test_jitter_comes_from_the_seed():
    def ends(seed):
        return Lockstep(2, "8mbit/100ms/jitter=50ms", seed=seed, step_seconds=0.0).run(
            lambda t: (t.start(Gather(b""), tag()).finish(), t.clock.seconds)[1]
        )

    assert ends(1) == ends(1) != ends(2)


def test_slow_replicas_compute_longer_and_fast_ones_wait():
    def worker(t):
        t.clock.step()
        t.start(Gather(b""), tag()).finish()
        return t.clock.compute, t.clock.wait

    assert Lockstep(2, speeds=[1.0, 0.5], step_seconds=3.0).run(worker) == ((3.0, 3.0), (6.0, 0.0))


def test_a_world_after_an_abort_gives_what_had_arrived_and_no_more():
    def worker(t):
        early = [t.start(Gather(b"here"), tag(0)), t.start(Gather(b"here"), tag(1))]
        early[0].finish()
        if t.rank == 0:
            t.abort("enough")
            with pytest.raises(PeerLostError, match="rank 0 stopped: enough"):
                t.start(Gather(b""), tag(2))
        return early[1].finish().payloads

    assert Lockstep(2).run(worker) == ((b"here", b"here"),) * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "replicas must be at least 1: 0"),
        ({"size": 2, "speeds": [1.0]}, "one speed per replica is needed: 1 for 2"),
        ({"size": 1, "speeds": [-1.0]}, "the speed of a replica must be positive"),
        ({"size": 1, "link": "fast"}, "link 'fast' has no delay"),
        ({"size": 1, "step_seconds": -1.0}, "step_seconds must be zero or more"),
    ],
)
def test_impossible_worlds_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Lockstep(**options)


def test_a_closed_transport_of_a_replica_is_closed_for_good():
    def worker(t):
        t.close()
        with pytest.raises(TransportError, match="the transport is closed"):
            t.receive(1 - t.rank, tag())
        return True

    assert Lockstep(2).run(worker) == (True, True)
