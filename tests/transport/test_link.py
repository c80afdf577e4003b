from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.transport.link import Link


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit/40ms", Link(100e6, 100e6, 0.04)),
        ("50mbit:10mbit/40ms", Link(up=10e6, down=50e6, delay=0.04)),
        ("1gbit:1.5mbit/0s", Link(up=1.5e6, down=1e9, delay=0.0)),
        (" 64KBIT/500us ", Link(64e3, 64e3, 0.0005)),
        ("50mbit:10mbit/40ms/jitter=5ms/loss=1%", Link(10e6, 50e6, 0.04, 0.005, 0.01)),
        ("300bit/1s/loss=0.25", Link(300, 300, 1.0, 0.0, 0.25)),
    ],
)
def test_a_link_is_read_as_down_up_delay(text, link):
    assert Link.parse(text) == link


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no delay"),
        ("100mbit", "has no delay"),
        ("100/40ms", "'100' is no number with a unit of bit, kbit, mbit, gbit"),
        ("100mb/40ms", "'100mb' is no number"),
        ("100mbit/40", "'40' is no number with a unit of us, ms, s"),
        ("100mbit/40ms/jiter=5ms", "unknown link option 'jiter'"),
        ("100mbit/40ms/jitter", "'' is no number"),
        ("100mbit/40ms/loss=-1%", "'-1%' is no number"),
        ("0mbit/40ms", "up must be positive"),
        ("1mbit:0mbit/40ms", "up must be positive"),
        ("0mbit:1mbit/40ms", "down must be positive"),
        ("1mbit/40ms/loss=100%", "loss must lie in"),
        ("1mbit/40ms/jitter=50ms", "jitter must lie between 0 and the delay"),
    ],
)
def test_a_wrong_link_is_refused_by_name(text, words):
    with pytest.raises(ConfigError, match=words) as error:
        Link.parse(text)
    assert "hint: " in str(error.value)


@pytest.mark.parametrize("bad", [{"up": float("nan")}, {"down": -1.0}, {"delay": float("inf")}, {"loss": float("nan")}])
def test_numbers_that_are_none_are_refused(bad):
    with pytest.raises(ConfigError):
        Link(**{"up": 1.0, "down": 1.0, "delay": 1.0, **bad})


def test_the_slower_direction_decides():
    link = Link(up=8e6, down=80e6, delay=0.1)
    assert link.transfer_seconds(1_000_000, 1_000_000) == pytest.approx(1.1)
    assert link.transfer_seconds(1_000_000, 20_000_000) == pytest.approx(2.1)
    assert link.wire_seconds(1_000_000, 20_000_000) == pytest.approx(2.0)


def test_every_hop_costs_the_delay_and_loss_is_sent_again():
    assert Link(8e6, 8e6, 0.1).transfer_seconds(1_000_000, 0, hops=3) == pytest.approx(1.3)
    assert Link(8e6, 8e6, 0.1, loss=0.5).transfer_seconds(1_000_000, 0) == pytest.approx(2.1)


@given(seed=st.integers(0, 1000), hops=st.integers(1, 4))
def test_jitter_stays_in_its_bounds_and_repeats_with_its_seed(seed, hops):
    link = Link(8e6, 8e6, 0.1, jitter=0.05)
    first = link.transfer_seconds(0, 0, random.Random(seed), hops=hops)
    assert hops * 0.05 <= first <= hops * 0.15
    assert first == link.transfer_seconds(0, 0, random.Random(seed), hops=hops)


def test_jitter_varies_and_without_a_generator_is_left_out():
    link, rng = Link(8e6, 8e6, 0.1, jitter=0.05), random.Random(0)
    assert len({link.transfer_seconds(0, 0, rng) for _ in range(5)}) == 5
    assert link.transfer_seconds(0, 0) == 0.1
