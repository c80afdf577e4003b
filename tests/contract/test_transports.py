"""The laws of every transport: one table of worlds, one list of laws."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide.errors import AgreementError, ConfigError, LowtideError, PeerLostError, TransportError
from lowtide.messages import Gather, Group, Inbox, Scatter, Send, Sum, Tag
from lowtide.transport.loopback import Loopback
from lowtide.transport.meter import Costed, Meter
from lowtide.transport.process_group import connect
from lowtide.transport.simulated import Lockstep

Worker = Callable[[Any], Any]


def guarded(worker: Worker) -> Worker:
    """Errors are results here: every rank's own is compared."""

    def run(transport):
        try:
            return worker(transport)
        except LowtideError as error:
            return error
        finally:
            transport.close()

    return run


def loopback(size: int, worker: Worker) -> tuple:
    assert size == 1
    return (guarded(worker)(Loopback()),)


def simulated(size: int, worker: Worker) -> tuple:
    return Lockstep(size).run(guarded(worker))


def process_group(size: int, worker: Worker, timeout: float = 20.0) -> tuple:
    store, results = dist.HashStore(), [None] * size

    def rank_main(rank: int) -> None:
        results[rank] = guarded(worker)(connect(store, rank, size, timeout=timeout, startup=20.0))

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return tuple(results)


@dataclass(frozen=True)
class World:
    """A way to run one worker on `size` ranks."""

    run: Callable[[int, Worker], tuple]
    size: int

    def __call__(self, worker: Worker) -> tuple:
        return self.run(self.size, worker)


def world_id(world: World) -> str:
    return f"{world.run.__name__}-{world.size}"


ALONE = [World(loopback, 1), World(simulated, 1), World(process_group, 1)]
TOGETHER = [World(simulated, 2), World(process_group, 2), World(simulated, 3), World(process_group, 3)]
BOTH = [World(simulated, 3), World(process_group, 3)]
every_world = pytest.mark.parametrize("world", ALONE + TOGETHER, ids=world_id)
worlds_of_many = pytest.mark.parametrize("world", TOGETHER, ids=world_id)
worlds_of_three = pytest.mark.parametrize("world", BOTH, ids=world_id)


def tag(event: int = 0, **fields: Any) -> Tag:
    return Tag("plan", event, **fields)


def payload(rank: int, nbytes: int) -> bytes:
    return bytes([65 + rank]) * nbytes


@every_world
@pytest.mark.parametrize("nbytes", [(0, 0, 0), (1, 0, 3), (300, 70_000, 1), (1_500_000, 2_500_000, 500_000)], ids=str)
def test_gather_gives_all_payloads_by_rank(world, nbytes):
    inboxes = world(lambda t: t.start(Gather(payload(t.rank, nbytes[t.rank])), tag()).finish())
    expected = tuple(payload(rank, nbytes[rank]) for rank in range(world.size))
    assert inboxes == (Inbox(tuple(range(world.size)), expected),) * world.size


@every_world
def test_scatter_gives_each_rank_its_own_by_source(world):
    def worker(t):
        out = tuple(b"%d to %d" % (t.rank, peer) * (peer * t.rank) for peer in range(t.size))
        return t.start(Scatter(out), tag()).finish()

    for rank, inbox in enumerate(world(worker)):
        expected = tuple(b"%d to %d" % (source, rank) * (rank * source) for source in range(world.size))
        assert inbox == Inbox(tuple(range(world.size)), expected)


def drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 100
    return values.to(dtype)


