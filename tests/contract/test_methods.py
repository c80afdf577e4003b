"""The laws of every method: one list of methods, one list of laws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tests.sync.toy import Cluster, same

from lowtide.codec import Chain
from lowtide.codec.payload import HEADER_BYTES, SECTION_BYTES, unseal
from lowtide.messages import Gather, Group, Scatter, Sum
from lowtide.sync import Method, Round
from lowtide.sync.exchange.gate import Gate
from lowtide.sync.exchange.gathered import Gathered
from lowtide.sync.exchange.low_rank import LowRank
from lowtide.sync.exchange.sharded import Sharded, split
from lowtide.sync.exchange.summed import Masked, Summed
from lowtide.sync.merge import Replace
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
from lowtide.tensors import Grid


@dataclass(frozen=True)
class Case:
    """A method, and how it is trained on the toy task."""

    name: str
    method: Method
    lr: float = 0.1
    adam: bool = False
    size: int = 3

    def cluster(self, *, seed: int = 0) -> Cluster:
        return Cluster(self.method, self.size, lr=self.lr, adam=self.adam, seed=seed)


ALL_METHODS = [
    Case("ddp", ddp()),
    Case("local_sgd", local_sgd(period=4)),
    Case("local_sgd-post", local_sgd(period=4, switch_at=3)),
    Case("diloco", diloco(period=4, outer_lr=0.7, momentum=0.6)),
    Case("diloco-int8", diloco(period=4, outer_lr=0.7, momentum=0.6, bits=8)),
    Case("decoupled", decoupled(period=4)),
    Case("decoupled-none", decoupled(period=4, transform="none", density=1 / 64)),
    Case("decoupled-sharded", decoupled(period=4, exchange="sharded")),
    Case("decoupled-nesterov", decoupled(period=4, preset="nesterov")),
    Case("decoupled-authors", decoupled(period=4, preset="authors", outer_lr=0.3, feedback=0.5)),
    Case("decoupled-resync", decoupled(period=2, preset="resync")),
    Case("demo", demo(), lr=1e-3),
    Case("demo-dense", demo(density=1.0, bits=8, transform="none", sign=False)),
    Case("sparseloco", sparseloco(period=4, density=1 / 16)),
    Case("sparseloco-clip", sparseloco(period=4, bits=8, clip=True)),
    Case("streaming_diloco", streaming_diloco(period=6, fragments=3, delay=1)),
    Case("streaming_diloco-plain", streaming_diloco(period=4, fragments=2, delay=0, alpha=0.0, bits=32)),
    Case("eager", eager(period=4, momentum=0.5)),
    Case("sparta", sparta(density=0.1)),
    Case("sparta-late", sparta(density=0.2, period=3, delay=2)),
    Case("sparta-diloco", sparta(density=0.1, diloco_period=6, momentum=0.5)),
    Case("noloco", noloco(period=4), size=4),
    Case("powersgd", powersgd(rank=4)),
    Case("des_loc", des_loc(period=2, first_period=4, second_period=6), lr=1e-2, adam=True),
    Case("fda", fda(theta=0.002)),
    Case("fda-calibrate", fda(theta="calibrate:3")),
    Case("fda-interval", fda(theta="interval:3", estimator="norm")),
    Case("fda-epochs", fda(theta="epochs:4", check_every=2, estimator="sketch", server="nesterov")),
    Case("fda-budget", fda(theta="budget:200e3/12", estimator="max_norm")),
    Case("fda-late", fda(theta=0.002, estimator="exact", check_every=3, delay=1)),
    Case("fda-adam", fda(theta="interval:4", server="adam")),
    Case("muloco", muloco(period=4, momentum=0.6), lr=1e-3, adam=True),
    Case("muloco-2bit", muloco(period=4, bits=2, feedback=0.9, momentum=0.5), lr=1e-3, adam=True),
]
every_method = pytest.mark.parametrize("case", ALL_METHODS, ids=lambda case: case.name)
STEPS = 12


def shared(cluster: Cluster) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The shared state of all replicas, a row for each round."""
    for row in cluster.rows:
        yield [one.state.shared for one in row]


def everything(cluster: Cluster) -> list[object]:
    """All that an event could change, by rank."""
    return [
        [dict(net.named_parameters()), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}]
        + [
            [one.state.event, one.last_step, len(one.flights), dict(one.state.shared), dict(one.state.private)]
            for one in mine
        ]
        for net, mine in zip(cluster.nets, cluster.rounds, strict=True)
    ]


