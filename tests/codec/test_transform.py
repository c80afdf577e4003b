"""Transforms: the published cosine basis, tile by tile, and back without loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lowtide.codec import Transform, dct, identity, transform_named
from lowtide.codec.transform import basis, times
from lowtide.errors import ConfigError
from lowtide.tensors import Entry, Layout, divisor, flat, tile

CPU = torch.device("cpu")
SHAPES = [(20, 24), (9, 30), (7,), (8, 8), (2, 3, 40), ()]
CHUNKERS = [tile(8, small=16), flat(32, small=16), divisor(10)]
each_chunker = pytest.mark.parametrize("chunker", CHUNKERS, ids=lambda chunker: chunker.name)


def laid_out(chunker) -> tuple[Layout, Tensor]:
    layout = Layout.build([Entry(f"t{number}", shape) for number, shape in enumerate(SHAPES)], chunker)
    return layout, layout.gather([torch.randn(shape) for shape in SHAPES])


def matrix(length: int) -> np.ndarray:
    """The basis from its formula, element by element."""
    return np.array(
        [
            [
                math.sqrt((1 if k == 0 else 2) / length) * math.cos(math.pi * (j + 0.5) * k / length)
                for j in range(length)
            ]
            for k in range(length)
        ]
    )


@pytest.mark.parametrize("length", [1, 2, 3, 8, 29, 64])
def test_the_basis_is_the_orthonormal_cosine_transform(length):
    found = basis(length, CPU)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), matrix(length), atol=1e-7)
    assert torch.allclose(found @ found.T, torch.eye(length), atol=1e-6)


@each_chunker
def test_coefficients_of_a_tile_are_the_double_sum(chunker):
    layout, buffer = laid_out(chunker)
    found = dct(8).forward_(buffer.clone(), layout.grid)
    assert layout.grid.groups
    for group in layout.grid.groups:
        for before, after in zip(group.view(buffer), group.view(found), strict=True):
            expected = matrix(group.rows) @ before.view(group.rows, group.cols).double().numpy() @ matrix(group.cols).T
            # coefficient (i, j) stands at j * rows + i
            np.testing.assert_allclose(after.view(group.cols, group.rows).T.numpy(), expected, atol=1e-5)


@each_chunker
def test_there_and_back_is_the_same_and_energy_is_kept(chunker):
    layout, buffer = laid_out(chunker)
    coefficients = dct(8).forward_(buffer.clone(), layout.grid)
    for group in layout.grid.groups:
        energy = group.view(buffer).square().sum(1)
        assert torch.allclose(group.view(coefficients).square().sum(1), energy, rtol=1e-5)
    back = dct(8).inverse_(coefficients, layout.grid)
    assert torch.allclose(back, buffer, atol=1e-5)


@each_chunker
def test_both_directions_are_linear(chunker):
    layout, first = laid_out(chunker)
    _, second = laid_out(chunker)
    for go in (dct(8).forward_, dct(8).inverse_):
        together = go(2 * first - second, layout.grid)
        apart = 2 * go(first.clone(), layout.grid) - go(second.clone(), layout.grid)
        assert torch.allclose(together, apart, atol=1e-5)


@each_chunker
def test_leading_axes_are_transformed_each_on_its_own(chunker):
    layout, first = laid_out(chunker)
    stacked = torch.stack([first, 2 * first, -first]).view(3, 1, -1)
    for direction in ("forward_", "inverse_"):
        found = getattr(dct(8), direction)(stacked.clone(), layout.grid)
        for replica in range(3):
            alone = getattr(dct(8), direction)(stacked[replica, 0].clone(), layout.grid)
            assert torch.allclose(found[replica, 0], alone, atol=1e-6)


@pytest.mark.parametrize("transform", [identity(), dct(8)], ids=["identity", "dct"])
def test_the_work_is_done_in_place_and_the_tail_left_alone(transform):
    layout, buffer = laid_out(CHUNKERS[0])
    tail = layout.grid.tail_view(buffer).clone()
    assert tail.numel() == 8
    for go in (transform.forward_, transform.inverse_):
        assert go(buffer, layout.grid).data_ptr() == buffer.data_ptr()
        assert torch.equal(layout.grid.tail_view(buffer), tail)


def test_a_constant_tile_has_one_coefficient():
    layout = Layout.single((8, 8), tile(8, small=1))
    found = dct(8).forward_(torch.full((64,), 3.0), layout.grid)
    assert found[0] == pytest.approx(24.0)
    assert found[1:].abs().max() < 1e-5


def test_a_wave_along_the_columns_has_one_coefficient_at_j_times_rows():
    layout = Layout.single((4, 8), divisor(8))
    wave = torch.from_numpy(matrix(8)[3]).float().expand(4, 8).flatten().clone()
    found = dct(8).forward_(wave, layout.grid)
    assert found[3 * 4] == pytest.approx(2.0, abs=1e-5)
    assert (found.abs() > 1e-5).sum() == 1


def test_the_blocks_of_a_large_buffer_are_its_tiles():
    layout = Layout.single((9 * 64, 16 * 64), tile(64))  # more than one block of 128 tiles
    buffer = layout.gather([torch.randn(9 * 64, 16 * 64)])
    found = dct().forward_(buffer.clone(), layout.grid)
    group = layout.grid.groups[0]
    for number in (0, 127, 128, 143):
        tile_ = group.view(buffer)[number].view(64, 64)
        expected = basis(64, CPU) @ tile_ @ basis(64, CPU).T
        assert torch.allclose(group.view(found)[number].view(64, 64).T, expected, atol=1e-4)


@each_chunker
def test_a_block_of_whole_tiles_is_inverted_as_within_the_buffer(chunker):
    layout, buffer = laid_out(chunker)
    expected = dct(8).inverse_(buffer.clone(), layout.grid)
    for group in layout.grid.groups:
        start, stop = group.offset + group.span * (group.count // 2), group.stop
        block = dct(8).inverse_block_(buffer[start:stop].clone(), group.rows, group.cols)
        assert torch.allclose(block, expected[start:stop], atol=1e-6)


def test_the_identity_changes_nothing():
    layout, buffer = laid_out(CHUNKERS[0])
    expected = buffer.clone()
    assert torch.equal(identity().forward_(buffer, layout.grid), expected)
    assert torch.equal(identity().inverse_(buffer, layout.grid), expected)
    assert torch.equal(identity().inverse_block_(buffer, 8, 8), expected)


@pytest.mark.parametrize("rows", [1, 7, 512])
@pytest.mark.parametrize("length", [1, 3, 64])
def test_the_product_is_the_plain_one_whichever_library_makes_it(rows, length):
    x, weight = torch.randn(rows, length), torch.randn(length, length)
    assert torch.allclose(times(x, weight), x @ weight.T, atol=1e-4)


def test_padding_takes_part_only_behind_the_cosine_transform():
    assert isinstance(identity(), Transform) and isinstance(dct(), Transform)
    assert (identity().mixes, dct().mixes) == (False, True)


def test_wire_numbers_never_change():
    assert (identity().code, dct().code) == (0, 1)


@pytest.mark.parametrize("edge", [1, 0, -8])
def test_tiles_too_small_to_transform_are_refused(edge):
    with pytest.raises(ConfigError, match=f"at least 2 x 2, not {edge}\nhint: "):
        dct(edge)


def test_a_transform_is_found_by_its_name_and_nothing_else():
    assert (transform_named("dct"), transform_named("none")) == (dct(64), identity())
    with pytest.raises(ConfigError, match="unknown transform 'fft'; known: dct, none"):
        transform_named("fft")
