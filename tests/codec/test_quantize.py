"""Quantisers: the same values for everybody, bounded errors, exact lengths, and no surprise from bad bytes."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.codec.quantize import (
    Quantizer,
    bf16,
    by_bits,
    e3m0,
    fp16,
    fp32,
    int8,
    linear,
    sign,
    stat,
    sym2,
)
from lowtide.errors import ConfigError, PayloadError

EXACT = [fp32(), bf16(), fp16(), sym2(), e3m0(), e3m0(3), sign(), sign(scaled=False)]
LINEAR = [linear(2), linear(16), linear(256)]
STAT = [int8(), int8(12), stat(2), stat(4), stat(16), stat(256)]
ALL = EXACT + LINEAR + STAT
LARGEST = float(np.finfo(np.float32).max)


def label(quantizer: Quantizer) -> str:
    return f"{quantizer.name}-{quantizer.parameter}"


every = pytest.mark.parametrize("quantizer", ALL, ids=label)

Case = tuple[Tensor, Tensor]

usual = st.floats(-100, 100, width=32)
extreme = st.floats(width=32, allow_nan=False, allow_infinity=False)
special = st.sampled_from([0.0, -0.0, 1.0, -1.0, LARGEST, -LARGEST, 65504.0, 65536.0, 1e-45, -1e-45])


@st.composite
def cases(draw: st.DrawFn, values: st.SearchStrategy[float] = usual | extreme | special) -> Case:
    segments = draw(st.lists(st.lists(values, max_size=12), max_size=5))
    flat = [value for segment in segments for value in segment]
    return torch.tensor(flat, dtype=torch.float32), lengths_of([len(segment) for segment in segments])


def lengths_of(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int64)


def normal(lengths: list[int], seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), generator=generator), lengths_of(lengths)


def there_and_back(quantizer: Quantizer, case: Case) -> Tensor:
    return quantizer.decode(quantizer.encode(*case), case[1])


def each(case: Case, decoded: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Values and what they decode to as doubles, segment by segment, without empty ones."""
    pairs = zip(case[0].split(case[1].tolist()), decoded.split(case[1].tolist()), strict=True)
    return [(before.double().numpy(), after.double().numpy()) for before, after in pairs if len(before)]


# ---- laws of all of them ----


@every
@given(case=cases())
@settings(deadline=None, max_examples=50)
def test_any_finite_values_come_back_finite_and_as_many(quantizer, case):
    decoded = there_and_back(quantizer, case)
    assert decoded.shape == case[0].shape
    assert decoded.dtype == torch.float32
    assert bool(decoded.isfinite().all())


@every
@given(case=cases())
@settings(deadline=None, max_examples=50)
def test_length_is_the_formula(quantizer, case):
    assert len(quantizer.encode(*case)) == quantizer.nbytes(case[1])


