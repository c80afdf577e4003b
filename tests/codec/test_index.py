"""Coded positions: the shortest of three codings, near the counting floor, and canonical whatever arrives."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.codec.index import Coding, IndexBlock, decode_index, encode_index, index_nbytes
from lowtide.errors import ConfigError, PayloadError

Runs = tuple[np.ndarray, np.ndarray, int]


def bits_to_bytes(bits: list[int]) -> bytes:
    return bytes(sum(bit << place for place, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8))


def golomb(runs: Runs, divisor: int) -> bytes:
    """The three streams, written from their definition, one bit at a time."""
    index, counts, _ = runs
    low = int(math.log2(divisor))
    short = 2 ** (low + 1) - divisor
    fixed, extra, unary, at = [], [], [], 0
    for count in counts:
        previous = -1
        for position in index[at : at + count]:
            quotient, remainder = divmod(int(position) - previous - 1, divisor)
            previous = int(position)
            code = remainder if remainder < short else (remainder + short) >> 1
            fixed += [code >> place & 1 for place in range(low)]
            extra += [remainder + short & 1] if remainder >= short else []
            unary += [0] * quotient + [1]
        at += count
    return bits_to_bytes(fixed) + bits_to_bytes(extra) + bits_to_bytes(unary)


def packed(runs: Runs) -> bytes:
    index, _, span = runs
    width = (span - 1).bit_length()
    return bits_to_bytes([int(position) >> place & 1 for position in index for place in range(width)])


def bitmap(runs: Runs) -> bytes:
    index, counts, span = runs
    bits = np.zeros((len(counts), span), int)
    bits[np.repeat(np.arange(len(counts)), counts), index] = 1
    return bits_to_bytes(bits.ravel().tolist())


def written(runs: Runs, coding: int, parameter: int) -> bytes:
    """What the encoder would have to write if it had chosen this coding."""
    if coding == Coding.RICE:
        return golomb(runs, parameter)
    return packed(runs) if coding == Coding.PACKED else bitmap(runs)


def uniform(counts: list[int], span: int, seed: int = 0) -> Runs:
    """Random positions, all sets of them equally likely."""
    random = np.random.default_rng(seed)
    chosen = [np.sort(random.choice(span, count, replace=False)) for count in counts]
    return np.concatenate([*chosen, np.zeros(0, np.int64)]).astype(np.int64), np.array(counts, np.int64), span


def equal_tiles(tiles: int, keep: int, span: int = 4096) -> Runs:
    order = np.argsort(np.random.default_rng(0).random((tiles, span)), axis=1)[:, :keep]
    return np.sort(order, axis=1).reshape(-1), np.full(tiles, keep), span


@st.composite
def some_runs(draw: st.DrawFn) -> Runs:
    span = draw(st.integers(1, 40) | st.sampled_from([4096, 1 << 15, (1 << 15) + 1, 1 << 31]))
    most = min(span, 12)
    sets = draw(st.lists(st.sets(st.integers(0, span - 1), max_size=most), max_size=6))
    index = np.array([position for chosen in sets for position in sorted(chosen)], np.int64)
    return index, np.array([len(chosen) for chosen in sets], np.int64), span


SMALL = {
    "nothing at all": uniform([], 64),
    "only empty runs": uniform([0, 0], 64),
    "one position": uniform([1], 1),
    "empty runs between": uniform([0, 3, 0, 0, 5, 0], 100),
    "full runs": uniform([16, 16], 16),
    "sparse": uniform([2, 1, 3], 4096),
    "dense": uniform([30, 20], 64),
    "crowded": (np.array([0, 1, 2, 3, 4000, 4001, 5, 6, 7]), np.array([6, 3]), 4096),
    "at both ends": (np.array([0, 4095, 4095, 0]), np.array([2, 1, 1]), 4096),
    "far apart": (np.array([(1 << 31) - 1]), np.array([1]), 1 << 31),
}
small = pytest.mark.parametrize("runs", SMALL.values(), ids=SMALL)


def accept(block: IndexBlock, runs: Runs) -> np.ndarray:
    return decode_index(block, runs[1], runs[2])


def refuse(block: IndexBlock, runs: Runs, reason: str | None = None) -> None:
    with pytest.raises(PayloadError, match=reason):
        decode_index(block, runs[1], runs[2])


# ---- what goes in comes out ----


@given(some_runs())
@settings(deadline=None)
def test_positions_come_back(runs):
    found = accept(encode_index(*runs), runs)
    assert found.dtype == np.int64
    assert found.tolist() == runs[0].tolist()


@given(some_runs())
@settings(deadline=None)
def test_length_is_the_formula(runs):
    block = encode_index(*runs)
    assert len(block.data) == index_nbytes(block.coding, block.parameter, *runs)


@given(some_runs(), st.integers(1, 65535))
@settings(deadline=None)
def test_any_divisor_decodes_and_its_length_is_the_formula(runs, divisor):
    if runs[2] > 1 << 15:
        divisor = max(divisor, 20_000)  # the definition above writes a zero at a time
        runs = (np.minimum(runs[0], 1 << 20), runs[1], runs[2]) if runs[0].size < 2 else uniform([3, 2], 1 << 20)
    block = IndexBlock(Coding.RICE, divisor, golomb(runs, divisor))
    assert accept(block, runs).tolist() == runs[0].tolist()
    assert len(block.data) == index_nbytes(Coding.RICE, divisor, *runs)


@small
def test_the_encoder_writes_what_the_definition_says(runs):
    block = encode_index(*runs)
    assert block.data == written(runs, block.coding, block.parameter)


@pytest.mark.parametrize("divisor", [1, 2, 3, 11, 22, 44, 127, 128, 129, 255, 256, 257, 1000, 32768, 65535])
def test_divisors_around_every_width_of_a_byte(divisor):
    runs = uniform([40, 0, 7, 100], 4096)
    assert accept(IndexBlock(Coding.RICE, divisor, golomb(runs, divisor)), runs).tolist() == runs[0].tolist()


@small
@pytest.mark.parametrize("coding", [Coding.PACKED, Coding.BITMAP])
def test_each_coding_decodes_whether_or_not_it_is_the_shortest(runs, coding):
    if coding == Coding.BITMAP and runs[2] > 1 << 20:
        runs = uniform([4, 1], 1 << 12)
    parameter = (runs[2] - 1).bit_length() if coding == Coding.PACKED else 0
    data = written(runs, coding, parameter)
    assert accept(IndexBlock(coding, parameter, data), runs).tolist() == runs[0].tolist()
    assert len(data) == index_nbytes(coding, parameter, *runs)


@pytest.mark.parametrize("dtype", ["i2", "i4", "i8", "u2", "u4"])
def test_the_type_of_the_positions_does_not_matter(dtype):
    index, counts, span = uniform([40, 3], 4096)
    assert encode_index(index.astype(dtype), counts.astype(np.int32), span) == encode_index(index, counts, span)


@pytest.mark.parametrize("keep", [3, 41, 128])
def test_long_lists_cross_the_blocks_they_are_handled_in(keep):
    runs = equal_tiles(70_000 // keep, keep, 512)
    block = encode_index(*runs)
    assert block.coding == Coding.RICE
    assert np.array_equal(accept(block, runs), runs[0])
    assert block.data == golomb(runs, block.parameter)


def test_one_run_over_a_whole_buffer():
    random = np.random.default_rng(1)
    index = np.flatnonzero(random.random(3_000_000) < 1 / 64)
    runs = (index, np.array([len(index)]), 3_000_000)
    block = encode_index(*runs)
    assert block.coding == Coding.RICE
    assert np.array_equal(accept(block, runs), index)


def test_runs_of_very_different_lengths():
    runs = uniform([0, 4096, 1, 0, 900, 17, 4095, 0], 4096)
    assert np.array_equal(accept(encode_index(*runs), runs), runs[0])


# ---- how short it is ----


@pytest.mark.parametrize("share", [16, 32, 64, 128])
def test_size_is_within_two_percent_of_the_counting_floor(share):
    keep, tiles = 4096 // share, 400
    block = encode_index(*equal_tiles(tiles, keep))
    floor = tiles * math.log2(math.comb(4096, keep)) / 8
    assert block.coding == Coding.RICE
    assert floor <= len(block.data) <= 1.02 * floor


@given(some_runs())
@settings(deadline=None)
def test_no_other_coding_is_shorter(runs):
    block = encode_index(*runs)
    for coding, parameter in ((Coding.PACKED, (runs[2] - 1).bit_length()), (Coding.BITMAP, 0)):
        assert len(block.data) <= index_nbytes(coding, parameter, *runs)


@pytest.mark.parametrize(
    ("runs", "coding"),
    [
        (uniform([2], 8), Coding.PACKED),
        (equal_tiles(50, 128), Coding.RICE),
        (equal_tiles(50, 3000), Coding.RICE),
        (uniform([64, 64], 64), Coding.BITMAP),
        (uniform([0, 0], 64), Coding.PACKED),
    ],
)
def test_the_shortest_coding_is_chosen_and_of_equal_ones_the_simplest(runs, coding):
    assert encode_index(*runs).coding == coding


CROWDED = np.sort(np.r_[np.arange(60), 1000, 2000, 3000, 4000])
LEANING = np.unique((4096 ** np.linspace(0, 1, 300, endpoint=False)).astype(int))


@pytest.mark.parametrize(
    "runs",
    [
        equal_tiles(20, 128),
        (np.tile(CROWDED, 50), np.full(50, len(CROWDED)), 4096),
        (np.tile(LEANING, 50), np.full(50, len(LEANING)), 4096),
    ],
    ids=["uniform", "crowded", "leaning"],
)
def test_hardly_any_divisor_is_better_than_the_chosen_one(runs):
    block = encode_index(*runs)
    best = min(index_nbytes(Coding.RICE, divisor, *runs) for divisor in range(1, 200))
    assert block.coding == Coding.RICE
    assert len(block.data) <= 1.01 * best


def test_the_divisor_of_a_long_list_is_found_in_a_part_of_it():
    runs = equal_tiles(400, 128)
    block = encode_index(*runs)
    best = min(index_nbytes(Coding.RICE, divisor, *runs) for divisor in range(15, 40))
    assert len(block.data) <= 1.002 * best


def test_the_same_positions_give_the_same_bytes():
    runs = equal_tiles(300, 128)
    assert encode_index(*runs) == encode_index(runs[0].astype(np.int32), runs[1], runs[2])


@pytest.mark.parametrize(
    ("runs", "coding", "parameter", "data"),
    [
        (uniform([1], 1), 1, 0, ""),
        ((np.array([3, 9, 40, 0, 63]), np.array([3, 2]), 64), 1, 6, "4382023f"),
        ((np.array([10, 30, 31, 90, 2, 50]), np.array([4, 2]), 4096), 2, 16, "3aa0f28d09"),
        ((np.arange(0, 64, 2), np.array([32]), 64), 3, 0, "5555555555555555"),
    ],
)
def test_the_format_never_changes(runs, coding, parameter, data):
    block = encode_index(*runs)
    assert (block.coding, block.parameter, block.data.hex()) == (coding, parameter, data)


def test_wire_numbers_never_change():
    assert {coding.name: int(coding) for coding in Coding} == {"NONE": 0, "PACKED": 1, "RICE": 2, "BITMAP": 3}


# ---- bytes that no encoder wrote ----


@small
@pytest.mark.parametrize("change", ["shorter", "longer", "zeros behind"])
def test_a_wrong_length_is_refused(runs, change):
    block = encode_index(*runs)
    data = {"shorter": block.data[:-1], "longer": block.data + b"\1", "zeros behind": block.data + b"\0"}[change]
    if data != block.data:
        refuse(IndexBlock(block.coding, block.parameter, data), runs)


@given(some_runs(), st.data())
@settings(deadline=None, max_examples=200)
def test_damaged_bytes_are_refused_or_are_another_canonical_coding(runs, data):
    if runs[2] > 1 << 15:
        runs = uniform([3, 1], 4096)
    kinds = st.sampled_from([(Coding.PACKED, (runs[2] - 1).bit_length()), (Coding.RICE, 1), (Coding.RICE, 5)])
    coding, parameter = data.draw(kinds | st.just((Coding.BITMAP, 0)))
    raw = bytearray(written(runs, coding, parameter))
    for place in data.draw(st.lists(st.integers(0, max(0, 8 * len(raw) - 1)), min_size=1, max_size=3)):
        if raw:
            raw[place // 8] ^= 1 << place % 8
    check_canonical(IndexBlock(coding, parameter, bytes(raw)), runs)


@given(st.integers(0, 3), st.integers(0, 70), st.binary(max_size=30), st.lists(st.integers(0, 9), max_size=4))
@settings(deadline=None, max_examples=300)
def test_arbitrary_bytes_are_refused_or_canonical(coding, parameter, raw, counts):
    check_canonical(IndexBlock(coding, parameter, raw), (np.zeros(0, int), np.array(counts, int), 50))


def check_canonical(block: IndexBlock, runs: Runs) -> None:
    _, counts, span = runs
    try:
        found = decode_index(block, counts, span)
    except PayloadError:
        return
    assert len(found) == counts.sum()
    at = 0
    for count in counts:
        run = found[at : at + count].tolist()
        assert run == sorted(set(run))
        assert all(0 <= position < span for position in run)
        at += count
    assert written((found, counts, span), block.coding, block.parameter) == block.data


@pytest.mark.parametrize(
    ("coding", "parameter"),
    [(0, 0), (0, 12), (1, 11), (1, 13), (1, 0), (2, 0), (2, 65536), (2, -1), (3, 1), (3, 12), (4, 0), (255, 7)],
)
def test_unknown_codings_and_parameters_are_refused(coding, parameter):
    runs = uniform([5], 4096)
    refuse(IndexBlock(coding, parameter, packed(runs)), runs, "no coding of positions")


def test_every_spare_bit_of_every_stream_must_be_zero():
    runs = (np.array([20, 21, 60]), np.array([3]), 64)
    data = golomb(runs, 11)
    assert data.hex() == "47010046"  # 9 bits fixed, 2 bits extra, 7 bits unary
    assert accept(IndexBlock(Coding.RICE, 11, data), runs).tolist() == [20, 21, 60]
    for place in [*range(9, 16), *range(18, 24), 31]:
        damaged = bytearray(data)
        damaged[place // 8] |= 1 << place % 8
        refuse(IndexBlock(Coding.RICE, 11, bytes(damaged)), runs)


@pytest.mark.parametrize(
    ("unary", "reason"),
    [
        (b"\x07", None),
        (b"\x03", "2 quotients"),
        (b"\x0f", "4 quotients"),
        (b"\x07\x00", "last in the last byte"),
        (b"\x03\x01", None),
        (b"", "0 quotients"),
        (b"\x03\x00\x00\x80", "a position is"),
        (b"\x03" + b"\0" * 20 + b"\x80", "at most"),
    ],
)
def test_quotients_end_where_they_must(unary, reason):
    runs = (np.zeros(0, int), np.array([2, 1]), 16)
    block = IndexBlock(Coding.RICE, 1, unary)
    if reason is None:
        assert len(accept(block, runs)) == 3
    else:
        refuse(block, runs, reason)


@pytest.mark.parametrize("positions", [[5, 5], [6, 5], [0, 50], [63, 1]])
def test_plain_positions_must_ascend_below_the_span(positions):
    runs = (np.array(positions), np.array([2]), 50)
    refuse(IndexBlock(Coding.PACKED, 6, packed(runs)), runs, "must ascend")


def test_plain_positions_may_fall_between_runs():
    runs = (np.array([5, 49, 0, 49, 0]), np.array([2, 0, 2, 1]), 50)
    assert accept(IndexBlock(Coding.PACKED, 6, packed(runs)), runs).tolist() == runs[0].tolist()


def test_a_bitmap_must_mark_as_many_as_each_run_has():
    runs = uniform([3, 5], 20)
    moved = (runs[0], np.array([4, 4]), 20)
    block = IndexBlock(Coding.BITMAP, 0, bitmap(runs))
    assert accept(block, runs).tolist() == runs[0].tolist()
    refuse(block, moved, "marks 8 positions")


def test_the_last_possible_position_is_accepted_and_the_next_refused():
    counts, span = np.array([1, 1]), 4096
    for divisor in (1, 7, 64, 3000):
        for last, valid in ((span - 1, True), (span, False)):
            runs = (np.array([last, 0]), counts, span)
            block = IndexBlock(Coding.RICE, divisor, golomb(runs, divisor))
            if valid:
                assert accept(block, runs).tolist() == [last, 0]
            else:
                refuse(block, runs)


@pytest.mark.parametrize("filler", [0x00, 0xFF, 0x80, 0x01])
@pytest.mark.parametrize("divisor", [1, 22, 65535])
def test_hostile_lengths_neither_overflow_nor_take_memory(filler, divisor):
    counts, size = np.full(10, 4), 1_000_000
    block = IndexBlock(Coding.RICE, divisor, bytes([filler]) * size)
    tracemalloc.start()
    with pytest.raises(PayloadError):
        decode_index(block, counts, 1 << 31)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * size


def test_memory_stays_a_small_multiple_of_the_positions():
    runs = equal_tiles(300, 128)
    block = encode_index(*runs)
    tracemalloc.start()
    accept(block, runs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * len(runs[0])


# ---- a caller's mistakes ----


@pytest.mark.parametrize("span", [64, 1 << 15, (1 << 15) + 1, 1 << 31])
@pytest.mark.parametrize("index", [[5, 5, 1], [9, 3, 1], [-1, 3, 1], [3, "span", 1], [3, 4, "span"], [3, 4, -7]])
def test_positions_that_do_not_ascend_in_their_run_are_refused(index, span):
    positions = np.array([span if position == "span" else position for position in index], np.int64)
    with pytest.raises(ConfigError, match="must ascend"):
        encode_index(positions, np.array([2, 1]), span)


@pytest.mark.parametrize("span", [0, -1, (1 << 31) + 1])
def test_impossible_spans_are_refused(span):
    with pytest.raises(ConfigError, match="positions"):
        encode_index(np.zeros(0, int), np.zeros(0, int), span)


@pytest.mark.parametrize("counts", [[5], [-1, 1]])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ConfigError, match="a run keeps"):
        decode_index(IndexBlock(Coding.PACKED, 2, b""), np.array(counts), 4)


def test_counts_must_add_up():
    with pytest.raises(ConfigError, match="counts add up to 3, but 2 positions"):
        encode_index(np.array([1, 2]), np.array([3]), 64)
