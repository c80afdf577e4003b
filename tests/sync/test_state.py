"""What outlives a step can be written down and read again, even half-way through an event."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from tests.contract.test_methods import everything
from tests.sync.toy import Cluster, same

from lowtide.messages import Gather, Group, Scatter, Send, Sum
from lowtide.sync.methods import decoupled, fda, powersgd, streaming_diloco
from lowtide.sync.state import RoundState, load_message, save_message

payloads = st.binary(max_size=40)
messages = st.one_of(
    st.builds(Gather, payloads),
    st.builds(Group, payloads, st.lists(st.integers(0, 9), min_size=1, unique=True).map(lambda x: tuple(sorted(x)))),
    st.builds(Send, payloads, st.integers(0, 9)),
    st.builds(Scatter, st.lists(payloads, min_size=1, max_size=12).map(tuple)),
)


@given(messages)
def test_a_message_is_saved_as_tensors_and_comes_back_whole(message):
    saved = save_message(message)
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    assert load_message(saved) == message
    assert load_message(load(save(saved))) == message


def test_a_sum_is_saved_with_its_bits():
    tensor = torch.tensor([1.0, -0.0, 3e-40, float("inf")])
    found = load_message(load(save(save_message(Sum(tensor)))))
    assert isinstance(found, Sum)
    assert same(found.tensor, tensor)


def test_many_shares_keep_their_order():
    message = Scatter(tuple(bytes([number % 256]) * 2 for number in range(1100)))
    assert load_message(save_message(message)) == message


def test_shared_and_private_are_two_homes():
    state = RoundState()
    state.home(shared=True)["anchor"] = torch.ones(1)
    state.home(shared=False)["residual"] = torch.zeros(1)
    assert list(state.shared) == ["anchor"]
    assert list(state.private) == ["residual"]


@pytest.mark.parametrize(
    ("method", "legs"),
    [
        (powersgd(), 1),
        (decoupled(period=1, exchange="sharded"), 1),
        (fda(theta=0.0), 1),
        (fda(theta=0.0), 0),
        (streaming_diloco(period=6), 0),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_an_event_saved_between_its_legs_ends_as_it_would_have(method, legs):
    straight = Cluster(method, 3).train(4)
    begin_event(straight, legs)
    saved = straight.saved()
    resumed = Cluster(method, 3).train(1).restore(saved)
    for cluster in (straight, resumed):
        assert [flight.tag.leg for flight in cluster.rounds[0][0].flights] == [legs]
        cluster.land(cluster.rows[0])
    assert same([[one[0], one[2]] for one in everything(resumed)], [[one[0], one[2]] for one in everything(straight)])


def begin_event(cluster: Cluster, legs: int) -> None:
    """Launch, and carry some legs; what is already on its way lands first."""
    cluster.step += 1
    cluster.gradients()
    row = cluster.rows[0]
    if not row[0].plan.before_step:
        for optimizer in cluster.optimizers:
            optimizer.step()
    while row[0].flights:
        cluster.land(row)
    cluster.launch(row)
    for _ in range(legs):
        assert cluster.leg(row)
