"""Owners combine: what a machine receives stays the same however many replicas there are.

Tiles are owned in turn by ranks. Each replica sends every owner its part of the payload (scatter); the owner
combines, adds what its last re-encoding left over, encodes again and sends that to all (gather). The second
residual lives with the owner, so nothing is lost on the way down either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from lowtide.codec import Codec, Coefficients, Transform, Turn, chain, dct, stat, top_k
from lowtide.messages import Gather, Inbox, Scatter
from lowtide.sync.combine import Combine, mean_of_contributors
from lowtide.sync.exchange.base import Closed, Exchange, Leg, Me, Outcome
from lowtide.tensors import Chunker, Grid, Tiles


@dataclass(frozen=True)
class Sharded:
    """Two legs: up to the owners, down from them."""

    up: Codec
    down: Codec
    combine: Combine
    private: bool = False
    shared_memory: frozenset[str] = frozenset()

    @property
    def chunker(self) -> Chunker:
        return self.up.chunker

    @property
    def transform(self) -> Transform:
        return self.up.transform

    def init(self, grid: Grid, device: torch.device) -> dict[str, Tensor]:
        return {}

    def open(self, signal: Tensor | None, grid: Grid, me: Me) -> Leg:
        shards = split(grid, me.size)
        turn = Turn(me.event, me.weight)
        # said to every owner, since each of them waits for a message from all
        if signal is None:
            return Leg(Scatter(tuple(self.up.abstain(shard.grid, turn) for shard in shards)))
        payloads = tuple(self.up.encode(shard.cut(signal), shard.grid, turn) for shard in shards)
        # decoded as owners will: the residual then keeps exactly what they did not get
        sent = [self.up.decode(payload, shard.grid, turn) for payload, shard in zip(payloads, shards, strict=True)]
        index = [shard.place(_positions(part)) for part, shard in zip(sent, shards, strict=True)]
        return Leg(Scatter(payloads), {"value": torch.cat([part.value for part in sent]), "index": torch.cat(index)})

    def advance(
        self, signal: Tensor | None, grid: Grid, carry: dict[str, Tensor], inbox: Inbox, me: Me
    ) -> Leg | Outcome | Closed:
        shards = split(grid, me.size)
        if "down" not in carry:
            return self._down(shards[me.rank], carry, inbox, me)
        decoded = [
            self.down.decode(payload, shards[rank].grid, Turn(me.event))
            for rank, payload in zip(inbox.ranks, inbox.payloads, strict=True)
        ]
        index = torch.cat(
            [shards[rank].place(_positions(part)) for rank, part in zip(inbox.ranks, decoded, strict=True)]
        )
        # owners hold every n-th tile, so their positions interleave, and they have to ascend
        order = index.argsort()
        value = torch.cat([part.value for part in decoded])[order]
        result = Coefficients(value, index[order], grid.size)
        sent = Coefficients.nothing(grid.size, me.device)
        if signal is not None:
            place = carry["index"].argsort()
            sent = Coefficients(carry["value"][place], carry["index"][place], grid.size, me.weight)
        return Outcome((result.to(me.device),), sent.to(me.device), inbox.ranks)

    def _down(self, shard: Shard, carry: dict[str, Tensor], inbox: Inbox, me: Me) -> Leg:
        """What an owner makes of the parts it was sent."""
        parts = [self.up.decode(payload, shard.grid, Turn(me.event)) for payload in inbox.payloads]
        parts = [part for part in self.combine.prepare(parts) if part.weight > 0]
        total = shard.grid.zeros()
        if parts:
            self.combine.block(parts, 0, shard.grid.size, total)
        # a single zero at first: nothing is owed yet, whatever the size of the shard
        total += me.memory.get("owed", torch.zeros(1))
        turn = Turn(me.event)
        payload = self.down.encode(total, shard.grid, turn)
        # kept at commit only, so a dropped event owes what was owed before it
        me.memory["owed"] = self.down.decode(payload, shard.grid, turn).subtract_from(total)
        # a mark in the carry, which a checkpoint saves, says that the next answer is the last
        return Leg(Gather(payload), carry | {"down": torch.ones(1)})


@dataclass(frozen=True, eq=False)
class Shard:
    """One owner's part of a grid: every `owners`-th tile of each group, and some tensors of the tail.

    A row of `stretches` says where a stretch of the shard's buffer comes from: its first element, the first element in
    the whole buffer, the elements of a tile, and how far its tiles lie apart in the whole.
    """

    grid: Grid
    stretches: Tensor

    def cut(self, signal: Tensor) -> Tensor:
        """The shard's part of a whole buffer."""
        rows = self.stretches.tolist()
        stops = [*(row[0] for row in rows[1:]), self.grid.size]
        # an owner may have nothing, where there are fewer tiles than owners
        if not rows:
            return signal[:0]
        parts = [
            signal.as_strided(((stop - start) // span, span), (apart, 1), signal.storage_offset() + first).flatten()
            for (start, first, span, apart), stop in zip(rows, stops, strict=True)
        ]
        return torch.cat(parts)

    def place(self, positions: Tensor) -> Tensor:
        """Where positions of the shard lie in the whole: arithmetic, since a table would be as large as the model."""
        if not len(positions):
            return positions
        row = torch.searchsorted(self.stretches[:, 0].contiguous(), positions, right=True) - 1
        start, first, span, apart = self.stretches[row].unbind(1)
        inside = positions - start
        return first + inside // span * apart + inside % span

    @property
    def index(self) -> Tensor:
        """Where each element of the shard lies in the whole."""
        return self.place(torch.arange(self.grid.size))


# geometry only, and the same at every event
@lru_cache(maxsize=32)
def split(grid: Grid, owners: int) -> tuple[Shard, ...]:
    """Deal the tiles of every group out in turn; the tail goes to the owners in one piece a tensor."""
    return tuple(_shard(grid, owner, owners) for owner in range(owners))


def _shard(grid: Grid, owner: int, owners: int) -> Shard:
    groups: list[Tiles] = []
    stretches: list[tuple[int, int, int, int]] = []
    offset = 0
    for group in grid.groups:
        # dealt out like cards, so that every owner has a share of each tensor
        mine = torch.arange(group.count)[owner::owners]
        # fewer tiles than owners
        if not len(mine):
            continue
        edge = torch.isin(group.edges, mine)
        # numbered without gaps, since quantisers keep a scale for each number
        numbers = torch.unique(group.owner[mine], return_inverse=True)[1]
        first = max((int(g.owner.max()) + 1 for g in groups), default=0)
        groups.append(
            Tiles(offset, len(mine), group.rows, group.cols, numbers + first, group.valid[mine],
                  (group.edges[edge] - owner) // owners, group.mask[edge])
        )  # fmt: skip
        stretches.append((offset, group.offset + owner * group.span, group.span, owners * group.span))
        offset = groups[-1].stop
    starts = list(accumulate(grid.tail, initial=grid.body))
    tails = [number for number in range(len(grid.tail)) if number % owners == owner]
    for number in tails:
        # a tensor without elements has no place
        if grid.tail[number]:
            stretches.append((offset, starts[number], grid.tail[number], grid.tail[number]))
            offset += grid.tail[number]
    # equal shapes of different owners are different shards: their payloads must not be taken for each other
    origin = grid.identity + owner.to_bytes(4, "little")
    part = Grid(tuple(groups), tuple(grid.tail[number] for number in tails), origin)
    return Shard(part, torch.tensor(stretches, dtype=torch.int64).view(-1, 4))


def _positions(part: Coefficients) -> Tensor:
    return torch.arange(part.value.numel()) if part.index is None else part.index


def sharded(up: Codec | None = None, down: Codec | None = None, combine: Combine | None = None) -> Exchange:
    """Owners combine and encode again; by default up to 1 of 32 at 2 bits, down to 1 of 8 at 4 bits."""
    default_up = up or chain(dct(64), top_k(1 / 32), stat(4))
    return Sharded(default_up, down or chain(dct(64), top_k(1 / 8), stat(16)), combine or mean_of_contributors())
