from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import AgreementError, TransportError
from lowtide.messages import Gather, Group, Scatter, Send, Sum, Tag
from lowtide.transport.frame import (
    CAUSES,
    FRAME_BYTES,
    WIRE_VERSION,
    Notice,
    header_of,
    ranks_text,
    unpack_header,
    unpack_notice,
    verdict,
)

MESSAGES = [Gather(b"a"), Scatter((b"a",)), Sum(torch.ones(3)), Group(b"a", (0, 2)), Send(b"a", 1)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_header_comes_back_as_it_was_packed(message):
    header = header_of(message, Tag("plan", 7, 1, b"id"), rank=3, size=5).announcing(b"payload")
    frame = header.pack()
    assert len(frame) == FRAME_BYTES
    assert unpack_header(frame, source=3) == header


@given(
    plan=st.text(max_size=80),
    event=st.integers(-(2**63), 2**63 - 1),
    leg=st.integers(0, 2**32 - 1),
    identity=st.binary(max_size=40),
    rank=st.integers(0, 2**32 - 1),
    data=st.binary(max_size=100),
)
def test_any_tag_fits_a_header(plan, event, leg, identity, rank, data):
    header = header_of(Gather(data), Tag(plan, event, leg, identity), rank=rank, size=1).announcing(data)
    back = unpack_header(header.pack(), source=rank)
    assert replace(back, plan="") == replace(header, plan="")
    assert back.nbytes == len(data)


@given(place=st.integers(0, FRAME_BYTES - 1), change=st.integers(1, 255))
def test_no_damaged_byte_of_a_header_goes_unseen(place, change):
    frame = bytearray(header_of(Gather(b""), Tag("plan", 7), rank=1, size=2).pack())
    frame[place] ^= change
    with pytest.raises(TransportError, match="rank 1"):
        unpack_header(bytes(frame), source=1)


@given(garbage=st.binary(max_size=2 * FRAME_BYTES))
def test_garbage_is_no_header_and_no_notice(garbage):
    for unpack in (unpack_header, unpack_notice):
        with pytest.raises(TransportError, match="rank 4 sent no lowtide frame"):
            unpack(garbage, 4)


def test_the_header_of_another_rank_is_refused():
    frame = header_of(Gather(b""), Tag("plan", 7), rank=1, size=2).pack()
    with pytest.raises(TransportError, match="rank 0 sent the header of rank 1"):
        unpack_header(frame, source=0)
    with pytest.raises(TransportError, match="rank 1 sent the header of rank 1, kind 130"):
        unpack_header(Notice(1, "disagreed").pack(), source=1)
    with pytest.raises(TransportError, match="rank 1 sent a notice of rank 1, cause 0"):
        unpack_notice(frame, source=1)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_notice_comes_back_as_it_was_packed(cause):
    notice = Notice(3, cause, "the loss is nan", (0, 2, 60_000))
    assert len(notice.pack()) == FRAME_BYTES
    assert unpack_notice(notice.pack(), source=3) == notice


@given(reason=st.text(), suspects=st.lists(st.integers(0, 65_535)).map(tuple))
def test_a_long_notice_is_cut_not_refused(reason, suspects):
    back = unpack_notice(Notice(0, "lost", reason, suspects).pack(), source=0)
    assert reason.rstrip("\0").startswith(back.reason)
    assert back.suspects == suspects[:16]


def headers(*changes: dict[str, object]) -> list:
    tag = Tag("delta", 3, 0, b"id")
    ours = [header_of(Gather(b""), tag, rank=rank, size=len(changes)) for rank in range(len(changes))]
    return [replace(header, **change) for header, change in zip(ours, changes, strict=True)]


def test_headers_that_agree_pass_whatever_their_payloads():
    ours = headers({}, {}, {})
    verdict([header.announcing(bytes(header.rank)) for header in ours])
    assert len({header.announcing(bytes(header.rank)).checksum for header in ours}) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 4}, "the number of replicas is 3 on ranks 0, 2; 4 on rank 1"),
        ({"kind": "Sum"}, "the kind of message is Gather on ranks 0, 2; Sum on rank 1"),
        ({"plan": "other"}, "the plan is 'delta' on ranks 0, 2; 'other' on rank 1"),
        ({"plan_hash": b"same start"}, "the plan is 'delta' on ranks 0, 2; 'delta' on rank 1"),
        ({"event": 2}, "the event is 3 on ranks 0, 2; 2 on rank 1"),
        ({"leg": 1}, "the leg is 0 on ranks 0, 2; 1 on rank 1"),
        ({"identity": b"\xff" * 16}, "ffffffff on rank 1"),
        ({"members": b"\x11" * 8}, "the list of group members"),
        ({"numel": 5}, "the number of elements is 0 on ranks 0, 2; 5 on rank 1"),
        ({"dtype": "float32"}, "the dtype is none on ranks 0, 2; float32 on rank 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_that_differs_is_named_with_its_ranks(change, words):
    with pytest.raises(AgreementError) as error:
        verdict(headers({}, change, {}))
    assert words in str(error.value)
    assert "plan 'delta', event 3, leg 0" in str(error.value)
    assert "hint: " in str(error.value)


def test_the_verdict_does_not_depend_on_the_order_of_headers():
    ours = headers({}, {"event": 4}, {"event": 5, "leg": 2})
    texts = set()
    for order in (ours, ours[::-1], [ours[1], ours[0], ours[2]]):
        with pytest.raises(AgreementError) as error:
            verdict(order)
        texts.add(str(error.value))
    assert len(texts) == 1
    assert texts.pop().count("\n") == 3  # the event, the leg, the hint


def test_another_wire_version_is_told_before_anything_else():
    newer = replace(header_of(Gather(b""), Tag("delta", 3), rank=1, size=2), version=WIRE_VERSION + 1)
    theirs = unpack_header(newer.pack(), source=1)
    assert theirs.version == WIRE_VERSION + 1
    with pytest.raises(AgreementError, match=r"wire versions: 1 on rank 0; 2 on rank 1\nhint: install one version"):
        verdict([headers({})[0], theirs])


def test_a_notice_of_another_wire_version_is_still_a_goodbye():
    frame = replace(header_of(Gather(b""), Tag("delta", 3), rank=1, size=2), version=9).pack()
    assert unpack_notice(frame, source=1) == Notice(1, "failed", "it speaks wire version 9, this rank 1")


def test_ranks_are_written_as_people_do():
    assert ranks_text([2]) == "rank 2"
    assert ranks_text([0, 1]) == "ranks 0, 1"
