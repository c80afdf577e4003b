from __future__ import annotations

import torch

from lowtide.messages import Gather, Send, Sum, Tag
from lowtide.transport.cost import frames
from lowtide.transport.ledger import Totals
from lowtide.transport.loopback import Loopback
from lowtide.transport.meter import Meter
from lowtide.transport.simulated import Lockstep


class Plain:
    """A transport of the bare protocol, as a user may write one."""

    def __init__(self) -> None:
        self.inner = Loopback()
        self.rank, self.size = 0, 1

    def start(self, message, tag):
        return self.inner.start(message, tag)

    def receive(self, source, tag):
        return self.inner.receive(source, tag)

    def close(self):
        self.inner.close()


def test_an_event_is_counted_when_it_is_finished():
    meter = Meter(Loopback())
    pending = meter.start(Gather(b"123"), Tag("plan", 0))
    assert meter.ledger.total == Totals()
    assert meter.last is None
    inbox = pending.finish()
    assert inbox.payloads == (b"123",)
    assert meter.ledger.total.payload == 3
    assert meter.last.kind == "Gather"


def gather_and_sum(transport):
    meter = Meter(transport)
    meter.start(Gather(bytes(1000 * (transport.rank + 1))), Tag("plan", 0)).finish()
    meter.start(Sum(torch.ones(300)), Tag("plan", 1, cause="drift")).finish()
    return meter


def test_sent_and_received_are_payloads_times_peers_with_the_frames():
    meters = Lockstep(3).run(gather_and_sum)
    around = frames(Gather(b""), 3)[0], frames(Sum(torch.ones(300)), 3)[0]
    for rank, meter in enumerate(meters):
        gather, summed = meter.events
        assert gather.totals.payload == 1000 * (rank + 1)
        assert gather.totals.sent == 2000 * (rank + 1) + around[0]
        assert gather.totals.received == 6000 - 1000 * (rank + 1) + around[0]
        assert summed.totals.payload == 1200
        assert summed.totals.sent == summed.totals.received == 1600 + around[1]
        assert meter.ledger.by_cause["drift"] == summed.totals


def test_a_receive_counts_what_came():
    def worker(transport):
        meter = Meter(transport)
        tag = Tag("stage", 0)
        (meter.start(Send(b"12345", 1), tag) if transport.rank == 0 else meter.receive(0, tag)).finish()
        return meter.last

    sent, came = Lockstep(2).run(worker)
    assert (sent.kind, came.kind) == ("Send", "Receive")
    assert (sent.totals.payload, came.totals.payload) == (5, 0)
    assert (sent.totals.sent, sent.totals.received) == (came.totals.received, came.totals.sent)


def test_seconds_are_those_spent_in_finish_on_the_transports_own_clock():
    def worker(transport):
        meter = Meter(transport)
        pending = meter.start(Gather(bytes(1000)), Tag("plan", 0))
        transport.clock.advance(0.5)
        pending.finish()
        return meter.ledger.total.seconds, transport.clock.seconds

    for seconds, end in Lockstep(2, "8mbit/1s", step_seconds=0.0).run(worker):
        assert end > 2.0
        assert seconds == end - 0.5


def test_the_dense_reference_is_that_of_a_ring():
    def worker(transport):
        meter = Meter(transport)
        meter.note_dense(4000)
        meter.note_dense(4000, cause="copy")
        return meter.ledger

    for ledger in Lockstep(4).run(worker):
        assert ledger.total.dense_reference == 2 * 3 * 4000 // 4 * 2
        assert ledger.by_cause["copy"].dense_reference == 6000
    alone = Meter(Loopback())
    alone.note_dense(4000)
    assert alone.ledger.total.dense_reference == 0


def test_counting_goes_on_from_a_checkpoint():
    first = Meter(Loopback())
    first.start(Gather(b"123"), Tag("plan", 0)).finish()
    second = Meter(Loopback())
    second.load_state_dict(first.state_dict())
    second.start(Gather(b"4567"), Tag("plan", 1)).finish()
    assert second.ledger.total.payload == 7
    assert second.ledger.total.events == 2


def test_only_the_latest_events_are_kept_one_by_one():
    meter = Meter(Loopback(), history=2)
    for event in range(5):
        meter.start(Gather(b"1"), Tag("plan", event)).finish()
    assert [entry.tag.event for entry in meter.events] == [3, 4]
    assert meter.ledger.total.events == 5


def test_a_transport_of_the_bare_protocol_is_counted_without_frames():
    meter = Meter(Plain())
    meter.start(Gather(b"123"), Tag("plan", 0)).finish()
    assert (meter.rank, meter.size) == (0, 1)
    assert meter.ledger.total.payload == 3
    assert meter.ledger.total.sent == 0
    meter.abort("no word for it")
    meter.close()
    assert meter.transport.inner._closed == "the transport is closed"


def test_abort_and_close_reach_the_transport():
    meter = Meter(Loopback())
    meter.abort("enough")
    assert "enough" in meter.transport._closed
    other = Meter(Loopback())
    other.close()
    assert other.transport._closed == "the transport is closed"