def copied(nest: object) -> object:
    if isinstance(nest, torch.Tensor):
        return nest.detach().clone()
    if isinstance(nest, dict):
        return {key: copied(value) for key, value in nest.items()}
    return [copied(value) for value in nest] if isinstance(nest, list) else nest


def lands_live(row: list[Round]) -> bool:
    """Whether a round leaves the parameters themselves equal, not only the anchors."""
    plan = row[0].plan
    return isinstance(plan.merge, Replace) and not plan.when.delay and plan.when.fragments == 1


@every_method
def test_what_is_shared_is_equal_on_all_replicas(case):
    cluster = case.cluster()
    for _ in range(STEPS):
        cluster.train(1)
        assert all(same(row[0], other) for row in shared(cluster) for other in row[1:])
    assert cluster.reports, "no round in this run: the law was not tried"


@every_method
def test_replicas_are_one_model_after_a_round_unless_the_method_is_private(case):
    cluster = case.cluster()
    agreed = 0
    for _ in range(STEPS):
        seen = len(cluster.reports)
        cluster.train(1)
        new = [reports[0] for reports in cluster.reports[seen:] if reports[0].closed is None]
        rows = {row[0].name: row for row in cluster.rows}
        common = [report for report in new if rows[report.plan][0].plan.makes_common and lands_live(rows[report.plan])]
        if common and not case.method.private:
            assert cluster.alike()
            agreed += 1
    if not case.method.private:
        assert cluster.finish().alike()
        assert agreed or not any(lands_live(row) for row in cluster.rows)


@every_method
def test_drift_is_real_and_bounded_where_it_is_allowed(case):
    cluster = case.cluster()
    first = cluster.parameters()
    cluster.train(STEPS + 1)
    drift = math.sqrt(cluster.variance()) / float((cluster.everyone().mean(0) - first).norm())
    if case.method.private:
        assert not cluster.alike()
    assert drift < 1.0


@every_method
def test_the_loss_falls(case):
    cluster = case.cluster()
    before = cluster.loss()
    cluster.train(2 * STEPS)
    assert all(cluster.loss(rank) < 0.985 * before for rank in range(case.size))


@every_method
def test_one_seed_gives_one_result(case):
    one, other, third = case.cluster().train(STEPS), case.cluster().train(STEPS), case.cluster(seed=1).train(STEPS)
    assert same(everything(one), everything(other))
    assert one.sent == other.sent
    assert not same(everything(one), everything(third))


@every_method
def test_dropping_an_event_and_doing_it_again_equals_doing_it_once(case):
    dropped = 0
    cluster = case.cluster()

    def drop_after_each_leg(row: list[Round]) -> None:
        nonlocal dropped
        before, follows, legs = copied(everything(cluster)), True, 0
        while follows and not row[0].flights:
            cluster.launch(row)
            for _ in range(legs):
                follows = cluster.leg(row)
            for one in row:
                one.drop()
            assert same(everything(cluster), before), f"{row[0].name}: a drop after {legs} legs left traces"
            legs, dropped = legs + 1, dropped + 1

    assert same(everything(cluster.train(STEPS, drop_after_each_leg)), everything(case.cluster().train(STEPS)))
    assert dropped >= 2


@every_method
def test_a_replica_that_is_not_finite_is_left_out_and_named(case):
    cluster, poisoned, kept = case.cluster(), [], []

    def poison(row: list[Round]) -> None:
        if cluster.step < 5 or row[0].fragment or (poisoned and row[0].name not in poisoned):
            return
        if not poisoned:
            net = cluster.nets[1]
            bad = net.first.weight.grad if row[0].plan.before_step else net.first.weight.data
            bad[3, 5] = math.nan
            poisoned.append(row[0].name)
            kept.append({name: value.clone() for name, value in row[1].state.private.items() if name == "residual"})

    while not any(reports[1].sick for reports in cluster.reports):
        assert cluster.step < 2 * STEPS
        cluster.train(1, poison)
    said = next(reports for reports in cluster.reports if reports[1].sick)
    assert [report.sick for report in said] == [None, "first.weight"] + [None] * (case.size - 2)
    row = next(row for row in cluster.rows if row[0].name == poisoned[0])
    assert all(same(row[1].state.private[name], value) for name, value in kept[0].items())
    assert all(bool(cluster.parameters(rank).isfinite().all()) for rank in range(case.size) if rank != 1)
    assert all(bool(value.isfinite().all()) for one in row for value in one.state.shared.values())
    if case.name.startswith("sparta") and case.name != "sparta-diloco":
        return  # a random share of the others' parameters cannot make up for a model that is lost
    cluster.train(STEPS)
    assert bool(cluster.everyone().isfinite().all())
    if not case.method.private:
        assert cluster.finish().alike()


