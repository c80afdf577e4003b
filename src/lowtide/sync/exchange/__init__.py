"""Who gets what: one file an exchange."""

from lowtide.sync.exchange.base import Closed, Exchange, Leg, Me, Outcome
from lowtide.sync.exchange.gate import gate
from lowtide.sync.exchange.gathered import Gathered, gathered, pairs
from lowtide.sync.exchange.low_rank import low_rank
from lowtide.sync.exchange.sharded import sharded
from lowtide.sync.exchange.summed import masked, summed

__all__ = [
    "Closed",
    "Exchange",
    "Gathered",
    "Leg",
    "Me",
    "Outcome",
    "gate",
    "gathered",
    "low_rank",
    "masked",
    "pairs",
    "sharded",
    "summed",
]
