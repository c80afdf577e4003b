"""The frame around every payload: fixed, versioned, little-endian; `docs/reference/wire-format.md` lists each byte."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, replace

from lowtide.errors import PayloadError

MAGIC = b"LOWT"
MAJOR, MINOR = 1, 0
NOTHING, COEFFICIENTS = 0, 1

# `<` turns off alignment too: the same 64 bytes on every machine
_HEADER = struct.Struct("<4sBBBBBBBBHHfIQQ8s16s")
_SECTION = struct.Struct("<BBHIQQ")
HEADER_BYTES, SECTION_BYTES = _HEADER.size, _SECTION.size
# at the end, so that hashing skips it by stopping early
_DIGEST = slice(48, 64)


@dataclass(frozen=True)
class Header:
    """What a payload says of itself before its data."""

    kind: int
    transform: int
    select: int
    quantizer: int
    tail: int
    parameter: int
    sections: int
    weight: float
    selection: int
    event: int
    count: int
    grid: bytes


@dataclass(frozen=True)
class Section:
    """How the positions of one group of tiles are coded, and in how many bytes."""

    coding: int
    parameter: int
    count: int
    nbytes: int


def digest(header: bytes, body: bytes | memoryview) -> bytes:
    """SHA-256 over the header with an empty digest field and the body, cut to 16 bytes."""
    state = hashlib.sha256(header[: _DIGEST.start])
    state.update(body)
    # half is plenty: it guards against damage, not against a peer that could hash its lie as well
    return state.digest()[:16]


def seal(header: Header, sections: list[Section], blocks: list[bytes]) -> bytes:
    """One payload from its parts."""
    # the weight is rounded to fp32 here, and a sender too works with the one that arrived
    head = _HEADER.pack(
        MAGIC, MAJOR, MINOR, header.kind, 0, header.transform, header.select, header.quantizer, header.tail,
        header.parameter, header.sections, header.weight, header.selection, header.event, header.count, header.grid,
        bytes(16),
    )  # fmt: skip
    # spare fields are zero and checked on arrival, so that a later format may use them
    table = b"".join(_SECTION.pack(s.coding, 0, s.parameter, 0, s.count, s.nbytes) for s in sections)
    body = b"".join([table, *blocks])
    return head[: _DIGEST.start] + digest(head, body) + body


def unseal(payload: bytes) -> tuple[Header, list[Section], memoryview]:
    """The header, the section table and the rest; everything that can be checked without the grid is."""
    if len(payload) < HEADER_BYTES:
        raise PayloadError(f"a payload has at least {HEADER_BYTES} bytes, this has {len(payload)}")
    (
        magic,
        major,
        minor,
        kind,
        zero,
        transform,
        select,
        quantizer,
        tail,
        parameter,
        sections,
        weight,
        selection,
        event,
        count,
        grid,
        claimed,
    ) = _HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise PayloadError(f"not a lowtide payload: it starts with {magic!r}, not {MAGIC!r}")
    # the version comes before the digest, which another format may keep elsewhere
    if major != MAJOR:
        raise PayloadError(
            f"payload format {major}.{minor}, this version reads {MAJOR}.x\nhint: run the same lowtide everywhere"
        )
    body = memoryview(payload)[HEADER_BYTES:]
    if digest(payload[:HEADER_BYTES], body) != claimed:
        raise PayloadError("the digest does not match: the payload was damaged on its way")
    # one weight that is negative or NaN would spoil the mean of every replica
    if zero or kind not in (NOTHING, COEFFICIENTS) or not (math.isfinite(weight) and weight >= 0):
        raise PayloadError(f"impossible header: kind={kind}, weight={weight}, reserved={zero}")
    header = Header(
        kind, transform, select, quantizer, tail, parameter, sections, weight, selection, event, count, grid
    )
    # from here on every number is a claim: the digest says that it is what was sent, not that it is possible
    table = sections * SECTION_BYTES
    if len(body) < table:
        raise PayloadError(f"{sections} sections need {table} bytes, {len(body)} are left")
    return header, [_section(body, number) for number in range(sections)], body[table:]


def _section(body: memoryview, number: int) -> Section:
    coding, zero, parameter, spare, count, nbytes = _SECTION.unpack_from(body, number * SECTION_BYTES)
    if zero or spare:
        raise PayloadError(f"section {number}: reserved bytes are {zero},{spare}, not zero")
    return Section(coding, parameter, count, nbytes)


def expect(header: Header, wanted: Header) -> None:
    """Refuse a payload that was made by another codec, for another layout or another event."""
    for field in ("transform", "select", "quantizer", "tail", "parameter", "selection", "event", "grid"):
        found, own = getattr(header, field), getattr(wanted, field)
        if found != own:
            raise PayloadError(
                f"the payload's {field} is {found!r}, ours is {own!r}\nhint: use the same method everywhere"
            )


def empty(header: Header) -> bytes:
    """The payload of a replica that abstains: a header and nothing else."""
    # a weight of zero keeps the sender out of every mean
    return seal(replace(header, kind=NOTHING, sections=0, weight=0.0, count=0), [], [])
