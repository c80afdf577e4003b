"""Many to one: the closed forms, weights, ranges and clipping."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sync.toy import Cluster

from lowtide.codec import Coefficients, chain, top_k
from lowtide.sync import Method, Plan
from lowtide.sync.combine import clip_to_median, mean, mean_of_contributors, sign_of_mean
from lowtide.sync.exchange import gathered, sharded, summed
from lowtide.sync.methods import decoupled, fda, powersgd, streaming_diloco
from lowtide.sync.outer import sgd
from lowtide.sync.signal import delta
from lowtide.sync.when import every

SIZE = 40


@st.composite
def replicas(draw) -> list[Coefficients]:
    """One to five payloads, sparse or dense, of all weights."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        weight = draw(st.sampled_from([1.0, 1.0, 0.5, 3.0, 100.0]))
        if draw(st.booleans()):
            found.append(Coefficients(torch.randn(SIZE, generator=generator), None, SIZE, weight))
            continue
        count = draw(st.integers(0, SIZE))
        index = torch.randperm(SIZE, generator=generator)[:count].sort().values
        found.append(Coefficients(torch.randn(count, generator=generator) + number, index, SIZE, weight))
    return found


def whole(rule, parts) -> torch.Tensor:
    return rule.block(rule.prepare(parts), 0, SIZE, torch.empty(SIZE))


def sent(part: Coefficients) -> torch.Tensor:
    if part.index is None:
        return torch.ones(SIZE, dtype=torch.float64)
    return torch.zeros(SIZE, dtype=torch.float64).index_fill(0, part.index, 1.0)


@given(replicas())
def test_the_mean_is_the_weighted_sum_over_all_weights(parts):
    total = sum(part.weight * part.dense().double() for part in parts)
    expected = total / sum(part.weight for part in parts)
    torch.testing.assert_close(whole(mean(), parts).double(), expected, atol=1e-5, rtol=1e-5)


@given(replicas())
def test_the_mean_of_contributors_divides_by_the_weights_of_those_who_sent(parts):
    total = sum(part.weight * part.dense().double() for part in parts)
    weight = sum(part.weight * sent(part) for part in parts)
    expected = torch.where(weight > 0, total / weight.clamp(min=1e-30), 0.0)
    torch.testing.assert_close(whole(mean_of_contributors(), parts).double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=40)
@given(replicas(), st.lists(st.integers(0, SIZE), max_size=3))
def test_a_rule_gives_the_same_bits_whatever_the_ranges(parts, cuts):
    bounds = [0, *sorted(cuts), SIZE]
    for rule in (mean(), mean_of_contributors(), clip_to_median(), sign_of_mean()):
        prepared = rule.prepare(parts)
        pieces = [rule.block(prepared, start, stop, torch.empty(stop - start)) for start, stop in pairwise(bounds)]
        assert torch.equal(torch.cat(pieces), whole(rule, parts))


def test_values_are_added_in_the_order_of_the_ranks():
    values = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    forward = [Coefficients(value, None, 1) for value in values]
    assert float(mean().block(forward, 0, 1, torch.empty(1))) == 0.0
    backward = [forward[0], forward[2], forward[1]]
    assert float(mean().block(backward, 0, 1, torch.empty(1))) == pytest.approx(1 / 3)


@given(replicas())
def test_the_scale_of_all_weights_means_nothing(parts):
    halves = [Coefficients(p.value, p.index, p.size, p.weight / 2) for p in parts]
    for rule in (mean(), mean_of_contributors()):
        torch.testing.assert_close(whole(rule, parts), whole(rule, halves))


@given(replicas())
def test_clipping_leaves_no_payload_over_the_median_norm_and_no_direction_changed(parts):
    norms = torch.stack([part.value.double().norm() for part in parts])
    median = float(norms.quantile(0.5))
    clipped = clip_to_median().prepare(parts)
    assert len(clipped) == len(parts)
    for before, after in zip(parts, clipped, strict=True):
        norm = float(before.value.double().norm())
        assert float(after.value.double().norm()) <= median * (1 + 1e-6) or len(parts) == 1
        if norm <= median or len(parts) == 1:
            assert torch.equal(after.value, before.value)
        else:
            torch.testing.assert_close(after.value, before.value * (median / norm))
        assert after.weight == before.weight


