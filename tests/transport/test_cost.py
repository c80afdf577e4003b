from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.messages import Gather, Group, Inbox, Scatter, Send, Sum
from lowtide.transport.cost import chunk_bounds, emitted, frames, hops, moved

RANKS = (0, 1, 2, 3)


@given(numel=st.integers(0, 10**12), parts=st.integers(1, 1000))
def test_chunks_hold_every_element_once_and_differ_by_one_at_most(numel, parts):
    bounds = chunk_bounds(numel, parts)
    sizes = [stop - start for start, stop in bounds]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert max(sizes) - min(sizes) <= 1


def test_a_payload_is_emitted_once_however_many_get_it():
    assert emitted(Gather(b"12345"), 0) == 5
    assert emitted(Group(b"12345", (0, 3)), 0) == 5
    assert emitted(Send(b"12345", 1), 0) == 5
    assert emitted(Sum(torch.ones(5, dtype=torch.bfloat16)), 0) == 10
    assert emitted(Scatter((b"1", b"22", b"333", b"4444")), rank=2) == 7


@pytest.mark.parametrize(
    ("message", "payloads", "ranks", "expected"),
    [
        (Gather(b"123"), (b"1", b"22", b"123", b"4444"), RANKS, (9, 7)),
        (Group(b"123", (1, 2)), (b"22", b"123"), (1, 2), (3, 2)),
        (Scatter((b"1", b"22", b"333", b"4444")), (b"a", b"bb", b"333", b"d"), RANKS, (7, 4)),
        (Send(b"123", 0), (), (2,), (3, 0)),
    ],
    ids=["Gather", "Group", "Scatter", "Send"],
)
def test_what_moves_is_what_goes_to_others_and_comes_from_them(message, payloads, ranks, expected):
    assert moved(message, Inbox(ranks, payloads), rank=2, size=4) == expected


@given(numel=st.integers(0, 10_000), size=st.integers(1, 9))
def test_sums_of_all_ranks_move_two_n_minus_one_over_n_of_the_tensor(numel, size):
    message = Sum(torch.empty(numel, device="meta"))
    parts = [moved(message, Inbox(tuple(range(size))), rank, size) for rank in range(size)]
    assert sum(sent for sent, _ in parts) == 2 * (size - 1) * numel * 4
    assert all(sent == received for sent, received in parts)
    assert max(sent for sent, _ in parts) - min(sent for sent, _ in parts) <= 4 * max(size - 2, 0)


def test_alone_nothing_moves():
    inbox = Inbox((0,), (b"123",))
    assert moved(Gather(b"123"), inbox, 0, 1) == (0, 0)
    assert moved(Scatter((b"123",)), inbox, 0, 1) == (0, 0)
    assert moved(Sum(torch.ones(3)), Inbox((0,)), 0, 1) == (0, 0)
    assert frames(Gather(b"123"), 1) == (0, 0)


def test_frames_grow_with_the_peers_and_a_send_costs_its_sender_more():
    assert frames(Gather(b""), 5)[0] == 4 * frames(Gather(b""), 2)[0]
    assert frames(Group(b"", (0, 4)), 5) == frames(Gather(b""), 2)
    assert frames(Sum(torch.ones(1)), 2)[0] > frames(Gather(b""), 2)[0]
    sent, received = frames(Send(b"", 1), 5)
    assert sent > received
    assert frames(None, 5) == (received, sent)


def test_a_sum_crosses_the_link_once_more():
    assert [hops(message) for message in (Send(b"", 1), Gather(b""), Scatter(()), Group(b"", (0,)))] == [1, 2, 2, 2]
    assert hops(Sum(torch.ones(1))) == 3
