from __future__ import annotations

import pytest
import torch
from tests.train.loops import Run, net, rank, sgd, step_once
from torch import nn

from lowtide import recalibrate, simulate
from lowtide.train.agreement import digest
from lowtide.train.buffers import synchronise
from lowtide.train.simulate import current_replica
from lowtide.transport.loopback import Loopback


def synchronised(policy, make, replicas=3):
    """What every replica's buffers are after one synchronisation."""

    def worker():
        buffers = make(rank())
        synchronise(current_replica().transport, buffers, policy)
        return buffers

    return simulate(worker, replicas=replicas).returns


def made(number):
    return {
        "mean": torch.tensor([1.0, 10.0]) * (number + 1),
        "half": torch.tensor([[0.5 * number]], dtype=torch.float16),
        "double": torch.tensor(2.0**40 + number, dtype=torch.float64),
        "count": torch.tensor(2**40 + number),
        "mask": torch.tensor([number == 0, number == 1]),
        "phase": torch.tensor([complex(0, number)]),
    }


def test_average_takes_the_mean_of_floats_and_the_counters_of_rank_0():
    for number, found in enumerate(synchronised("average", made)):
        torch.testing.assert_close(found["mean"], torch.tensor([2.0, 20.0]))
        assert found["half"].item() == 0.5
        assert found["double"].item() == 2.0**40 + 1
        assert found["count"].item() == 2**40
        assert found["mask"].tolist() == [True, False]
        assert found["phase"].tolist() == [complex(0, number)]  # neither counter nor statistic: left alone
        assert [t.dtype for t in found.values()] == [t.dtype for t in made(0).values()]


def test_rank0_takes_everything_from_rank_0():
    for found in synchronised("rank0", made):
        for name in ("mean", "half", "double", "count", "mask"):
            assert torch.equal(found[name], made(0)[name])


def test_ignore_leaves_everything():
    for number, found in enumerate(synchronised("ignore", made)):
        assert all(torch.equal(found[name], value) for name, value in made(number).items())


@pytest.mark.parametrize("policy", ["average", "rank0", "ignore"])
def test_alone_and_without_buffers_nothing_moves(policy):
    buffers = made(3)
    synchronise(Loopback(), buffers, policy)
    assert all(torch.equal(buffers[name], value) for name, value in made(3).items())
    assert synchronised(policy, lambda _: {}) == ({}, {}, {})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_are_left_out_and_healed(bad):
    def make(number):
        return {"mean": torch.tensor([bad if number == 1 else number * 1.0, 4.0])}

    for found in synchronised("average", make):
        assert found["mean"].tolist() == [1.0, 4.0]


def test_when_no_statistics_are_finite_each_keeps_its_own():
    for number, found in enumerate(synchronised("average", lambda number: {"mean": torch.tensor([torch.inf, number])})):
        assert found["mean"].tolist() == [torch.inf, number]


@pytest.mark.parametrize(("policy", "alike"), [("average", True), ("rank0", True), ("ignore", False)])
def test_the_policy_holds_at_every_round(policy, alike):
    def worker():
        run = Run("local_sgd", {"period": 2}, extra={"buffers": policy})
        seen = []
        for step in range(1, 5):
            step_once(run.model, run.optimizer, step)
            seen.append(digest(run.model.buffers()))
        return seen, run.model.norm.num_batches_tracked.item(), run.sync.stats().by_cause.get("buffers", 0)

    (one, count, sent), (other, *_) = simulate(worker, replicas=2).returns
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, alike, False, alike]
    assert count == 4
    assert bool(sent) == alike


def test_the_average_is_of_the_statistics_before_the_round():
    def worker():
        run = Run("local_sgd", {"period": 1})
        model, _ = run.model, run.sync.detach()
        own = sgd(model)
        step_once(model, own, 1)
        alone = model.norm.running_mean.clone()
        again = Run("local_sgd", {"period": 1})
        step_once(again.model, again.optimizer, 1)
        return alone, again.model.norm.running_mean.clone()

    (a, mean), (b, same) = simulate(worker, replicas=2).returns
    torch.testing.assert_close(mean, (a + b) / 2)
    assert torch.equal(mean, same)


def test_a_round_of_the_optimizers_state_moves_no_buffers():
    def worker():
        run = Run("des_loc", {"period": 4, "first_period": 1, "second_period": 1}, adamw_of)
        run.train(1, 3)
        return run.sync.stats().rounds, "buffers" in run.sync.stats().by_cause

    assert simulate(worker, replicas=2).returns == ((6, False),) * 2


def adamw_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_gate_that_stays_closed_moves_no_buffers():
    def worker():
        return Run("fda", {"theta": 1e9}).train(1, 3).sync.stats().by_cause

    for causes in simulate(worker, replicas=2).returns:
        assert set(causes) == {"start", "monitor"}


def test_recalibration_is_the_plain_mean_over_the_batches():
    model = net()
    batches = [torch.randn(16, 6) for _ in range(3)]
    model.eval()
    recalibrate(model, batches)
    inputs = [model.first(x) for x in batches]
    torch.testing.assert_close(model.norm.running_mean, torch.stack([x.mean(0) for x in inputs]).mean(0))
    torch.testing.assert_close(model.norm.running_var, torch.stack([x.var(0) for x in inputs]).mean(0))
    assert model.norm.num_batches_tracked.item() == 3
    assert not model.training
    assert model.norm.momentum == 0.1


def test_recalibration_leaves_parameters_and_modes_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.Dropout(0.5), nn.BatchNorm2d(4))
    model.train()
    model[1].eval()  # frozen on purpose, as in fine-tuning
    before = digest(model.parameters())
    recalibrate(model, [{"x": torch.randn(2, 3, 8, 8)}], lambda module, batch: module(batch["x"]))
    assert digest(model.parameters()) == before
    assert [module.training for module in model] == [True, False, True, True]
    assert [model[1].momentum, model[3].momentum] == [0.3, 0.1]
    assert all(p.grad is None for p in model.parameters())


def test_recalibration_comes_back_from_an_error_as_it_was():
    model = net()
    model.eval()
    with pytest.raises(RuntimeError):
        recalibrate(model, [torch.randn(4, 5)])
    assert model.norm.momentum == 0.1
    assert not model.training


def test_a_norm_without_statistics_is_passed_over():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3))
    recalibrate(model, [torch.ones(4, 3)])
    assert model[0].running_mean is None
    assert model[1].num_batches_tracked.item() == 1
