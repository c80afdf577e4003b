"""The bound on the spread: when it opens, how it is set, and what it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.sync.trigger import Trigger, trigger


def intervals(
    bound: Trigger, variance, steps: int, *, check_every: int = 1, rate=lambda _: 1.0, cost: float = 1.0
) -> list[int]:
    """Lengths of the rounds when the spread is `variance(steps since the last)`."""
    memory, last, found = bound.init(), 0, []
    for step in range(check_every, steps + 1, check_every):
        spread = variance(step - last)
        if bound.opens(spread, step, rate(step), memory):
            bound.agreed(spread, step, rate(step), cost, memory)
            found.append(step - last)
            last = step
    return found


def linear(since: int) -> float:
    return 0.3 * since


def quadratic(since: int) -> float:
    return 0.01 * since**2


def test_a_bound_is_strict():
    bound = trigger(2.0)
    memory = bound.init()
    assert not bound.opens(2.0, 5, 1.0, memory)
    assert bound.opens(math.nextafter(2.0, 3.0), 5, 1.0, memory)


def test_a_bound_of_zero_opens_at_every_change_and_an_infinite_one_never():
    assert intervals(trigger(0.0), linear, 10) == [1] * 10
    assert intervals(trigger(0), lambda _: 0.0, 10) == []
    assert intervals(trigger(math.inf), linear, 1999) == []


@given(st.integers(1, 30), st.integers(1, 30))
def test_no_round_is_shorter_or_longer_than_the_guards(shortest, more):
    longest = shortest + more
    often = intervals(trigger(0.0, shortest=shortest, longest=longest), linear, 200)
    seldom = intervals(trigger(math.inf, shortest=shortest, longest=longest), linear, 200)
    assert set(often) <= {shortest}
    assert set(seldom) <= {longest}


def test_even_an_infinite_bound_opens_after_the_longest_interval():
    assert intervals(trigger(math.inf), linear, 4500) == [2000, 2000]
    assert intervals(trigger(math.inf, longest=7), linear, 20) == [7, 7]


def test_calibration_takes_the_first_round_as_long_as_asked_and_keeps_what_it_saw():
    assert intervals(trigger("calibrate:10"), linear, 50) == [10, 11, 11, 11]
    bound = trigger("calibrate:10")
    memory = bound.init()
    bound.agreed(3.0, 10, 1.0, 1.0, memory)
    bound.agreed(9.0, 20, 1.0, 1.0, memory)
    assert float(memory["theta"]) == 3.0


@pytest.mark.parametrize(("variance", "rounds"), [(linear, 2), (quadratic, 5)])
def test_interval_holds_the_mean_interval_whatever_the_first_round_was(variance, rounds):
    bound = trigger("interval:20")
    memory = bound.init()
    bound.agreed(variance(50), 50, 1.0, 1.0, memory)
    last, found = 50, []
    for step in range(51, 400):
        if bound.opens(variance(step - last), step, 1.0, memory):
            bound.agreed(variance(step - last), step, 1.0, 1.0, memory)
            found.append(step - last)
            last = step
    assert all(abs(length - 20) <= 1 for length in found[rounds:])


def test_interval_never_stops_when_the_spread_stops_growing():
    lengths = intervals(trigger("interval:10"), lambda since: min(0.1 * since, 0.5), 200)
    assert max(lengths) == 30
    assert sum(lengths) > 170


def test_interval_follows_a_task_that_changes():
    """Twice the spread a step: a fixed bound would halve the rounds for good."""
    lengths = intervals(trigger("interval:20"), linear, 100) + intervals(
        trigger("interval:20"), lambda s: 2 * linear(s), 100
    )
    assert all(19 <= length <= 21 for length in lengths)


@pytest.mark.parametrize("most", [4, 10])
def test_epochs_gives_rounds_of_half_the_most_and_a_first_one_of_a_single_check(most):
    lengths = intervals(trigger(f"epochs:{most}", check_every=7), linear, 7 * 60, check_every=7)
    epochs = [length // 7 for length in lengths]
    assert epochs[0] == 1
    assert all(abs(length - most / 2) <= 1 for length in epochs[1:])
    assert intervals(trigger(f"epochs:{most}", check_every=7), lambda _: 1e-9, 7 * 60, check_every=7)[2] <= 7 * most


@given(st.integers(2, 20), st.integers(1, 9), st.floats(0.01, 100), st.integers(1, 12))
def test_epochs_sets_the_published_bound(most, check_every, spread, checks):
    """theta = (max epochs / 2) / j * Var after a round of j epochs."""
    bound = trigger(f"epochs:{most}", check_every=check_every)
    memory = bound.init()
    bound.agreed(spread, checks * check_every, 1.0, 1.0, memory)
    assert float(memory["theta"]) == pytest.approx(most / 2 / checks * spread)


@pytest.mark.parametrize("rounds", [1, 5, 20])
def test_budget_spends_what_it_was_given_and_not_more(rounds):
    lengths = intervals(trigger(f"budget:{rounds * 100}/1000"), linear, 1000, cost=100.0)
    assert rounds - 1 <= len(lengths) <= rounds + 1
    assert sum(lengths) > 700 or rounds == 1


def test_a_budget_that_is_spent_stays_spent_even_where_nothing_spreads():
    bound = trigger("budget:100/1000")
    memory = bound.init()
    bound.agreed(0.0, 10, 1.0, 100.0, memory)
    assert float(memory["theta"]) == math.inf
    assert not bound.opens(1e30, 500, 1.0, memory)


def halving(step: int) -> float:
    return 1.0 if step <= 100 else 0.5


def test_a_bound_follows_the_square_of_the_rate():
    """A rate half as large spreads a quarter as much: the rounds keep their length."""
    memory = trigger(3.0).init()
    assert trigger(3.0).opens(0.76, 5, 0.5, memory)
    assert not trigger(3.0).opens(0.74, 5, 0.5, memory)
    assert not trigger(3.0, rate_power=0.0).opens(0.76, 5, 0.5, memory)


@pytest.mark.parametrize("theta", [3.0, "calibrate:10"])
def test_rounds_go_on_when_the_rate_decays(theta):
    bound, memory, last, found = trigger(theta), trigger(theta).init(), 0, []
    for step in range(1, 300):
        spread = 0.3 * (step - last) * halving(step) ** 2
        if bound.opens(spread, step, halving(step), memory):
            bound.agreed(spread, step, halving(step), 1.0, memory)
            found.append(step - last)
            last = step
    assert all(10 <= length <= 17 for length in found)


def test_a_rate_of_zero_divides_nothing():
    bound = trigger("calibrate:5")
    memory = bound.init()
    bound.agreed(2.0, 5, 0.0, 1.0, memory)
    assert float(memory["theta"]) == 2.0


@pytest.mark.parametrize(
    ("theta", "options", "message"),
    [
        (-1.0, {}, "theta must be at least 0, not -1.0"),
        (math.nan, {}, "theta must be at least 0, not nan"),
        ("often", {}, "cannot read theta='often'"),
        ("interval", {}, "cannot read theta='interval'"),
        ("interval:0", {}, "cannot read theta='interval:0'"),
        ("interval:2.5", {}, "cannot read"),
        ("calibrate:-3", {}, "cannot read"),
        ("epochs:x", {}, "cannot read"),
        ("budget:1e9", {}, "cannot read"),
        ("budget:0/100", {}, "cannot read"),
        ("budget:-5/100", {}, "cannot read"),
        ("budget:nan/100", {}, "cannot read"),
        ("budget:1e9/0", {}, "cannot read"),
        (None, {}, "cannot read theta=None"),
        (1.0, {"shortest": 0}, "min_interval must be at least 1, not 0"),
        (1.0, {"shortest": 5, "longest": 4}, "max_interval must not be below min_interval: 4 < 5"),
    ],
)
def test_a_bound_that_cannot_be_read_is_refused(theta, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        trigger(theta, **options)
    assert "\nhint: " in str(error.value)
