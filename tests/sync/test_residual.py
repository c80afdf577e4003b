"""What is kept back: how it decays, and that it stays small."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sync.toy import Cluster

from lowtide.codec import chain, dct, sym2, top_k
from lowtide.errors import ConfigError
from lowtide.sync import Method, Plan
from lowtide.sync.combine import mean_of_contributors
from lowtide.sync.exchange import gathered
from lowtide.sync.outer import sgd
from lowtide.sync.residual import error_feedback, momentum, no_residual
from lowtide.sync.signal import delta
from lowtide.sync.when import every
from lowtide.tensors import Entry, Layout, tile

GRID = Layout.build([Entry("w", (64, 64)), Entry("b", (10,))], tile()).grid
betas = st.floats(0, 1, width=32)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(GRID.size, generator=generator), torch.randn(GRID.size, generator=generator)


@given(betas)
def test_feedback_adds_the_decayed_memory_and_forgets_nothing_of_the_tail(beta):
    memory, signal = pair()
    added = error_feedback(beta).add(memory.clone(), signal.clone(), GRID)
    torch.testing.assert_close(added[: GRID.body], beta * memory[: GRID.body] + signal[: GRID.body])
    torch.testing.assert_close(added[GRID.body :], memory[GRID.body :] + signal[GRID.body :])


@given(betas)
def test_momentum_decays_all_of_the_memory(beta):
    memory, signal = pair()
    added = momentum(beta).add(memory.clone(), signal.clone(), GRID)
    torch.testing.assert_close(added, beta * memory + signal)


@pytest.mark.parametrize("residual", [error_feedback(0.5), momentum(0.5)], ids=["feedback", "momentum"])
def test_adding_leaves_the_memory_as_it_was(residual):
    memory, signal = pair()
    before = memory.clone()
    residual.add(memory, signal, GRID)
    assert torch.equal(memory, before)


def test_without_a_residual_the_signal_is_all():
    memory, signal = pair()
    assert no_residual().add(memory, signal, GRID) is signal
    assert not no_residual().keeps


@pytest.mark.parametrize("make", [error_feedback, momentum])
@pytest.mark.parametrize("beta", [-0.1, 1.0001, float("nan"), float("inf")])
def test_a_feedback_that_cannot_decay_is_refused(make, beta):
    with pytest.raises(ConfigError, match=r"feedback must be in \[0, 1\], not .*\nhint"):
        make(beta)


def plan(beta: float) -> Method:
    exchange = gathered(chain(dct(64), top_k(1 / 16), sym2()), mean_of_contributors())
    parts = Plan(when=every(2), signal=delta(), residual=error_feedback(beta), exchange=exchange, outer=sgd(0.5))
    return Method("mine", (parts,))


def test_the_residual_is_bounded_by_what_came_in_while_it_decays():
    cluster, largest = Cluster(plan(0.5), 2), 0.0
    one = cluster.rounds[0][0]

    def measure(_row):
        nonlocal largest
        signal = one.plan.signal.read(cluster.replicas[0], one.layout, one.anchor, one.grid.zeros())
        largest = max(largest, float(signal[: one.grid.body].norm()))

    for _ in range(10):
        cluster.train(2, measure)
        kept = float(one.state.private["residual"][: one.grid.body].norm())
        # a step sends a part of the memory, so the norm cannot exceed the geometric sum of what came in
        assert 0 < kept <= largest / (1 - 0.5)


def test_a_dead_position_that_was_kept_is_sent_in_the_end():
    exchange = gathered(chain(top_k(1 / 64)), mean_of_contributors())
    parts = Plan(when=every(1), signal=delta(), residual=error_feedback(1.0), exchange=exchange, outer=sgd(1.0))
    cluster = Cluster(Method("mine", (parts,)), 1, lr=0.0)
    one, net = cluster.rounds[0][0], cluster.nets[0]
    with torch.no_grad():
        net.first.weight += 0.01 * torch.randn(net.first.weight.shape)
    wanted = cluster.parameters()
    cluster.train(64)
    torch.testing.assert_close(cluster.parameters(), wanted, atol=1e-6, rtol=0)
    assert float(one.state.private["residual"].abs().max()) < 1e-7


def test_the_tail_owes_at_most_half_a_step_of_its_scale():
    cluster = Cluster(plan(0.9), 2)
    one = cluster.rounds[0][0]
    grid, inputs = one.grid, []

    def watch(row):
        cluster.launch(row)
        inputs[:] = [row[0].flights[0].signal[grid.body :].clone()]
        for each in row:
            each.drop()

    cluster.train(8, watch)
    owed = one.state.private["residual"][grid.body :].split(grid.tail)
    for kept, came in zip(owed, inputs[0].split(grid.tail), strict=True):
        assert float(kept.abs().max()) <= 0.5001 * float(came.abs().max()) / 127
