"""Whatever the bytes: a payload is refused with PayloadError, or it is well formed; and it never takes much memory.

Damage that the digest must notice is one half. The other, more important one is bytes with a digest that fits:
headers, section tables, positions, metadata and tails that no encoder wrote, so that the parser itself is at work.
"""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from lowtide.codec import (
    Chain,
    Coefficients,
    Turn,
    all_,
    bf16,
    chain,
    cyclic,
    dct,
    e3m0,
    fp16,
    fp32,
    int8,
    linear,
    random,
    sign,
    stat,
    sym2,
    threshold,
    top_k,
    top_k_tensor,
)
from lowtide.codec.payload import HEADER_BYTES, SECTION_BYTES, digest
from lowtide.errors import PayloadError
from lowtide.tensors import Entry, Grid, Layout, divisor, tile

TILES, PIECES = tile(8, small=16), divisor(6)
CODECS = {
    "fp32": chain(all_(), fp32(), chunker=TILES),
    "int8": chain(int8(), chunker=TILES),
    "e3m0": chain(dct(8), e3m0(16), chunker=TILES),
    "linear": chain(linear(16), chunker=TILES),
    "sign": chain(sign(), chunker=PIECES),
    "top-k sym2": chain(dct(8), top_k(1 / 8), sym2(), chunker=TILES),
    "top-k fp32, exact tail": chain(top_k(1 / 16), tail="fp32", chunker=TILES),
    "top-k of most": chain(top_k(7 / 8), sign(), chunker=TILES),
    "top-k in divisors": chain(dct(8), top_k(count=3), fp16(), chunker=PIECES),
    "top-k everything": chain(top_k(1.0), sym2(), chunker=TILES),
    "tensor bf16": chain(top_k_tensor(1 / 8), bf16(), chunker=TILES),
    "tensor stat, in divisors": chain(dct(8), top_k_tensor(1 / 8), stat(4), chunker=PIECES),
    "threshold sym2": chain(threshold(1 / 4), sym2(), chunker=TILES),
    "threshold e3m0, in divisors": chain(threshold(1 / 2), e3m0(), chunker=PIECES),
    "random linear": chain(random(1 / 4), linear(4), chunker=TILES),
    "cyclic stat": chain(cyclic(1 / 4), stat(16), chunker=TILES),
}
SHAPES = [(20, 12), (8, 16), (5,), (9, 14), ()]
MOST = 64  # bytes of memory for each byte of the payload and each element of the buffer
QUICK, THOROUGH = 500, 7000  # forged payloads for each codec; the slow suite tries over 100,000 of them

HEADER_FIELDS = [(0, "I"), (4, "B"), (5, "B"), (6, "B"), (7, "B"), (8, "B"), (9, "B"), (10, "B"), (11, "B"), (12, "H"),
                 (14, "H"), (16, "f"), (20, "I"), (24, "Q"), (32, "Q"), (40, "Q")]  # fmt: skip
SECTION_FIELDS = [(0, "B"), (1, "B"), (2, "H"), (4, "I"), (8, "Q"), (16, "Q")]
WHOLE = {"B": 8, "H": 16, "I": 32, "Q": 64}
FLOATS = [math.nan, math.inf, -math.inf, -0.0, 0.0, -1.0, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 2.7e36]
BYTES = [0x00, 0x01, 0x7F, 0x80, 0xFE, 0xFF]

each_codec = pytest.mark.parametrize("name", CODECS)


@dataclass(frozen=True)
class Subject:
    """A codec, the grid it reads for, and payloads that it wrote."""

    codec: Chain
    grid: Grid
    payloads: tuple[bytes, ...]

    def decode(self, payload: bytes) -> Coefficients:
        return self.codec.decode(payload, self.grid, Turn(3))


def subject(name: str) -> Subject:
    codec = CODECS[name]
    layout = Layout.build([Entry(f"t{number}", shape) for number, shape in enumerate(SHAPES)], codec.chunker)
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(layout.grid.size, generator=generator) for _ in range(3)]
    buffers += [layout.grid.zeros(), buffers[0].round(), buffers[1] * (buffers[1] > 1.5)]
    written = [codec.encode(buffer, layout.grid, Turn(3)) for buffer in buffers]
    return Subject(codec, layout.grid, (*written, codec.abstain(layout.grid, Turn(3))))


# ---- forging ----

Change = Callable[[np.random.Generator, bytearray, Subject], bytearray]


