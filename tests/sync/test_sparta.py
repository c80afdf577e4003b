"""SPARTA's options that belong to its companion."""

from __future__ import annotations

import pytest

from lowtide import ConfigError, sparta


@pytest.mark.parametrize("option", [{"outer_lr": 0.5}, {"momentum": 0.5}])
def test_an_option_of_a_companion_that_is_not_there_is_refused(option):
    with pytest.raises(ConfigError, match=r"belong to a DiLoCo plan, and there is none\nhint: give diloco_period too"):
        sparta(**option)


def test_the_companion_takes_its_options():
    companion = sparta(diloco_period=100, outer_lr=0.5, momentum=0.25).plans[1]
    assert (companion.when.period, companion.outer.lr, companion.outer.mu) == (100, 0.5, 0.25)
    assert sparta(diloco_period=100).plans[1].outer.lr == 0.7
