"""The halves of a round: numbers, proposals, what a drop undoes, what a sick replica gets."""

from __future__ import annotations

import math

import pytest
import torch
from tests.contract.test_methods import copied, every_method, everything
from tests.sync.toy import Cluster, same

from lowtide.sync import Method, Plan, Round
from lowtide.sync.exchange import gathered, summed
from lowtide.sync.methods import (
    ddp,
    decoupled,
    des_loc,
    diloco,
    eager,
    fda,
    local_sgd,
    powersgd,
    sparta,
    streaming_diloco,
)
from lowtide.sync.outer import sgd
from lowtide.sync.signal import delta
from lowtide.sync.when import every


def test_events_count_from_one_and_a_dropped_number_is_used_again():
    cluster = Cluster(diloco(period=2), 2)

    def drop(row: list[Round]) -> None:
        cluster.launch(row)
        for one in row:
            one.drop()

    cluster.train(8, drop)
    assert [(reports[0].event, reports[0].step) for reports in cluster.reports] == [(1, 2), (2, 4), (3, 6), (4, 8)]


def test_a_report_says_what_came_of_the_event():
    cluster = Cluster(diloco(period=2), 3).train(2)
    report = cluster.reports[0][1]
    assert (report.plan, report.event, report.step, report.ranks) == ("diloco.0", 1, 2, (0, 1, 2))
    assert (report.sick, report.closed) == (None, None)


def test_a_tag_names_plan_event_and_leg_and_binds_the_layout():
    cluster = Cluster(powersgd(), 2)
    tags = []

    def watch(row: list[Round]) -> None:
        cluster.launch(row)
        tags.append(row[0].tag)
        cluster.leg(row)
        tags.append(row[0].tag)
        for one in row:
            one.drop()

    cluster.train(1, watch)
    assert [(tag.plan, tag.event, tag.leg, tag.cause) for tag in tags] == [
        ("powersgd.0", 1, 0, "round"),
        ("powersgd.0", 1, 1, "round"),
    ]
    assert tags[0].identity == cluster.rounds[1][0].layout.identity
    assert sum(share for _, share in tags[0].groups) == pytest.approx(1.0)


def test_nothing_is_changed_before_the_commit():
    cluster = Cluster(decoupled(period=2), 2).train(3)
    cluster.step += 1
    row, before = cluster.rows[0], copied(everything(cluster))
    cluster.launch(row)
    assert not cluster.leg(row)
    after = everything(cluster)
    for rank in range(2):
        assert same(after[rank][:2], before[rank][:2])
        assert same(after[rank][2][3:], before[rank][2][3:])


def test_committing_before_the_event_is_decided_is_a_mistake_of_ours():
    cluster = Cluster(diloco(period=2), 2)
    cluster.launch(cluster.rows[0])
    with pytest.raises(AssertionError, match="before the event was decided"):
        cluster.rounds[0][0].commit(cluster.replicas[0])


def test_dropping_forgets_every_open_event():
    cluster = Cluster(eager(period=2), 2).train(4)
    row = cluster.rows[0]
    before = copied(everything(cluster))
    cluster.step += 1
    cluster.launch(row)
    assert [flight.event for flight in row[0].flights] == [2, 3]
    for one in row:
        one.drop()
    after = everything(cluster)
    assert all(not one.flights for one in row)
    assert all(
        same(one[2][3:], other[2][3:]) and one[2][1] == other[2][1] for one, other in zip(after, before, strict=True)
    )


def test_the_last_round_is_counted_from_the_last_agreement_not_from_a_dropped_launch():
    cluster = Cluster(diloco(period=4), 2).train(4)
    cluster.step = 8
    cluster.launch(cluster.rows[0])
    for one in cluster.rows[0]:
        one.drop()
    assert cluster.rounds[0][0].last_step == 4


def test_a_round_that_was_cut_short_steps_in_proportion():
    moves = []
    for scale in (1.0, 0.25, 7.0):
        cluster = Cluster(diloco(period=100), 2).train(4)
        before = cluster.rounds[0][0].anchor.clone()
        cluster.launch(cluster.rows[0], scale=scale)
        cluster.land(cluster.rows[0])
        moves.append(cluster.rounds[0][0].anchor - before)
    torch.testing.assert_close(moves[1], 0.25 * moves[0], atol=1e-7, rtol=0)
    assert same(moves[2], moves[0]), "a round is never stretched"