def test_one_huge_replica_cannot_move_a_clipped_mean_far():
    generator = torch.Generator().manual_seed(0)
    usual = [Coefficients(torch.randn(SIZE, generator=generator), None, SIZE) for _ in range(4)]
    huge = Coefficients(1e6 * torch.randn(SIZE, generator=generator), None, SIZE)
    plain, clipped = whole(mean(), [*usual, huge]), whole(clip_to_median(mean()), [*usual, huge])
    assert float(plain.norm()) > 1e5
    assert float(clipped.norm()) < 10


def test_the_sign_of_the_mean_is_a_weighted_vote():
    votes = [Coefficients(torch.tensor([1.0, -1.0, 0.0]), None, 3, w) for w in (1.0, 1.0)]
    against = Coefficients(torch.tensor([-3.0, 1.0, 0.0]), None, 3, 1.0)
    assert sign_of_mean().block([*votes, against], 0, 3, torch.empty(3)).tolist() == [-1.0, -1.0, 0.0]


def test_nobody_gives_zero():
    for rule in (mean(), mean_of_contributors(), sign_of_mean(), clip_to_median()):
        assert torch.equal(whole(rule, []), torch.zeros(SIZE))


WEIGHTS = (1.0, 2.0, 5.0)


@pytest.mark.parametrize("exchange", [summed(), gathered(), sharded(chain(), chain())], ids=["sum", "gather", "shard"])
def test_weights_reach_the_mean_through_every_exchange(exchange):
    plan = Plan(when=every(3), signal=delta(), exchange=exchange, outer=sgd(1.0))
    apart = Cluster(Method("apart", (Plan(when=every(9), signal=delta(), exchange=summed(), outer=sgd()),)), 3)
    apart.train(3)
    expected = sum(w * x.double() for w, x in zip(WEIGHTS, apart.everyone(), strict=True)) / sum(WEIGHTS)
    agreed = Cluster(Method("mine", (plan,)), 3, weights=WEIGHTS).train(3)
    torch.testing.assert_close(agreed.parameters().double(), expected, atol=1e-6, rtol=0)
    assert agreed.alike()


def test_weights_reach_the_mean_of_contributors():
    plan = Plan(
        when=every(3),
        signal=delta(),
        exchange=gathered(chain(top_k(1 / 8)), mean_of_contributors()),
        outer=sgd(1.0),
    )
    cluster = Cluster(Method("mine", (plan,)), 3, weights=WEIGHTS)
    apart = Cluster(Method("mine", (plan,)), 3, weights=WEIGHTS)
    cluster.train(3)
    apart.train(2)
    apart.step += 1
    apart.gradients()
    for optimizer in apart.optimizers:
        optimizer.step()
    row = apart.rows[0]
    signals = [
        r.plan.signal.read(x, r.layout, r.anchor, r.grid.zeros()) for r, x in zip(row, apart.replicas, strict=True)
    ]
    index = [row[0].plan.exchange.codec.select.pick(s, row[0].grid, None, mixed=False) for s in signals]
    body = row[0].grid.body
    total, weight = torch.zeros(body).double(), torch.zeros(body).double()
    for signal, places, w in zip(signals, index, WEIGHTS, strict=True):
        total[places] += w * signal[places].double()
        weight[places] += w
    expected = row[0].anchor[:body] - (total / weight.clamp(min=1e-9)).float()
    torch.testing.assert_close(cluster.rounds[0][0].anchor[:body], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "method",
    [decoupled(period=3), powersgd(), streaming_diloco(period=6), fda(theta=0.0)],
    ids=lambda method: method.name,
)
def test_a_replica_of_almost_no_weight_changes_almost_nothing(method):
    most = Cluster(method, 3, weights=(1.0, 1.0, 1e-6)).train(6)
    two = Cluster(method, 2, weights=(1.0, 1.0)).train(6)
    if method.name == "decoupled":  # a position that only the light replica sent is its own value, at full height
        assert most.alike()
        return
    torch.testing.assert_close(most.parameters(), two.parameters(), atol=1e-5, rtol=0)
