"""Federated dynamic averaging in whole runs: identities, the promised bound, bytes, FDA-Opt's rounds, bad input."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tests.sync.toy import SIZE, Cluster, same

from lowtide.errors import ConfigError
from lowtide.sync import Method, Plan
from lowtide.sync.exchange import gate, summed
from lowtide.sync.methods import diloco, fda, local_sgd
from lowtide.sync.methods.fda import bytes_paper
from lowtide.sync.outer import adam, heavy_ball, nesterov, sgd
from lowtide.sync.signal import delta
from lowtide.sync.spread import estimator, sketch
from lowtide.sync.trigger import trigger
from lowtide.sync.when import every

ROUNDING = {"atol": 2e-6, "rtol": 0.0}
KINDS = ["linear", "norm", "sketch", "max_norm", "exact"]


def agreed(cluster: Cluster) -> list[int]:
    """Steps after which all agreed."""
    return [reports[0].step for reports in cluster.reports if reports[0].closed is None]


# identities


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_of_zero_is_exactly_averaging_at_every_step(kind):
    one, other = Cluster(fda(theta=0.0, estimator=kind), 3).train(8), Cluster(local_sgd(period=1), 3).train(8)
    assert agreed(one) == list(range(1, 9))
    assert same(one.everyone(), other.everyone())


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_bound_is_exactly_training_apart(kind):
    one = Cluster(fda(theta=math.inf, estimator=kind), 3).train(8)
    other = Cluster(local_sgd(period=10**6), 3).train(8)
    assert agreed(one) == []
    assert same(one.everyone(), other.everyone())
    assert not one.alike()


def test_a_fixed_trigger_is_exactly_federated_averaging():
    """FedOpt, FDA and FDA-Opt are one algorithm: this one has the trigger of the first and the server of plain SGD."""
    fixed = Cluster(fda(theta=math.inf, max_interval=4), 3).train(12)
    assert agreed(fixed) == [4, 8, 12]
    assert same(fixed.everyone(), Cluster(local_sgd(period=4), 3).train(12).everyone())


@pytest.mark.parametrize(
    ("server", "make"),
    [
        (sgd(1.0), lambda p: torch.optim.SGD(p, lr=1.0)),
        (heavy_ball(1.0, 0.9), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)),
        (nesterov(1.0, 0.3), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.3, nesterov=True)),
        (adam(), lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.99), eps=1e-3)),
    ],
    ids=["FedAvg", "FedAvgM", "nesterov", "FedAdam"],
)
def test_a_fixed_trigger_with_a_server_is_the_federated_method_of_that_server(server, make):
    exchange = gate(estimator("norm"), trigger(math.inf, longest=4), summed())
    plan = Plan(when=every(1), signal=delta(), exchange=exchange, outer=server)
    cluster = Cluster(Method("mine", (plan,)), 3).train(12)
    apart = Cluster(local_sgd(period=10**6), 3)
    model = torch.nn.Parameter(apart.parameters())
    optimizer = make([model])
    for _ in range(3):
        apart.train(4)
        model.grad = model.detach() - apart.everyone().mean(0)
        optimizer.step()
        for net in apart.nets:
            torch.nn.utils.vector_to_parameters(model.detach().clone(), net.parameters())
    torch.testing.assert_close(cluster.parameters(), model.detach(), **ROUNDING)


@pytest.mark.parametrize(("server", "rule"), [("sgd", sgd(1.0)), ("nesterov", nesterov(1.0, 0.3)), ("adam", adam())])
def test_servers_are_the_rules_of_their_names(server, rule):
    assert fda(server=server).plans[0].outer == rule


def test_one_replica_never_agrees_with_itself():
    cluster = Cluster(fda(theta=1e-6, estimator="exact"), 1).train(8)
    assert agreed(cluster) == []
    assert same(cluster.parameters(), Cluster(local_sgd(period=10**6), 1).train(8).parameters())


# the promise


def test_the_spread_never_passes_the_bound_and_is_zero_after_a_round():
    theta = 0.002
    cluster = Cluster(fda(theta=theta, estimator="exact"), 4, lr=0.1)
    for _ in range(20):
        seen = len(agreed(cluster))
        cluster.train(1)
        assert cluster.variance() <= theta * (1 + 1e-6)
        if len(agreed(cluster)) > seen:
            assert cluster.alike()
            assert cluster.variance() == 0.0
    assert 2 <= len(agreed(cluster)) < 20, "the bound never mattered: the law was not tried"


@pytest.mark.parametrize("kind", ["linear", "norm", "max_norm"])
def test_cheap_estimators_keep_the_promise_with_more_rounds(kind):
    exact, cheap = (Cluster(fda(theta=0.002, estimator=name), 4, lr=0.1) for name in ("exact", kind))
    for _ in range(20):
        assert cheap.train(1).variance() <= 0.002 * (1 + 1e-6)
    assert len(agreed(cheap)) >= len(agreed(exact.train(20)))


def test_linear_agrees_no_more_often_than_norm():
    often = [len(agreed(Cluster(fda(theta=0.003, estimator=kind), 4).train(24))) for kind in ("linear", "norm")]
    assert often[0] <= often[1]


def test_the_sketch_is_near_the_spread_in_training():
    kind, cluster, ratios = sketch(), Cluster(local_sgd(period=5), 4), []
    start = cluster.parameters()
    for step in range(1, 16):
        cluster.train(1)
        if cluster.alike():
            start = cluster.parameters()
            continue
        drifts = start - cluster.everyone()
        estimate = kind.spread(torch.stack([kind.state(drift, None) for drift in drifts]))
        ratios.append(estimate / cluster.variance())
        assert step % 5
    assert 0.95 < sum(ratios) / len(ratios) < 1.1
    assert min(ratios) > 0.9


# the modes of theta


def test_calibration_measures_after_the_steps_it_was_given():
    assert agreed(Cluster(fda(theta="calibrate:6"), 3).train(6)) == [6]
    assert fda().plans[0].exchange.trigger == trigger("calibrate:50")


def test_interval_holds_the_mean_interval():
    steps = agreed(Cluster(fda(theta="interval:5", estimator="norm"), 4, lr=0.1).train(60))
    assert 9 <= len(steps) <= 14
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 15


def test_budget_spends_its_rounds_over_the_whole_run():
    cluster = Cluster(fda(theta=f"budget:{6 * 4 * SIZE}/60"), 3).train(60)
    rounds = [legs for _, _, leg, _, legs in cluster.sent if leg == 1]
    assert 4 <= len(rounds) <= 6
    assert agreed(cluster)[-1] > 30


def test_guards_bound_every_interval():
    steps = [0, *agreed(Cluster(fda(theta=0.0, min_interval=3), 3).train(12))]
    assert [later - earlier for earlier, later in pairwise(steps)] == [3, 3, 3, 3]


def test_a_decaying_rate_does_not_end_the_rounds():
    """With a bound that stays, rounds cease when the rate falls; one that follows its square keeps them."""
    rounds = {}
    for power in (0.0, None):
        cluster = Cluster(fda(theta=0.002, estimator="norm", rate_power=power), 3)
        for _ in range(4):
            cluster.train(6)
            for optimizer in cluster.optimizers:
                optimizer.param_groups[0]["lr"] *= 0.4
        rounds[power] = [step for step in agreed(cluster) if step > 12]
    assert len(rounds[0.0]) == 0
    assert len(rounds[None]) >= 2


# FDA-Opt: rounds of epochs, a server


@pytest.mark.parametrize("server", ["sgd", "nesterov", "adam"])
def test_fda_opt_makes_rounds_of_half_the_most_epochs(server):
    epoch, most = 3, 6
    cluster = Cluster(fda(theta=f"epochs:{most}", check_every=epoch, server=server, estimator="sketch"), 4)
    cluster.train(epoch * 36)
    steps = [0, *agreed(cluster)]
    epochs = [(later - earlier) // epoch for earlier, later in pairwise(steps)]
    assert epochs[0] == 1
    assert max(epochs) <= most
    assert 2 <= sum(epochs[1:]) / len(epochs[1:]) <= 4.5
    assert all(step % epoch == 0 for step in steps)


def test_fda_opt_sets_the_bound_of_its_paper():
    cluster = Cluster(fda(theta="epochs:10", check_every=2, estimator="exact"), 3).train(1)
    spreads, last = [], 0
    for _ in range(15):
        cluster.step += 1
        cluster.gradients()
        for optimizer in cluster.optimizers:
            optimizer.step()
        spreads.append(cluster.variance())
        cluster.due(cluster.rows[0])
        if len(agreed(cluster)) > last:
            last = len(agreed(cluster))
            before = agreed(cluster)[-2] if last > 1 else 0
            epochs = (cluster.step - before) / 2
            theta = float(cluster.rounds[0][0].state.shared["exchange.theta"])
            assert theta == pytest.approx(5 / epochs * spreads[-1], rel=1e-4)
    assert last >= 2


# a check that lags behind


def test_a_lagged_check_decides_on_what_was_sent_and_keeps_what_was_done_since():
    cluster = Cluster(fda(theta=0.002, estimator="exact", check_every=3, delay=2), 3)
    while not agreed(cluster):
        cluster.train(1)
    assert agreed(cluster)[0] % 3 == 0, "a report names the step of the check"
    assert cluster.step == agreed(cluster)[0] + 2
    assert not cluster.alike(), "two steps were taken since the check"
    anchors = [mine[0].anchor for mine in cluster.rounds]
    assert all(same(anchor, anchors[0]) for anchor in anchors)


def test_a_lagged_check_trains_as_well_as_a_prompt_one():
    prompt, lagged = (
        Cluster(fda(theta=0.002, check_every=3, delay=delay), 3, lr=0.1).train(30).finish() for delay in (0, 2)
    )
    assert lagged.loss() == pytest.approx(prompt.loss(), rel=0.02)


def test_the_last_round_makes_one_model_though_the_gate_would_stay_closed():
    cluster = Cluster(fda(theta=math.inf), 3).train(5)
    assert not cluster.alike()
    assert cluster.finish().alike()
    assert agreed(cluster) == [5]


# bytes


@pytest.mark.parametrize(("kind", "each"), [("norm", 4), ("linear", 8), ("sketch", 5004), ("max_norm", 4)])
def test_bytes_are_the_closed_forms(kind, each):
    cluster = Cluster(fda(theta=0.002, estimator=kind), 3, lr=0.1).train(12)
    checks = [sent for sent in cluster.sent if sent[3] == "monitor"]
    rounds = [sent for sent in cluster.sent if sent[3] == "round"]
    assert len(checks) == 12
    assert len(rounds) == len(agreed(cluster)) > 0
    assert {size for sent in checks for size in sent[4]} == {each}
    assert {size for sent in rounds for size in sent[4]} == {4 * SIZE + 4}


@pytest.mark.parametrize(("kind", "each"), [("norm", 4), ("linear", 8), ("sketch", 5004), ("max_norm", 0.125)])
def test_the_papers_accounting_is_two_models_a_round_and_the_numbers_a_check(kind, each):
    found = bytes_paper(10, 61_706, rounds=12, checks=3188, estimator=kind)
    assert found == 12 * 2 * 10 * 4 * 61_706 + 3188 * 10 * each


def test_the_share_of_monitoring_is_the_published_one():
    """LeNet with a sketch and 230 steps a round: 70 %; DenseNet121: 2 %."""
    for size, share in ((61_706, 0.70), (6_964_106, 0.02)):
        monitor = bytes_paper(5, size, rounds=0, checks=230, estimator="sketch")
        total = bytes_paper(5, size, rounds=1, checks=230, estimator="sketch")
        assert monitor / total == pytest.approx(share, abs=0.005)


def test_what_was_published_for_two_runs_comes_out():
    """LeNet, ten replicas, linear, theta 7: 12 rounds in 3188 steps, 59.5 MB; theta 1.5: 48 in 2813, 237 MB."""
    assert bytes_paper(10, 61_706, rounds=12, checks=3188) == pytest.approx(59.5e6, rel=2e-3)
    assert bytes_paper(10, 61_706, rounds=48, checks=2813) == pytest.approx(237e6, rel=2e-3)


# bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": -0.1}, "theta must be at least 0, not -0.1"),
        ({"theta": math.nan}, "theta must be at least 0, not nan"),
        ({"theta": "every step"}, "cannot read theta='every step'"),
        ({"theta": None}, "cannot read theta=None"),
        ({"check_every": 0}, "period must be a whole number of at least 1, not 0"),
        ({"check_every": 4, "delay": 4}, "delay must be shorter than the period"),
        ({"check_every": 4, "delay": -1}, "delay must be a whole number of at least 0"),
        ({"min_interval": 0}, "min_interval must be at least 1"),
        ({"min_interval": 9, "max_interval": 5}, "max_interval must not be below min_interval: 5 < 9"),
        ({"estimator": "ams"}, "unknown estimator 'ams'"),
        ({"server": "adagrad"}, "unknown server 'adagrad'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        fda(**options)


def test_a_fixed_clock_with_the_same_rounds_is_the_honest_baseline():
    """The gate decides when, never what: on the same steps it gives the very same model."""
    cluster = Cluster(fda(theta="interval:4", estimator="norm", max_interval=4, min_interval=4), 3).train(12)
    assert agreed(cluster) == [4, 8, 12]
    fixed = Cluster(diloco(period=4, outer_lr=1.0, momentum=0.0), 3).train(12)
    assert same(cluster.everyone(), fixed.everyone())
