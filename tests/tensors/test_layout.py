"""Laying out and back loses nothing, whatever the shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ModelError
from lowtide.tensors import Entry, Layout, divisor, flat, tile, whole

CHUNKERS = [tile(8, small=20), tile(64), flat(50, small=20), divisor(8), whole(small=20)]
shapes = st.lists(
    st.lists(st.integers(1, 40), min_size=0, max_size=4).map(tuple).filter(lambda s: torch.Size(s).numel() < 5000),
    min_size=1,
    max_size=5,
)


def build(shape_list, chunker):
    layout = Layout.build([Entry(f"t{i}", shape) for i, shape in enumerate(shape_list)], chunker)
    tensors = [torch.randn(shape) + 10 for shape in shape_list]
    return layout, tensors


@pytest.mark.parametrize("chunker", CHUNKERS, ids=lambda c: c.name)
@given(shape_list=shapes)
@settings(max_examples=40, deadline=None)
def test_scatter_undoes_gather(chunker, shape_list):
    layout, tensors = build(shape_list, chunker)
    buffer = layout.gather(tensors)
    back = [torch.full_like(t, float("nan")) for t in tensors]
    layout.scatter(buffer, back)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


@pytest.mark.parametrize("chunker", CHUNKERS, ids=lambda c: c.name)
@given(shape_list=shapes)
@settings(max_examples=40, deadline=None)
def test_every_element_lies_in_the_buffer_exactly_once(chunker, shape_list):
    layout, tensors = build(shape_list, chunker)
    buffer = layout.gather([torch.ones_like(t) for t in tensors], out=torch.full((layout.grid.size,), 7.0))
    assert buffer.sum() == layout.numel  # valid ones, padding zero, nothing left of the sevens
    for group in layout.grid.groups:
        assert torch.equal(group.view(buffer).sum(1).long(), group.valid)
        assert torch.equal(group.view(buffer)[group.edges].bool(), group.mask)


@pytest.mark.parametrize("chunker", CHUNKERS, ids=lambda c: c.name)
def test_leading_axes_are_replicas(chunker):
    shape_list = [(30, 21), (5,), (3, 4, 5, 6), (8, 8)]
    layout, _ = build(shape_list, chunker)
    stacked = [torch.randn(3, *shape) for shape in shape_list]
    buffer = layout.gather(stacked)
    assert buffer.shape == (3, layout.grid.size)
    for replica in range(3):
        assert torch.equal(buffer[replica], layout.gather([t[replica] for t in stacked]))
    back = [torch.empty_like(t) for t in stacked]
    layout.scatter(buffer, back)
    assert all(torch.equal(a, b) for a, b in zip(stacked, back, strict=True))


def test_low_precision_and_permuted_tensors_come_back_exactly():
    image = torch.randn(16, 3, 8, 8).to(memory_format=torch.channels_last)
    half = torch.randn(100, 70).bfloat16()
    layout = Layout.build([Entry("image", (16, 3, 8, 8)), Entry("half", (100, 70))], tile(64, small=16))
    buffer = layout.gather([image, half])
    back = [torch.empty_like(image), torch.empty_like(half)]
    layout.scatter(buffer, back)
    assert buffer.dtype == torch.float32
    assert torch.equal(back[0], image) and back[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back[1], half)


def test_parameters_keep_their_autograd_history_out_of_it():
    weight = torch.nn.Parameter(torch.randn(70, 70))
    layout = Layout.build([Entry("w", (70, 70))], tile(64))
    layout.scatter(layout.gather([weight]) * 2, [weight])
    assert weight.requires_grad and weight.grad_fn is None


def test_blocks_cover_the_buffer_once_in_order():
    layout, _ = build([(640, 640), (640, 641), (9,)], tile(64))
    position = 0
    for start, stop, group in layout.grid.blocks():
        assert start == position and stop > start
        assert group is None or (start - group.offset) % group.span == 0
        position = stop
    assert position == layout.grid.size


def test_skinny_matrices_are_not_mostly_padding():
    layout, _ = build([(2, 100_000)], tile(64))
    assert layout.grid.size <= 200_000 + 4096


def test_restrict_keeps_the_named_part():
    layout, tensors = build([(70, 70), (70,), (128, 64)], tile(64))
    part = layout.restrict(lambda entry: entry.name != "t0")
    assert [entry.name for entry in part.entries] == ["t1", "t2"]
    assert part.identity != layout.identity
    assert part.gather(tensors[1:]).abs().sum() == pytest.approx(float(tensors[1].abs().sum() + tensors[2].abs().sum()))


def test_identity_depends_on_names_shapes_and_chunker():
    def identity(name, shape, chunker):
        return Layout.build([Entry(name, shape)], chunker).identity

    base = identity("w", (70, 70), tile(64))
    assert base == identity("w", (70, 70), tile(64))
    assert (
        len(
            {
                base,
                identity("v", (70, 70), tile(64)),
                identity("w", (70, 71), tile(64)),
                identity("w", (70, 70), flat()),
            }
        )
        == 4
    )


def test_shares_add_up_to_one():
    layout = Layout.build(
        [Entry("e", (100, 64), "embedding"), Entry("m", (64, 64)), Entry("b", (5,), "vector")], tile(64)
    )
    shares = dict(layout.shares())
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["embedding"] == pytest.approx(6400 / (6400 + 4096 + 5))


@pytest.mark.parametrize(
    ("shape_list", "message"),
    [([(70, 71)], "has shape"), ([(70, 70), (2,)], "holds 1 tensors, but 2")],
)
def test_other_shapes_are_refused_with_the_name(shape_list, message):
    layout, _ = build([(70, 70)], tile(64))
    with pytest.raises(ModelError, match=message):
        layout.gather([torch.zeros(shape) for shape in shape_list])


def test_equal_names_are_refused():
    with pytest.raises(ModelError, match="share a name: w"):
        Layout.build([Entry("w", (2, 2)), Entry("w", (3, 3))], tile(64))


def test_what_16_bits_lose_of_a_buffer_is_added_and_nothing_where_they_lose_nothing():
    entries = [Entry("half", (70, 70), dtype=torch.bfloat16), Entry("full", (70, 64)), Entry("b", (5,), "vector")]
    layout = Layout.build(entries, tile(64))
    exact = [torch.randn(entry.shape) for entry in entries]
    lost = layout.grid.zeros()
    layout.add_rounding(layout.gather(exact), lost, 2.0)
    back = [torch.empty_like(tensor) for tensor in exact]
    layout.scatter(lost, back)
    torch.testing.assert_close(back[0], 2 * (exact[0] - exact[0].bfloat16().float()))
    assert not back[1].any() and not back[2].any() and back[0].any()
