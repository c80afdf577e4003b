"""The frame: every field comes back, every bit is covered, and what cannot be is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.codec.payload import (
    COEFFICIENTS,
    HEADER_BYTES,
    NOTHING,
    SECTION_BYTES,
    Header,
    Section,
    digest,
    empty,
    expect,
    seal,
    unseal,
)
from lowtide.errors import PayloadError

HEADER = Header(
    kind=COEFFICIENTS,
    transform=1,
    select=1,
    quantizer=6,
    tail=2,
    parameter=0x0102,
    sections=2,
    weight=0.5,
    selection=0x03040506,
    event=0x0708090A0B0C0D0E,
    count=5,
    grid=b"\x10\x11\x12\x13\x14\x15\x16\x17",
)
SECTIONS = [Section(2, 22, 3, 7), Section(1, 12, 2, 3)]
BLOCKS = [b"positions!", b"values"]

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
headers = st.builds(
    Header, kind=st.sampled_from([NOTHING, COEFFICIENTS]), transform=u8, select=u8, quantizer=u8, tail=u8,
    parameter=u16, sections=st.just(0), weight=st.floats(0, 2.0**100, width=32), selection=u32, event=u64, count=u64,
    grid=st.binary(min_size=8, max_size=8),
)  # fmt: skip
tables = st.lists(st.builds(Section, coding=u8, parameter=u16, count=u64, nbytes=u64), max_size=4)


def resealed(payload: bytes, place: int, code: str, value: object) -> bytes:
    """The payload with another value at a byte, and a digest that fits."""
    changed = bytearray(payload)
    struct.pack_into(f"<{code}", changed, place, value)
    changed[48:64] = digest(bytes(changed[:HEADER_BYTES]), bytes(changed[HEADER_BYTES:]))
    return bytes(changed)


@given(headers, tables, st.lists(st.binary(max_size=20), max_size=3))
def test_what_is_sealed_is_unsealed(header, sections, blocks):
    header = dataclasses.replace(header, sections=len(sections))
    payload = seal(header, sections, blocks)
    assert len(payload) == HEADER_BYTES + SECTION_BYTES * len(sections) + sum(map(len, blocks))
    found, table, body = unseal(payload)
    assert (found, table, bytes(body)) == (header, sections, b"".join(blocks))


def test_the_format_never_changes():
    payload = seal(HEADER, SECTIONS, BLOCKS)
    assert (HEADER_BYTES, SECTION_BYTES) == (64, 24)
    assert payload[:48].hex(" ", 8) == (
        "4c4f575401000100 0101060202010200 0000003f06050403 0e0d0c0b0a090807 0500000000000000 1011121314151617"
    )
    assert payload[64:112].hex(" ", 8) == (
        "0200160000000000 0300000000000000 0700000000000000 01000c0000000000 0200000000000000 0300000000000000"
    )
    assert payload[112:] == b"positions!values"
    assert payload[48:64] == hashlib.sha256(payload[:48] + payload[64:]).digest()[:16]


def test_any_flipped_bit_is_noticed():
    payload = seal(HEADER, SECTIONS, BLOCKS)
    for place in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(PayloadError):
            unseal(bytes(damaged))


def test_any_missing_or_added_byte_is_noticed():
    payload = seal(HEADER, SECTIONS, BLOCKS)
    for length in range(len(payload)):
        with pytest.raises(PayloadError):
            unseal(payload[:length])
    with pytest.raises(PayloadError, match="damaged on its way"):
        unseal(payload + b"\0")


@pytest.mark.parametrize("length", [0, 1, 63])
def test_less_than_a_header_is_refused(length):
    with pytest.raises(PayloadError, match=f"at least 64 bytes, this has {length}"):
        unseal(bytes(length))


def test_other_files_are_refused():
    with pytest.raises(PayloadError, match="starts with b'PK"):
        unseal(b"PK\3\4" + bytes(100))


@pytest.mark.parametrize("major", [0, 2, 255])
def test_another_major_version_is_refused_before_anything_else_is_read(major):
    payload = bytearray(seal(HEADER, SECTIONS, BLOCKS))
    payload[4] = major
    payload[40:] = b"\xff" * (len(payload) - 40)  # even the digest may mean something else there
    with pytest.raises(PayloadError, match=rf"payload format {major}\.0, this version reads 1\.x\nhint: "):
        unseal(bytes(payload))


def test_a_newer_minor_version_is_read():
    payload = resealed(seal(HEADER, SECTIONS, BLOCKS), 5, "B", 9)
    assert unseal(payload)[0] == HEADER


@pytest.mark.parametrize(
    ("place", "code", "value", "reason"),
    [
        (6, "B", 2, "kind=2"),
        (6, "B", 255, "kind=255"),
        (7, "B", 1, "reserved=1"),
        (14, "H", 3, "3 sections need 72 bytes, 64 are left"),
        (14, "H", 65535, "65535 sections need 1572840 bytes, 64 are left"),
        (16, "f", math.nan, "weight=nan"),
        (16, "f", math.inf, "weight=inf"),
        (16, "f", -1.0, "weight=-1.0"),
        (65, "B", 1, "section 0: reserved bytes are 1,0"),
        (68, "I", 7, "section 0: reserved bytes are 0,7"),
        (92, "I", 1 << 31, "section 1: reserved bytes"),
    ],
)
def test_impossible_fields_are_refused_although_the_digest_fits(place, code, value, reason):
    payload = resealed(seal(HEADER, SECTIONS, BLOCKS), place, code, value)
    with pytest.raises(PayloadError, match=reason):
        unseal(payload)


def test_a_table_that_fills_the_payload_is_read():
    payload = seal(dataclasses.replace(HEADER, sections=1), [Section(1, 2, 3, 4)], [])
    assert unseal(payload)[1] == [Section(1, 2, 3, 4)]
    assert len(unseal(payload)[2]) == 0


FIELDS = ["transform", "select", "quantizer", "tail", "parameter", "selection", "event", "grid"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_difference_is_named_by_its_field(field):
    wanted = dataclasses.replace(HEADER, **{field: b"otherone" if field == "grid" else 99})
    with pytest.raises(PayloadError, match=f"the payload's {field} is .*, ours is .*\nhint: "):
        expect(HEADER, wanted)


def test_what_differs_from_sender_to_sender_is_not_compared():
    expect(HEADER, dataclasses.replace(HEADER, kind=NOTHING, sections=0, weight=9.0, count=77))
    compared = {*FIELDS, "kind", "sections", "weight", "count"}
    assert compared == {field.name for field in dataclasses.fields(Header)}


def test_nothing_is_a_header_alone():
    payload = empty(HEADER)
    header, sections, body = unseal(payload)
    assert len(payload) == HEADER_BYTES
    assert (header.kind, header.weight, header.count, sections, len(body)) == (NOTHING, 0.0, 0, [], 0)
    expect(header, HEADER)