@every_method
def test_scratch_buffers_are_never_part_of_the_state_and_do_not_grow(case):
    cluster = case.cluster()
    counts = []
    for _ in range(2):
        cluster.train(12)
        mine = cluster.rounds[0]
        for one in mine:
            kept = [*one.state.shared.values(), *one.state.private.values()]
            kept += [
                buffer for flight in one.flights for buffer in (flight.signal, flight.snapshot) if buffer is not None
            ]
            spare = [buffer.data_ptr() for buffer in one.scratch.free]
            assert len(set(spare)) == len(spare), "one buffer was handed back twice"
            assert not {tensor.data_ptr() for tensor in kept if tensor.numel()} & set(spare)
        counts.append(sum(len(one.scratch.free) for one in mine))
    assert counts[0] == counts[1]


def poison(
    cluster: Cluster, rank: int, value: float = math.nan, name: str = "norm.bias", *, grad: bool = False
) -> None:
    parameter = dict(cluster.nets[rank].named_parameters())[name]
    (parameter.grad if grad else parameter.data)[1] = value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", [diloco(period=4), decoupled(period=4), local_sgd(period=4)], ids=lambda m: m.name)
def test_the_others_agree_as_if_a_sick_replica_had_not_been_there(method, value):
    three, two = Cluster(method, 3).train(3), Cluster(method, 2).train(3)
    for cluster in (three, two):
        cluster.step += 1
        cluster.gradients()
        for optimizer in cluster.optimizers:
            optimizer.step()
    poison(three, 2, value)
    kept = copied(three.rounds[2][0].state.private)
    for cluster in (three, two):
        cluster.due(cluster.rows[0])
    assert three.alike()
    assert same(three.parameters(), two.parameters())
    assert [report.sick for report in three.reports[0]] == [None, None, "norm.bias"]
    assert same(three.rounds[2][0].state.private, kept)


@pytest.mark.parametrize(
    "method", [diloco(period=2), decoupled(period=2), fda(theta=0.0), streaming_diloco(period=2, fragments=1, delay=0)],
    ids=lambda method: method.name,
)  # fmt: skip
def test_where_all_are_sick_nothing_is_agreed_and_all_go_back_to_the_anchor(method):
    cluster = Cluster(method, 2).train(2)
    anchor = cluster.rounds[0][0].anchor.clone()
    state = copied([one.state.shared for one in cluster.rows[0]])
    cluster.step += 2
    for rank in range(2):
        poison(cluster, rank)
    cluster.launch(cluster.rows[0])
    reports = cluster.land(cluster.rows[0])
    assert {report.closed for report in reports} == {"no replica had a finite signal"}
    assert {report.sick for report in reports} == {"norm.bias"}
    for mine, replica, shared in zip(cluster.rounds, cluster.replicas, state, strict=True):
        one = mine[0]
        live = replica.read("parameters", one.layout, one.scratch.take())
        assert torch.equal(live, anchor)
        assert all(same(one.state.shared[name], shared[name]) for name in shared if "exchange" not in name)


@pytest.mark.parametrize("method", [ddp(), powersgd()], ids=lambda method: method.name)
def test_where_all_gradients_are_sick_no_step_is_taken_and_replicas_stay_one(method):
    cluster = Cluster(method, 3).train(2)
    before = cluster.parameters()
    cluster.step += 1
    cluster.gradients()
    for rank, name in enumerate(["norm.bias", "first.weight", "second.bias"]):
        poison(cluster, rank, name=name, grad=True)
    cluster.due(cluster.rows[0])
    for optimizer in cluster.optimizers:
        optimizer.step()
    assert cluster.alike()
    assert same(cluster.parameters(), before)
    assert {report.closed for report in cluster.reports[-1]} == {"no replica had a finite signal"}


