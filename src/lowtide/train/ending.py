"""How replicas that drifted end: with their mean."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import LowtideError
from lowtide.sync import Plan, Round
from lowtide.sync.exchange import summed
from lowtide.sync.outer import assign
from lowtide.sync.signal import parameters
from lowtide.sync.when import every
from lowtide.tensors import Entry, Layout
from lowtide.train.engine import Engine


def average(engine: Engine) -> None:
    """One dense round over all parameters that the method handles."""
    plan = Plan(when=every(1), signal=parameters(), exchange=summed(), outer=assign())
    layout = Layout.build(_entries(engine.rounds), plan.exchange.chunker)
    last = Round(plan, layout, "final", rank=engine.transport.rank, size=engine.transport.size)
    last.start(engine.replica, engine.rounds[0].device)
    message = last.outgoing(engine.replica, 1)
    try:
        last.incoming(engine.transport.start(message, last.tag).finish())
        last.commit(engine.replica)
    except LowtideError:
        last.drop()
        raise


def _entries(rounds: Sequence[Round]) -> list[Entry]:
    """Every tensor once, though several plans may handle it."""
    found: dict[str, Entry] = {}
    for round_ in rounds:
        for entry in round_.layout.entries:
            found.setdefault(entry.name, entry)
    return list(found.values())