def sealed(payload: bytearray) -> bytes:
    """The payload with a digest that fits."""
    if len(payload) >= HEADER_BYTES:
        payload[48:64] = digest(bytes(payload[:HEADER_BYTES]), bytes(payload[HEADER_BYTES:]))
    return bytes(payload)


def pick(rng: np.random.Generator, choices: Sequence) -> object:
    return choices[int(rng.integers(len(choices)))]


def number(rng: np.random.Generator, code: str, now: int) -> int:
    """A number near the present one, near a power of two, or any other."""
    bits = WHOLE[code]
    near = [
        now + int(rng.integers(-3, 4)),
        now * 2,
        now // 2,
        (1 << int(rng.integers(bits + 1))) - int(rng.integers(2)),
    ]
    return int(pick(rng, [*near, int(rng.integers(0, 1 << min(bits, 62))), int(rng.integers(0, 300))])) % (1 << bits)


def set_field(rng: np.random.Generator, payload: bytearray, place: int, code: str) -> bytearray:
    if place + struct.calcsize(code) <= len(payload):
        (now,) = struct.unpack_from(f"<{code}", payload, place)
        value = pick(rng, FLOATS) if code == "f" else number(rng, code, now)
        struct.pack_into(f"<{code}", payload, place, value)
    return payload


def tables(payload: bytearray) -> int:
    """Where the data begin."""
    return min(len(payload), HEADER_BYTES + SECTION_BYTES * struct.unpack_from("<H", payload, 14)[0])


