"""What a codec is, and what it decodes to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lowtide.tensors import Chunker, Grid


@dataclass
class Turn:
    """One encoding: which event it belongs to, what it weighs, and the codec's memory.

    `event` seeds everything that is random and shared. `memory` is a copy: it is kept only if the event is.
    """

    # not frozen: a selector leaves its next memory in it
    event: int = 0
    weight: float = 1.0
    memory: dict[str, Tensor] = field(default_factory=dict)


# compared by identity, since tensors have no single truth value
@dataclass(frozen=True, eq=False)
class Coefficients:
    """A decoded payload: values at positions of a buffer, in the basis of the codec.

    `index` ascends; `None` means that every position has a value. A weight of zero means that the sender took no part.
    """

    value: Tensor
    index: Tensor | None
    size: int
    weight: float = 1.0

    @classmethod
    def nothing(cls, size: int, device: torch.device | None = None) -> Coefficients:
        """What a replica says that abstains."""
        empty = torch.zeros(0, device=device)
        return cls(empty, torch.zeros(0, dtype=torch.int64, device=device), size, 0.0)

    def to(self, device: torch.device) -> Coefficients:
        """The same on another device."""
        if self.value.device == device:
            return self
        return replace(self, value=self.value.to(device), index=None if self.index is None else self.index.to(device))

    def within(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """The values in a range, and their positions counted from its start."""
        if self.index is None:
            return self.value[start:stop], None
        # the index ascends, so a range of positions is a range of values
        # one call for both ends: on a device each would be a wait of its own
        bounds = torch.tensor([start, stop], device=self.index.device)
        first, last = torch.searchsorted(self.index, bounds).tolist()
        return self.value[first:last], self.index[first:last] - start

    def subtract_from(self, buffer: Tensor) -> Tensor:
        """Take the values out of a buffer, in place."""
        if self.index is None:
            return buffer.sub_(self.value)
        # no position comes twice, so the order in which a device adds cannot matter
        if buffer.device.type == "cpu":
            # no position comes twice; twice as fast as the call below
            return buffer.scatter_add_(0, self.index, -self.value)
        return buffer.index_add_(0, self.index, self.value, alpha=-1)

    def dense(self) -> Tensor:
        """The values in a full buffer, zero elsewhere."""
        if self.index is None:
            # not copied: whoever works in place on the result takes a clone first
            return self.value
        return self.value.new_zeros(self.size).index_copy_(0, self.index, self.value)


# checkable, so that `chain` tells its parts apart by what they can do
@runtime_checkable
class Transform(Protocol):
    """An orthonormal change of basis of every tile; the tail is left alone."""

    @property
    def code(self) -> int: ...

    @property
    def mixes(self) -> bool:
        """Whether padding takes part: then every position of a tile may be selected."""

    def forward_(self, buffer: Tensor, grid: Grid) -> Tensor:
        """Into the basis, in place."""

    def inverse_(self, buffer: Tensor, grid: Grid) -> Tensor:
        """Back, in place."""

    def inverse_block_(self, block: Tensor, rows: int, cols: int) -> Tensor:
        """Back, for a whole number of tiles that lie one after the other."""


class Codec(Protocol):
    """Signal <-> payload; pure.

    Laws, tested for every codec: what is decoded depends on the bytes only; encoding what was decoded gives it again
    where the quantiser is exact; a closed formula gives `len(payload)`.
    """

    @property
    def chunker(self) -> Chunker: ...

    @property
    def transform(self) -> Transform: ...

    def encode(self, coefficients: Tensor, grid: Grid, turn: Turn) -> bytes:
        """The payload for one buffer that is already in the basis."""

    def abstain(self, grid: Grid, turn: Turn) -> bytes:
        """The payload of a replica that has nothing to say this time."""

    def decode(self, payload: bytes, grid: Grid, turn: Turn) -> Coefficients:
        """What the payload says; raises `PayloadError` for any bytes that are not one."""
