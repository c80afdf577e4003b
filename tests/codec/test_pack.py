"""Bit packing is exact, canonical, and refuses what it could not have written."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.codec.pack import pack_bits, packed_nbytes, unpack_bits
from lowtide.errors import ConfigError, PayloadError

WIDTHS = range(33)
COUNTS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 100, 1003)

lists = st.integers(0, 32).flatmap(
    lambda width: st.tuples(st.just(width), st.lists(st.integers(0, (1 << width) - 1), max_size=70))
)


def draw(count: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << width, count, dtype=np.int64)


def as_one_number(values: list[int], width: int) -> bytes:
    """The definition: the values are the digits of one number, the first the least significant."""
    number = sum(value << (width * place) for place, value in enumerate(values))
    return number.to_bytes((len(values) * width + 7) // 8, "little")


@given(lists)
@settings(deadline=None)
def test_bytes_are_the_values_written_as_one_number(case):
    width, values = case
    assert pack_bits(np.array(values, np.int64), width).tobytes() == as_one_number(values, width)


@given(lists)
@settings(deadline=None)
def test_unpacking_gives_the_values_back(case):
    width, values = case
    assert unpack_bits(as_one_number(values, width), len(values), width).tolist() == values


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
def test_every_width_and_remainder_of_eight_agrees_with_the_definition(width, count):
    values = draw(count, width)
    packed = pack_bits(values, width)
    assert packed.dtype == np.uint8
    assert packed.tobytes() == as_one_number(values.tolist(), width)
    assert np.array_equal(unpack_bits(packed, count, width), values)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
def test_length_is_the_formula(width, count):
    assert len(pack_bits(draw(count, width), width)) == packed_nbytes(count, width) == -(-count * width // 8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("extreme", ["zeros", "ones"])
def test_extreme_values_do_not_touch_their_neighbours(width, extreme):
    top = (1 << width) - 1
    values = np.array([0, top] * 11 if extreme == "zeros" else [top, 0] * 11)
    assert unpack_bits(pack_bits(values, width), 22, width).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([1, 0, 1, 1, 0, 0, 0, 0, 1], 1, "0d01"),
        ([1, 2, 3], 2, "39"),
        ([1, 2, 3, 4, 5, 6, 7, 0, 1], 3, "d1581f01"),
        ([1, 15], 4, "f1"),
        ([0x123, 0xABC], 12, "23c1ab"),
        ([0x1234], 16, "3412"),
        ([0x12345], 17, "452301"),
        ([0x12345678], 32, "78563412"),
    ],
)
def test_the_format_never_changes(values, width, expected):
    assert pack_bits(np.array(values), width).tobytes().hex() == expected


@pytest.mark.parametrize(
    ("width", "dtype"), [(0, "u1"), (1, "u1"), (8, "u1"), (9, "u2"), (16, "u2"), (17, "u4"), (32, "u4")]
)
def test_values_come_back_in_the_smallest_type_that_holds_them(width, dtype):
    assert unpack_bits(pack_bits(draw(9, width), width), 9, width).dtype == np.dtype(dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_unpacked_may_be_written_to(width):
    frozen = pack_bits(draw(24, width), width).tobytes()
    values = unpack_bits(frozen, 24, width)
    values[:] = 0
    assert values.flags.writeable
    assert frozen == pack_bits(draw(24, width), width).tobytes()


@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", "?"])
@pytest.mark.parametrize("width", [1, 3, 4, 8, 12, 16, 20, 32])
def test_the_type_of_the_values_does_not_matter(dtype, width):
    values = draw(50, 1)
    assert pack_bits(values.astype(dtype), width).tobytes() == as_one_number(values.tolist(), width)


@pytest.mark.parametrize("width", [3, 4, 8, 12, 17])
def test_shape_and_strides_do_not_matter(width):
    values = draw(120, width)
    expected = pack_bits(values, width).tobytes()
    assert pack_bits(values.reshape(4, 30), width).tobytes() == expected
    assert pack_bits(np.repeat(values, 2)[::2], width).tobytes() == expected


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 11, 12, 16, 24, 32])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer])
def test_any_buffer_is_read_at_any_address(width, kind):
    values = draw(41, width)
    packed = pack_bits(values, width).tobytes()
    shifted = memoryview(b"\xff" + packed)[1:]
    for data in (packed, shifted):
        source = np.frombuffer(data, np.uint8) if kind is np.frombuffer else kind(data)
        assert np.array_equal(unpack_bits(source, 41, width), values)


@pytest.mark.parametrize("width", range(1, 32))
@pytest.mark.parametrize("wrong", [-1, "too large"])
def test_values_that_do_not_fit_are_refused(width, wrong):
    values = np.array([0, 1, 1 << width if wrong == "too large" else wrong])
    with pytest.raises(ConfigError, match=f"do not fit into {width} bits"):
        pack_bits(values, width)


def test_the_largest_values_of_a_type_are_checked_too():
    with pytest.raises(ConfigError, match="do not fit into 7 bits"):
        pack_bits(np.array([128], np.uint8), 7)
    with pytest.raises(ConfigError, match="do not fit into 0 bits"):
        pack_bits(np.array([1], np.uint8), 0)
    with pytest.raises(ConfigError, match="do not fit into 32 bits"):
        pack_bits(np.array([1 << 32]), 32)


@pytest.mark.parametrize("width", [-1, 33, 64])
def test_impossible_widths_are_refused(width):
    with pytest.raises(ConfigError, match="0 to 32 bits"):
        packed_nbytes(1, width)
    with pytest.raises(ConfigError, match="0 to 32 bits"):
        pack_bits(np.array([0]), width)
    with pytest.raises(ConfigError, match="0 to 32 bits"):
        unpack_bits(b"", 0, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 8, 13])
def test_a_wrong_length_is_refused(width, count):
    packed = pack_bits(draw(count, width), width).tobytes()
    with pytest.raises(PayloadError, match="bytes"):
        unpack_bits(packed + b"\0", count, width)
    if packed:
        with pytest.raises(PayloadError, match="bytes"):
            unpack_bits(packed[:-1], count, width)


@pytest.mark.parametrize("width", range(1, 33))
@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_each_spare_bit_must_be_zero(width, count):
    packed = pack_bits(draw(count, width), width).tobytes()
    spare = 8 * len(packed) - count * width
    for bit in range(spare):
        damaged = packed[:-1] + bytes([packed[-1] | (0x80 >> bit)])
        with pytest.raises(PayloadError, match="spare bits"):
            unpack_bits(damaged, count, width)


@given(width=st.integers(1, 32), count=st.integers(0, 40), data=st.data())
@settings(deadline=None)
def test_whatever_is_accepted_is_canonical(width, count, data):
    raw = data.draw(st.binary(min_size=packed_nbytes(count, width), max_size=packed_nbytes(count, width)))
    try:
        values = unpack_bits(raw, count, width)
    except PayloadError:
        spare = 8 * len(raw) - count * width
        assert raw[-1] >> (8 - spare)
    else:
        assert pack_bits(values, width).tobytes() == raw


@pytest.mark.parametrize("width", [1, 3, 4, 8, 12, 16, 17, 31, 32])
def test_memory_stays_a_small_multiple_of_the_values(width):
    count = 200_000
    packed = pack_bits(draw(count, width), width).tobytes()
    tracemalloc.start()
    unpack_bits(packed, count, width)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80 * count
