"""A cheap question before the costly exchange: how all decide alike, and what an answer changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.contract.test_methods import copied, everything
from tests.sync.toy import Cluster, same

from lowtide.codec import chain, top_k
from lowtide.errors import PayloadError
from lowtide.messages import Gather, Inbox, Sum
from lowtide.sync import Method, Plan
from lowtide.sync.combine import mean_of_contributors
from lowtide.sync.exchange import Closed, Leg, Me, gate, gathered, low_rank, sharded, summed
from lowtide.sync.methods import fda
from lowtide.sync.outer import sgd
from lowtide.sync.residual import error_feedback
from lowtide.sync.signal import delta
from lowtide.sync.spread import estimator
from lowtide.sync.trigger import trigger
from lowtide.sync.when import every
from lowtide.tensors import Entry, Layout, whole

GRID = Layout.build([Entry("w", (70, 96)), Entry("b", (5,))], whole()).grid


def gated(theta=1.0, then=None, kind: str = "norm"):
    return gate(estimator(kind), trigger(theta), then or summed())


def numbers(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def asked(exchange, payloads: list[bytes], **about) -> tuple[object, Me]:
    """The answer of replica 0 to everybody's numbers."""
    me = Me(0, len(payloads), 1, **({"step": 5} | about))
    me.memory.update(exchange.init(GRID, torch.device("cpu")))
    signal = torch.ones(GRID.size)
    leg = exchange.open(signal, GRID, me)
    assert isinstance(leg.message, Gather)
    assert leg.cause == "monitor"
    return exchange.advance(signal, GRID, leg.carry, Inbox(tuple(range(len(payloads))), tuple(payloads)), me), me


def test_a_spread_within_the_bound_closes_the_event():
    answer, _ = asked(gated(1.0), [numbers(0.5), numbers(1.5)])
    assert isinstance(answer, Closed)
    assert answer.reason == "spread 1 is within the bound"


def test_a_spread_over_the_bound_opens_the_costly_exchange():
    answer, _ = asked(gated(1.0), [numbers(0.5), numbers(1.6)])
    assert isinstance(answer, Leg)
    assert isinstance(answer.message, Sum)
    assert answer.cause == "round"


def test_the_last_event_of_a_run_passes_whatever_the_bound():
    answer, _ = asked(gated(math.inf), [numbers(0.0), numbers(0.0)], last=True)
    assert isinstance(answer, Leg)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_replica_that_is_not_finite_opens_the_gate_for_the_others_model(bad):
    answer, _ = asked(gated(1e9), [numbers(0.0), numbers(bad)])
    assert isinstance(answer, Leg)


def test_a_replica_without_a_signal_says_so_with_its_numbers():
    exchange = gated(kind="linear")
    me = Me(1, 2, 1, memory=exchange.init(GRID, torch.device("cpu")))
    leg = exchange.open(None, GRID, me)
    assert np.isnan(np.frombuffer(leg.message.payload, "<f4")).all()


@pytest.mark.parametrize("payload", [b"", b"\0" * 3, b"\0" * 8], ids=len)
def test_numbers_of_another_length_are_refused(payload):
    with pytest.raises(PayloadError, match=f"rank 1 sent {len(payload)} bytes of spread, expected 4"):
        asked(gated(), [numbers(1.0), payload])


def test_all_decide_alike_because_all_add_the_same_bytes_in_the_same_order():
    """Numbers whose sum depends on the order of additions, at a bound that lies between the two sums."""
    payloads = [numbers(1e16), numbers(1.0), numbers(1.0), numbers(1.0)]
    between = float(np.frombuffer(b"".join(payloads), "<f4").astype(np.float64).mean())
    decisions = set()
    for rank in range(4):
        exchange = gated(between)
        me = Me(rank, 4, 1, step=5, memory=exchange.init(GRID, torch.device("cpu")))
        leg = exchange.open(torch.randn(GRID.size), GRID, me)
        inbox = Inbox((0, 1, 2, 3), tuple(payloads))
        decisions.add(type(exchange.advance(torch.ones(GRID.size), GRID, leg.carry, inbox, me)).__name__)
    assert len(decisions) == 1


def test_a_closed_event_changes_nothing_but_its_number():
    cluster = Cluster(fda(theta=math.inf), 3).train(5)
    before = copied(everything(cluster))
    cluster.step += 1
    cluster.due(cluster.rows[0])
    assert cluster.reports[-1][0].closed is not None
    for now, then in zip(everything(cluster), before, strict=True):
        assert same(now[:2], then[:2])
        assert same(now[2][1:], then[2][1:])


EXCHANGES = [
    summed(),
    gathered(chain(top_k(1 / 4)), mean_of_contributors()),
    sharded(chain(top_k(1 / 4)), chain(top_k(1 / 2))),
    low_rank(8),
]


@pytest.mark.parametrize("then", EXCHANGES, ids=lambda then: type(then).__name__)
@pytest.mark.parametrize("kind", ["linear", "norm", "sketch", "max_norm", "exact"])
def test_any_exchange_can_stand_behind_any_estimator(then, kind):
    exchange = gate(estimator(kind), trigger("interval:3"), then)
    plan = Plan(when=every(1), signal=delta(), residual=error_feedback(1.0), exchange=exchange, outer=sgd(1.0))
    cluster = Cluster(Method("mine", (plan,)), 3).train(9)
    agreed = [reports[0].step for reports in cluster.reports if reports[0].closed is None]
    assert agreed[0] == 3
    assert 2 <= len(agreed) <= 4
    while cluster.reports[-1][0].closed is not None:
        cluster.train(1)
    assert cluster.alike()


def test_the_direction_is_that_of_the_last_common_move_and_of_length_one():
    cluster = Cluster(fda(theta=0.0), 3).train(2)
    before = cluster.rounds[0][0].anchor.clone()
    cluster.train(1)
    one = cluster.rounds[0][0]
    move, direction = one.anchor - before, one.state.shared["exchange.direction"]
    assert float(direction.norm()) == pytest.approx(1.0, rel=1e-5)
    assert abs(float(direction @ move)) == pytest.approx(float(move.norm()), rel=1e-3)
    assert all(same(mine[0].state.shared["exchange.direction"], direction) for mine in cluster.rounds)


def test_the_first_direction_is_a_seeded_draw_of_length_one():
    exchange = gated(kind="linear")
    first, again = (exchange.init(GRID, torch.device("cpu"))["direction"] for _ in range(2))
    assert torch.equal(first, again)
    assert float(first.norm()) == pytest.approx(1.0, rel=1e-5)


def test_only_opened_events_count_as_rounds_and_cost_bytes():
    cluster = Cluster(fda(theta="interval:4", estimator="norm"), 3).train(12)
    memory = {name: float(value) for name, value in cluster.rounds[0][0].state.shared.items() if value.numel() == 1}
    agreed = [reports[0].step for reports in cluster.reports if reports[0].closed is None]
    assert memory["exchange.last"] == agreed[-1]
    assert memory["exchange.spent"] == len(agreed) * 4 * 13216


def test_what_a_gate_remembers_is_shared_by_all():
    cluster = Cluster(fda(theta="interval:4"), 3).train(9)
    rows = [one.state.shared for one in cluster.rows[0]]
    names = {"exchange.theta", "exchange.last", "exchange.spent", "exchange.direction"}
    assert names <= set(rows[0])
    assert all(same(row, rows[0]) for row in rows)
