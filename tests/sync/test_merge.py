"""What becomes of the steps that were taken while a message was on its way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sync.toy import Cluster

from lowtide.errors import ConfigError
from lowtide.sync.merge import mix, rebase, replace
from lowtide.sync.methods import decoupled, fda, sparta, streaming_diloco


def three() -> list[torch.Tensor]:
    return list(torch.randn(3, 20, generator=torch.Generator().manual_seed(2)))


def test_replace_takes_what_was_agreed():
    agreed, current, snapshot = three()
    assert torch.equal(replace().merge(agreed, current, snapshot), agreed)
    assert not replace().needs


@given(st.floats(0, 1))
def test_mix_keeps_a_share_of_the_live_value(alpha):
    agreed, current, _ = three()
    merged = mix(alpha).merge(agreed.clone(), current.clone(), None)
    torch.testing.assert_close(merged, alpha * current + (1 - alpha) * agreed)


def test_the_ends_of_mix_are_exact():
    agreed, current, _ = three()
    assert torch.equal(mix(0.0).merge(agreed, current, None), agreed)
    assert torch.equal(mix(1.0).merge(agreed, current, None), current)


@pytest.mark.parametrize("alpha", [-0.01, 1.01, float("nan")])
def test_a_share_outside_0_and_1_is_refused(alpha):
    with pytest.raises(ConfigError, match=r"alpha must be in \[0, 1\]"):
        mix(alpha)


def test_rebase_keeps_the_steps_taken_meanwhile_in_full():
    agreed, current, snapshot = three()
    torch.testing.assert_close(rebase().merge(agreed, current.clone(), snapshot), agreed + (current - snapshot))


def test_the_anchor_is_the_agreed_value_itself_and_only_the_live_one_is_mixed():
    cluster = Cluster(
        streaming_diloco(period=4, fragments=1, delay=2, alpha=0.25, outer_lr=1.0, momentum=0.0, bits=32), 2
    )
    cluster.train(4)
    snapshots = cluster.everyone()
    apart = Cluster(streaming_diloco(period=100, fragments=1, delay=0), 2).train(6)
    alone = apart.everyone()
    cluster.train(2)
    one = cluster.rounds[0][0]
    torch.nn.utils.vector_to_parameters(snapshots.mean(0), apart.nets[0].parameters())
    agreed = one.layout.gather([p.detach() for p in apart.nets[0].parameters()])
    torch.testing.assert_close(one.anchor, agreed, atol=1e-6, rtol=0)
    torch.testing.assert_close(cluster.everyone(), 0.25 * alone + 0.75 * snapshots.mean(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize("delay", [1, 2])
def test_a_late_difference_loses_no_step_that_was_taken_meanwhile(delay):
    late = Cluster(sparta(density=1.0, period=3, delay=delay), 2).train(3 + delay)
    apart = Cluster(sparta(density=1.0, period=100), 2)
    apart.train(3)
    snapshots = apart.everyone()
    meanwhile = late_steps(snapshots, delay)
    torch.testing.assert_close(late.everyone(), snapshots.mean(0) + meanwhile, atol=1e-6, rtol=0)


def late_steps(snapshots: torch.Tensor, steps: int) -> torch.Tensor:
    """What plain training adds to the replicas from `snapshots` on."""
    apart = Cluster(sparta(density=1.0, period=100), 2).train(3)
    assert torch.equal(apart.everyone(), snapshots)
    return apart.train(steps).everyone() - snapshots


def test_a_lagged_check_keeps_the_steps_after_it():
    cluster = Cluster(fda(theta=0.0, check_every=3, delay=1), 2).train(4)
    apart = Cluster(fda(theta=0.0, check_every=100), 2).train(3)
    snapshots = apart.everyone()
    torch.testing.assert_close(
        cluster.everyone(), snapshots.mean(0) + apart.train(1).everyone() - snapshots, atol=1e-6, rtol=0
    )


def test_a_last_round_is_taken_as_it_is_whatever_the_rule():
    cluster = Cluster(streaming_diloco(period=6, fragments=3, delay=1, alpha=0.9), 3).train(8)
    assert not cluster.alike()
    assert cluster.finish().alike()


def test_a_merge_that_moves_anchors_leaves_every_plan_with_the_same():
    cluster = Cluster(decoupled(period=2, preset="resync"), 3)
    cluster.train(8)
    assert len({float(one[0].anchor.double().sum()) for one in cluster.rounds}) == 3
    cluster.train(2)
    assert cluster.alike()
    anchors = [mine[0].anchor for mine in cluster.rounds]
    assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
    live = cluster.rounds[0][0].layout.gather([p.detach() for p in cluster.nets[0].parameters()])
    assert torch.equal(anchors[0], live)
