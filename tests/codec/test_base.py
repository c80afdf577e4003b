"""Decoded payloads: values at positions, cut, subtracted and spread without a copy of the buffer."""

from __future__ import annotations

import pytest
import torch

from lowtide.codec import Coefficients, Turn


def sparse() -> Coefficients:
    return Coefficients(torch.tensor([1.0, -2.0, 3.0, 4.0]), torch.tensor([0, 3, 4, 9]), 10, 0.5)


def dense() -> Coefficients:
    return Coefficients(torch.arange(1.0, 11.0), None, 10)


def test_values_are_spread_over_a_buffer_of_zeros():
    assert sparse().dense().tolist() == [1, 0, 0, -2, 3, 0, 0, 0, 0, 4]
    assert dense().dense().tolist() == list(range(1, 11))


@pytest.mark.parametrize("make", [sparse, dense])
def test_subtracting_happens_in_place_and_takes_out_what_is_there(make):
    buffer = make().dense().clone()
    found = make().subtract_from(buffer)
    assert found.data_ptr() == buffer.data_ptr()
    assert not bool(buffer.any())


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (0, 0), (3, 5), (4, 9), (5, 9), (9, 10), (10, 10)])
@pytest.mark.parametrize("make", [sparse, dense])
def test_a_range_holds_its_values_and_counts_from_its_start(make, start, stop):
    value, index = make().within(start, stop)
    expected = make().dense()[start:stop]
    found = value if index is None else torch.zeros(stop - start).index_copy_(0, index, value)
    assert torch.equal(found, expected)


def test_ranges_together_hold_everything_once():
    parts = [sparse().within(start, start + 3)[0] for start in range(0, 10, 3)]
    assert torch.equal(torch.cat(parts), sparse().value)


def test_nothing_has_no_weight_and_changes_nothing():
    nothing = Coefficients.nothing(10)
    assert nothing.weight == 0
    assert not bool(nothing.dense().any())
    assert torch.equal(nothing.subtract_from(torch.ones(10)), torch.ones(10))
    assert nothing.within(2, 5)[0].numel() == 0


def test_where_it_already_is_nothing_is_copied():
    found = sparse()
    assert found.to(torch.device("cpu")) is found


def test_another_device_keeps_size_weight_and_density():
    moved = sparse().to(torch.device("meta"))
    assert (moved.value.device.type, moved.index.device.type) == ("meta", "meta")
    assert (moved.size, moved.weight) == (10, 0.5)
    assert dense().to(torch.device("meta")).index is None


def test_each_turn_has_a_memory_of_its_own():
    first, second = Turn(), Turn()
    first.memory["a"] = torch.ones(1)
    assert second.memory == {}
    assert (first.event, first.weight) == (0, 1.0)
