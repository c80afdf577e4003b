from __future__ import annotations

import pytest
import torch

from lowtide.errors import ConfigError, TransportError
from lowtide.messages import Gather, Group, Inbox, Scatter, Send, Sum, Tag
from lowtide.transport.loopback import Loopback

TAG = Tag("plan", 0)


@pytest.mark.parametrize("message", [Gather(b"mine"), Group(b"mine", (0,)), Scatter((b"mine",))], ids=str)
def test_payloads_come_straight_back(message):
    assert Loopback().start(message, TAG).finish() == Inbox((0,), (b"mine",))


def test_a_sum_is_a_copy():
    tensor = torch.arange(4.0)
    total = Loopback().start(Sum(tensor), TAG).finish().total
    assert torch.equal(total, tensor)
    total.zero_()
    assert tensor.sum() == 6.0


def test_there_is_nobody_to_talk_to():
    alone = Loopback()
    with pytest.raises(ConfigError, match="a world of one has nobody to talk to"):
        alone.start(Send(b"", 0), TAG)
    with pytest.raises(ConfigError, match="a world of one has nobody to talk to"):
        alone.receive(1, TAG)


def test_nothing_is_on_the_wire_and_time_runs():
    alone = Loopback()
    assert alone.overhead(Gather(b"1")) == alone.overhead(None) == (0, 0)
    assert alone.now() <= alone.now()


def test_an_abort_drops_what_is_unfinished_and_says_why():
    alone = Loopback()
    pending = alone.start(Gather(b""), TAG)
    alone.abort("the loss is nan")
    alone.close()
    for call in (pending.finish, lambda: alone.start(Gather(b""), TAG)):
        with pytest.raises(TransportError, match="aborted: the loss is nan"):
            call()
