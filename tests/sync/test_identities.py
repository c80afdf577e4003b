"""The eighteen identities between methods: two ways to say one thing.

"exactly" means bit for bit; elsewhere the tolerance stands at the top, with what causes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from tests.sync.toy import MATRICES, SIZE, VECTORS, Cluster, same
from torch import Tensor

from lowtide.codec import chain, dct, sym2, top_k
from lowtide.sync import Method, Plan, Round
from lowtide.sync.combine import mean_of_contributors
from lowtide.sync.exchange import gathered, low_rank
from lowtide.sync.methods import (
    ddp,
    decoupled,
    demo,
    des_loc,
    diloco,
    eager,
    fda,
    local_sgd,
    muloco,
    noloco,
    powersgd,
    sparseloco,
    sparta,
    streaming_diloco,
)
from lowtide.sync.outer import Rule, Seen, heavy_ball, inner, sgd
from lowtide.sync.residual import error_feedback, momentum
from lowtide.sync.signal import delta, gradient
from lowtide.sync.when import every
from lowtide.tensors import divisor

ROUNDING = {"atol": 2e-6, "rtol": 0.0}  # parameters of size 0.1 after a few dozen additions in fp32
TRANSFORMED = {"atol": 1e-5, "rtol": 0.0}  # the same through an orthonormal transform and back, every round
STEPS = 12


def trained(method: Method, size: int = 3, steps: int = STEPS, **options) -> Cluster:
    return Cluster(method, size, **options).train(steps)


def alone(steps: int = STEPS, *, adam: bool = False, lr: float = 0.05) -> Tensor:
    """One replica's plain training."""
    return Cluster(ddp(), 1, adam=adam, lr=lr).train(steps).parameters()


def method(plan: Plan) -> Method:
    return Method("mine", (plan,))


def close(one: Cluster, other: Cluster, tolerance: dict[str, float]) -> None:
    for rank in range(one.size):
        torch.testing.assert_close(one.parameters(rank), other.parameters(rank), **tolerance)


def equal(one: Cluster, other: Cluster) -> None:
    assert all(same(one.parameters(rank), other.parameters(rank)) for rank in range(one.size))


def test_1_local_sgd_is_exactly_diloco_with_rate_1_and_no_momentum():
    equal(trained(local_sgd(period=4)), trained(diloco(period=4, outer_lr=1.0, momentum=0.0)))


@pytest.mark.parametrize("adam", [False, True])
def test_2_diloco_of_one_replica_with_rate_1_and_no_momentum_is_plain_training(adam):
    lr = 1e-3 if adam else 0.05
    cluster = trained(diloco(period=4, outer_lr=1.0, momentum=0.0), size=1, adam=adam, lr=lr)
    torch.testing.assert_close(cluster.parameters(), alone(adam=adam, lr=lr), **ROUNDING)


@pytest.mark.parametrize("feedback", [0.0, 0.9, 1.0])
def test_3_sparseloco_at_full_density_without_quantiser_is_exactly_diloco_without_momentum(feedback):
    sparse = trained(sparseloco(period=4, density=1.0, bits=32, feedback=feedback, outer_lr=0.6))
    equal(sparse, trained(diloco(period=4, outer_lr=0.6, momentum=0.0)))
    assert all(not one.state.private["residual"].any() for mine in sparse.rounds for one in mine)


@pytest.mark.parametrize("density", [1 / 128, 1 / 8, 1.0])
def test_4_the_authors_rule_on_one_replica_is_diloco_whatever_is_sent(density):
    published = decoupled(period=4, preset="authors", density=density, outer_lr=0.5, feedback=0.8)
    close(trained(published, size=1), trained(diloco(period=4, outer_lr=0.5, momentum=0.8), size=1), TRANSFORMED)


@dataclass(frozen=True)
class Synced(Rule):
    """The authors' rule with its direct term averaged: all of the momentum is common, so it says the mean delta."""

    memory: tuple[str, ...] = ("before",)
    lr: float = 0.5
    beta: float = 0.8

    def step(self, combined: Tensor, seen: Seen) -> Tensor:
        assert seen.anchor is not None
        fresh = combined - self.beta * seen.memory["before"]
        seen.memory["before"].copy_(combined)
        return seen.anchor.sub_(fresh + self.beta * combined, alpha=self.lr)


