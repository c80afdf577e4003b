"""Clocks: which steps launch and land, fragment by fragment."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.sync.when import every, one_late, staggered, switch


def launches(when, fragment: int = 0, steps: int = 60) -> list[int]:
    return [step for step in range(steps + 1) if when.launches(step, fragment)]


@given(st.integers(1, 20))
def test_every_launches_after_each_period_and_never_before_the_first_step(period):
    assert launches(every(period)) == list(range(period, 61, period))


def test_switch_agrees_at_every_step_first_and_then_once_a_period():
    assert launches(switch(3, 5), steps=20) == [1, 2, 3, 8, 13, 18]
    assert launches(switch(0, 5), steps=12) == [5, 10]


@st.composite
def cuts(draw) -> tuple[int, int, int]:
    """Fragments, period, delay that go together."""
    number = draw(st.integers(1, 8))
    beat = draw(st.integers(1, 8))
    return number, number * beat, draw(st.integers(0, beat - 1))


@given(cuts())
def test_every_fragment_has_its_turn_exactly_once_a_period(cut):
    number, period, delay = cut
    when = staggered(number, period, delay=delay)
    for start in (1, period + 1):
        turns = [[s for s in range(start, start + period) if when.launches(s, f)] for f in range(number)]
        assert all(len(turn) == 1 for turn in turns)
        assert len({turn[0] for turn in turns}) == number, "two fragments leave at one step"


@given(cuts())
def test_fragments_are_spread_evenly_and_one_is_on_its_way_at_a_time(cut):
    number, period, delay = cut
    when = staggered(number, period, delay=delay)
    times = sorted(step for fragment in range(number) for step in launches(when, fragment, 3 * period))
    assert {later - earlier for earlier, later in pairwise(times)} == {period // number}
    assert delay < period // number or delay == 0


@given(cuts())
def test_what_leaves_lands_once_and_just_as_late_as_was_said(cut):
    number, period, delay = cut
    when = staggered(number, period, delay=delay)
    for fragment in range(number):
        landed = {step: when.lands(step, fragment) for step in range(1, 3 * period + delay + 1)}
        sent = launches(when, fragment, 3 * period)
        assert {step: launch for step, launch in landed.items() if launch is not None} == {s + delay: s for s in sent}


def test_one_late_applies_the_round_before_and_first_of_all_nothing():
    when = one_late(4)
    assert [when.lands(step, 0) for step in range(13)] == [
        None,
        None,
        None,
        None,
        0,
        None,
        None,
        None,
        4,
        *[None] * 3,
        8,
    ]
    assert when.delay == when.period == 4


def test_a_delay_moves_only_the_landing():
    when = every(5, delay=2)
    assert launches(when, steps=12) == [5, 10]
    assert [step for step in range(1, 13) if when.lands(step, 0)] == [7, 12]
    assert when.lands(7, 0) == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: every(0), "period must be a whole number of at least 1, not 0"),
        (lambda: every(2.5), "period must be a whole number of at least 1, not 2.5"),
        (lambda: every("20"), "period must be a whole number of at least 1, not '20'"),
        (lambda: every(float("nan")), "period must be a whole number of at least 1, not nan"),
        (lambda: every(float("inf")), "period must be a whole number of at least 1, not inf"),
        (lambda: every(5, delay=-1), "delay must be a whole number of at least 0, not -1"),
        (lambda: every(5, delay=5), "delay must be shorter than the period: delay=5, period=5"),
        (lambda: switch(-1, 5), "start must be"),
        (lambda: switch(1, 0), "period must be"),
        (lambda: one_late(0), "period must be"),
        (lambda: staggered(0, 6), "fragments must be"),
        (lambda: staggered(4, 6), "period must be a multiple of the fragment count: period=6, fragments=4"),
        (lambda: staggered(3, 6, delay=2), "delay must be shorter than a fragment's beat: delay=2, period/fragments=2"),
    ],
)
def test_a_clock_that_cannot_run_is_refused(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\nhint: " in str(error.value)


def test_the_hint_for_fragments_names_the_next_period_that_works():
    with pytest.raises(ConfigError, match="hint: period=32 is the next valid value"):
        staggered(4, 30)
    assert staggered(4, 32).period == 32
