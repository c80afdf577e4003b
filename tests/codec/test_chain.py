"""The whole chain: any tensor to bytes and back, each byte accounted for, and nothing believed that does not fit."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowtide.codec import (
    Chain,
    Turn,
    all_,
    bf16,
    chain,
    cyclic,
    dct,
    fp16,
    fp32,
    identity,
    int8,
    random,
    sign,
    sym2,
    threshold,
    top_k,
    top_k_tensor,
)
from lowtide.codec.payload import Header, Section, seal, unseal
from lowtide.errors import ConfigError, PayloadError
from lowtide.tensors import Entry, Grid, Layout, divisor, flat, tile, whole

SHAPES = [(), (1,), (0,), (7,), (5000,), (3, 5), (64, 64), (70, 90), (2, 3, 20, 50), (4, 33, 96), (0, 70), (2, 9000)]
SELECTORS = [all_(), top_k(1 / 8), top_k(count=9), top_k_tensor(1 / 8), threshold(1 / 8), random(1 / 8), cyclic(1 / 8)]
SMALL = tile(8, small=16)


def layout_of(codec: Chain, shapes=((70, 90), (64, 128), (33,), ())) -> Layout:
    return Layout.build([Entry(f"t{number}", tuple(shape)) for number, shape in enumerate(shapes)], codec.chunker)


def coefficients(codec: Chain, layout: Layout) -> Tensor:
    buffer = layout.gather([torch.randn(entry.shape) for entry in layout.entries])
    return codec.transform.forward_(buffer, layout.grid)


def forged(payload: bytes, *, sections: list[Section] | None = None, body: bytes | None = None, **fields) -> bytes:
    """The payload with other fields, table or data, and a digest that fits."""
    header, table, rest = unseal(payload)
    table = table if sections is None else sections
    fields.setdefault("sections", len(table))
    return seal(replace(header, **fields), table, [bytes(rest) if body is None else body])


# ---- plain tensors ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("select", SELECTORS, ids=lambda select: f"{type(select).__name__}")
@pytest.mark.parametrize("tail", ["fp32", "int8"])
def test_a_tensor_of_any_shape_goes_there_and_back(shape, select, tail):
    codec, tensor = chain(select, tail=tail), torch.randn(shape)
    found = codec.unpack(codec.pack(tensor), shape)
    assert found.shape == tensor.shape
    sent = found != 0
    # what is sent is what it was; only int8 of the tail is coarser
    assert torch.allclose(found[sent], tensor[sent], atol=0.02 if tail == "int8" else 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "chunker", [tile(8, small=4), flat(32, small=4), divisor(64), whole(small=4)], ids=lambda c: c.name
)
@pytest.mark.parametrize("select", [all_(), top_k(1.0), top_k_tensor(1.0), random(1.0), cyclic(1.0), threshold(1.0)])
def test_at_full_rate_a_codec_is_the_identity(shape, chunker, select):
    tensor = torch.randn(shape)
    codec = chain(select, tail="fp32", chunker=chunker)
    assert torch.equal(codec.unpack(codec.pack(tensor), shape), tensor)


@pytest.mark.parametrize("chunker", [tile(8, small=4), flat(32, small=4), divisor(64)], ids=lambda c: c.name)
@pytest.mark.parametrize("shape", [(70, 90), (3, 5, 7), (64, 64)], ids=str)
def test_at_full_rate_the_cosine_transform_is_undone(shape, chunker):
    tensor = torch.randn(shape)
    codec = chain(dct(8), chunker=chunker)
    assert torch.allclose(codec.unpack(codec.pack(tensor), shape), tensor, atol=1e-5)


def test_activations_of_a_batch_are_a_tensor_like_any_other():
    codec, activations = chain(int8()), torch.randn(4, 33, 96).bfloat16().requires_grad_()
    payload = codec.pack(activations)
    found = codec.unpack(payload, activations.shape)
    assert len(payload) < 4 * 33 * 96 + 1200
    assert float((found - activations.detach().float()).norm() / found.norm()) < 0.02
    assert not found.requires_grad


def test_a_large_value_in_a_smooth_tensor_survives_the_transform():
    tensor = torch.linspace(0, 1, 64 * 64).view(64, 64)
    codec = chain(dct(), top_k(1 / 64))
    assert float((codec.unpack(codec.pack(tensor), (64, 64)) - tensor).abs().max()) < 0.05


def test_the_event_of_a_plain_tensor_must_be_the_same_on_both_sides():
    codec, tensor = chain(random(1 / 4)), torch.randn(70, 90)
    payload = codec.pack(tensor, Turn(event=3))
    assert torch.equal(codec.unpack(payload, (70, 90), Turn(3)), codec.unpack(payload, (70, 90), Turn(3)))
    with pytest.raises(PayloadError, match="event is 3, ours is 4"):
        codec.unpack(payload, (70, 90), Turn(4))


@pytest.mark.parametrize("other", [(70, 91), (90, 70), (7, 10, 90), (6300,), (70, 9, 10)], ids=str)
@pytest.mark.parametrize("codec", [chain(), chain(top_k(1 / 8))], ids=["dense", "top-k"])
def test_a_tensor_of_another_shape_is_refused_whatever_its_size(codec, other):
    with pytest.raises(PayloadError, match="the payload's grid is"):
        codec.unpack(codec.pack(torch.randn(70, 90)), other)


# ---- bytes ----


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        (chain(), 4 * 4096),
        (chain(bf16()), 2 * 4096),
        (chain(int8()), 4096 + 4 * 257),
        (chain(random(1 / 8)), 4 * 512),
        (chain(cyclic(1 / 8), sign()), 512 // 8 + 4),
        (chain(dct(), random(1 / 8), sym2()), 512 // 4 + 8),
    ],
    ids=["fp32", "bf16", "int8", "random", "cyclic sign", "dct random sym2"],
)
def test_dense_and_shared_selections_carry_no_index_bytes(codec, values):
    payload = codec.pack(torch.randn(64, 64))
    assert len(payload) == 64 + values
    assert unseal(payload)[1] == []


def test_selected_positions_cost_a_section_and_their_code():
    codec = chain(top_k(1 / 32), sym2())
    layout = Layout.single((128, 64), codec.chunker)
    payload = codec.pack(torch.randn(128, 64))
    (section,) = unseal(payload)[1]
    assert section.count == 256
    assert len(payload) == 64 + 24 + section.nbytes + 8 + 256 // 4 == codec.nbytes(layout.grid, section.nbytes)


def test_the_tail_costs_its_values_and_a_scale_each():
    for tail, nbytes in (("fp32", 4 * 34), ("int8", 34 + 4 * 2)):
        codec = chain(tail=tail)
        layout = layout_of(codec, [(64, 64), (33,), ()])
        assert codec.nbytes(layout.grid) == 64 + 4 * 4096 + nbytes
        assert len(codec.encode(coefficients(codec, layout), layout.grid, Turn())) == codec.nbytes(layout.grid)


def test_the_formula_takes_the_numbers_where_the_selector_does_not_fix_them():
    codec = chain(threshold(1 / 8), fp16())
    layout = layout_of(codec)
    payload = codec.encode(coefficients(codec, layout), layout.grid, Turn())
    index_bytes = sum(section.nbytes for section in unseal(payload)[1])
    index = codec.decode(payload, layout.grid, Turn()).index
    counts = torch.tensor([int((index < 2 * 2 * 4096).sum()), int(((index >= 4 * 4096) & (index < 6 * 4096)).sum())])
    assert len(payload) == codec.nbytes(layout.grid, index_bytes, counts)


@pytest.mark.parametrize(
    "select", [top_k(1 / 8), top_k_tensor(1 / 8), threshold(1 / 8)], ids=lambda s: type(s).__name__
)
def test_groups_of_tiles_have_a_section_each(select):
    codec = chain(dct(), select, fp32(), chunker=divisor(10))
    layout = layout_of(codec, [(20, 30), (9, 14), (7,), (), (12, 20), (11, 13)])
    assert len(layout.grid.groups) == 5
    buffer = coefficients(codec, layout)
    payload = codec.encode(buffer, layout.grid, Turn())
    sections = unseal(payload)[1]
    found = codec.decode(payload, layout.grid, Turn())
    assert len(sections) == 5
    for group, section in zip(layout.grid.groups, sections, strict=True):
        inside = (found.index >= group.offset) & (found.index < group.stop)
        assert int(inside.sum()) == section.count > 0
    assert torch.equal(found.value, buffer[found.index])
    assert torch.equal(found.index, select.pick(buffer, layout.grid, Turn(), mixed=True))


def test_sparse_positions_are_coded_and_crowded_ones_marked():
    sparse, dense = (chain(top_k(density)).pack(torch.randn(64, 64)) for density in (1 / 64, 1.0))
    assert [section.coding for payload in (sparse, dense) for section in unseal(payload)[1]] == [2, 3]


# ---- turns ----


@pytest.mark.parametrize("weight", [0.0, 1.0, 0.1, 12345.678])
def test_the_weight_travels_in_single_precision(weight):
    codec = chain(top_k(1 / 8))
    layout = layout_of(codec)
    found = codec.decode(
        codec.encode(coefficients(codec, layout), layout.grid, Turn(weight=weight)), layout.grid, Turn()
    )
    assert found.weight == struct.unpack("<f", struct.pack("<f", weight))[0]


@pytest.mark.parametrize("select", SELECTORS, ids=lambda select: f"{type(select).__name__}")
def test_who_abstains_sends_a_header_and_weighs_nothing(select):
    codec = chain(select)
    layout = layout_of(codec)
    payload = codec.abstain(layout.grid, Turn(5, weight=3.0))
    found = codec.decode(payload, layout.grid, Turn(5))
    assert len(payload) == 64
    assert (found.weight, found.value.numel(), found.size) == (0.0, 0, layout.grid.size)
    assert not bool(found.dense().any())
    with pytest.raises(PayloadError, match="the payload's event is 5, ours is 6"):
        codec.decode(payload, layout.grid, Turn(6))


def test_a_thresholds_memory_goes_with_the_turn_and_the_receiver_needs_none():
    codec = chain(threshold(1 / 8, every=2), chunker=SMALL)
    layout = layout_of(codec)
    buffer, turn, sent = coefficients(codec, layout), Turn(), []
    for event in range(3):
        turn = Turn(event, memory=dict(turn.memory))
        payload = codec.encode(buffer * (event + 1), layout.grid, turn)
        sent.append(codec.decode(payload, layout.grid, Turn(event)).value.numel())
    assert int(turn.memory["age"]) == 3
    assert sent[0] == sent[2] < sent[1]


def test_a_cycle_sends_everything_once():
    codec = chain(cyclic(1 / 5), tail="fp32", chunker=SMALL)
    layout = layout_of(codec)
    buffer, total = coefficients(codec, layout), layout.grid.zeros()
    for event in range(5):
        total += codec.decode(codec.encode(buffer, layout.grid, Turn(event)), layout.grid, Turn(event)).dense()
    body = layout.grid.body
    assert torch.equal(total[:body], buffer[:body])
    assert torch.allclose(total[body:], 5 * buffer[body:])  # the tail goes every time


def test_encoding_and_decoding_change_neither_buffer_nor_bytes():
    codec = chain(top_k(1 / 8), sym2())
    layout = layout_of(codec)
    buffer = coefficients(codec, layout)
    before = buffer.clone()
    payload = codec.encode(buffer, layout.grid, Turn())
    first = codec.decode(payload, layout.grid, Turn())
    first.value.mul_(2)
    second = codec.decode(payload, layout.grid, Turn())
    assert torch.equal(buffer, before)
    assert torch.equal(first.value, 2 * second.value)
    assert payload == codec.encode(buffer, layout.grid, Turn())


# ---- building one ----


def test_parts_left_out_are_the_plain_ones():
    assert chain() == chain(identity(), all_(), fp32(), tail="fp32", chunker=whole())
    assert chain(top_k(1 / 8)) == chain(identity(), top_k(1 / 8), fp32(), tail="fp32", chunker=tile(64))
    assert chain(dct(32)).chunker == tile(32)
    assert chain(random(1 / 8)).chunker == whole()
    assert Chain(chunker=whole()) == chain()


@pytest.mark.parametrize(
    ("quantizer", "code"), [(fp32(), 1), (bf16(), 1), (fp16(), 1), (int8(), 2), (sym2(), 2), (sign(), 2)]
)
def test_the_tail_is_as_coarse_as_the_values_are(quantizer, code):
    assert chain(quantizer).tail.code == code
    assert chain(quantizer, tail="fp32").tail.code == 1
    assert chain(quantizer, tail="int8").tail.code == 2


@pytest.mark.parametrize(
    "parts", [(top_k(1 / 8), dct()), (sym2(), top_k(1 / 8)), (sym2(), dct()), (dct(), dct()), (sym2(), sym2())]
)
def test_parts_stand_in_their_order_and_each_once(parts):
    with pytest.raises(ConfigError, match=r"at most one .*, in this order, not .*\nhint: chain\(dct\(64\), top_k"):
        chain(*parts)


@pytest.mark.parametrize("part", [3, "sym2", None, tile(64)], ids=str)
def test_what_is_no_part_is_refused(part):
    with pytest.raises(ConfigError, match=r"is no transform, selector or quantiser\nhint: chain\(dct"):
        chain(dct(), part)


@pytest.mark.parametrize(
    ("chunker", "most"), [(tile(64), 4096), (tile(8), 64), (flat(100), 100), (divisor(10), 100)], ids=str
)
def test_a_count_larger_than_the_largest_tile_is_refused_at_once(chunker, most):
    assert chain(top_k(count=most), chunker=chunker).select.count == most
    with pytest.raises(ConfigError, match=rf"top_k\(count={most + 1}\) of tiles with {most} elements\nhint: at most"):
        chain(top_k(count=most + 1), chunker=chunker)


def test_of_whole_matrices_any_count_may_be_kept():
    codec = chain(top_k(count=5000), chunker=whole())
    tensor = torch.randn(70, 90)
    assert int((codec.unpack(codec.pack(tensor), (70, 90)) != 0).sum()) == 5000


def test_an_unknown_tail_is_refused():
    with pytest.raises(ConfigError, match="tail must be"):
        chain(tail="int4")


# ---- what does not fit ----


def selected() -> tuple[Chain, Grid, bytes]:
    codec = chain(top_k(1 / 8), fp32(), chunker=SMALL)
    layout = layout_of(codec, [(20, 12), (16, 8), (3,)])
    return codec, layout.grid, codec.encode(coefficients(codec, layout), layout.grid, Turn())


def free() -> tuple[Chain, Grid, bytes]:
    codec = chain(top_k_tensor(1 / 8), fp32(), chunker=divisor(8))
    layout = layout_of(codec, [(16, 16), (21, 14)])
    return codec, layout.grid, codec.encode(coefficients(codec, layout), layout.grid, Turn())


HUGE = (1 << 63, (1 << 64) - 1)


@pytest.mark.parametrize("make", [selected, free])
@pytest.mark.parametrize("count", [0, 1, *HUGE])
def test_a_count_that_the_table_does_not_hold_is_refused(make, count):
    codec, grid, payload = make()
    with pytest.raises(PayloadError, match="values"):
        codec.decode(forged(payload, count=count), grid, Turn())


@pytest.mark.parametrize("make", [selected, free])
@pytest.mark.parametrize("field", ["count", "nbytes"])
@pytest.mark.parametrize("number", [0, 1, 1000, *HUGE])
def test_a_section_that_does_not_fit_is_refused(make, field, number):
    codec, grid, payload = make()
    header, sections, _ = unseal(payload)
    lie = [replace(sections[0], **{field: number}), *sections[1:]]
    together = sum(section.count for section in lie)
    for count in {header.count, min(together, (1 << 64) - 1)}:
        with pytest.raises(PayloadError):
            codec.decode(forged(payload, sections=lie, count=count), grid, Turn())


@pytest.mark.parametrize("make", [selected, free])
@pytest.mark.parametrize("change", ["none", "fewer", "more"])
def test_another_number_of_sections_is_refused(make, change):
    codec, grid, payload = make()
    _, sections, _ = unseal(payload)
    table = {"none": [], "fewer": sections[1:], "more": [*sections, Section(1, 6, 0, 0)]}[change]
    with pytest.raises(PayloadError, match=f"{len(table)} sections"):
        codec.decode(forged(payload, sections=table), grid, Turn())


@pytest.mark.parametrize("make", [selected, free])
@pytest.mark.parametrize(("coding", "parameter"), [(0, 0), (4, 0), (255, 65535), (2, 0), (1, 1)])
def test_unknown_codings_are_refused(make, coding, parameter):
    codec, grid, payload = make()
    _, sections, _ = unseal(payload)
    lie = [replace(sections[0], coding=coding, parameter=parameter), *sections[1:]]
    with pytest.raises(PayloadError, match="no coding of positions"):
        codec.decode(forged(payload, sections=lie), grid, Turn())


@pytest.mark.parametrize("make", [selected, free])
@pytest.mark.parametrize("cut", [-1, -4, 1])
def test_values_and_tail_fill_the_payload_exactly(make, cut):
    codec, grid, payload = make()
    body = bytes(unseal(payload)[2])
    body = body[:cut] if cut < 0 else body + bytes(cut)
    with pytest.raises(PayloadError, match="values and tail take"):
        codec.decode(forged(payload, body=body), grid, Turn())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [-12, -4], ids=["first of the tail", "last of the tail"])
def test_a_tail_that_is_not_finite_is_refused(number, place):
    codec, grid, payload = selected()
    body = bytearray(unseal(payload)[2])
    struct.pack_into("<f", body, len(body) + place, number)
    with pytest.raises(PayloadError, match="not finite"):
        codec.decode(forged(payload, body=bytes(body)), grid, Turn())


@pytest.mark.parametrize("change", [{"count": 3}, {"body": b"x"}, {"sections": [Section(1, 6, 0, 0)]}])
def test_who_abstains_carries_nothing(change):
    codec, grid, _ = selected()
    with pytest.raises(PayloadError, match="an abstaining payload carries nothing"):
        codec.decode(forged(codec.abstain(grid, Turn()), **change), grid, Turn())


@pytest.mark.parametrize("select", [all_(), random(1 / 8), cyclic(1 / 8)], ids=lambda select: type(select).__name__)
@pytest.mark.parametrize("change", [{"count": 7}, {"sections": [Section(1, 6, 0, 0)]}])
def test_shared_selections_leave_the_sender_no_choice(select, change):
    codec = chain(select, chunker=SMALL)
    layout = layout_of(codec)
    payload = codec.encode(coefficients(codec, layout), layout.grid, Turn())
    with pytest.raises(PayloadError, match=r"expected \d+ in none"):
        codec.decode(forged(payload, **change), layout.grid, Turn())


def test_a_forged_payload_with_nothing_changed_is_the_payload():
    codec, grid, payload = selected()
    assert forged(payload) == payload
    assert isinstance(unseal(payload)[0], Header)
    assert codec.decode(payload, grid, Turn()).index is not None