def test_eager_survives_parameters_that_turn_bad_after_the_launch():
    """Its rule reads the parameters of now, not only those that were sent."""
    cluster = Cluster(eager(period=2, momentum=0.5), 3).train(3)
    cluster.step += 1
    row = cluster.rows[0]
    poison(cluster, 1)
    cluster.due(row)
    assert bool(cluster.everyone().isfinite().all())
    assert all(bool(one.anchor.isfinite().all()) for one in row)
    cluster.train(6)
    assert [report.sick for report in cluster.reports[1]] == [None, "norm.bias", None]
    assert bool(cluster.everyone().isfinite().all())
    assert cluster.spread() < 0.05


def test_a_sick_replica_takes_the_mean_at_shared_positions_and_keeps_its_own_elsewhere():
    cluster = Cluster(sparta(density=0.25), 3)
    cluster.step = 1
    with torch.no_grad():
        for rank, net in enumerate(cluster.nets):
            for parameter in net.parameters():
                parameter.fill_(1.0 + rank)
    cluster.nets[2].first.weight.data[0, 0] = math.nan
    cluster.launch(cluster.rows[0])
    cluster.land(cluster.rows[0])
    values, counts = cluster.parameters(2).unique(return_counts=True)
    assert sorted(values.tolist())[:2] == [1.5, 3.0]
    assert int(counts[values == 1.5]) in range(13216 // 4 - 2, 13216 // 4 + 2)


@pytest.mark.parametrize(("method", "adam"), [(streaming_diloco(period=6), False), (des_loc(period=2), True)])
def test_a_replica_that_lost_everything_is_one_of_all_again(method, adam):
    cluster = Cluster(method, 3, adam=adam, lr=1e-2).train(6)
    for parameter in cluster.nets[1].parameters():
        parameter.data.fill_(math.nan)
    while not any(report.sick for reports in cluster.reports for report in reports):
        cluster.train(1) if not adam else cluster.due(cluster.rows[0])
    assert bool(cluster.everyone().isfinite().all())


def test_another_plan_moves_the_anchor_and_a_revert_goes_back_to_it():
    cluster = Cluster(diloco(period=50), 2).train(3)
    one, replica = cluster.rounds[0][0], cluster.replicas[0]
    one.adopt(replica)
    live = cluster.parameters()
    one.revert(replica)
    assert same(cluster.parameters(), live)
    cluster.train(1)
    poison(cluster, 0)
    one.revert(replica)
    assert same(cluster.parameters(), live)


def test_weights_scale_nothing_when_all_are_equal():
    plan = Plan(when=every(2), signal=delta(), exchange=summed(), outer=sgd(1.0))
    one, four = (Cluster(Method("mine", (plan,)), 2, weights=(w, w)).train(6) for w in (1.0, 4.0))
    assert same(one.parameters(), four.parameters())


def test_gathered_and_summed_means_are_one():
    plans = [
        Plan(when=every(2), signal=delta(), exchange=exchange, outer=sgd(0.5)) for exchange in (summed(), gathered())
    ]
    one, other = (Cluster(Method("mine", (plan,)), 3).train(8) for plan in plans)
    assert same(one.everyone(), other.everyone())


def test_the_rate_that_a_gate_sees_is_a_share_of_the_schedules_base():
    cluster = Cluster(fda(theta=1e9), 2)
    for optimizer in cluster.optimizers:
        optimizer.param_groups[0]["initial_lr"] = 0.2
    for one, replica in zip(cluster.rows[0], cluster.replicas, strict=True):
        one.start(replica, torch.device("cpu"))
        one.outgoing(replica, 1)
    assert cluster.rounds[0][0].flights[0].me.rate == pytest.approx(0.25)


@pytest.mark.parametrize(
    "method",
    [streaming_diloco(period=4, fragments=1, delay=1), fda(theta=0.0, check_every=3, delay=1)],
    ids=lambda method: method.name,
)
def test_a_sick_replica_takes_the_agreed_value_itself_whatever_the_merge_rule(method):
    cluster = Cluster(method, 3).train(2)
    row, poisoned = cluster.rows[0], []

    def once(_row: list[Round]) -> None:
        poison(cluster, 1)
        poisoned.append(cluster.step)

    while not poisoned:
        cluster.train(1, once)
    while row[1].flights[0].outcome is None:
        cluster.leg(row)
    row[1].commit(cluster.replicas[1])
    live = cluster.replicas[1].read("parameters", row[1].layout, row[1].scratch.take())
    assert bool(live.isfinite().all())
    assert torch.equal(live, row[1].anchor)