@every_world
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (7, 11), (40_001,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_sum_adds_in_rank_order_bit_for_bit(world, shape, dtype):
    inboxes = world(lambda t: t.start(Sum(drawn(t.rank, shape, dtype)), tag()).finish())
    expected = drawn(0, shape, dtype)
    for rank in range(1, world.size):
        expected = expected + drawn(rank, shape, dtype)
    for inbox in inboxes:
        assert inbox.ranks == tuple(range(world.size))
        assert inbox.payloads == ()
        assert inbox.total.dtype == dtype
        assert torch.equal(inbox.total, expected)


@every_world
def test_sum_takes_a_strided_tensor_that_needs_gradients(world):
    def worker(t):
        tensor = drawn(t.rank, (6, 4), torch.float32).t()[1:].requires_grad_()
        return t.start(Sum(tensor), tag()).finish().total

    expected = torch.zeros(3, 6)
    for rank in range(world.size):
        expected += drawn(rank, (6, 4), torch.float32).t()[1:]
    for total in world(worker):
        assert torch.equal(total, expected)
        assert not total.requires_grad


@every_world
def test_the_sum_is_a_tensor_of_its_own(world):
    def worker(t):
        ours = torch.ones(5)
        first = t.start(Sum(ours), tag(0)).finish().total
        first.zero_()
        second = t.start(Sum(ours), tag(1)).finish().total
        return ours.sum().item(), second.sum().item()

    assert world(worker) == ((5.0, 5.0 * world.size),) * world.size


@every_world
def test_a_group_shares_among_its_members_only(world):
    def worker(t):
        pair = tuple(rank for rank in (t.rank // 2 * 2, t.rank // 2 * 2 + 1) if rank < t.size)
        return t.start(Group(payload(t.rank, 10), pair), tag()).finish()

    for rank, inbox in enumerate(world(worker)):
        pair = tuple(other for other in range(world.size) if other // 2 == rank // 2)
        assert inbox == Inbox(pair, tuple(payload(member, 10) for member in pair))


@worlds_of_many
@pytest.mark.parametrize("receive_first", [True, False])
def test_what_is_sent_is_received_in_order_both_ways_at_once(world, receive_first):
    def worker(t):
        above, below = (t.rank + 1) % t.size, (t.rank - 1) % t.size

        def receives():
            return [t.receive(below, tag(event)) for event in range(3)]

        early = receives() if receive_first else []
        sends = [t.start(Send(payload(t.rank, 100 * event), above), tag(event)) for event in range(3)]
        came = [pending.finish() for pending in early or receives()]
        return came, [pending.finish() for pending in sends]

    for rank, (came, sent) in enumerate(world(worker)):
        below = (rank - 1) % world.size
        assert came == [Inbox((below,), (payload(below, 100 * event),)) for event in range(3)]
        assert sent == [Inbox((rank,))] * 3


@every_world
def test_messages_may_be_finished_in_any_order(world):
    def worker(t):
        gathers = [t.start(Gather(payload(t.rank, event)), tag(event)) for event in range(5)]
        total = t.start(Sum(torch.full((3,), float(t.rank))), tag(5))
        return total.finish().total.tolist(), [pending.finish().payloads[0] for pending in reversed(gathers)]

    expected = [float(sum(range(world.size)))] * 3, [payload(0, event) for event in reversed(range(5))]
    assert world(worker) == (expected,) * world.size


DISAGREEMENTS = {
    "event": (Gather(b"a"), Tag("p", 3), Gather(b"a"), Tag("p", 4), "the event is 3 on ranks 0, 1; 4 on rank 2"),
    "leg": (Gather(b"a"), Tag("p", 3, 0), Gather(b"a"), Tag("p", 3, 1), "the leg is 0 on ranks 0, 1; 1 on rank 2"),
    "plan": (Gather(b"a"), Tag("p", 3), Gather(b"a"), Tag("q", 3), "the plan is 'p' on ranks 0, 1; 'q' on rank 2"),
    "identity": (Gather(b"a"), Tag("p", 3, 0, b"x"), Gather(b"a"), Tag("p", 3, 0, b"y"), "the identity"),
    "kind": (Gather(b"a"), Tag("p", 3), Sum(torch.ones(2)), Tag("p", 3), "Gather on ranks 0, 1; Sum on rank 2"),
    "numel": (Sum(torch.ones(2)), Tag("p", 3), Sum(torch.ones(3)), Tag("p", 3), "elements is 2 on ranks 0, 1; 3 on"),
    "dtype": (
        Sum(torch.ones(2)),
        Tag("p", 3),
        Sum(torch.ones(2, dtype=torch.int32)),
        Tag("p", 3),
        "the dtype is float32 on ranks 0, 1; int32 on rank 2",
    ),
    "members": (Group(b"a", (0, 1, 2)), Tag("p", 3), Group(b"a", (1, 2)), Tag("p", 3), None),
}


@worlds_of_three
@pytest.mark.parametrize("case", [name for name in DISAGREEMENTS if name != "members"])
def test_a_disagreement_is_the_same_error_on_every_rank(world, case):
    message, agreed, odd_message, odd, words = DISAGREEMENTS[case]

    def worker(t):
        return t.start(odd_message if t.rank == 2 else message, odd if t.rank == 2 else agreed).finish()

    errors = world(worker)
    assert [type(error) for error in errors] == [AgreementError] * 3
    assert len({str(error) for error in errors}) == 1
    assert words in str(errors[0])
    assert "hint: " in str(errors[0])


@worlds_of_three
def test_groups_that_do_not_name_the_same_members_are_refused(world):
    message, agreed, odd_message, odd, _ = DISAGREEMENTS["members"]

    def worker(t):
        return t.start(odd_message if t.rank == 2 else message, odd if t.rank == 2 else agreed).finish()

    errors = world(worker)
    assert isinstance(errors[1], AgreementError)
    assert "group members" in str(errors[1])
    assert all(isinstance(error, AgreementError | PeerLostError) for error in errors)


@worlds_of_many
def test_a_send_is_checked_against_its_receive(world):
    def worker(t):
        if t.rank == 0:
            t.start(Send(b"a", 1), tag(7)).finish()
        if t.rank == 1:
            t.receive(0, tag(8)).finish()
        return t.start(Gather(b""), tag(9)).finish()

    errors = world(worker)
    assert [type(error) for error in errors] == [AgreementError] * world.size
    assert "the event is 7 on rank 0; 8 on rank 1" in str(errors[1])


@worlds_of_many
def test_after_an_error_every_call_raises_it_again(world):
    def worker(t):
        with pytest.raises(AgreementError) as first:
            t.start(Gather(b""), tag(t.rank)).finish()
        again = []
        for call in (lambda: t.start(Gather(b""), tag(9)), lambda: t.receive((t.rank + 1) % t.size, tag(9))):
            with pytest.raises(AgreementError, match="the transport is broken since: ") as error:
                call()
            again.append(str(error.value).endswith(str(first.value)))
        return again

    assert world(worker) == ([True, True],) * world.size


@worlds_of_many
def test_an_abort_ends_the_others_with_its_reason_and_rank(world):
    def worker(t):
        t.start(Gather(b""), tag(0)).finish()
        if t.rank == 1:
            t.abort("ValueError: the loss is nan")
            with pytest.raises(LowtideError, match="the loss is nan"):
                t.start(Gather(b""), tag(1))
            return None
        return t.start(Gather(b""), tag(1)).finish()

    results = world(worker)
    for rank in set(range(world.size)) - {1}:
        assert isinstance(results[rank], PeerLostError)
        assert results[rank].ranks == (1,)
        assert "rank 1 stopped" in str(results[rank])
        assert "ValueError: the loss is nan" in str(results[rank])
    assert results[1] is None


@worlds_of_many
def test_a_rank_that_closed_early_is_named(world):
    def worker(t):
        rounds = 1 if t.rank == 1 else 2
        return [t.start(Gather(b""), tag(event)).finish() for event in range(rounds)]

    results = world(worker)
    for rank in set(range(world.size)) - {1}:
        assert isinstance(results[rank], PeerLostError)
        assert results[rank].ranks == (1,)
        assert "closed" in str(results[rank])
    assert len(results[1]) == 1


def test_ranks_that_wait_for_each_other_are_told_so():
    def worker(t):
        if t.rank == 0:
            return t.start(Gather(b""), tag(0)).finish()
        return t.receive(0, tag(5)).finish()

    for errors in (simulated(2, worker), process_group(2, worker, timeout=0.3)):
        assert [type(error) for error in errors] == [AgreementError] * 2
        assert "replicas wait for each other" in str(errors[0])
        assert "plan 'plan', event 0" in str(errors[0])
        assert "plan 'plan', event 5" in str(errors[0])


@every_world
def test_closing_on_an_unfinished_message_is_an_error_that_names_it(world):
    def worker(t):
        t.start(Gather(b""), Tag("late", 4, 1))
        with pytest.raises(TransportError, match="plan 'late', event 4, leg 1"):
            t.close()
        return True

    assert True in world(worker)


@every_world
def test_a_closed_transport_refuses_work_and_closes_again(world):
    def worker(t):
        t.start(Gather(b""), tag()).finish()
        t.close()
        t.close()
        with pytest.raises(TransportError, match="closed"):
            t.start(Gather(b""), tag())
        return True

    assert world(worker) == (True,) * world.size


@every_world
def test_a_message_is_finished_once(world):
    def worker(t):
        pending = t.start(Gather(b""), tag(3))
        pending.finish()
        with pytest.raises(TransportError, match="event 3, leg 0 was finished before"):
            pending.finish()
        return True

    assert world(worker) == (True,) * world.size


@every_world
def test_impossible_messages_are_refused_and_do_no_harm(world):
    def worker(t):
        bad = [
            (Send(b"", t.rank), f"cannot send to rank {t.rank}: this is rank {t.rank} of {t.size}"),
            (Send(b"", t.size), "cannot send to rank"),
            (Scatter((b"",) * (t.size + 1)), f"got {t.size + 1} for {t.size} ranks"),
            (Group(b"", ()), "group members must be ascending"),
            (Group(b"", (t.rank, t.size)), "group members must be ascending"),
            (Group(b"", (t.rank, t.rank)), "group members must be ascending"),
            (Group(b"", (-1, t.rank)), "group members must be ascending"),
        ]
        for message, words in bad:
            with pytest.raises(ConfigError, match=words):
                t.start(message, tag())
        with pytest.raises(ConfigError, match=f"cannot receive from rank {t.rank}"):
            t.receive(t.rank, tag())
        return t.start(Gather(b"well"), tag()).finish().payloads

    assert world(worker) == ((b"well",) * world.size,) * world.size


def several_kinds(t):
    meter = Meter(t)
    meter.start(Gather(payload(t.rank, 1000 * (t.rank + 1))), tag(0)).finish()
    meter.start(Sum(torch.ones(1001)), tag(1, cause="drift")).finish()
    meter.start(Scatter(tuple(payload(t.rank, 10 * peer) for peer in range(t.size))), tag(2)).finish()
    meter.start(Group(payload(t.rank, 7), tuple(range(t.size))), tag(3)).finish()
    if t.size > 1 and t.rank < 2:
        (meter.start(Send(b"12345", 1), tag(4)) if t.rank == 0 else meter.receive(0, tag(4))).finish()
    meter.note_dense(4004)
    return meter.ledger


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_simulator_counts_the_bytes_of_real_connections(size):
    ledgers = [[counts(ledger) for ledger in run(size, several_kinds)] for run in (simulated, process_group)]
    assert ledgers[0] == ledgers[1]


def counts(ledger):
    parts = {"total": ledger.total, **ledger.by_cause}
    return {name: {**part.to_dict(), "seconds": 0} for name, part in parts.items()}


@every_world
def test_what_is_sent_is_what_is_received(world):
    ledgers = world(several_kinds)
    assert sum(ledger.total.sent for ledger in ledgers) == sum(ledger.total.received for ledger in ledgers)
    assert all(ledger.total.seconds >= 0 for ledger in ledgers)
    assert (ledgers[0].total.sent > 0) == (world.size > 1)


@every_world
def test_every_transport_says_what_it_costs(world):
    assert world(lambda t: isinstance(t, Costed)) == (True,) * world.size


def test_the_sum_of_the_simulator_is_that_of_the_process_group_bit_for_bit():
    def worker(t):
        return t.start(Sum(drawn(t.rank, (1013,), torch.float32)), tag()).finish().total

    assert all(torch.equal(*pair) for pair in zip(simulated(3, worker), process_group(3, worker), strict=True))
