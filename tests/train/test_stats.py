from __future__ import annotations

import dataclasses
import json

import pytest
from tests.train.loops import METHODS, Run, case, net

from lowtide import Settings, Stats, simulate

PARAMETERS = sum(p.numel() for p in net().parameters())


def run_of(name, steps=8, replicas=3):
    def worker():
        run = case(name).train(1, steps)
        run.sync.close()
        run.sync.any(False) if not run.sync.release else None
        return run.sync.stats(), run.sync.meter.ledger

    return simulate(worker, replicas=replicas).returns


@pytest.mark.parametrize("name", METHODS)
def test_bytes_add_up_by_cause_and_by_group(name):
    for stats, ledger in run_of(name):
        assert sum(stats.by_cause.values()) == stats.sent
        assert sum(stats.by_group.values()) == stats.sent
        assert sum(each.payload for each in ledger.by_cause.values()) == stats.payload
        assert set(stats.by_cause) <= {"start", "round", "monitor", "check", "buffers", "stop"}
        assert set(stats.by_group) <= {"matrix", "vector", "other"}
        assert (stats.steps, stats.dropped) == (8, 0)
        assert stats.received > 0


@pytest.mark.parametrize("name", ["diloco", "decoupled", "ddp", "streaming", "des_loc", "fda_calibrated"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_dense_reference_is_a_ring_all_reduce_in_fp32_of_what_the_rounds_agreed_on(name, replicas):
    def worker():
        agreed = []
        run = case(name, on_round=lambda report: agreed.append(report.plan) if report.closed is None else None)
        run.train(1, 8)
        run.sync.close()
        sizes = {round_.name: round_.layout.numel for round_ in run.sync.engine.rounds}
        return run.sync.stats(), [sizes[plan] for plan in agreed]

    for stats, sizes in simulate(worker, replicas=replicas).returns:
        assert stats.dense_reference == sum(2 * (replicas - 1) * 4 * size // replicas for size in sizes)
        assert stats.rounds == len(sizes)


def test_dense_methods_send_their_reference_and_frames():
    def worker():
        return Run("local_sgd", {"period": 4}).train(1, 8).sync.meter.ledger

    for ledger in simulate(worker, replicas=2).returns:
        rounds = ledger.by_cause["round"]
        assert rounds.payload == 2 * 4 * (PARAMETERS + 1)
        frames = rounds.sent - 2 * 4 * (PARAMETERS + 1)
        assert rounds.dense_reference == 2 * 4 * PARAMETERS
        assert 0 < frames < 5000


@pytest.mark.parametrize(("period", "rounds"), [(1, 8), (2, 4), (3, 2), (8, 1), (9, 0)])
def test_rounds_are_counted(period, rounds):
    result = simulate(lambda: Run("decoupled", {"period": period}).train(1, 8), replicas=2)
    assert [stats.rounds for stats in result.stats] == [rounds, rounds]


def test_a_closed_gate_is_no_round():
    for stats in simulate(lambda: Run("fda", {"theta": 1e9}).train(1, 5), replicas=2).stats:
        assert (stats.rounds, stats.dense_reference) == (0, 0)
        assert stats.by_cause["monitor"] > 0
        assert "round" not in stats.by_cause


def test_alone_nothing_is_moved():
    stats = Run("decoupled").train(1, 3).sync.stats()
    assert stats == Stats(3, 0, 0, 0, 0, 0, 0, stats.seconds, {}, {})
    stats = Run("decoupled", {"period": 1}, extra={"settings": Settings(alone="method")}).train(1, 3).sync.stats()
    assert (stats.rounds, stats.sent, stats.received, stats.dense_reference) == (3, 0, 0, 0)
    assert stats.payload > 0


def test_stats_are_a_frozen_record_of_one_moment():
    def worker():
        run = Run("decoupled", {"period": 2}).train(1, 2)
        early = run.sync.stats()
        copy = dataclasses.asdict(early)
        run.train(3, 6)
        assert dataclasses.asdict(early) == copy
        with pytest.raises(dataclasses.FrozenInstanceError):
            early.steps = 3
        return json.dumps(copy)

    assert len(simulate(worker, replicas=2).returns) == 2


def test_times_fewer_counts_what_is_more_of_sent_and_received():
    stats = Stats(1, 1, 0, 5, 10, 40, 4000, {}, {}, {})
    assert stats.times_fewer == 100
    assert dataclasses.replace(stats, sent=80).times_fewer == 50
    assert dataclasses.replace(stats, sent=0, received=0, dense_reference=0).times_fewer == 0


def test_a_simulation_hands_out_the_stats_of_each_replica():
    result = simulate(lambda: Run("decoupled", {"period": 2}).train(1, 4), replicas=2)
    assert [stats.rounds for stats in result.stats] == [2, 2]
