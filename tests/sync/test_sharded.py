"""Owners combine: every element has one, and nothing is lost on the way up or down."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sync.toy import Cluster, deliver, same
from torch import Tensor

from lowtide.codec import chain, dct, fp32, stat, sym2, top_k
from lowtide.sync import Method, Plan, Round
from lowtide.sync.combine import mean, mean_of_contributors
from lowtide.sync.exchange import Leg, Me, Outcome, gathered, sharded
from lowtide.sync.exchange.sharded import split
from lowtide.sync.outer import sgd
from lowtide.sync.residual import error_feedback
from lowtide.sync.signal import delta
from lowtide.sync.when import every
from lowtide.tensors import Entry, Grid, Layout, divisor, flat, tile, whole

OWNERS = range(1, 8)
SHAPES = st.lists(
    st.sampled_from([(64, 64), (100, 70), (130, 64), (5,), (1,), (20, 300), (70, 96), ()]), min_size=1, max_size=5
)
CHUNKERS = st.sampled_from([tile(), flat(100), divisor(16), whole()])


@settings(max_examples=60)
@given(SHAPES, CHUNKERS, st.integers(1, 9))
def test_every_element_has_exactly_one_owner(shapes, chunker, owners):
    grid = Layout.build([Entry(f"t{number}", shape) for number, shape in enumerate(shapes)], chunker).grid
    shards = split(grid, owners)
    assert len(shards) == owners
    index = torch.cat([shard.index for shard in shards])
    assert torch.equal(index.sort().values, torch.arange(grid.size))
    for shard in shards:
        assert shard.grid.size == len(shard.index)
        assert bool((shard.index.diff() > 0).all()), "positions must ascend"


@settings(max_examples=40)
@given(SHAPES, st.integers(1, 7))
def test_a_shard_knows_tensors_and_padding_as_the_whole_does(shapes, owners):
    layout = Layout.build([Entry(f"t{number}", shape) for number, shape in enumerate(shapes)], tile())
    grid = layout.grid
    inside = torch.ones(grid.size)
    layout.clear_padding(inside)
    for shard in split(grid, owners):
        mine, here = inside[shard.index], torch.ones(shard.grid.size)
        for group in shard.grid.groups:
            group.view(here)[group.edges] = group.mask.float()
            assert group.valid.tolist() == group.view(mine).sum(1).int().tolist()
            assert bool((group.owner.diff() >= 0).all())
        assert torch.equal(here, mine)


@pytest.mark.parametrize("owners", OWNERS)
def test_owners_have_nearly_equal_shares_where_there_are_tiles_enough(owners):
    grid = Layout.build([Entry("w", (64 * 10, 64 * 7))], tile()).grid
    sizes = [shard.grid.size for shard in split(grid, owners)]
    assert max(sizes) - min(sizes) <= 4096


GRID = Layout.build([Entry("a", (100, 70)), Entry("b", (64, 130)), Entry("c", (33,)), Entry("d", ())], tile()).grid


def event(
    exchange, signals: list[Tensor | None], memories: list[dict[str, Tensor]], number: int, grid: Grid = GRID
) -> list[Outcome]:
    """One event over a perfect network; memories are kept."""
    everyone = [Me(rank, len(signals), number, memory=dict(memory)) for rank, memory in enumerate(memories)]
    legs = [exchange.open(signal, grid, me) for signal, me in zip(signals, everyone, strict=True)]
    while True:
        inboxes = deliver([leg.message for leg in legs])
        answers = [
            exchange.advance(signal, grid, leg.carry, inbox, me)
            for signal, leg, inbox, me in zip(signals, legs, inboxes, everyone, strict=True)
        ]
        if not isinstance(answers[0], Leg):
            break
        legs = answers
    for memory, me in zip(memories, everyone, strict=True):
        memory.update(me.memory)
    return answers


def signals(number: int, seed: int) -> list[Tensor]:
    found = torch.randn(number, GRID.size, generator=torch.Generator().manual_seed(seed))
    for group in GRID.groups:
        for row in found:
            group.view(row)[group.edges] *= group.mask
    return list(found)


COARSE = chain(top_k(1 / 16), stat(16))


@pytest.mark.parametrize("replicas", OWNERS)
@pytest.mark.parametrize("combine", [mean(), mean_of_contributors()], ids=["mean", "contributors"])
def test_what_owners_were_sent_is_what_they_gave_out_and_still_owe(replicas, combine):
    exchange = sharded(chain(top_k(1 / 8), sym2()), COARSE, combine)
    memories: list[dict[str, Tensor]] = [{} for _ in range(replicas)]
    went_up, came_down = torch.zeros(GRID.size).double(), torch.zeros(GRID.size).double()
    for number in range(1, 6):
        outcomes = event(exchange, signals(replicas, number), memories, number)
        parts = [outcome.sent for outcome in outcomes]
        went_up += combine.block(parts, 0, GRID.size, torch.zeros(GRID.size))
        came_down += outcomes[0].dense()
    owed = torch.zeros(GRID.size)
    for shard, memory in zip(split(GRID, replicas), memories, strict=True):
        owed[shard.index] = memory["owed"]
    assert float(owed.abs().max()) > 0.1
    torch.testing.assert_close(came_down + owed, went_up, atol=1e-4, rtol=0)


@pytest.mark.parametrize("replicas", OWNERS)
def test_all_replicas_get_the_same_bits_in_ascending_positions(replicas):
    exchange = sharded(combine=mean_of_contributors())
    outcomes = event(exchange, signals(replicas, 1), [{} for _ in range(replicas)], 1)
    for outcome in outcomes:
        assert torch.equal(outcome.dense(), outcomes[0].dense())
        for part in (*outcome.parts, outcome.sent):
            assert bool((part.index.diff() > 0).all())
            assert int(part.index[-1]) < GRID.size


@pytest.mark.parametrize("replicas", OWNERS)
def test_with_nothing_lost_on_the_way_down_it_is_exactly_the_gathered_exchange(replicas):
    up = chain(dct(64), top_k(1 / 8), fp32())
    given_signals = signals(replicas, 3)
    for signal in given_signals:
        up.transform.forward_(signal, GRID)
    one = event(sharded(up, chain(dct(64)), mean_of_contributors()), given_signals, [{} for _ in range(replicas)], 1)
    other = event(gathered(up, mean_of_contributors()), given_signals, [{} for _ in range(replicas)], 1)
    assert torch.equal(one[0].dense(), other[0].dense())
    assert all(torch.equal(a.sent.dense(), b.sent.dense()) for a, b in zip(one, other, strict=True))


def test_a_replica_without_a_signal_still_serves_what_it_owns():
    exchange = sharded(chain(), chain(), mean())
    grid = Layout.build([Entry("a", (100, 70)), Entry("b", (33,))], exchange.chunker).grid
    first, second = torch.randn(2, grid.size)
    outcomes = event(exchange, [first, None, second], [{}, {}, {}], 1, grid)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.dense(), (first + second) / 2)
    assert outcomes[1].sent.weight == 0
    assert outcomes[1].sent.value.numel() == 0


def test_what_is_owed_stays_where_the_event_is_dropped():
    plan = Plan(
        when=every(1),
        signal=delta(),
        residual=error_feedback(0.9),
        exchange=sharded(chain(top_k(1 / 8)), COARSE),
        outer=sgd(0.5),
    )
    cluster = Cluster(Method("mine", (plan,)), 3).train(3)
    owed = [one.state.private["exchange.owed"].clone() for one in cluster.rows[0]]
    cluster.step += 1
    cluster.launch(cluster.rows[0])
    assert cluster.leg(cluster.rows[0])
    for one in cluster.rows[0]:
        one.drop()
    assert all(
        same(one.state.private["exchange.owed"], before) for one, before in zip(cluster.rows[0], owed, strict=True)
    )


@pytest.mark.parametrize("replicas", [1, 2, 5, 7])
def test_replicas_stay_one_model_with_fewer_tiles_than_owners(replicas):
    plan = Plan(
        when=every(2), signal=delta(), residual=error_feedback(0.9), exchange=sharded(), outer=sgd(0.8)
    )  # six tiles and four vectors
    cluster = Cluster(Method("mine", (plan,)), replicas)
    before = cluster.loss()
    assert cluster.train(8).alike()
    assert cluster.loss() < before


def test_what_comes_down_does_not_grow_with_the_number_of_replicas():
    exchange = sharded()
    received = {}
    for replicas in (2, 6):
        memories: list[dict[str, Tensor]] = [{} for _ in range(replicas)]
        grid = Layout.build([Entry("w", (64 * 12, 64 * 10))], tile()).grid
        me = Me(0, replicas, 1, memory=memories[0])
        leg = exchange.open(torch.randn(grid.size), grid, me)
        received[replicas] = len(leg.message.payloads[0]) * (replicas - 1)
    assert received[6] / 5 * 6 == pytest.approx(received[2] * 2, rel=0.1)


def test_what_owners_owe_is_paid_in_later_rounds():
    exchange = sharded(chain(top_k(1.0)), COARSE, mean())
    plan = Plan(when=every(2), signal=delta(), exchange=exchange, outer=sgd(1.0))
    cluster = Cluster(Method("mine", (plan,)), 3)
    row = cluster.rows[0]
    first, came = row[0].anchor.double(), torch.zeros(row[0].grid.size).double()

    def watch(row: list[Round]) -> None:
        for one, replica in zip(row, cluster.replicas, strict=True):
            came.add_(one.plan.signal.read(replica, one.layout, one.anchor, one.grid.zeros()) / 3)

    cluster.train(12, watch)
    owed = torch.zeros(row[0].grid.size)
    for shard, one in zip(split(row[0].grid, 3), row, strict=True):
        owed[shard.index] = one.state.private["exchange.owed"]
    assert float(owed.abs().max()) > 1e-5
    torch.testing.assert_close(first - row[0].anchor + owed, came, atol=1e-6, rtol=0)
