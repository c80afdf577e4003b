"""Everybody gets everybody's payload."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.codec import Codec, Coefficients, Transform, Turn, chain, generator
from lowtide.errors import ConfigError
from lowtide.messages import Gather, Group, Inbox
from lowtide.sync.combine import Combine, mean
from lowtide.sync.exchange.base import Closed, Exchange, Leg, Me, Outcome
from lowtide.tensors import Chunker, Grid

_WORTH_THREADS = 1 << 16  # bytes of payloads below which starting threads takes longer than decoding


@dataclass(frozen=True)
class Gathered:
    """One payload from each to all, combined in rank order."""

    codec: Codec
    combine: Combine
    private: bool = False
    shared_memory: frozenset[str] = frozenset()

    @property
    def chunker(self) -> Chunker:
        return self.codec.chunker

    @property
    def transform(self) -> Transform:
        return self.codec.transform

    def init(self, grid: Grid, device: torch.device) -> dict[str, Tensor]:
        return {}

    def open(self, signal: Tensor | None, grid: Grid, me: Me) -> Leg:
        return Leg(Gather(self._payload(signal, grid, me)))

    def advance(
        self, signal: Tensor | None, grid: Grid, carry: dict[str, Tensor], inbox: Inbox, me: Me
    ) -> Leg | Outcome | Closed:
        # without memory: what is decoded may depend on the bytes only
        turn = Turn(me.event)
        decoded = decode_all(self.codec, inbox.payloads, grid, turn, me.device)
        # who abstained is no contributor, and has no norm to compare with
        parts = self.combine.prepare([part for part in decoded if part.weight > 0])
        # our own bytes as peers decode them: the residual keeps exactly what they did not get
        return Outcome(parts, decoded[inbox.ranks.index(me.rank)], inbox.ranks, self.combine)

    def _payload(self, signal: Tensor | None, grid: Grid, me: Me) -> bytes:
        turn = Turn(me.event, me.weight, me.memory)
        return self.codec.abstain(grid, turn) if signal is None else self.codec.encode(signal, grid, turn)


def decode_all(
    codec: Codec, payloads: Sequence[bytes], grid: Grid, turn: Turn, device: torch.device
) -> list[Coefficients]:
    """Every payload, on as many cores as torch may use: numpy decodes, and its work runs side by side in threads."""

    def decode(payload: bytes) -> Coefficients:
        return codec.decode(payload, grid, turn).to(device)

    if torch.get_num_threads() == 1 or sum(map(len, payloads)) < _WORTH_THREADS:
        return [decode(payload) for payload in payloads]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        # in the order of ranks, whichever thread is first
        return list(pool.map(decode, payloads))


@dataclass(frozen=True)
class Pairs(Gathered):
    """The same inside small groups that are drawn anew at every event; replicas keep different models."""

    size: int = 2
    seed: int = 0
    private: bool = True

    def open(self, signal: Tensor | None, grid: Grid, me: Me) -> Leg:
        return Leg(
            Group(
                self._payload(signal, grid, me), group_of(me.rank, me.size, self.size, seed=self.seed, event=me.event)
            )
        )


def group_of(rank: int, replicas: int, size: int, *, seed: int, event: int) -> tuple[int, ...]:
    """Our group in a random order that all share; the last group takes what is left over, so nobody is alone.

    >>> sorted(group_of(rank, 5, 2, seed=0, event=1) for rank in range(5)) == sorted(
    ...     group for group in {group_of(rank, 5, 2, seed=0, event=1) for rank in range(5)} for _ in group)
    True
    """
    order = torch.randperm(replicas, generator=generator(seed, event)).tolist()
    number = max(1, replicas // size)
    place = min(order.index(rank) // size, number - 1)
    stop = replicas if place == number - 1 else (place + 1) * size
    # ascending, since all members must name the group alike
    return tuple(sorted(order[place * size : stop]))


def gathered(codec: Codec | None = None, combine: Combine | None = None) -> Exchange:
    """All-gather of payloads."""
    return Gathered(codec or chain(), combine or mean())


def pairs(size: int = 2, codec: Codec | None = None, *, seed: int = 0) -> Exchange:
    """All-gather inside random groups of `size`."""
    if size < 2:
        raise ConfigError(f"a group has at least 2 members, not {size}\nhint: group=2 sends to one peer a round")
    return Pairs(codec or chain(), mean(), size=size, seed=seed)