def header_field(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    return set_field(rng, payload, *pick(rng, HEADER_FIELDS))


def section_field(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    place, code = pick(rng, SECTION_FIELDS)
    section = int(rng.integers(max(1, (tables(payload) - HEADER_BYTES) // SECTION_BYTES)))
    return set_field(rng, payload, HEADER_BYTES + SECTION_BYTES * section + place, code)


def some_bytes(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    start = tables(payload)
    for _ in range(int(rng.integers(1, 5))):
        if start < len(payload):
            payload[int(rng.integers(start, len(payload)))] = int(pick(rng, [*BYTES, int(rng.integers(256))]))
    return payload


def some_float(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    """A special number where metadata or values may be: behind the positions, in steps from both ends, anywhere."""
    start, last = tables(payload), len(payload) - 4
    if start <= last:
        rows = range(HEADER_BYTES + 16, start - 7, SECTION_BYTES)
        behind = min(last, start + sum(struct.unpack_from("<Q", payload, row)[0] for row in rows))
        steps = [
            range(behind, last + 1, 4)[:5],
            range(start, last + 1, 4),
            range(last, start - 1, -4),
            range(start, last + 1),
        ]
        struct.pack_into("<f", payload, int(pick(rng, pick(rng, steps))), pick(rng, FLOATS))
    return payload


def flipped_bits(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(8 * len(payload)))
        payload[place // 8] ^= 1 << place % 8
    return payload


def other_length(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    cut = int(rng.integers(1, 9)) if rng.random() < 0.7 else int(rng.integers(1, len(payload) + 1))
    if rng.random() < 0.5:
        return payload[: max(0, len(payload) - cut)]
    place = int(rng.integers(min(HEADER_BYTES, len(payload)), len(payload) + 1))
    return payload[:place] + bytearray(rng.bytes(cut)) + payload[place:]


def noise_behind_the_tables(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    start = tables(payload)
    length = len(payload) - start
    filler = pick(rng, [rng.bytes(length), bytes([int(pick(rng, BYTES))]) * length])
    return payload[:start] + bytearray(filler)


def spliced(rng: np.random.Generator, payload: bytearray, subject: Subject) -> bytearray:
    other = pick(rng, list(subject.payloads))
    place = int(pick(rng, [HEADER_BYTES, tables(payload), int(rng.integers(HEADER_BYTES, len(payload) + 1))]))
    return payload[:place] + bytearray(other[place:])


def moved_counts(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    """Lies that agree with each other: a section and the header, or two sections."""
    sections = (tables(payload) - HEADER_BYTES) // SECTION_BYTES
    if sections == 0:
        return payload
    step = int(pick(rng, [-1, 1, 2, -7, 8, 64, 1000, 1 << 40]))
    first, second = (HEADER_BYTES + SECTION_BYTES * int(place) + 8 for place in rng.integers(sections, size=2))
    for place, change in ((first, step), (pick(rng, [32, second]), step if rng.random() < 0.8 else -step)):
        (now,) = struct.unpack_from("<Q", payload, place)
        struct.pack_into("<Q", payload, place, (now + change) % (1 << 64))
    return payload


def recoded_positions(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    """Another coding and other bytes for the positions of the first section, of a length that the table admits."""
    start = tables(payload)
    if start < HEADER_BYTES + SECTION_BYTES:
        return payload
    _, _, count, nbytes = struct.unpack_from("<BxHxxxxQQ", payload, HEADER_BYTES)
    old = min(nbytes, len(payload) - start)
    coding, parameter = int(rng.integers(1, 4)), int(pick(rng, [0, 1, 2, 5, 6, 6, 7, 9, 10, 22, 255, 65535]))
    fitting = (count * parameter + 7) // 8 if coding == 1 and count < 10_000 and parameter < 33 else old
    length = int(pick(rng, [fitting, fitting, fitting, fitting + int(rng.integers(-2, 3)), int(rng.integers(200))]))
    data = bytearray(rng.bytes(max(0, length)))
    if rng.random() < 0.3:  # streams of quotients are mostly ones
        data = bytearray(byte | int(rng.integers(256)) for byte in data)
    if data and rng.random() < 0.7:
        data[-1] &= 0xFF >> -count * parameter % 8
    struct.pack_into("<BxHxxxxQQ", payload, HEADER_BYTES, coding, parameter, count, len(data))
    return payload[:start] + data + payload[start + old :]


def other_tables(rng: np.random.Generator, payload: bytearray, _: Subject) -> bytearray:
    sections = (tables(payload) - HEADER_BYTES) // SECTION_BYTES
    struct.pack_into("<H", payload, 14, (sections + int(pick(rng, [-1, 1, 2]))) % 65536)
    if rng.random() < 0.5:
        place = HEADER_BYTES + SECTION_BYTES * int(rng.integers(sections + 1))
        row = struct.pack("<BxHxxxxQQ", int(rng.integers(4)), int(rng.integers(9)), 0, int(rng.integers(3)))
        payload = payload[:place] + bytearray(row) + payload[place:]
    return payload


CHANGES: list[Change] = [
    header_field, section_field, some_bytes, some_float, some_float, flipped_bits, other_length,
    noise_behind_the_tables, spliced, moved_counts, recoded_positions, recoded_positions, other_tables,
]  # fmt: skip


def forgeries(subject: Subject, count: int) -> Iterator[bytes]:
    """Payloads with one to three changes and a digest that fits."""
    rng = np.random.default_rng(count)
    for _ in range(count):
        payload = bytearray(pick(rng, list(subject.payloads)))
        for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
            if len(payload) >= HEADER_BYTES:
                payload = pick(rng, CHANGES)(rng, payload, subject)
        yield sealed(payload)


# ---- judging ----


def judge(subject: Subject, payload: bytes) -> str | None:
    """Why the payload was refused, or None; fails on anything else than a clean refusal or a clean result."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    reason, found = None, None
    try:
        found = subject.decode(payload)
    except PayloadError as error:
        reason = str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {payload.hex()}") from error
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak < MOST * (len(payload) + subject.grid.size), f"{peak} bytes of memory for {payload.hex()}"
    if found is not None:
        assert well_formed(found, subject.grid.size), payload.hex()
    return reason


def well_formed(found: Coefficients, size: int) -> bool:
    index = torch.arange(size) if found.index is None else found.index
    inside = index.numel() == 0 or 0 <= int(index[0]) <= int(index[-1]) < size
    return (
        found.size == size
        and (found.value.dtype, index.dtype) == (torch.float32, torch.int64)
        and found.value.shape == index.shape
        and inside
        and bool((index.diff() > 0).all())
        and bool(found.value.isfinite().all())
        and 0 <= found.weight < math.inf
    )


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@cache
def verdicts(name: str, count: int) -> Counter[str | None]:
    """How often each reason was given, and None for what was accepted."""
    one = subject(name)
    return Counter(judge(one, payload) for payload in forgeries(one, count))


# ---- laws ----


@each_codec
def test_what_was_written_is_accepted(name):
    one = subject(name)
    assert [judge(one, payload) for payload in one.payloads] == [None] * len(one.payloads)


@each_codec
def test_noise_is_refused(name):
    one, rng = subject(name), np.random.default_rng(1)
    for length in [*range(130), 1000, 10_000]:
        noise = rng.bytes(length)
        assert judge(one, noise)
        assert judge(one, b"LOWT\x01\x00" + noise)


@each_codec
def test_any_damage_is_noticed_by_the_digest(name):
    one, rng = subject(name), np.random.default_rng(2)
    for _ in range(QUICK):
        payload = bytearray(pick(rng, list(one.payloads)))
        damaged = bytes(pick(rng, CHANGES)(rng, bytearray(payload), one))
        assert damaged == payload or judge(one, damaged)


@each_codec
def test_every_truncation_is_refused_with_and_without_a_digest_that_fits(name):
    one = subject(name)
    payload = one.payloads[0]
    for length in [*range(0, len(payload) - 150, 7), *range(max(0, len(payload) - 150), len(payload))]:
        assert judge(one, payload[:length])
        assert judge(one, sealed(bytearray(payload[:length])))


@each_codec
def test_forged_payloads_are_refused_or_well_formed(name):
    found = verdicts(name, QUICK)
    assert found[None] > QUICK // 20, "hardly any forgery gets through to the values"
    assert len(found) > 10


@pytest.mark.slow
@each_codec
def test_very_many_forged_payloads_are_refused_or_well_formed(name):
    found = verdicts(name, THOROUGH)
    assert found.total() * len(CODECS) >= 100_000
    assert found[None] > THOROUGH // 20


def test_forging_reaches_every_check_of_the_parser():
    reasons = "\n".join(str(reason) for name in CODECS for reason in verdicts(name, QUICK))
    for check in [
        "at least 64 bytes", "not a lowtide payload", "payload format", "impossible header", "sections need",
        "reserved bytes", "payload's transform", "payload's select ", "payload's quantizer", "payload's tail",
        "payload's parameter", "payload's selection", "payload's event", "payload's grid", "abstaining payload",
        "values for a buffer", "sections with", "sections, expected", "does not fit", "values and tail take",
        "no coding of positions", "must ascend", "quotients in", "bytes of quotients", "a position is",
        "a bitmap marks", "spare bits", "values of 6 bits take", "are not finite", "tail has a scale", "code of -128",
        "of sym2 are negative or fall", "e3m0 has a negative", "of sign is negative", "least value of a linear",
    ]:  # fmt: skip
        assert check in reasons, check


@each_codec
def test_payloads_of_other_codecs_are_refused(name):
    one = subject(name)
    for other in CODECS:
        if other != name:
            assert [judge(one, payload) is None for payload in subject(other).payloads] == [False] * 7


@pytest.mark.parametrize("coding", [1, 2, 3])
@pytest.mark.parametrize("select", [top_k(1.0), top_k_tensor(1 / 8), threshold(1 / 8)], ids=lambda s: type(s).__name__)
def test_declared_sizes_cost_no_memory_beyond_the_bound(select, coding):
    codec = chain(select, sign(), chunker=TILES)
    layout = Layout.single((1024, 512), codec.chunker)
    size = layout.grid.size
    one = Subject(codec, layout.grid, (codec.encode(torch.randn(size), layout.grid, Turn(3)),))
    width = size.bit_length() - 1 if select.code != top_k(1.0).code else 6
    for count in (size, size - 1, 1):
        for nbytes, filler in ((0, 0), (10, 255), (size // 8, 255), (size // 8, 0), (size // 4, 85), (3 * size, 255)):
            for parameter in {0: {0}, 1: {width}, 2: {1, 2, 255, 65535}}.get(coding, {0}):
                payload = bytearray(one.payloads[0][: HEADER_BYTES + SECTION_BYTES])
                struct.pack_into("<Q", payload, 32, count)
                struct.pack_into("<BxHxxxxQQ", payload, HEADER_BYTES, coding, parameter, count, nbytes)
                judge(one, sealed(payload + bytearray([filler]) * nbytes + bytearray(4 + size // 8)))


def test_a_huge_table_costs_no_more_than_its_bytes():
    one = subject("top-k sym2")
    payload = bytearray(one.payloads[0][:HEADER_BYTES])
    struct.pack_into("<H", payload, 14, 65535)
    reason = judge(one, sealed(payload + bytearray(65535 * SECTION_BYTES)))
    assert reason.startswith("65535 sections with")


def test_the_judge_itself_notices_what_is_wrong():
    good = Coefficients(torch.ones(2), torch.tensor([1, 3]), 4)
    assert well_formed(good, 4)
    wrong = [
        {"index": torch.tensor([3, 1])}, {"index": torch.tensor([1, 1])}, {"index": torch.tensor([1, 4])},
        {"index": torch.tensor([-1, 1])}, {"index": None}, {"value": torch.ones(3)}, {"size": 5},
        {"value": torch.tensor([1.0, math.nan])}, {"weight": math.inf}, {"weight": -1.0},
        {"value": torch.ones(2).double()},
    ]  # fmt: skip
    assert [well_formed(replace(good, **change), 4) for change in wrong] == [False] * len(wrong)
