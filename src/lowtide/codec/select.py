"""Selectors: which coefficients of a buffer are sent.

A selector names positions in the body of a buffer, ascending. Some need index bytes (`top_k` and its kin); others
derive the positions from the event number, which every replica knows (`all_`, `random`, `cyclic`).
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lowtide.codec.base import Turn
from lowtide.codec.top import keep_exactly, kth_magnitude, largest
from lowtide.errors import ConfigError
from lowtide.tensors import Grid, Tiles


@runtime_checkable
class Selector(Protocol):
    """Names the positions that are sent."""

    @property
    def code(self) -> int: ...

    @property
    def shared(self) -> bool:
        """Whether all replicas know the positions without being told."""

    @property
    def selection(self) -> int:
        """A checksum of what else a receiver must know to find the positions, or 0."""

    def counts(self, group: Tiles) -> Tensor | None:
        """How many of each tile are sent, where that is fixed."""

    def pick(self, buffer: Tensor, grid: Grid, turn: Turn, *, mixed: bool) -> Tensor | None:
        """Positions to send, ascending; `None` for all. `mixed` says that padding may be chosen too."""


@dataclass(frozen=True)
class All:
    """Everything."""

    code: int = 0
    shared: bool = True
    selection: int = 0

    def counts(self, group: Tiles) -> Tensor | None:
        # padding counts too: a dense payload is the body as it lies
        return torch.full((group.count,), group.span)

    def pick(self, buffer: Tensor, grid: Grid, turn: Turn, *, mixed: bool) -> Tensor | None:
        return None


@dataclass(frozen=True)
class TopK:
    """The largest magnitudes of every tile: a share of it, or a number; ties go to the lower index.

    A tile that owns fewer than the number is sent in full.
    """

    density: float | None
    count: int | None
    code: int = 1
    shared: bool = False

    @property
    def selection(self) -> int:
        return checksum(self.density or 0.0, self.count or 0)

    def counts(self, group: Tiles) -> Tensor | None:
        if self.count is not None:
            return group.valid.clamp(max=self.count)
        return share(group.valid, self.density or 1.0)

    def pick(self, buffer: Tensor, grid: Grid, turn: Turn, *, mixed: bool) -> Tensor | None:
        found = []
        for group in grid.groups:
            counts = self.counts(group)
            assert counts is not None
            # a transform spreads the signal into the padding, whose coefficients then count like any other
            masked = None if mixed else (group.edges, group.mask)
            found.append(largest(group.view(buffer), counts, masked) + group.offset)
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class TopKTensor:
    """The largest magnitudes of every whole tensor."""

    density: float
    code: int = 2
    shared: bool = False
    selection: int = 0  # the bounds stay at home: positions travel in full

    def counts(self, group: Tiles) -> Tensor | None:
        return None

    def pick(self, buffer: Tensor, grid: Grid, turn: Turn, *, mixed: bool) -> Tensor | None:
        found = []
        # where values are fewer than wanted, zeros fill up; padding, which is zero as well, must not
        magnitude = buffer[: grid.body].abs()
        for group in () if mixed else grid.groups:
            tiles, edges = group.view(magnitude), group.edges.to(buffer.device)
            tiles[edges] = tiles[edges].masked_fill(~group.mask.to(buffer.device), -torch.inf)
        for start, stop, allowed in tensor_ranges(grid):
            part = magnitude[None, start:stop]
            number = int(share(allowed, self.density))
            found.append(keep_exactly(part, torch.tensor([number]), kth_magnitude(part, number)) + start)
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Threshold:
    """All magnitudes over a bound of their tensor; the bounds give `density` and are renewed every `every` events.

    A bound of zero holds nothing back, so it is renewed at once: it comes from a tensor that had hardly any values.
    """

    density: float
    every: int = 16
    code: int = 3
    shared: bool = False
    selection: int = 0

    def counts(self, group: Tiles) -> Tensor | None:
        return None

    def pick(self, buffer: Tensor, grid: Grid, turn: Turn, *, mixed: bool) -> Tensor | None:
        age = int(turn.memory.get("age", torch.zeros(1)))
        # a copy: the memory belongs to the state until the event is committed
        bounds = turn.memory["bounds"].clone() if age % self.every else torch.zeros(grid.tensors, device=buffer.device)
        ranges = tensor_ranges(grid)
        for number in (bounds == 0).nonzero().flatten().tolist():
            start, stop, allowed = ranges[number]
            bounds[number] = self._bound(buffer[start:stop], allowed)
        turn.memory.update(bounds=bounds, age=torch.tensor([age + 1]))
        found = []
        for group in grid.groups:
            tiles = group.view(buffer)
            # zeros are held back even by a bound of zero: they say nothing, and padding is among them
            keep = (tiles.abs() >= bounds.to(tiles.device)[group.owner.to(tiles.device), None]) & (tiles != 0)
            found.append(keep.flatten().nonzero().flatten() + group.offset)
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)

    def _bound(self, part: Tensor, allowed: Tensor) -> Tensor:
        return kth_magnitude(part.abs()[None], int(share(allowed, self.density)))[0]


@dataclass(frozen=True)
class Random:
    """A fresh share of all positions at every event, drawn from a shared seed: one of every stratum."""

    density: float
    seed: int = 0
    code: int = 4
    shared: bool = True

    @property
    def selection(self) -> int:
        return checksum(self.density, self.seed)

    def counts(self, group: Tiles) -> Tensor | None:
        return None

    def pick(self, buffer: Tensor, grid: Grid, turn: Turn, *, mixed: bool) -> Tensor | None:
        return strata(grid.body, self.density, seed=self.seed, event=turn.event).to(buffer.device)


@dataclass(frozen=True)
class Cyclic:
    """One slice of a fixed random order at every event, so that each position has its turn once a cycle."""

    density: float
    seed: int = 0
    code: int = 5
    shared: bool = True

    @property
    def selection(self) -> int:
        return checksum(self.density, self.seed)

    def counts(self, group: Tiles) -> Tensor | None:
        return None

    def pick(self, buffer: Tensor, grid: Grid, turn: Turn, *, mixed: bool) -> Tensor | None:
        cycle = max(1, round(1 / self.density))
        starts = torch.arange(0, grid.body, cycle)
        # always event 0: the order stands for the whole run, only the turn moves on
        shift = torch.randint(cycle, starts.shape, generator=generator(self.seed, 0))
        position = starts + (shift + turn.event) % cycle
        # the last range may be shorter than a cycle: some of its turns fall outside
        return position[position < grid.body].to(buffer.device)


def generator(seed: int, event: int) -> torch.Generator:
    """Randomness that all replicas share: it depends on seed and event alone, on every machine."""
    mixed = np.random.SeedSequence([seed, event]).generate_state(1, np.uint64)[0]
    # torch takes seeds as signed numbers
    return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))


def strata(size: int, density: float, *, seed: int, event: int) -> Tensor:
    """One random position out of each of `ceil(density * size)` nearly equal ranges.

    Every position is as likely as any other within rounding, the number is exact, and the result ascends.

    >>> strata(10, 1.0, seed=0, event=3).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    number = math.ceil(density * size - 1e-9)
    # whole numbers only: a boundary must not depend on how a machine rounds
    bounds = torch.arange(number + 1) * size // max(number, 1)
    width = bounds[1:] - bounds[:-1]
    # in double: in single, parts of a range wider than 2^24 could never be drawn
    draw = torch.rand(number, generator=generator(seed, event), dtype=torch.float64)
    # a draw next to 1 may round up to the width itself
    return bounds[:-1] + (draw * width).long().clamp(max=width - 1)


