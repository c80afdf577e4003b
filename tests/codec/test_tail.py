"""The tail: small tensors in full, exactly or to 1 of 127 of their largest value."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.codec.tail import Tail, tail_named
from lowtide.errors import ConfigError, PayloadError

LARGEST = float(np.finfo(np.float32).max)
BOTH = [tail_named("fp32"), tail_named("int8")]
both = pytest.mark.parametrize("tail", BOTH, ids=lambda tail: type(tail).__name__)
normal = st.floats(-LARGEST, LARGEST, width=32).filter(lambda value: value == 0 or abs(value) > 1e-30)


@st.composite
def tails(draw: st.DrawFn, values: st.SearchStrategy[float] = normal) -> tuple[Tensor, tuple[int, ...]]:
    tensors = draw(st.lists(st.lists(values, max_size=6), max_size=5))
    flat = [value for tensor in tensors for value in tensor]
    return torch.tensor(flat, dtype=torch.float32), tuple(len(tensor) for tensor in tensors)


def there_and_back(tail: Tail, values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    return tail.decode(memoryview(tail.encode(values, lengths)), lengths)


@both
@given(case=tails(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_any_finite_values_come_back_finite_and_the_length_is_the_formula(tail, case):
    assert len(tail.encode(*case)) == tail.nbytes(case[1])
    found = there_and_back(tail, *case)
    assert found.shape == case[0].shape and found.dtype == torch.float32
    assert bool(found.isfinite().all())


@given(tails(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_fp32_is_exact_to_the_bit(case):
    found = there_and_back(tail_named("fp32"), *case)
    assert torch.equal(found.view(torch.int32), case[0].view(torch.int32))


@given(tails())
def test_int8_is_off_by_at_most_half_a_step_of_its_own_tensor(case):
    found = there_and_back(tail_named("int8"), *case)
    for before, after in zip(case[0].split(case[1]), found.split(case[1]), strict=True):
        if before.numel():
            step = float(before.double().abs().max()) / 127
            assert float((before.double() - after.double()).abs().max()) <= step * 0.5001


@given(tails())
def test_int8_of_what_was_decoded_comes_back(case):
    once = there_and_back(tail_named("int8"), *case)
    assert torch.allclose(there_and_back(tail_named("int8"), once, case[1]), once, rtol=1e-6, atol=0)


def test_int8_keeps_zero_and_both_ends():
    values = torch.tensor([0.0, -2.54, 2.54, 0.02, 0.0, 0.0])
    found = there_and_back(tail_named("int8"), values, (4, 2))
    assert found.tolist() == pytest.approx([0.0, -2.54, 2.54, 0.02, 0.0, 0.0])


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 1e-45, 1e-44, 1e-38])
def test_the_ends_of_the_number_range_stay_finite_and_small(value):
    found = float(there_and_back(tail_named("int8"), torch.tensor([value]), (1,)))
    assert math.isfinite(found)
    assert found == pytest.approx(value, rel=1e-5, abs=2e-43)


@both
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (0, 3, 0), (2, 0)])
def test_tensors_without_elements_take_no_values(tail, lengths):
    values = torch.arange(1.0, 1 + sum(lengths))
    assert len(tail.encode(values, lengths)) == tail.nbytes(lengths)
    assert there_and_back(tail, values, lengths).tolist() == pytest.approx(values.tolist(), rel=0.01)


def test_the_format_never_changes():
    values, lengths = torch.tensor([1.0, -0.5, 254.0]), (2, 1)
    assert tail_named("fp32").encode(values, lengths) == struct.pack("<3f", 1.0, -0.5, 254.0)
    expected = struct.pack("<2f3b", np.float32(1) / np.float32(127), 2.0, 127, -64, 127)
    assert tail_named("int8").encode(values, lengths) == expected


def test_wire_numbers_never_change():
    assert (tail_named("fp32").code, tail_named("int8").code) == (1, 2)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-45, LARGEST, LARGEST / 126])
def test_scales_that_no_encoder_writes_are_refused(scale):
    data = memoryview(struct.pack("<fb", scale, 127))
    with pytest.raises(PayloadError, match="the tail has a scale"):
        tail_named("int8").decode(data, (1,))


def test_the_code_that_no_encoder_writes_is_refused():
    with pytest.raises(PayloadError, match="code of -128"):
        tail_named("int8").decode(memoryview(struct.pack("<fb", 1.0, -128)), (1,))


@both
def test_the_same_values_give_the_same_bytes_and_stay_as_they_are(tail):
    values = torch.randn(50)
    before = values.clone()
    assert tail.encode(values, (20, 30)) == tail.encode(values.clone(), (20, 30))
    assert torch.equal(values, before)


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="must be 'int8' or 'fp32', not 'int4'\nhint: "):
        tail_named("int4")
