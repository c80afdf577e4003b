from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.transport.baton import Baton


def relay(size: int, waits: list[int], settle=None) -> tuple[list[int], list[tuple]]:
    """Run a thread per rank that waits so many times; the order of turns, and the switches that were told."""
    turns, switches, waiting = [], [], set()

    def free_all():
        return settle(waiting) if settle else set(waiting)

    baton = Baton(size, free_all, lambda holder, following: switches.append((holder, following)))

    def runner(rank: int) -> None:
        baton.enter(rank)
        turns.append(rank)
        for _ in range(waits[rank]):
            waiting.add(rank)
            baton.wait(rank)
            waiting.discard(rank)
            turns.append(rank)
        baton.leave(rank)

    threads = [threading.Thread(target=runner, args=(rank,), daemon=True) for rank in range(size)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return turns, switches


def test_ranks_take_turns_from_zero_however_they_were_started():
    turns, _ = relay(3, [2, 2, 2])
    assert turns == [0, 1, 2] * 3


@given(waits=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_every_turn_comes_and_the_order_is_that_of_a_round_robin(waits):
    turns, _ = relay(len(waits), waits)
    expected = [rank for turn in range(max(waits) + 1) for rank in range(len(waits)) if waits[rank] >= turn]
    assert turns == expected


def test_each_pass_is_told_once_from_none_to_none():
    turns, switches = relay(2, [1, 0])
    assert turns == [0, 1, 0]
    assert switches == [(None, 0), (0, 1), (1, 0), (0, None)]


def test_one_alone_keeps_the_baton():
    turns, switches = relay(1, [3])
    assert turns == [0, 0, 0, 0]
    assert switches == [(None, 0), (0, None)]


def test_settle_decides_who_goes_on():
    turns, _ = relay(3, [1, 1, 1], settle=lambda waiting: {max(waiting)} if waiting else set())
    assert turns == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("size", [2, 5])
def test_one_runs_at_a_time(size):
    running, most, live = [], [], set(range(size))
    baton = Baton(size, lambda: live)

    def runner(rank: int) -> None:
        baton.enter(rank)
        for _ in range(50):
            running.append(rank)
            most.append(len(running))
            running.remove(rank)
            baton.wait(rank)
        live.discard(rank)
        baton.leave(rank)

    threads = [threading.Thread(target=runner, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert most == [1] * 50 * size