def share(valid: Tensor, density: float) -> Tensor:
    """`ceil(density * valid)`, at least one where there is anything."""
    # in double precision: in single, 0.72 * 600 would round up to 433
    return torch.ceil(valid.double() * density - 1e-9).long().clamp(min=1).minimum(valid)


def tensor_ranges(grid: Grid) -> list[tuple[int, int, Tensor]]:
    """For each tensor of the body: its first and last position, and how many of them are not padding."""
    found = []
    for group in grid.groups:
        # numbers of tensors run on from group to group, so the group's first is taken off
        tiles = torch.bincount(group.owner - group.owner[0])
        stops = tiles.cumsum(0)
        valid = torch.zeros_like(tiles).index_add_(0, group.owner - group.owner[0], group.valid)
        for first, last, allowed in zip((stops - tiles).tolist(), stops.tolist(), valid, strict=True):
            found.append((group.offset + first * group.span, group.offset + last * group.span, allowed))
    return found


def checksum(density: float, number: int) -> int:
    """CRC-32 of a density and a whole number, by which replicas notice that they do not select alike."""
    return zlib.crc32(struct.pack("<dQ", density, number))


def checked_density(density: float) -> float:
    """A share in (0, 1]."""
    if not 0 < density <= 1:
        raise ConfigError(
            f"density must be in (0, 1], not {density!r}\nhint: density=1/32 keeps 128 of 4096 coefficients"
        )
    return float(density)


def checked_seed(seed: int) -> int:
    """A seed that fits into 64 bits."""
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed must be at least 0 and below 2**64, not {seed}\nhint: seed=0")
    return seed


def all_() -> Selector:
    """Send everything."""
    return All()


def top_k(density: float | None = None, *, count: int | None = None) -> Selector:
    """The largest of every tile: a share (`density`) or a number (`count`) of them."""
    if (density is None) == (count is None):
        raise ConfigError(f"top_k takes density or count, not density={density!r}, count={count!r}\nhint: top_k(1/32)")
    if count is not None and count < 1:
        raise ConfigError(f"top_k keeps at least one of a tile, not count={count}\nhint: top_k(count=32)")
    return TopK(None if density is None else checked_density(density), count)


def top_k_tensor(density: float) -> Selector:
    """The largest of every whole tensor."""
    return TopKTensor(checked_density(density))


def threshold(density: float, *, every: int = 16) -> Selector:
    """All over a bound that gives `density` when it is set, every `every` events."""
    if every < 1:
        raise ConfigError(
            f"threshold is renewed every 1 or more events, not every={every}\nhint: threshold(1/32, every=16)"
        )
    return Threshold(checked_density(density), every)


def random(density: float, *, seed: int = 0) -> Selector:
    """A random share, the same on all replicas, without index bytes."""
    return Random(checked_density(density), checked_seed(seed))


def cyclic(density: float, *, seed: int = 0) -> Selector:
    """Every position once in `1 / density` events, without index bytes."""
    return Cyclic(checked_density(density), checked_seed(seed))
