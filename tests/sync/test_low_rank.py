"""Low-rank averaging: what one power iteration finds, and who takes part."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tests.sync.toy import deliver
from torch import Tensor

from lowtide.sync.exchange import Closed, Leg, Me, Outcome, low_rank
from lowtide.tensors import Entry, Grid, Layout

ENTRIES = [Entry("wide", (70, 96)), Entry("conv", (80, 8, 3, 3)), Entry("bias", (70,)), Entry("tall", (96, 70))]


def build(rank: int) -> tuple[object, Grid]:
    exchange = low_rank(rank)
    return exchange, Layout.build(ENTRIES, exchange.chunker).grid


def start(exchange, grid: Grid, replicas: int, weights=None) -> list[Me]:
    memory = exchange.init(grid, torch.device("cpu"))
    return [
        Me(rank, replicas, weight=(weights or [1.0] * replicas)[rank], memory=dict(memory)) for rank in range(replicas)
    ]


def event(exchange, grid: Grid, signals: list[Tensor | None], everyone: list[Me]) -> list[Outcome | Closed]:
    """One event over a perfect network."""
    legs = [exchange.open(signal, grid, me) for signal, me in zip(signals, everyone, strict=True)]
    while True:
        inboxes = deliver([leg.message for leg in legs])
        answers = [
            exchange.advance(signal, grid, leg.carry, inbox, me)
            for signal, leg, inbox, me in zip(signals, legs, inboxes, everyone, strict=True)
        ]
        if not isinstance(answers[0], Leg):
            return answers
        legs = answers


def signals(grid: Grid, number: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(number, grid.size, generator=torch.Generator().manual_seed(seed)))


def test_full_rank_gives_the_weighted_mean():
    exchange, grid = build(96)
    given, weights = signals(grid, 3), [1.0, 2.0, 5.0]
    outcomes = event(exchange, grid, given, start(exchange, grid, 3, weights))
    expected = sum(w * s for w, s in zip(weights, given, strict=True)) / 8
    for outcome in outcomes:
        torch.testing.assert_close(outcome.dense(), expected, atol=1e-4, rtol=0)


def test_all_replicas_get_the_same_bits_and_remember_the_same():
    exchange, grid = build(2)
    everyone = start(exchange, grid, 4)
    outcomes = event(exchange, grid, signals(grid, 4), everyone)
    assert all(torch.equal(outcome.dense(), outcomes[0].dense()) for outcome in outcomes)
    assert all(torch.equal(me.memory["right"], everyone[0].memory["right"]) for me in everyone)


def test_what_was_sent_is_what_all_agreed_on():
    exchange, grid = build(2)
    for outcome in event(exchange, grid, signals(grid, 2), start(exchange, grid, 2)):
        assert torch.equal(outcome.sent.dense(), outcome.dense())


def test_small_tensors_go_whole():
    exchange, grid = build(1)
    given = signals(grid, 2)
    outcome = event(exchange, grid, given, start(exchange, grid, 2))[0]
    torch.testing.assert_close(outcome.dense()[grid.body :], (given[0] + given[1])[grid.body :] / 2)


def test_the_result_has_the_rank_that_was_asked_for():
    exchange, grid = build(3)
    result = event(exchange, grid, signals(grid, 2), start(exchange, grid, 2))[0].dense()
    for group in grid.groups:
        values = torch.linalg.svdvals(group.view(result).view(group.count, group.rows, group.cols))
        assert bool((values[:, 3:] < 1e-4 * values[:, :1]).all())
        assert bool((values[:, 2] > 1e-2 * values[:, 0]).all())


def test_the_remembered_factor_makes_each_guess_better():
    """The same signal again and again is a power iteration: the error falls to that of the best guess."""
    exchange, grid = build(2)
    everyone = start(exchange, grid, 1)
    spectrum = torch.zeros(grid.size)
    for group in grid.groups:
        for index in range(group.count):
            left = torch.linalg.qr(torch.randn(group.rows, 5, generator=torch.Generator().manual_seed(index))).Q
            right = torch.linalg.qr(torch.randn(group.cols, 5, generator=torch.Generator().manual_seed(9 + index))).Q
            matrix = left @ torch.diag(torch.tensor([9.0, 7.0, 2.0, 1.0, 0.5])) @ right.T
            group.view(spectrum)[index] = matrix.flatten()
    errors = []
    for _ in range(8):
        result = event(exchange, grid, [spectrum], everyone)[0].dense()
        errors.append(float((result - spectrum).norm()))
    best = math.sqrt(3 * (2.0**2 + 1.0 + 0.25))
    assert all(later <= earlier * 1.0001 for earlier, later in pairwise(errors))
    assert errors[0] > 1.02 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_a_replica_without_a_signal_leaves_the_mean_to_the_others():
    exchange, grid = build(96)
    given = signals(grid, 2)
    three = event(exchange, grid, [given[0], None, given[1]], start(exchange, grid, 3))
    torch.testing.assert_close(three[1].dense(), (given[0] + given[1]) / 2, atol=1e-4, rtol=0)
    assert all(torch.equal(outcome.dense(), three[0].dense()) for outcome in three)
    assert three[1].sent.weight == 0
    assert not three[1].sent.dense().any()


def test_where_nobody_has_a_signal_nothing_is_decided_and_the_factor_stays():
    exchange, grid = build(2)
    everyone = start(exchange, grid, 2)
    before = everyone[0].memory["right"].clone()
    answers = event(exchange, grid, [None, None], everyone)
    assert all(isinstance(answer, Closed) for answer in answers)
    assert torch.equal(everyone[0].memory["right"], before)


def test_a_signal_of_zeros_gives_zeros_and_the_next_one_is_found_again():
    exchange, grid = build(2)
    everyone = start(exchange, grid, 2)
    outcome = event(exchange, grid, [torch.zeros(grid.size)] * 2, everyone)[0]
    assert not outcome.dense().any()
    given = signals(grid, 2)
    result = event(exchange, grid, given, everyone)[0].dense()
    assert bool(result.isfinite().all())
    assert float(result.norm()) > 0


def test_messages_have_the_bytes_of_the_factors():
    exchange, grid = build(2)
    everyone = start(exchange, grid, 2)
    given = signals(grid, 2)
    legs = [exchange.open(signal, grid, me) for signal, me in zip(given, everyone, strict=True)]
    assert legs[0].message.tensor.numel() == 2 * (70 + 80 + 96) + 70 + 1
    answer = exchange.advance(given[0], grid, legs[0].carry, deliver([leg.message for leg in legs])[0], everyone[0])
    assert isinstance(answer, Leg)
    assert answer.message.tensor.numel() == 2 * (96 + 72 + 70) + 1