def test_5_the_authors_rule_with_all_of_it_synced_is_diloco():
    codec = chain(dct(64), top_k(1.0), chunker=divisor(64))
    plan = Plan(
        when=every(4),
        signal=delta(),
        residual=momentum(0.8),
        exchange=gathered(codec, mean_of_contributors()),
        outer=Synced(),
    )
    close(trained(method(plan)), trained(diloco(period=4, outer_lr=0.5, momentum=0.8)), TRANSFORMED)


def test_6_the_authors_rule_drifts_from_the_first_round_on_even_when_all_is_sent():
    drifting = trained(decoupled(period=4, preset="authors", density=1.0), steps=4)
    assert len(drifting.reports) == 1
    assert drifting.spread() > 1e-5


@pytest.mark.parametrize("preset", [None, "nesterov"])
def test_6_the_default_never_drifts(preset):
    cluster = Cluster(decoupled(period=4, preset=preset), 3)
    for _ in range(5):
        assert cluster.train(4).alike()


def test_7_decoupled_is_exactly_sparseloco_with_a_transform():
    plan = Plan(
        when=every(4),
        signal=delta(),
        residual=error_feedback(0.9),
        exchange=gathered(chain(dct(64), top_k(1 / 32), sym2()), mean_of_contributors()),
        outer=sgd(0.8),
    )
    equal(trained(decoupled(period=4)), trained(method(plan)))


def test_7_decoupled_without_a_transform_is_exactly_sparseloco():
    options = {"period": 4, "density": 1 / 16, "bits": 8, "feedback": 0.7, "outer_lr": 0.9}
    equal(trained(decoupled(transform="none", **options)), trained(sparseloco(**options)))


@pytest.mark.parametrize("feedback", [0.0, 0.999])
def test_8_demo_at_full_density_without_sign_is_exactly_sgd_on_the_mean_gradient(feedback):
    cluster = trained(demo(density=1.0, feedback=feedback, transform="none", sign=False))
    equal(cluster, trained(ddp()))
    assert all(not one.state.private["residual"].any() for mine in cluster.rounds for one in mine)


def test_8_demo_that_sends_every_coefficient_is_sgd_on_the_mean_gradient():
    exchange = gathered(chain(dct(64)), mean_of_contributors())
    plan = Plan(
        when=every(1), signal=gradient(), residual=error_feedback(0.999), exchange=exchange, outer=inner(sign=False)
    )
    cluster = trained(method(plan))
    close(cluster, trained(ddp()), TRANSFORMED)
    assert all(not one.state.private["residual"].any() for mine in cluster.rounds for one in mine)


def test_9_streaming_of_one_fragment_at_once_in_fp32_is_exactly_diloco():
    plain = streaming_diloco(period=4, fragments=1, delay=0, alpha=0.0, outer_lr=0.7, momentum=0.6, bits=32)
    equal(trained(plain), trained(diloco(period=4, outer_lr=0.7, momentum=0.6)))


@pytest.mark.parametrize("delay", [0, 1])
def test_9_streaming_that_keeps_all_of_its_own_is_exactly_training_apart(delay):
    cluster = trained(streaming_diloco(period=6, fragments=3, delay=delay, alpha=1.0))
    apart = trained(local_sgd(period=10**6))
    equal(cluster, apart)
    assert len({float(cluster.parameters(rank).sum()) for rank in range(3)}) == 3


def test_10_eager_on_one_replica_is_diloco_on_one_replica():
    options = {"period": 4, "outer_lr": 0.7, "momentum": 0.6}
    close(trained(eager(**options), size=1), trained(diloco(**options), size=1), ROUNDING)


@pytest.mark.parametrize("pull", [0.0, 0.4, None])
def test_11_noloco_in_one_group_from_equal_anchors_is_heavy_ball_diloco(pull):
    plan = Plan(when=every(4), signal=delta(), exchange=gathered(), outer=heavy_ball(0.7, 0.5))
    gossip = trained(noloco(period=4, group=3, outer_lr=0.7, momentum=0.5, pull=pull))
    close(gossip, trained(method(plan)), ROUNDING)
    assert gossip.alike()


