"""Outer rules against the optimizers they are named after, and against their formulas."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.sync.toy import Cluster

from lowtide.errors import ConfigError
from lowtide.sync.methods import fda
from lowtide.sync.outer import (
    COUNTER,
    Seen,
    adam,
    assign,
    assign_delta,
    consensus,
    eager,
    heavy_ball,
    inner,
    nesterov,
    private_nesterov,
    sgd,
    sign_sgd,
    zeros,
)

SIZE = 50
CPU = torch.device("cpu")


def deltas(number: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, generator=generator) for _ in range(number)]


def stepped(rule, signals) -> torch.Tensor:
    """The anchor after a round for each signal."""
    anchor, memory = torch.ones(SIZE), zeros(rule, SIZE, CPU)
    for number, signal in enumerate(signals, 1):
        agreed = rule.step(signal.clone(), Seen(anchor=anchor, memory=memory, rounds=number))
        assert agreed is anchor
    return anchor


def optimized(make, signals) -> torch.Tensor:
    """The same with a torch optimizer that takes the combined delta for a gradient."""
    parameter = torch.nn.Parameter(torch.ones(SIZE))
    optimizer = make([parameter])
    for signal in signals:
        parameter.grad = signal.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (sgd(0.8), lambda p: torch.optim.SGD(p, lr=0.8)),
        (heavy_ball(0.3, 0.9), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
        (nesterov(0.7, 0.9), lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
        (adam(0.1, (0.8, 0.95), 1e-3), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3)),
    ],
    ids=["sgd", "heavy_ball", "nesterov", "adam"],
)
def test_a_rule_is_the_optimizer_of_its_name(rule, make):
    torch.testing.assert_close(stepped(rule, deltas()), optimized(make, deltas()), atol=1e-6, rtol=1e-6)


def test_a_sign_step_has_one_length_everywhere():
    moved = 1 - stepped(sign_sgd(0.01), deltas(1))
    torch.testing.assert_close(moved, 0.01 * deltas(1)[0].sign())


def test_rules_without_an_anchor_give_the_value_itself():
    combined, own, got_across = deltas(3)
    assert torch.equal(assign().step(combined.clone(), Seen()), combined)
    assert torch.equal(inner().step(combined.clone(), Seen()), combined)
    assert torch.equal(inner(sign=True).step(combined.clone(), Seen()), combined.sign())
    only_exchanged = assign_delta().step(combined.clone(), Seen(signal=own, sent=got_across))
    torch.testing.assert_close(only_exchanged, own + combined - got_across)


def test_the_published_rule_steps_along_its_own_delta_and_its_momentum():
    momentum, fresh = deltas(2)
    anchor = torch.ones(SIZE)
    private_nesterov(0.5, 0.9).step(momentum.clone(), Seen(anchor=anchor, fresh=fresh))
    torch.testing.assert_close(anchor, 1 - 0.5 * (fresh + 0.9 * momentum))


def test_gossip_is_momentum_on_the_mean_and_a_pull_to_the_mean_anchor():
    theirs, phi = deltas(2)
    own, before = torch.ones(SIZE), 0.1 * deltas(3)[2]
    memory = {"momentum": before.clone()}
    # what arrives: the mean of anchor - parameters - pull * anchor
    combined = -theirs - 0.5 * phi
    moved = consensus(0.7, 0.3, 0.5).step(combined.clone(), Seen(anchor=own.clone(), memory=memory))
    expected = own + 0.3 * before + 0.7 * theirs + 0.35 * (phi - own)
    torch.testing.assert_close(moved, expected)


def test_eager_takes_its_own_part_now_and_the_others_one_round_late():
    late, fresh, got_across = deltas(3)
    anchor = torch.zeros(SIZE)
    eager(sgd(1.0)).step(late.clone(), Seen(anchor=anchor, fresh=fresh, sent=got_across, replicas=4))
    torch.testing.assert_close(anchor, -(fresh / 4 + late - got_across / 4))


ANCHORED = [
    sgd(0.5),
    sign_sgd(0.5),
    nesterov(),
    heavy_ball(),
    adam(),
    private_nesterov(),
    consensus(),
    eager(nesterov()),
]


@pytest.mark.parametrize("rule", ANCHORED, ids=lambda rule: type(rule).__name__)
def test_a_rule_acts_on_each_element_alone(rule):
    signal, fresh, got_across = deltas(3)
    memory, whole = zeros(rule, SIZE, CPU), torch.ones(SIZE)
    seen = Seen(anchor=whole, fresh=fresh, sent=got_across, memory=memory, replicas=3, rounds=2)
    rule.step(signal.clone(), seen)
    pieces, again = torch.ones(SIZE), zeros(rule, SIZE, CPU)
    for start, stop in ((0, 7), (7, 50)):
        cut = slice(start, stop)
        part = dataclasses.replace(
            seen,
            anchor=pieces[cut],
            fresh=fresh[cut],
            sent=got_across[cut],
            memory={name: value[cut] for name, value in again.items() if name != COUNTER},
        )
        rule.step(signal[cut].clone(), part)
    assert torch.equal(whole, pieces)
    assert all(torch.equal(memory[name], again[name]) for name in memory)


@pytest.mark.parametrize("rule", ANCHORED, ids=lambda rule: type(rule).__name__)
def test_a_round_that_was_cut_short_takes_a_shorter_step_the_same_way(rule):
    signal, fresh, got_across = deltas(3)
    moves = []
    for scale in (1.0, 0.25):
        anchor = torch.zeros(SIZE)
        rule.step(
            signal.clone(),
            Seen(anchor=anchor, fresh=fresh, sent=got_across, memory=zeros(rule, SIZE, CPU), scale=scale),
        )
        moves.append(anchor)
    torch.testing.assert_close(moves[1], 0.25 * moves[0])


def test_a_server_adam_counts_rounds_and_not_the_checks_between_them():
    """Its correction for the zeros it starts from would otherwise be gone before the first round."""
    cluster = Cluster(fda(theta=math.inf, max_interval=5, server="adam"), 3)
    reference = Cluster(fda(theta=math.inf), 3)
    phi = reference.parameters()
    anchor = torch.nn.Parameter(phi.clone())
    server = torch.optim.Adam([anchor], lr=1e-2, betas=(0.9, 0.99), eps=1e-3)
    for _ in range(3):
        reference.train(5)
        anchor.grad = anchor.detach() - reference.everyone().mean(0)
        server.step()
        for net in reference.nets:
            torch.nn.utils.vector_to_parameters(anchor.detach().clone(), net.parameters())
    cluster.train(15)
    assert [reports[0].step for reports in cluster.reports if reports[0].closed is None] == [5, 10, 15]
    torch.testing.assert_close(cluster.parameters(), anchor.detach(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("make", [sgd, sign_sgd, nesterov, heavy_ball, adam, private_nesterov, consensus])
@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_no_rate_is_refused(make, rate):
    with pytest.raises(ConfigError, match=r"outer_lr must be positive, not .*\nhint"):
        make(rate)


@pytest.mark.parametrize("make", [nesterov, heavy_ball, private_nesterov, consensus])
@pytest.mark.parametrize("mu", [-0.1, 1.0, math.nan])
def test_a_momentum_that_never_fades_is_refused(make, mu):
    with pytest.raises(ConfigError, match=r"momentum must be in \[0, 1\), not .*\nhint"):
        make(0.7, mu)


@pytest.mark.parametrize("then", [assign(), private_nesterov()])
def test_eager_refuses_a_rule_that_steps_no_anchor_or_asks_for_more(then):
    with pytest.raises(ConfigError, match=r"eager needs a rule that steps an anchor, not .*\nhint: "):
        eager(then)
