"""What a session has done and moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.train.engine import Engine
from lowtide.transport.ledger import Ledger


@dataclass(frozen=True)
class Stats:
    """Steps and rounds, bytes, and seconds.

    payload          what this replica's codecs put out
    sent, received   what really left and reached this machine, frames included
    dense_reference  what the same rounds would have sent as fp32 ring all-reduce
    seconds          encode, decode, wire (waiting for messages of any kind), wait (of that, for those of rounds)
    by_group         sent bytes by kind of tensor
    by_cause         sent bytes by reason: rounds, monitoring, checks, buffers, the start
    """

    steps: int
    rounds: int
    dropped: int
    payload: int
    sent: int
    received: int
    dense_reference: int
    seconds: Mapping[str, float]
    by_group: Mapping[str, int]
    by_cause: Mapping[str, int]

    @property
    def times_fewer(self) -> float:
        """Dense reference over what was really sent or received, whichever is more."""
        return self.dense_reference / max(self.sent, self.received, 1)


def stats_of(steps: int, engine: Engine, ledger: Ledger) -> Stats:
    """A snapshot."""
    total, seconds = ledger.total, engine.seconds
    return Stats(
        steps=steps,
        rounds=engine.done,
        dropped=engine.dropped,
        payload=total.payload,
        sent=total.sent,
        received=total.received,
        dense_reference=total.dense_reference,
        seconds={"encode": seconds.encode, "wire": total.seconds, "wait": seconds.wait, "decode": seconds.decode},
        by_group={name: each.sent for name, each in ledger.by_group.items()},
        by_cause={name: each.sent for name, each in ledger.by_cause.items()},
    )
