"""The shape of a buffer without names: groups of equal tiles, then a tail of small tensors.

    buffer  [ tiles of group 0 | tiles of group 1 | ... | tail ]        one flat fp32 tensor, any leading axes before it

A codec sees only this: views `[..., count, rows * cols]` for the groups and one for the tail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BLOCK = 128 * 4096  # elements that a pass works on at once, so that they stay in cache


@dataclass(frozen=True, eq=False)
class Tiles:
    """`count` tiles of `rows x cols`, stacked from element `offset` of the buffer on.

    `owner[i]` is the number of the tensor that tile `i` is a part of, ascending; `valid[i]` counts the elements of
    tile `i` that are not padding; `edges` are the tiles with padding and `mask[j]` marks the valid part of `edges[j]`.
    """

    offset: int
    count: int
    rows: int
    cols: int
    owner: Tensor
    valid: Tensor
    edges: Tensor
    mask: Tensor

    @property
    def span(self) -> int:
        """Elements in a tile."""
        return self.rows * self.cols

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.offset + self.count * self.span

    def view(self, buffer: Tensor) -> Tensor:
        """The tiles of a buffer, `[..., count, span]`."""
        part = buffer[..., self.offset : self.stop]
        return part.view(*part.shape[:-1], self.count, self.span)


@dataclass(frozen=True, eq=False)
class Grid:
    """Groups of tiles, then the lengths of the tensors in the tail.

    `origin` tells grids apart that have the same geometry: the digest of the layout.
    """

    groups: tuple[Tiles, ...]
    tail: tuple[int, ...]
    origin: bytes = b""

    @property
    def body(self) -> int:
        """Elements before the tail, padding included."""
        return self.groups[-1].stop if self.groups else 0

    @property
    def size(self) -> int:
        """Elements of a buffer."""
        return self.body + sum(self.tail)

    @cached_property
    def tensors(self) -> int:
        """Tensors in the body; their numbers are `Tiles.owner`."""
        return 1 + max((int(group.owner.max()) for group in self.groups if group.count), default=-1)

    @cached_property
    def identity(self) -> bytes:
        """A digest of origin and geometry, carried by every payload."""
        digest = hashlib.sha256(self.origin)
        for group in self.groups:
            digest.update(f"{group.offset},{group.count},{group.rows},{group.cols};".encode())
            digest.update(group.owner.numpy().astype("<i8").tobytes())
            digest.update(group.valid.numpy().astype("<i8").tobytes())
        digest.update(",".join(map(str, self.tail)).encode())
        return digest.digest()[:8]

    def tail_view(self, buffer: Tensor) -> Tensor:
        """The tail of a buffer."""
        return buffer[..., self.body :]

    def zeros(self, *lead: int, device: torch.device | str | None = None) -> Tensor:
        """An empty buffer, with leading axes if wanted."""
        return torch.zeros(*lead, self.size, device=device)

    def blocks(self) -> Iterator[tuple[int, int, Tiles | None]]:
        """Cuts `0 .. size` into ranges that stay in cache: `(start, stop, group)`, whole tiles, `None` for the tail."""
        for group in self.groups:
            # at least one tile, however large
            step = max(1, BLOCK // group.span) * group.span
            for start in range(group.offset, group.stop, step):
                yield start, min(start + step, group.stop), group
        if self.tail:
            yield self.body, self.size, None