@every_method
def test_saving_and_restoring_equals_never_having_stopped(case):
    straight = case.cluster().train(STEPS)
    for stop in (5, 7):
        saved = case.cluster().train(stop).saved()
        resumed = case.cluster(seed=0).train(2).restore(saved)
        assert same(everything(resumed.train(STEPS - stop)), everything(straight))


def expected(one: Round, leg: int, message: object, cluster: Cluster) -> int:
    """The closed formula for the bytes of a message, from the plan, the shapes and the coded positions alone."""
    exchange, grid = one.plan.exchange, one.grid
    if isinstance(exchange, Gate):
        if leg == 0:
            return 4 * exchange.monitor.numbers(grid.size)
        exchange, leg = exchange.then, leg - 1
    match exchange:
        case Summed():
            return 4 * (one.layout.numel + 1)
        case Masked():
            return 4 * (math.ceil(exchange.density * one.layout.numel - 1e-9) + 1)
        case LowRank():
            shapes = [(group.count, group.rows if leg == 0 else group.cols) for group in grid.groups]
            factors = sum(count * edge * exchange.rank for count, edge in shapes)
            return 4 * (factors + (sum(grid.tail) if leg == 0 else 0) + 1)
        case Gathered():
            return coded(exchange.codec, grid, message.payload)
        case Sharded():
            if leg == 1:
                return coded(exchange.down, split(grid, cluster.size)[one.rank].grid, message.payload)
            shards = zip(split(grid, cluster.size), message.payloads, strict=True)
            return sum(coded(exchange.up, shard.grid, payload) for shard, payload in shards)
    raise AssertionError(exchange)


METADATA = {"fp32": 0, "bf16": 0, "int8": 4 + 4 * 256, "stat(4)": 4 + 4 * 4, "stat(16)": 4 + 4 * 16, "sym2": 8}


def coded(codec: Chain, grid: Grid, payload: bytes) -> int:
    """Header, sections, positions, values with their metadata, tail."""
    sections = [] if codec.select.shared else unseal(payload)[1]
    values = grid.body if codec.select.shared else sum(section.count for section in sections)
    if codec.quantizer.name == "e3m0":
        lengths = [
            int((group.owner == owner).sum()) * group.span for group in grid.groups for owner in group.owner.unique()
        ]
        metadata = 4 * sum(-(-length // 256) for length in lengths)
    else:
        metadata = METADATA[codec.quantizer.name] * grid.tensors
    tail = 4 * sum(grid.tail) if codec.quantizer.bits >= 16 else sum(grid.tail) + 4 * len(grid.tail)
    for section, group in zip(sections, grid.groups, strict=False):
        near_the_floor(section.count, group.count, group.span, section.nbytes)
    positions = sum(section.nbytes for section in sections)
    return (
        HEADER_BYTES
        + SECTION_BYTES * len(sections)
        + positions
        + metadata
        + math.ceil(values * codec.quantizer.bits / 8)
        + tail
    )


def near_the_floor(count: int, tiles: int, span: int, nbytes: int) -> None:
    """Positions take at most what plain packing takes."""
    assert nbytes <= math.ceil(count * (span - 1).bit_length() / 8), (count, tiles, span, nbytes)


@every_method
def test_a_message_has_the_bytes_of_its_formula(case):
    cluster = case.cluster()
    tried = 0

    def weigh(row: list[Round]) -> None:
        nonlocal tried
        if row[0].flights:
            return
        cluster.launch(row)
        follows, leg = True, 0
        while follows:
            for one in row:
                message = one.flights[0].leg.message
                assert isinstance(message, Sum | Gather | Group | Scatter)
                found = cluster_bytes(message)
                assert found == expected(one, leg, message, cluster)
            follows, leg, tried = cluster.leg(row), leg + 1, tried + 1
        for one in row:
            one.drop()

    cluster.train(STEPS, weigh)
    assert tried


def cluster_bytes(message: Sum | Gather | Group | Scatter) -> int:
    if isinstance(message, Sum):
        return message.tensor.nbytes
    return sum(map(len, message.payloads)) if isinstance(message, Scatter) else len(message.payload)
