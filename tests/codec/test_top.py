"""The largest of every tile: exactly as many as wanted, lower positions first among equals, on every path the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.codec.top import BLOCK, _on_device, keep_exactly, kth_magnitude, largest

levels = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 1e-45, 3e38])  # few of them, so that ties abound

Case = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]


def by_sorting(tiles: Tensor, counts: Tensor, mask: Tensor) -> list[int]:
    """The definition: sort by magnitude, then by position; padding does not stand for election."""
    found = []
    for number, (values, count, valid) in enumerate(zip(tiles.tolist(), counts.tolist(), mask.tolist(), strict=True)):
        places = sorted((-abs(value), place) for place, value in enumerate(values) if valid[place])
        found += sorted(place + number * len(values) for _, place in places[:count])
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count, span = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    tiles = torch.tensor([draw(st.lists(levels, min_size=span, max_size=span)) for _ in range(count)])
    mask = torch.ones(count, span, dtype=torch.bool)
    for row in draw(st.sets(st.integers(0, count - 1))):
        mask[row, draw(st.integers(1, span)) :] = False
    counts = torch.tensor([draw(st.integers(0, int(valid))) for valid in mask.sum(1)])
    edges = (~mask.all(1)).nonzero().flatten()
    tiles[~mask] = draw(levels)  # padding is usually zero, but must not matter if not
    return tiles, counts, (edges, mask[edges])


def full_mask(case: Case) -> Tensor:
    mask = torch.ones(case[0].shape, dtype=torch.bool)
    if case[2] is not None:
        mask[case[2][0]] = case[2][1]
    return mask


@given(cases())
def test_both_paths_follow_the_definition(case):
    expected = by_sorting(*case[:2], full_mask(case))
    assert largest(*case).tolist() == expected
    assert _on_device(*case).tolist() == expected


@pytest.mark.parametrize("quantum", [0.0, 0.25, 1e-4], ids=["all zero", "many ties", "few ties"])
@pytest.mark.parametrize("tiles", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_both_paths_agree_over_several_blocks(tiles, quantum):
    values = (torch.randn(tiles, 256) / max(quantum, 1e-9)).round() * quantum
    counts = torch.randint(0, 257, (tiles,))
    counts[: tiles // 2] = 8
    edges = torch.arange(0, tiles, 7)
    mask = torch.rand(len(edges), 256) < 0.5
    counts[edges] = counts[edges].minimum(mask.sum(1))
    found = largest(values, counts, (edges, mask))
    assert torch.equal(found, _on_device(values, counts, (edges, mask)))
    assert found.numel() == counts.sum()
    assert bool((found.diff() > 0).all())


def test_equal_magnitudes_go_to_the_lower_position():
    tiles = torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 2.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    counts = torch.tensor([2, 1, 3])
    for path in (largest(tiles, counts), _on_device(tiles, counts, None)):
        assert path.tolist() == [0, 1, 5, 8, 9, 10]


def test_the_sign_of_zero_and_of_the_value_does_not_matter():
    tiles = torch.tensor([[0.0, -0.0, 1.0, -1.0]])
    assert torch.equal(largest(tiles, torch.tensor([3])), largest(-tiles, torch.tensor([3])))


def test_padding_loses_against_zeros():
    tiles = torch.zeros(2, 6)
    padding = (torch.tensor([1]), torch.tensor([[False, True, True, False, True, False]]))
    counts = torch.tensor([1, 3])
    for path in (largest(tiles, counts, padding), _on_device(tiles, counts, padding)):
        assert path.tolist() == [0, 7, 8, 10]


def test_a_tile_may_want_none_or_all():
    tiles = torch.randn(3, 5)
    counts = torch.tensor([0, 5, 0])
    for path in (largest(tiles, counts), _on_device(tiles, counts, None)):
        assert path.tolist() == [5, 6, 7, 8, 9]


def test_no_tiles_have_no_largest():
    assert largest(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_the_number_of_threads_does_not_matter_and_the_values_stay():
    tiles, counts = torch.randn(5 * BLOCK + 3, 64).round(decimals=1), torch.full((5 * BLOCK + 3,), 9)
    before, alone = tiles.clone(), largest(tiles, counts)
    torch.set_num_threads(3)
    try:
        together = largest(tiles, counts)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone, together)
    assert torch.equal(tiles, before)


@given(st.lists(levels, min_size=1, max_size=20), st.data())
def test_the_kth_magnitude_is_the_kth_of_the_sorted(values, data):
    number = data.draw(st.integers(1, len(values)))
    rows = torch.tensor([values, values[::-1]]).abs()
    expected = sorted(rows[0].tolist(), reverse=True)[number - 1]
    assert kth_magnitude(rows, number).tolist() == pytest.approx([expected, expected])


def test_exactly_as_many_are_kept_at_the_bound():
    magnitude = torch.tensor([[1.0, 3.0, 1.0, 1.0], [2.0, 2.0, 2.0, 5.0]])
    kept = keep_exactly(magnitude, torch.tensor([2, 3]), torch.tensor([1.0, 2.0]))
    assert kept.tolist() == [0, 1, 4, 5, 7]


def test_a_strided_view_of_a_buffer_is_searched_in_place():
    buffer = torch.from_numpy(np.arange(24, dtype=np.float32))
    assert largest(buffer[4:20].view(2, 8), torch.tensor([2, 1])).tolist() == [6, 7, 15]
