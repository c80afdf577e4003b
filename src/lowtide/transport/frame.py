"""The frames that go before data: what a rank is about to move, and why a rank stopped.

Every frame is 256 bytes in every version of the protocol, so that a peer of another version is told apart
instead of breaking the wire below (gloo aborts the process when sizes differ). Little-endian:

    bytes     Header                                      Notice
    0   4     b"LTFR"                                     the same
    4   2     wire version                                the same
    6   1     kind of message (its place in KINDS)        cause (its place in CAUSES), plus 128
    7   1     zero                                        number of suspects
    8   4     rank of the sender                          the same
    12  4     number of replicas                          suspects, 16 of 2 bytes
    16  8     event
    24  4     leg
    28  8     bytes of the payload for this peer
    36  8     elements of a summed tensor
    44  16    dtype of a summed tensor                    reason, up to 208 bytes of UTF-8
    60  8     hash of the group's members
    68  8     hash of the plan's name
    76  16    hash of the tag's identity
    92  16    digest of the payload for this peer
    108 48    start of the plan's name, for messages
    252 4     CRC-32 of all before                        the same

All hashes are the first bytes of a SHA-256.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowtide.errors import AgreementError, TransportError
from lowtide.messages import Gather, Group, Message, Scatter, Send, Sum, Tag

FRAME_BYTES = 256  # in every version, see above
WIRE_VERSION = 1
DIGEST_BYTES = 16
KINDS: tuple[type, ...] = (Gather, Scatter, Sum, Group, Send)
CAUSES = ("closed", "lost", "disagreed", "failed")

_MAGIC = b"LTFR"
# No padding: "<" packs fields as they are written here, on every machine.
_HEADER = struct.Struct("<4sHBBIIqIQQ16s8s8s16s16s48s")
_NOTICE = struct.Struct("<4sHBBI32s208s")
_MAX_SUSPECTS = 16


def digest(data: bytes | memoryview, length: int = DIGEST_BYTES) -> bytes:
    """The first `length` bytes of the SHA-256 of `data`."""
    return hashlib.sha256(data).digest()[:length]


@dataclass(frozen=True)
class Header:
    """What one rank says of one message before any of it moves."""

    rank: int
    size: int
    kind: str
    plan: str
    event: int
    leg: int
    plan_hash: bytes
    identity: bytes
    members: bytes = bytes(8)
    numel: int = 0
    dtype: str = ""
    nbytes: int = 0
    checksum: bytes = bytes(DIGEST_BYTES)
    version: int = WIRE_VERSION

    def pack(self) -> bytes:
        """The header as 256 bytes.

        >>> header = header_of(Gather(b"abc"), Tag("delta", event=3), rank=1, size=4)
        >>> frame = header.pack()
        >>> len(frame), unpack_header(frame, source=1) == header
        (256, True)
        """
        kind = [each.__name__ for each in KINDS].index(self.kind)
        # struct pads texts with zeros and cuts what is too long; the hash of the plan covers its whole name.
        fields = (self.version, kind, 0, self.rank, self.size, self.event, self.leg, self.nbytes, self.numel)
        texts = (self.dtype.encode(), self.members, self.plan_hash, self.identity, self.checksum, self.plan.encode())
        return _seal(_HEADER.pack(_MAGIC, *fields, *texts))

    def announcing(self, data: bytes | memoryview) -> Header:
        """The same header for a peer that will get `data`."""
        return replace(self, nbytes=len(data), checksum=digest(data))


def header_of(message: Message, tag: Tag, *, rank: int, size: int) -> Header:
    """The header of `message`, before it is addressed to a peer with `announcing`."""
    # A Group's members are told as a hash: a header has one size, however large the group.
    members = _members_hash(message.members) if isinstance(message, Group) else bytes(8)
    numel, dtype = (message.tensor.numel(), str(message.tensor.dtype)[6:22]) if isinstance(message, Sum) else (0, "")
    return Header(
        rank=rank,
        size=size,
        kind=type(message).__name__,
        plan=tag.plan.encode()[:48].decode(errors="ignore"),  # cut where it is packed, between characters
        event=tag.event,
        leg=tag.leg,
        plan_hash=digest(tag.plan.encode(), 8),
        identity=digest(tag.identity),
        members=members,
        numel=numel,
        dtype=dtype,
    )


def unpack_header(frame: bytes, source: int) -> Header:
    """Read what `source` sent; a damaged frame or one of somebody else is a `TransportError` that names it."""
    version = _open(frame, source)
    if version != WIRE_VERSION:
        # Nothing behind the version can be trusted to be laid out as here: only the version is compared.
        return Header(source, 0, "", "", 0, 0, b"", b"", version=version)
    _, _, kind, _, rank, size, event, leg, nbytes, numel, *texts = _HEADER.unpack(frame[: _HEADER.size])
    dtype, members, plan_hash, identity, checksum, plan = texts
    if rank != source or kind >= len(KINDS):
        raise TransportError(f"rank {source} sent the header of rank {rank}, kind {kind}\n{_FOREIGN}")
    return Header(
        rank=rank,
        size=size,
        kind=KINDS[kind].__name__,
        plan=_text(plan),
        event=event,
        leg=leg,
        plan_hash=plan_hash,
        identity=identity,
        members=members,
        numel=numel,
        dtype=_text(dtype),
        nbytes=nbytes,
        checksum=checksum,
    )


@dataclass(frozen=True)
class Notice:
    """The last word of a rank: why it left, and which ranks it misses."""

    rank: int
    cause: str
    reason: str = ""
    suspects: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """The notice as 256 bytes; a long reason is cut."""
        # With more than sixteen suspects the network is gone, and sixteen names tell that, too.
        suspects = self.suspects[:_MAX_SUSPECTS]
        ranks = struct.pack(f"<{len(suspects)}H", *suspects)
        reason = self.reason.encode()[:208].decode(errors="ignore").encode()
        # Above all kinds of message, so that a notice is never read as a header.
        cause = 128 + CAUSES.index(self.cause)
        return _seal(_NOTICE.pack(_MAGIC, WIRE_VERSION, cause, len(suspects), self.rank, ranks, reason))


def unpack_notice(frame: bytes, source: int) -> Notice:
    """Read the last word of `source`."""
    version = _open(frame, source)
    if version != WIRE_VERSION:
        return Notice(source, "failed", f"it speaks wire version {version}, this rank {WIRE_VERSION}")
    _, _, cause, count, rank, ranks, reason = _NOTICE.unpack(frame[: _NOTICE.size])
    if rank != source or not 128 <= cause < 128 + len(CAUSES) or count > _MAX_SUSPECTS:
        raise TransportError(f"rank {source} sent a notice of rank {rank}, cause {cause}\n{_FOREIGN}")
    suspects = struct.unpack(f"<{count}H", ranks[: 2 * count])
    return Notice(source, CAUSES[cause - 128], _text(reason), suspects)


def verdict(headers: Sequence[Header]) -> None:
    """Raise `AgreementError` unless all headers announce the same message.

    Every rank holds the same headers, so every rank comes to the same verdict.

    >>> ours = [header_of(Gather(b""), Tag("delta", event=3), rank=rank, size=3) for rank in (0, 1)]
    >>> verdict([*ours, header_of(Gather(b""), Tag("delta", event=4), rank=2, size=3)])
    Traceback (most recent call last):
    lowtide.errors.AgreementError: replicas do not run the same thing in plan 'delta', event 3, leg 0:
      the event is 3 on ranks 0, 1; 4 on rank 2
    hint: a rank is rounds ahead or behind; start all from the same checkpoint and data length
    """
    # Sorted, so that all ranks write the same text, whoever they are.
    ordered = sorted(headers, key=lambda header: header.rank)
    if len({header.version for header in ordered}) > 1:
        parts = _spread(ordered, lambda h: h.version, lambda h: str(h.version))
        raise AgreementError(f"replicas speak different wire versions: {parts}\nhint: install one version of lowtide")
    differing = [check for check in _CHECKS if len({check.key(header) for header in ordered}) > 1]
    if differing:
        first = ordered[0]
        # The first difference gives the hint: the checks go from the cause to what follows from it.
        where = f"plan {first.plan!r}, event {first.event}, leg {first.leg}"
        lines = "\n".join(f"  {check.title} is {_spread(ordered, check.key, check.show)}" for check in differing)
        raise AgreementError(f"replicas do not run the same thing in {where}:\n{lines}\nhint: {differing[0].hint}")


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2` or `ranks 0, 1`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class _Check:
    """One field of the header that all ranks must agree on."""

    title: str
    key: Callable[[Header], Any]
    show: Callable[[Header], str]
    hint: str


_CODE = "run the same code and configuration on every rank"
_CHECKS = (
    _Check("the number of replicas", lambda h: h.size, lambda h: str(h.size), "start one job, with one size"),
    _Check("the kind of message", lambda h: h.kind, lambda h: h.kind, _CODE),
    _Check("the plan", lambda h: (h.plan, h.plan_hash), lambda h: repr(h.plan), _CODE),
    _Check(
        "the event",
        lambda h: h.event,
        lambda h: str(h.event),
        "a rank is rounds ahead or behind; start all from the same checkpoint and data length",
    ),
    _Check("the leg", lambda h: h.leg, lambda h: str(h.leg), _CODE),
    _Check(
        "the identity (layout and plan)",
        lambda h: h.identity,
        lambda h: h.identity.hex()[:8],
        "the models or the methods differ: compare parameter names, shapes, requires_grad and options",
    ),
    _Check("the list of group members (its hash)", lambda h: h.members, lambda h: h.members.hex()[:8], _CODE),
    _Check("the number of elements", lambda h: h.numel, lambda h: str(h.numel), "the summed tensors differ in shape"),
    _Check("the dtype", lambda h: h.dtype, lambda h: h.dtype or "none", "convert the summed tensors to one dtype"),
)
_FOREIGN = "hint: something that is not lowtide speaks on this connection, or it is damaged"


def _spread(headers: Sequence[Header], key: Callable[[Header], Any], show: Callable[[Header], str]) -> str:
    holders: dict[Any, list[Header]] = {}
    for header in headers:
        holders.setdefault(key(header), []).append(header)
    parts = (f"{show(group[0])} on {ranks_text([header.rank for header in group])}" for group in holders.values())
    return "; ".join(parts)


def _members_hash(members: tuple[int, ...]) -> bytes:
    return digest(",".join(map(str, members)).encode(), 8)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _seal(body: bytes) -> bytes:
    # TCP's own sum is 16 bits wide, and a damaged size would make gloo abort the process.
    padded = body.ljust(FRAME_BYTES - 4, b"\0")
    return padded + struct.pack("<I", zlib.crc32(padded))


def _open(frame: bytes, source: int) -> int:
    """Check length, mark and sum of a frame; return its wire version."""
    if len(frame) != FRAME_BYTES or frame[:4] != _MAGIC:
        raise TransportError(f"rank {source} sent no lowtide frame: it starts with {frame[:4]!r}\n{_FOREIGN}")
    if struct.unpack("<I", frame[-4:])[0] != zlib.crc32(frame[:-4]):
        raise TransportError(f"the frame of rank {source} is damaged: its CRC-32 does not fit\n{_FOREIGN}")
    return int(struct.unpack("<H", frame[4:6])[0])