def test_12_sparta_of_everything_every_h_steps_is_local_sgd():
    close(trained(sparta(density=1.0, period=4)), trained(local_sgd(period=4)), ROUNDING)


def test_13_des_loc_on_one_clock_is_local_sgd_with_averaged_moments():
    cluster = trained(des_loc(period=4, first_period=4, second_period=4), adam=True, lr=1e-2)
    apart = Cluster(local_sgd(period=10**6), 3, adam=True, lr=1e-2)
    for _ in range(STEPS // 4):
        apart.train(4)
        average_everything(apart)
    close(cluster, apart, ROUNDING)


def average_everything(cluster: Cluster) -> None:
    """Parameters and both moments become their mean on all replicas."""
    rows = list(zip(*(net.parameters() for net in cluster.nets), strict=True))
    with torch.no_grad():
        for row in rows:
            states = [optimizer.state[p] for p, optimizer in zip(row, cluster.optimizers, strict=True)]
            for same_place in (row, *([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq"))):
                mean = torch.stack([tensor.detach() for tensor in same_place]).mean(0)
                for tensor in same_place:
                    tensor.copy_(mean)


@pytest.mark.parametrize("rank", [70, 1000])
def test_14_powersgd_of_full_rank_is_the_mean_gradient(rank):
    close(trained(powersgd(rank=rank), lr=0.5), trained(ddp(), lr=0.5), TRANSFORMED)


def test_14_powersgd_of_low_rank_is_not():
    low, dense = trained(powersgd(rank=1), lr=0.5), trained(ddp(), lr=0.5)
    assert not torch.allclose(low.parameters(), dense.parameters(), **TRANSFORMED)


@pytest.mark.parametrize("beta", [1.0, 0.9, 0.3])
@pytest.mark.parametrize(
    "exchange", [gathered(chain(dct(64), top_k(1 / 16), sym2())), low_rank(2)], ids=["dct", "rank"]
)
def test_16_what_is_kept_and_what_was_sent_is_what_came_in(beta, exchange):
    plan = Plan(when=every(1), signal=gradient(), residual=error_feedback(beta), exchange=exchange, outer=inner())
    cluster = Cluster(method(plan), 2)
    one = cluster.rounds[0][0]
    decay = torch.full((one.grid.size,), beta).double()
    decay[one.grid.body :] = 1.0  # the tail forgets nothing
    came, went = torch.zeros_like(decay), torch.zeros_like(decay)

    def watch(row: list[Round]) -> None:
        nonlocal came, went
        signal = one.plan.signal.read(cluster.replicas[0], one.layout, None, one.grid.zeros())
        came = decay * came + exchange.transform.forward_(signal, one.grid)
        cluster.launch(row)
        while cluster.leg(row):
            pass
        went = decay * went + one.flights[0].outcome.sent.dense()
        for each in row:
            each.drop()

    cluster.train(20, watch)
    kept = one.state.private["residual"]
    assert float((came - went).norm()) > 1e-3, "everything was sent: the law was not tried"
    torch.testing.assert_close(kept + went, came, atol=1e-5 * float(came.abs().max()), rtol=0)


@pytest.mark.parametrize("beta", [1.0, 0.9])
def test_16_a_momentum_that_writes_back_keeps_what_all_agreed_on(beta):
    plan = Plan(
        when=every(2),
        signal=delta(),
        residual=momentum(beta),
        exchange=gathered(chain(top_k(1 / 16))),
        outer=sgd(0.5),
    )
    cluster = Cluster(method(plan), 2).train(3)
    one = cluster.rounds[0][0]
    inputs, sent = [], []

    def watch(row: list[Round]) -> None:
        cluster.launch(row)
        cluster.leg(row)
        inputs.extend(each.flights[0].signal.clone() for each in row)
        sent.extend(each.flights[0].outcome.sent.dense() for each in row)
        for each in row:
            each.drop()

    cluster.train(1, watch)
    agreed = (sent[0] + sent[1]) / 2
    torch.testing.assert_close(one.state.private["residual"], inputs[0] - sent[0] + agreed)
    assert float((agreed - sent[0]).abs().max()) > 1e-5


def first_messages(method: Method, size: int = 2, **options) -> list[int]:
    """Bytes of each leg of the first event, of replica 0."""
    cluster = Cluster(method, size, **options)
    while not cluster.sent:
        cluster.train(1)
    first = cluster.sent[0]
    return [each[4][0] for each in cluster.sent if each[:2] == first[:2]]


HEADER, SECTION = 64, 24
TAIL = sum(VECTORS)  # int8 with an fp32 scale a vector


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (ddp(), [4 * SIZE + 4]),
        (local_sgd(period=2), [4 * SIZE + 4]),
        (diloco(period=2), [4 * SIZE + 4]),
        (muloco(period=2), [4 * SIZE + 4]),
        (eager(period=2), [4 * SIZE + 4]),
        (noloco(period=2), [HEADER + 4 * SIZE]),
        (des_loc(period=2), [4 * SIZE + 4]),
        (sparta(density=0.01), [4 * math.ceil(0.01 * SIZE) + 4]),
        (powersgd(rank=2), [4 * 2 * (96 + 64) + 4 * TAIL + 4, 4 * 2 * (70 + 96) + 4]),
        (fda(theta=0.0), [8, 4 * SIZE + 4]),
        (fda(theta=0.0, estimator="norm"), [4, 4 * SIZE + 4]),
        (fda(theta=0.0, estimator="sketch"), [5004, 4 * SIZE + 4]),
        (
            streaming_diloco(period=2, fragments=1, delay=0),
            [HEADER + sum(math.ceil(r * c / 256) * 4 + r * c // 2 for r, c in MATRICES) + TAIL + 4 * len(VECTORS)],
        ),
        (
            diloco(period=2, bits=8),
            [HEADER + sum(r * c + 4 + 4 * 256 for r, c in MATRICES) + TAIL + 4 * len(VECTORS)],
        ),
        (muloco(period=2, bits=2), [HEADER + sum(r * c // 4 + 8 for r, c in MATRICES) + TAIL + 4 * len(VECTORS)]),
    ],
    ids=str,
)
def test_17_messages_have_the_bytes_of_their_formula(method, expected):
    assert first_messages(method, adam=method.name == "des_loc") == expected


TILES = [64 * 64, 64 * 6, 32 * 64, 32 * 6, 64 * 64, 64 * 32]  # elements of each matrix that lie in each of its tiles


@pytest.mark.parametrize(
    ("method", "bits", "metadata"),
    [
        (decoupled(period=2), 2, 8),
        (sparseloco(period=2, density=1 / 32), 2, 4 + 4 * 4),
        (demo(density=1 / 32), 32, 0),
        (decoupled(period=2, preset="nesterov", density=1 / 32, bits=8), 8, 4 + 4 * 256),
    ],
    ids=["decoupled", "sparseloco", "demo", "nesterov"],
)
def test_17_sparse_messages_have_the_bytes_of_their_formula_with_positions_near_the_counting_floor(
    method, bits, metadata
):
    tail = 4 * TAIL if bits >= 16 else TAIL + 4 * len(VECTORS)
    counts = [math.ceil(elements / 32) for elements in TILES]
    values = math.ceil(sum(counts) * bits / 8)
    floor = sum(math.log2(math.comb(elements, count)) for elements, count in zip(TILES, counts, strict=True)) / 8
    (found,) = first_messages(method)
    positions = found - (HEADER + SECTION + metadata * len(MATRICES) + values + tail)
    assert 0.9 * floor < positions < 1.25 * floor


@pytest.mark.parametrize(
    "method",
    [
        ddp(),
        diloco(period=4),
        decoupled(period=4),
        sparseloco(period=4, clip=True),
        demo(sign=False),
        powersgd(),
        streaming_diloco(period=6),
        eager(period=4),
        sparta(density=0.1),
        fda(theta="interval:3", estimator="norm"),
        decoupled(period=4, preset="authors", feedback=0.5),
    ],
    ids=str,
)
def test_18_the_order_of_the_replicas_changes_nothing_beyond_rounding(method):
    order = (2, 0, 3, 1)
    plain, permuted = Cluster(method, 4).train(STEPS), Cluster(method, 4, order=order).train(STEPS)
    for rank, source in enumerate(order):
        torch.testing.assert_close(permuted.parameters(rank), plain.parameters(source), **TRANSFORMED)
