"""A cheap question before the costly exchange: have the replicas spread far enough.

First leg: everybody's few numbers. All see the same bytes and add them in the same order, so all decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lowtide.codec import Transform, generator
from lowtide.errors import PayloadError
from lowtide.messages import Gather, Inbox
from lowtide.sync.exchange.base import Closed, Exchange, Leg, Me, Outcome
from lowtide.sync.spread import Estimator
from lowtide.sync.trigger import Trigger
from lowtide.tensors import Chunker, Grid


@dataclass(frozen=True)
class Gate:
    """Ask `monitor` at every event; open `then` when `trigger` says so.

    A replica whose drift is not finite says so with its numbers: that opens the gate, and it gets the others' model.
    """

    monitor: Estimator
    trigger: Trigger
    then: Exchange

    @property
    def chunker(self) -> Chunker:
        return self.then.chunker

    @property
    def transform(self) -> Transform:
        return self.then.transform

    @property
    def private(self) -> bool:
        return self.then.private

    @property
    def shared_memory(self) -> frozenset[str]:
        return self.then.shared_memory | {"theta", "last", "spent", "direction"}

    def init(self, grid: Grid, device: torch.device) -> dict[str, Tensor]:
        memory = self.then.init(grid, device) | self.trigger.init()
        if self.monitor.directed:
            # any direction will do at first, if all have the same: drawn on the CPU, where seeds agree
            first = torch.randn(grid.size, generator=generator(0, 0)).to(device)
            memory["direction"] = first / first.norm()
        return memory

    def open(self, signal: Tensor | None, grid: Grid, me: Me) -> Leg:
        if signal is None:
            # of the usual length: an abstention must not look like a damaged message
            state = np.full(self.monitor.numbers(grid.size), np.nan)
        else:
            state = self.monitor.state(signal, me.memory.get("direction")).cpu().numpy()
        # rounded before anybody decides: we use our own number as the others see it
        return Leg(Gather(state.astype("<f4").tobytes()), cause="monitor")

    def advance(
        self, signal: Tensor | None, grid: Grid, carry: dict[str, Tensor], inbox: Inbox, me: Me
    ) -> Leg | Outcome | Closed:
        # the carry tells the legs apart, so that it works for a message out of a checkpoint too
        if "spread" in carry:
            return self._then(signal, grid, carry, inbox, me)
        states = [self._state(payload, rank, grid) for rank, payload in zip(inbox.ranks, inbox.payloads, strict=True)]
        # one sick replica must not blind the gate for the sound ones
        finite = [state for state in states if bool(torch.isfinite(state).all())]
        spread = self.monitor.spread(torch.stack(finite)) if finite else 0.0
        forced = any((me.last, len(finite) < len(states)))
        if not forced and not self.trigger.opens(spread, me.step, me.rate, me.memory):
            return Closed(f"spread {spread:.4g} is within the bound")
        leg = self.then.open(signal, grid, me)
        return replace(leg, carry=leg.carry | {"spread": torch.tensor(spread, dtype=torch.float64)})

    def _then(
        self, signal: Tensor | None, grid: Grid, carry: dict[str, Tensor], inbox: Inbox, me: Me
    ) -> Leg | Outcome | Closed:
        """The legs of the costly exchange, with our own number carried through."""
        spread = carry["spread"]
        # the inner exchange tells its own legs apart by what it finds in there
        rest = {name: value for name, value in carry.items() if name != "spread"}
        answer = self.then.advance(signal, grid, rest, inbox, me)
        if isinstance(answer, Leg):
            return replace(answer, carry=answer.carry | {"spread": spread})
        if isinstance(answer, Outcome):
            # the largest payload, not ours: the bounds of all replicas have to move alike
            cost = 4.0 * grid.size if inbox.total is not None else float(max(map(len, inbox.payloads)))
            self.trigger.agreed(float(spread), me.step, me.rate, cost, me.memory)
            if self.monitor.directed and not answer.empty:
                move = answer.dense()
                norm = move.norm()
                # replicas that did not move on the whole have no direction to offer
                me.memory["direction"] = move / norm if norm > 0 else me.memory["direction"]
        return answer

    def _state(self, payload: bytes, rank: int, grid: Grid) -> Tensor:
        expected = 4 * self.monitor.numbers(grid.size)
        if len(payload) != expected:
            raise PayloadError(f"rank {rank} sent {len(payload)} bytes of spread, expected {expected}")
        return torch.from_numpy(np.frombuffer(payload, "<f4").astype(np.float64))


def gate(monitor: Estimator, trigger: Trigger, then: Exchange) -> Exchange:
    """Open `then` only when the replicas have spread."""
    return Gate(monitor, trigger, then)