@every
@given(case=cases(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_damaged_bytes_are_refused_or_decode_to_finite_values(quantizer, case, data):
    raw = bytearray(quantizer.encode(*case))
    for place in data.draw(st.lists(st.integers(0, max(0, 8 * len(raw) - 1)), min_size=1, max_size=4)):
        if raw:
            raw[place // 8] ^= 1 << place % 8
    check_valid_or_refused(quantizer, bytes(raw), case[1])


@every
@given(case=cases(usual), data=st.data())
@settings(deadline=None, max_examples=40)
def test_arbitrary_bytes_are_refused_or_decode_to_finite_values(quantizer, case, data):
    size = quantizer.nbytes(case[1])
    raw = data.draw(st.binary(min_size=min(size, 64), max_size=min(size, 64)))
    check_valid_or_refused(quantizer, raw.ljust(size, b"\0"), case[1])


def check_valid_or_refused(quantizer: Quantizer, raw: bytes, lengths: Tensor) -> None:
    try:
        decoded = quantizer.decode(raw, lengths)
    except PayloadError:
        return
    assert len(decoded) == int(lengths.sum())
    assert bool(decoded.isfinite().all())


@every
@pytest.mark.parametrize("lengths", [[], [0], [1], [9, 0, 4], [300]])
def test_every_wrong_length_is_refused(quantizer, lengths):
    case = normal(lengths)
    raw = quantizer.encode(*case)
    for size in range(len(raw)):
        with pytest.raises(PayloadError):
            quantizer.decode(raw[:size], case[1])
    with pytest.raises(PayloadError):
        quantizer.decode(raw + b"\0", case[1])


@every
def test_the_same_values_give_the_same_bytes(quantizer):
    case = normal([5000, 0, 17, 1])
    once = quantizer.encode(*case)
    assert once == quantizer.encode(case[0].clone(), case[1].clone())
    assert torch.equal(quantizer.decode(once, case[1]), quantizer.decode(memoryview(once), case[1]))


@every
def test_encoding_leaves_the_values_as_they_are(quantizer):
    case = normal([100, 28])
    before = case[0].clone()
    decoded = there_and_back(quantizer, case)
    decoded.zero_()
    assert torch.equal(case[0], before)


@every
def test_dtype_shape_and_gradient_of_the_values_do_not_matter(quantizer):
    values, lengths = normal([64])
    values = values.bfloat16().float()
    expected = quantizer.encode(values, lengths)
    assert quantizer.encode(values.double().requires_grad_(), lengths) == expected
    assert quantizer.encode(values.bfloat16().view(8, 8), lengths) == expected
    assert quantizer.encode(values.repeat_interleave(2)[::2], lengths) == expected


@every
def test_segments_do_not_touch_each_other(quantizer):
    case = normal([300, 0, 1, 41, 700])
    whole = there_and_back(quantizer, case)
    parts = [there_and_back(quantizer, (part, lengths_of([len(part)]))) for part in case[0].split(case[1].tolist())]
    assert torch.equal(whole, torch.cat(parts))


@every
def test_values_must_fill_the_segments(quantizer):
    with pytest.raises(ConfigError, match="12 values in all do not fit 11"):
        quantizer.encode(torch.zeros(11), lengths_of([5, 7]))


@every
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -0.3, 1e-45, LARGEST, -LARGEST, 6e4])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_equal_values_are_exact_where_the_type_holds_them(quantizer, value, length):
    case = torch.full((length,), value), lengths_of([0, length, 0])
    decoded = there_and_back(quantizer, case)
    if quantizer.name in {"bf16", "fp16"}:
        limit = torch.finfo(torch.bfloat16 if quantizer.name == "bf16" else torch.float16).max
        assert torch.allclose(decoded, case[0].clamp(-limit, limit), rtol=2**-8, atol=2**-24)
    elif label(quantizer) == "sign-0":
        assert decoded.tolist() == [1.0 if value >= 0 else -1.0] * length
    else:
        assert torch.equal(decoded, case[0])


@pytest.mark.parametrize("quantizer", [*EXACT, *LINEAR], ids=label)
@given(case=cases())
@settings(deadline=None, max_examples=60)
def test_coding_what_was_decoded_gives_it_again(quantizer, case):
    once = there_and_back(quantizer, case)
    twice = there_and_back(quantizer, (once, case[1]))
    if quantizer in LINEAR:
        assert torch.allclose(once, twice, rtol=1e-6, atol=1e-30)
    else:
        assert torch.equal(once, twice)


@pytest.mark.parametrize("quantizer", EXACT, ids=label)
def test_bytes_of_what_was_decoded_are_the_same_bytes(quantizer):
    case = normal([9000, 1, 0, 300])
    once = quantizer.encode(*case)
    assert quantizer.encode(quantizer.decode(once, case[1]), case[1]) == once


@pytest.mark.parametrize("quantizer", STAT, ids=label)
def test_statistical_bins_come_near_what_they_decoded(quantizer):
    case = normal([4000])
    once = there_and_back(quantizer, case)
    twice = there_and_back(quantizer, (once, case[1]))
    first, second = (once - case[0]).norm(), (twice - once).norm()
    assert second <= first + 1e-6


# ---- what each of them means ----


@given(case=cases())
@settings(deadline=None)
def test_fp32_is_exact_to_the_bit(case):
    assert there_and_back(fp32(), case).numpy().tobytes() == case[0].numpy().tobytes()


@given(case=cases())
@settings(deadline=None)
def test_bf16_rounds_to_the_nearest_and_never_to_infinity(case):
    limit = torch.finfo(torch.bfloat16).max
    assert torch.equal(there_and_back(bf16(), case), case[0].clamp(-limit, limit).bfloat16().float())


@given(case=cases())
@settings(deadline=None)
def test_fp16_rounds_to_the_nearest_and_clamps(case):
    decoded = there_and_back(fp16(), case)
    assert torch.equal(decoded, case[0].clamp(-65504, 65504).half().float())
    assert float(decoded.abs().max() if len(decoded) else 0) <= 65504


@pytest.mark.parametrize("quantizer", STAT, ids=label)
def test_bins_keep_the_sum_of_each_segment(quantizer):
    case = normal([1000, 37, 2])
    for before, after in each(case, there_and_back(quantizer, case)):
        assert math.isclose(before.sum(), after.sum(), abs_tol=1e-4)


@pytest.mark.parametrize("quantizer", STAT, ids=label)
def test_values_inside_the_range_are_off_by_less_than_a_bin(quantizer):
    case = normal([5000, 300], seed=3)
    bins, width = 2**quantizer.bits, quantizer.parameter if quantizer.name == "int8" else 6
    for before, after in each(case, there_and_back(quantizer, case)):
        step = width * before.std(ddof=1) / bins
        inside = np.abs(before - before.mean()) < (bins // 2 - 1) * step
        assert np.all(np.abs(before - after)[inside] <= 1.0001 * step)


def test_bins_are_the_published_ones():
    values = torch.tensor([-9.0, -3.0, -1.4, -0.6, 0.0, 0.6, 1.4, 3.0, 9.0])
    sd, mean = values.std().item(), values.mean().item()
    codes = [max(0, min(3, round((value - mean) / (6 * sd / 4)) + 2)) for value in values.tolist()]
    means = {code: np.mean([v for v, c in zip(values.tolist(), codes, strict=True) if c == code]) for code in codes}
    decoded = there_and_back(stat(4), (values, lengths_of([9])))
    assert np.allclose(decoded.numpy(), [means[code] for code in codes], atol=1e-6)


def test_a_wider_int8_reaches_farther_with_coarser_bins():
    values = torch.cat([normal([10_000])[0], torch.tensor([5.0])])
    narrow, wide = (there_and_back(int8(width), (values, lengths_of([10_001]))) for width in (6, 12))
    assert abs(wide[-1] - 5) < abs(narrow[-1] - 5)
    assert (wide - values)[:-1].abs().median() > (narrow - values)[:-1].abs().median()


def test_int8_is_stat_with_256_bins():
    case = normal([700, 3])
    assert int8().encode(*case) == stat(256).encode(*case)


@given(case=cases(usual))
@settings(deadline=None)
def test_sym2_splits_at_the_median_and_decodes_to_class_means(case):
    for before, after in each(case, there_and_back(sym2(), case)):
        magnitude = np.abs(before)
        large = magnitude > np.sort(magnitude)[(len(before) - 1) // 2]
        expected = np.where(large, magnitude[large].mean() if large.any() else 0, magnitude[~large].mean())
        assert np.allclose(after, np.where(before < 0, -expected, expected), rtol=1e-6, atol=1e-30)


def test_sym2_takes_the_median_of_evenly_spaced_values_of_a_long_segment():
    case = normal([10_000])
    picked = case[0].abs()[torch.arange(4096) * 10_000 // 4096]
    large = case[0].abs() > picked.sort().values[2047]
    decoded = there_and_back(sym2(), case).abs()
    assert torch.equal(decoded == decoded.max(), large)
    assert abs(float(large.float().mean()) - 0.5) < 0.03


def test_sym2_keeps_the_sum_of_magnitudes():
    case = normal([2000, 9])
    for before, after in each(case, there_and_back(sym2(), case)):
        assert math.isclose(np.abs(before).sum(), np.abs(after).sum(), rel_tol=1e-6)


@given(case=cases(usual.filter(lambda value: value == 0 or abs(value) > 1e-30)), block=st.sampled_from([1, 2, 5, 256]))
@settings(deadline=None)
def test_e3m0_takes_the_nearest_level_of_its_block(case, block):
    decoded = there_and_back(e3m0(block), case)
    for before, after in each(case, decoded):
        for start in range(0, len(before), block):
            inside, found = before[start : start + block], after[start : start + block]
            scale = np.abs(inside).max()
            levels = scale * np.array([0, *2.0 ** np.arange(-6, 1)])
            nearest = np.abs(np.abs(inside)[:, None] - levels).min(axis=1)
            assert np.all(np.abs(inside - found) <= nearest + 1e-6 * scale)


@pytest.mark.parametrize(
    ("ratio", "level"),
    [
        *[(1, 1), (0.76, 1), (0.75, 1), (0.74, 0.5), (0.376, 0.5), (0.374, 0.25)],
        *[(0.0118, 1 / 64), (0.0079, 1 / 64), (2**-7, 1 / 64), (0.0078, 0), (1e-30, 0), (0, 0)],
    ],
)
@pytest.mark.parametrize("scale", [1.0, 8.0, 2.0**-100, 2.0**120])
def test_e3m0_thresholds(ratio, level, scale):
    values = torch.tensor([scale, ratio * scale, -ratio * scale])
    assert there_and_back(e3m0(), (values, lengths_of([3]))).tolist() == [scale, level * scale, -level * scale]


def test_e3m0_blocks_begin_anew_in_each_segment():
    values = torch.tensor([1.0, 1000.0, 1.0, 1000.0, 1.0, 1.0])
    decoded = there_and_back(e3m0(2), (values, lengths_of([3, 0, 3])))
    assert decoded.tolist() == [0.0, 1000.0, 1.0, 1000.0, 0.0, 1.0]


@given(case=cases(usual))
@settings(deadline=None)
def test_sign_keeps_the_sign_and_the_mean_magnitude(case):
    for before, after in each(case, there_and_back(sign(), case)):
        assert np.allclose(after, np.where(before < 0, -1, 1) * np.abs(before).mean(), rtol=1e-6, atol=1e-30)
    assert torch.equal(there_and_back(sign(scaled=False), case), torch.where(case[0] < 0, -1.0, 1.0))


@pytest.mark.parametrize("bins", [2, 8, 256])
@given(case=cases(usual))
@settings(deadline=None, max_examples=50)
def test_linear_is_off_by_half_a_step_and_exact_at_its_ends(bins, case):
    for before, after in each(case, there_and_back(linear(bins), case)):
        spread = before.max() - before.min()
        assert np.all(np.abs(before - after) <= spread / (bins - 1) / 2 + 1e-6 * np.abs(before).max())
        ends = (before == before.max()) | (before == before.min())
        assert np.array_equal(before[ends], after[ends])


def test_fewer_bits_are_not_more_exact():
    case = normal([4096, 4096])
    ladder = [fp32(), fp16(), bf16(), int8(), stat(16), sym2(), sign()]
    errors = [float((there_and_back(quantizer, case) - case[0]).norm()) for quantizer in ladder]
    assert errors == sorted(errors)


# ---- metadata ----


@pytest.mark.parametrize("quantizer", [sym2(), e3m0(), sign(), linear(4), stat(4), int8()], ids=label)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_metadata_must_be_finite(quantizer, number):
    case = normal([9, 5])
    raw = quantizer.encode(*case)
    with pytest.raises(PayloadError, match="not finite"):
        quantizer.decode(raw[:4] + struct.pack("<f", number) + raw[8:], case[1])


@pytest.mark.parametrize("quantizer", [fp32(), bf16(), fp16()], ids=label)
def test_cast_values_must_be_finite(quantizer):
    infinity = {"fp32": "0000807f", "bf16": "807f", "fp16": "007c"}[quantizer.name]
    with pytest.raises(PayloadError, match="not finite"):
        quantizer.decode(bytes.fromhex(infinity), lengths_of([1]))


@pytest.mark.parametrize(
    ("quantizer", "metadata", "codes"),
    [
        (sym2(), (-1.0, 1.0), 1),
        (sym2(), (2.0, 1.0), 1),
        (sign(), (-1.0,), 1),
        (e3m0(), (-1.0,), 1),
        (e3m0(), (1.0,), 8),
        (linear(16), (1.0, 0.5), 1),
    ],
)
def test_metadata_and_codes_that_no_encoder_writes_are_refused(quantizer, metadata, codes):
    raw = struct.pack(f"<{len(metadata)}f", *metadata) + bytes([codes])
    with pytest.raises(PayloadError):
        quantizer.decode(raw, lengths_of([1]))


def test_hostile_tables_stay_finite():
    raw = struct.pack("<5f", LARGEST, *[LARGEST] * 4) + b"\0"
    assert stat(4).decode(raw, lengths_of([1])).tolist() == [LARGEST]


# ---- names, formulas, format ----


@pytest.mark.parametrize(
    ("quantizer", "metadata"),
    [
        *[(fp32(), 0), (bf16(), 0), (fp16(), 0), (int8(), 1028), (stat(4), 20), (stat(16), 68)],
        *[(sym2(), 8), (sign(), 4), (sign(scaled=False), 0), (linear(256), 8), (linear(16), 8)],
    ],
)
def test_bytes_are_metadata_of_each_segment_and_bits_of_each_value(quantizer, metadata):
    assert quantizer.nbytes(lengths_of([])) == 0
    assert quantizer.nbytes(lengths_of([1000, 0, 7])) == 3 * metadata + math.ceil(1007 * quantizer.bits / 8)


def test_e3m0_has_metadata_of_each_block():
    assert e3m0().nbytes(lengths_of([1000, 0, 7])) == 4 * (4 + 0 + 1) + math.ceil(1007 / 2)
    assert e3m0(10).nbytes(lengths_of([100, 101])) == 4 * (10 + 11) + 101


def test_wire_numbers_never_change():
    codes = {quantizer.name: (quantizer.code, quantizer.parameter, quantizer.bits) for quantizer in ALL}
    assert codes == {
        "fp32": (1, 0, 32),
        "bf16": (2, 0, 16),
        "fp16": (3, 0, 16),
        "int8": (4, 12, 8),
        "stat(2)": (5, 2, 1),
        "stat(4)": (5, 4, 2),
        "stat(16)": (5, 16, 4),
        "stat(256)": (5, 256, 8),
        "sym2": (6, 0, 2),
        "e3m0": (7, 3, 4),
        "sign": (8, 0, 1),
        "linear(2)": (9, 2, 1),
        "linear(16)": (9, 16, 4),
        "linear(256)": (9, 256, 8),
    }


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (fp32(), "0000803f000000c0000000000000e040"),
        (bf16(), "803f00c00000e040"),
        (fp16(), "003c00c000000047"),
        (sym2(), "0000003f00009040" + "4c"),
        (e3m0(), "0000e040" + "d470"),
        (sign(), "00002040" + "02"),
        (sign(scaled=False), "02"),
        (linear(4), "000000c00000e040" + "d1"),
    ],
)
def test_the_format_never_changes(quantizer, expected):
    assert quantizer.encode(torch.tensor([1.0, -2.0, 0.0, 7.0]), lengths_of([4])).hex() == expected


@pytest.mark.parametrize(
    ("bits", "name"), [(1, "sign"), (2, "sym2"), (4, "stat(16)"), (8, "int8"), (16, "bf16"), (32, "fp32")]
)
def test_bits_name_a_quantiser_of_that_many_bits(bits, name):
    assert (by_bits(bits).name, by_bits(bits).bits) == (name, bits)


def test_unknown_bits_are_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"bits=3\nhint: bits is one of 1 \(sign\), 2 \(sym2\), 4 \(stat\(16\)\), 8"):
        by_bits(3)


@pytest.mark.parametrize(
    "build",
    [
        lambda: int8(8),
        lambda: stat(3),
        lambda: stat(1),
        lambda: stat(512),
        lambda: linear(0),
        lambda: linear(1000),
        lambda: e3m0(0),
        lambda: e3m0(65536),
    ],
)
def test_impossible_parameters_are_refused(build):
    with pytest.raises(ConfigError):
        build()


@every
def test_equal_quantisers_are_equal_and_can_be_keys(quantizer):
    assert len({quantizer, *ALL}) == len(ALL)
