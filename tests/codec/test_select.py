"""Selectors: which positions, how many, the same for everybody, and never one that no tensor owns."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.codec import Selector, Turn, all_, cyclic, generator, random, strata, threshold, top_k, top_k_tensor
from lowtide.codec.select import checksum, share, tensor_ranges
from lowtide.errors import ConfigError
from lowtide.tensors import Entry, Grid, Layout, divisor, flat, tile

SHAPES = [(20, 12), (8, 16), (3, 50), (5,), (21, 13), ()]
CHUNKERS = [tile(8, small=16), flat(32, small=16), divisor(10)]
SELECTORS = {
    "top_k": top_k(1 / 4),
    "top_k count": top_k(count=5),
    "top_k_tensor": top_k_tensor(1 / 4),
    "threshold": threshold(1 / 4),
    "random": random(1 / 4),
    "cyclic": cyclic(1 / 4),
}
BY_SIZE = {name: selector for name, selector in SELECTORS.items() if not selector.shared}
each_chunker = pytest.mark.parametrize("chunker", CHUNKERS, ids=lambda chunker: chunker.name)
each_selector = pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
each_by_size = pytest.mark.parametrize("selector", BY_SIZE.values(), ids=BY_SIZE)


def laid_out(chunker=CHUNKERS[0], shapes=SHAPES) -> Layout:
    return Layout.build([Entry(f"t{number}", shape) for number, shape in enumerate(shapes)], chunker)


def filled(layout: Layout) -> Tensor:
    return layout.gather([torch.randn(entry.shape) for entry in layout.entries])


def owned(layout: Layout) -> Tensor:
    """Which positions of a buffer belong to a tensor."""
    return layout.gather([torch.ones(entry.shape) for entry in layout.entries]).bool()


def pick(selector: Selector, buffer: Tensor, grid: Grid, turn: Turn | None = None, *, mixed: bool = False) -> Tensor:
    index = selector.pick(buffer, grid, turn or Turn(), mixed=mixed)
    assert index is not None
    return index


# ---- laws of all of them ----


@each_chunker
@each_selector
@pytest.mark.parametrize("mixed", [False, True])
def test_positions_ascend_and_lie_in_the_body(selector, chunker, mixed):
    layout = laid_out(chunker)
    index = pick(selector, filled(layout), layout.grid, mixed=mixed)
    assert index.dtype == torch.int64
    assert bool((index.diff() > 0).all())
    assert 0 <= int(index[0]) <= int(index[-1]) < layout.grid.body


@each_chunker
@each_by_size
@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["random", "all zero"])
def test_padding_is_never_chosen_without_a_transform(selector, chunker, scale):
    layout = laid_out(chunker)
    index = pick(selector, filled(layout) * scale, layout.grid)
    assert bool(owned(layout)[index].all())


@each_by_size
def test_padding_may_be_chosen_behind_a_transform_that_mixes(selector):
    layout = laid_out()
    buffer = torch.where(owned(layout), 0.01 * torch.randn(layout.grid.size), 1 + torch.rand(layout.grid.size))
    index = pick(selector, buffer, layout.grid, mixed=True)
    assert not bool(owned(layout)[index].all())


@each_selector
def test_the_same_input_gives_the_same_positions(selector):
    layout = laid_out()
    buffer = filled(layout)
    first, before = pick(selector, buffer, layout.grid, Turn(7)), buffer.clone()
    torch.rand(3)  # nobody draws from the global generator
    assert torch.equal(first, pick(selector, buffer, layout.grid, Turn(7)))
    assert torch.equal(buffer, before)


@each_selector
@pytest.mark.parametrize("shapes", [[(5,), ()], []], ids=["tail only", "nothing"])
def test_a_buffer_without_body_has_no_positions(selector, shapes):
    layout = laid_out(shapes=shapes)
    assert pick(selector, torch.zeros(layout.grid.size), layout.grid).tolist() == []


def test_all_names_every_position_by_naming_none():
    layout = laid_out()
    assert all_().pick(filled(layout), layout.grid, Turn(), mixed=False) is None
    assert [all_().counts(group).tolist() for group in layout.grid.groups] == [
        [group.span] * group.count for group in layout.grid.groups
    ]


@each_selector
def test_only_top_k_fixes_the_number_of_each_tile(selector):
    layout = laid_out()
    fixed = selector.counts(layout.grid.groups[0])
    assert (fixed is not None) == (selector.code == top_k(1).code)
    assert selector.shared == (selector.code in (random(1).code, cyclic(1).code))


# ---- how many ----


@pytest.mark.parametrize(
    ("valid", "density", "count"),
    [
        *((4096, 1 / 32, 128), (4096, 1 / 64, 64), (4096, 1 / 128, 32), (4096, 1 / 320, 13), (4096, 1e-9, 1)),
        *((4096, 1, 4096), (1, 1 / 32, 1), (63, 1 / 32, 2), (64, 1 / 32, 2), (65, 1 / 32, 3)),
        *((600, 0.72, 432), (70, 0.1, 7)),
    ],
)
def test_a_share_is_rounded_up_to_whole_numbers(valid, density, count):
    assert share(torch.tensor([valid]), density).tolist() == [count]


@given(st.integers(1, 1_000_000), st.integers(1, 1000), st.integers(1, 1000))
def test_a_share_is_the_exact_fraction_rounded_up(valid, part, whole):
    part = min(part, whole)
    expected = math.ceil(Fraction(part * valid, whole))
    assert int(share(torch.tensor(valid), part / whole)) == min(expected, valid)


def test_a_share_does_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        wide = share(torch.arange(1, 5000), 0.3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(wide, share(torch.arange(1, 5000), 0.3))


@each_chunker
def test_each_tile_sends_its_share_of_what_it_owns(chunker):
    layout = laid_out(chunker)
    index = pick(top_k(1 / 5), filled(layout), layout.grid)
    for group in layout.grid.groups:
        inside = index[(index >= group.offset) & (index < group.stop)] - group.offset
        found = torch.bincount(inside // group.span, minlength=group.count)
        assert found.tolist() == [math.ceil(Fraction(int(valid), 5)) for valid in group.valid]
        assert torch.equal(found, top_k(1 / 5).counts(group))


@each_chunker
def test_each_tensor_sends_its_share_of_what_it_owns(chunker):
    layout = laid_out(chunker)
    index = pick(top_k_tensor(1 / 5), filled(layout), layout.grid)
    for start, stop, allowed in tensor_ranges(layout.grid):
        found = int(((index >= start) & (index < stop)).sum())
        assert found == math.ceil(Fraction(int(allowed), 5))


@each_chunker
def test_the_ranges_of_tensors_follow_each_other_and_count_what_is_owned(chunker):
    layout = laid_out(chunker)
    ranges = tensor_ranges(layout.grid)
    assert len(ranges) == layout.grid.tensors
    assert [start for start, _, _ in ranges] == [0, *(stop for _, stop, _ in ranges[:-1])]
    assert ranges[-1][1] == layout.grid.body
    for start, stop, allowed in ranges:
        assert int(owned(layout)[start:stop].sum()) == int(allowed)


def test_a_count_is_limited_by_what_a_tile_owns():
    layout = laid_out(tile(8, small=4), [(9, 8)])  # a full tile, and one with a single row
    assert top_k(count=20).counts(layout.grid.groups[0]).tolist() == [20, 8]
    assert pick(top_k(count=20), filled(layout), layout.grid).numel() == 28


def test_small_tiles_beside_large_ones_are_sent_in_full():
    layout = laid_out(divisor(8), [(8, 8), (3,), ()])
    index = pick(top_k(count=32), filled(layout), layout.grid)
    assert index.numel() == 32 + 3 + 1


# ---- the largest ----


@each_chunker
def test_top_k_sends_the_largest_of_each_tile(chunker):
    layout = laid_out(chunker)
    buffer = filled(layout)
    index = pick(top_k(1 / 4), buffer, layout.grid)
    sent = torch.zeros(layout.grid.size, dtype=torch.bool).index_fill_(0, index, value=True)
    for group in layout.grid.groups:
        magnitude, kept = group.view(buffer).abs(), group.view(sent)
        least = magnitude.masked_fill(~kept, torch.inf).amin(1)
        assert bool((magnitude.masked_fill(kept, 0) <= least[:, None]).all())


@each_chunker
def test_top_k_tensor_sends_the_largest_of_each_tensor(chunker):
    layout = laid_out(chunker)
    buffer = filled(layout)
    index = pick(top_k_tensor(1 / 4), buffer, layout.grid)
    for start, stop, _ in tensor_ranges(layout.grid):
        inside = index[(index >= start) & (index < stop)]
        expected = buffer[start:stop].abs().topk(len(inside)).indices + start
        assert torch.equal(expected.sort().values, inside)


def test_of_an_all_zero_tile_the_first_are_sent():
    layout = laid_out(tile(4, small=4), [(4, 4)])
    assert pick(top_k(1 / 4), torch.zeros(16), layout.grid).tolist() == [0, 1, 2, 3]
    assert pick(top_k_tensor(1 / 4), torch.zeros(16), layout.grid).tolist() == [0, 1, 2, 3]


def test_zeros_fill_up_where_values_are_fewer_than_wanted():
    layout = laid_out(tile(4, small=4), [(4, 4)])
    buffer = torch.zeros(16).index_fill_(0, torch.tensor([9, 14]), -2.0)
    for selector in (top_k(1 / 4), top_k_tensor(1 / 4)):
        assert pick(selector, buffer, layout.grid).tolist() == [0, 1, 9, 14]


def test_zeros_that_fill_up_are_never_padding():
    layout = laid_out(tile(4, small=4), [(5, 4)])  # the second tile has one row of four
    for selector in (top_k(count=4), top_k_tensor(1.0), top_k(1.0)):
        index = pick(selector, torch.zeros(32), layout.grid)
        assert index[index >= 16].tolist() == [16, 17, 18, 19]


# ---- the threshold ----


def test_a_threshold_sends_its_density_when_it_is_set():
    layout = laid_out()
    index = pick(threshold(1 / 5), filled(layout), layout.grid)
    for start, stop, allowed in tensor_ranges(layout.grid):
        assert int(((index >= start) & (index < stop)).sum()) == math.ceil(Fraction(int(allowed), 5))


def test_a_threshold_is_kept_between_renewals_and_renewed_every_so_many_events():
    layout = laid_out()
    selector, memory, numbers = threshold(1 / 4, every=3), {}, []
    base = filled(layout)
    usual = pick(selector, base, layout.grid).numel()
    for event in range(7):
        turn = Turn(event, memory=dict(memory))
        numbers.append(pick(selector, base * (1 + event), layout.grid, turn).numel())
        memory = turn.memory
    assert [numbers[event] for event in (0, 3, 6)] == [usual] * 3  # renewed: the scale does not matter
    assert usual < numbers[1] < numbers[2]
    assert numbers[3] < numbers[4] < numbers[5]


def test_what_a_dropped_event_remembered_does_not_count():
    layout = laid_out()
    buffer, turn = filled(layout), Turn()
    pick(threshold(1 / 4), buffer, layout.grid, turn)
    kept = {name: value.clone() for name, value in turn.memory.items()}
    dropped = Turn(1, memory=dict(turn.memory))
    pick(threshold(1 / 4), buffer * 3, layout.grid, dropped)
    assert all(torch.equal(turn.memory[name], kept[name]) for name in kept)
    again = Turn(1, memory=dict(turn.memory))
    assert (
        pick(threshold(1 / 4), buffer, layout.grid, again).numel()
        == pick(threshold(1 / 4), buffer, layout.grid).numel()
    )


def test_a_threshold_never_sends_zeros():
    layout = laid_out()
    assert pick(threshold(1.0), torch.zeros(layout.grid.size), layout.grid).tolist() == []
    buffer = filled(layout).relu()
    assert torch.equal(pick(threshold(1.0), buffer, layout.grid), buffer[: layout.grid.body].nonzero().flatten())


def test_a_bound_of_zero_is_renewed_at_once_for_its_tensor_alone():
    layout = laid_out(shapes=[(8, 8), (16, 8)])
    selector, turn = threshold(1 / 4, every=100), Turn()
    buffer = filled(layout)
    buffer[64:] = 0
    assert pick(selector, buffer, layout.grid, turn).numel() == 16
    louder = filled(layout).sign() * torch.linspace(10, 20, layout.grid.size)
    found = pick(selector, louder, layout.grid, Turn(1, memory=turn.memory))
    assert int((found < 64).sum()) == 64  # the old bound holds for the first tensor
    assert int((found >= 64).sum()) == 32  # and a new one for the second


def test_the_bounds_are_one_of_each_tensor():
    layout = laid_out()
    turn = Turn()
    pick(threshold(1 / 4), filled(layout), layout.grid, turn)
    assert turn.memory["bounds"].shape == (layout.grid.tensors,)
    assert int(turn.memory["age"]) == 1


# ---- shared seeds ----


def test_random_at_density_one_is_everything():
    layout = laid_out()
    index = pick(random(1.0), torch.empty(0), layout.grid, Turn(5))
    assert torch.equal(index, torch.arange(layout.grid.body))


@pytest.mark.parametrize("selector", [random(1 / 4), random(1 / 4, seed=3)], ids=["seed 0", "seed 3"])
def test_random_is_drawn_anew_at_every_event(selector):
    layout = laid_out()
    draws = [tuple(pick(selector, torch.empty(0), layout.grid, Turn(event)).tolist()) for event in range(20)]
    assert len(set(draws)) == 20
    assert {len(draw) for draw in draws} == {math.ceil(layout.grid.body / 4)}


@pytest.mark.parametrize("make", [random, cyclic])
def test_seeds_draw_differently(make):
    layout = laid_out()
    draws = [tuple(pick(make(1 / 4, seed=seed), torch.empty(0), layout.grid).tolist()) for seed in range(10)]
    assert len(set(draws)) == 10


@given(st.integers(0, 500), st.floats(0.001, 1), st.integers(0, 2**40))
def test_strata_are_exact_in_number_and_hold_one_position_each(size, density, event):
    found = strata(size, density, seed=1, event=event)
    number = math.ceil(density * size - 1e-9)
    assert found.numel() == number
    bounds = [place * size // number for place in range(number + 1)] if number else []
    for start, stop, position in zip(bounds, bounds[1:], found.tolist(), strict=False):
        assert start <= position < stop


def test_every_position_is_drawn_as_often_as_any_other():
    times = torch.zeros(64)
    for event in range(2000):
        times[strata(64, 1 / 4, seed=0, event=event)] += 1
    assert times.sum() == 2000 * 16
    # 500 is expected, with a standard deviation of 19
    assert float(times.min()) > 420
    assert float(times.max()) < 580


@pytest.mark.parametrize(("density", "cycle"), [(1 / 4, 4), (1 / 7, 7), (0.3, 3), (1.0, 1), (1 / 1000, 1000)])
@pytest.mark.parametrize("start", [0, 13])
def test_cyclic_covers_every_position_exactly_once_a_cycle(density, cycle, start):
    layout = laid_out()
    slices = [pick(cyclic(density), torch.empty(0), layout.grid, Turn(start + event)) for event in range(cycle)]
    assert torch.equal(torch.cat(slices).sort().values, torch.arange(layout.grid.body))
    after = pick(cyclic(density), torch.empty(0), layout.grid, Turn(start + cycle))
    assert torch.equal(after, slices[0])


def test_shared_randomness_never_changes():
    assert strata(1000, 0.01, seed=3, event=5).tolist() == [49, 152, 223, 369, 464, 528, 647, 729, 875, 921]
    layout = laid_out(shapes=[(8, 8)])
    assert pick(cyclic(1 / 8, seed=2), torch.empty(0), layout.grid, Turn(9)).tolist() == [0, 12, 16, 28, 34, 40, 48, 57]
    assert torch.randint(1 << 30, (3,), generator=generator(7, 11)).tolist() == [750435954, 749827353, 305695179]


# ---- on the wire, and bad input ----


def test_wire_numbers_never_change():
    assert [s.code for s in (all_(), *SELECTORS.values())] == [0, 1, 1, 2, 3, 4, 5]


def test_the_checksum_tells_apart_what_a_receiver_must_know():
    told = [
        top_k(1 / 4),
        top_k(1 / 5),
        top_k(count=4),
        top_k(count=5),
        random(1 / 4),
        random(1 / 4, seed=1),
        random(1 / 5),
    ]
    assert len({(selector.code, selector.selection) for selector in told}) == len(told)
    assert random(1 / 4, seed=9).selection == checksum(0.25, 9) == 0x5D6DD034
    for self_describing in (all_(), top_k_tensor(1 / 4), threshold(1 / 4)):
        assert self_describing.selection == 0


@pytest.mark.parametrize("make", [top_k, top_k_tensor, threshold, random, cyclic])
@pytest.mark.parametrize("density", [0, -0.1, 1.5, 32, math.nan, math.inf])
def test_a_density_outside_of_0_to_1_is_refused(make, density):
    with pytest.raises(ConfigError, match=r"density must be in \(0, 1\], not .*\nhint: density=1/32 keeps 128 of 4096"):
        make(density)


@pytest.mark.parametrize("arguments", [{}, {"density": 0.5, "count": 3}])
def test_top_k_takes_a_density_or_a_count(arguments):
    with pytest.raises(ConfigError, match=r"density or count, not density=.*\nhint: top_k"):
        top_k(**arguments)


@pytest.mark.parametrize("count", [0, -1])
def test_top_k_keeps_at_least_one(count):
    with pytest.raises(ConfigError, match=f"not count={count}\nhint: "):
        top_k(count=count)


@pytest.mark.parametrize("every", [0, -3])
def test_a_threshold_is_renewed_at_some_time(every):
    with pytest.raises(ConfigError, match=f"not every={every}"):
        threshold(1 / 4, every=every)


@pytest.mark.parametrize("make", [random, cyclic])
@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seeds_fit_into_64_bits(make, seed):
    with pytest.raises(ConfigError, match=f"not {seed}\nhint: "):
        make(1 / 4, seed=seed)


@each_selector
def test_equal_selectors_are_equal_and_can_be_keys(selector):
    assert isinstance(selector, Selector)
    assert {selector: 1}[selector] == 1
