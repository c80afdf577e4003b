"""How a decided event changes a replica: the one place where the model is written.

The buffer is worked through range by range, so that combining, the inverse transform, the outer step and the merge
find their data in cache. No step after the first can fail for a reason that lies in what was received: payloads
were decoded and checked before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.sync.exchange import Outcome
from lowtide.sync.merge import Merge, Rebase, Replace
from lowtide.sync.outer import COUNTER, Seen
from lowtide.sync.replica import GRADIENTS, PARAMETERS, Replica, nonfinite
from lowtide.sync.state import OUTER, Flight

if TYPE_CHECKING:
    from lowtide.sync.round import Round


@dataclass(frozen=True)
class Desk:
    """The buffers that a commit works on; `live` is what is written to the model at the end.

    `lost` says that the parameters are not finite now, so that the inner steps since the launch count for nothing.
    """

    live: Tensor
    current: Tensor | None
    snapshot: Tensor | None
    signal: Tensor
    merge: Merge
    lost: bool


def apply(rounds: Round, replica: Replica, flight: Flight, outcome: Outcome, *, final: bool) -> None:
    """Residual, combine, invert, outer step, merge; then write the live value."""
    plan = rounds.plan
    desk = _desk(rounds, replica, flight, final=final)
    # a sick replica got nothing across, so its residual stays as it is
    keeps = plan.residual.keeps and not flight.sick
    if keeps:
        # the proposal becomes the residual, the old residual becomes scratch: nothing is copied
        outcome.sent.subtract_from(flight.signal)
        rounds.scratch.give(rounds.state.private["residual"])
        rounds.state.private["residual"] = flight.signal
    elif flight.sick:
        _make_room(flight.signal, outcome)
    # before the first range, so that all ranges see the same number
    _count(rounds)
    work = torch.empty(0, device=rounds.device)
    for start, stop, group in rounds.grid.blocks():
        if work.numel() < stop - start:
            work = torch.empty(stop - start, device=rounds.device)
        block = outcome.block(start, stop, work[: stop - start])
        if keeps and plan.residual.writes_back:
            block = block.copy_(rounds.state.private["residual"][start:stop].add_(block))
        # after combining: the transform is linear, so one inverse serves all replicas
        if group is not None:
            plan.exchange.transform.inverse_block_(block, group.rows, group.cols)
        agreed = plan.outer.step(block, _seen(rounds, flight, outcome, desk, slice(start, stop)))
        merged = desk.merge.merge(agreed, _cut(desk.current, start, stop), _cut(desk.snapshot, start, stop))
        # most rules work in place, and then there is nothing to copy
        if merged.data_ptr() != desk.live[start:stop].data_ptr():
            desk.live[start:stop].copy_(merged)
    if rounds.anchor is not None:
        rounds.layout.clear_padding(rounds.anchor)  # an inverse transform may reach into it
    # once and last: the model is never seen half changed
    replica.write(plan.signal.target, rounds.layout, desk.live)
    _clear(rounds, flight, desk)


def heal(rounds: Round, replica: Replica, flight: Flight) -> None:
    """Where all abstained: the last agreed value instead of one that is not finite, or no gradient at all."""
    if rounds.anchor is not None:
        replica.write(PARAMETERS, rounds.layout, rounds.anchor)
    elif rounds.plan.before_step:
        # an inner optimizer's moments would keep a NaN for good
        replica.write(GRADIENTS, rounds.layout, flight.signal.zero_())


def _desk(rounds: Round, replica: Replica, flight: Flight, *, final: bool) -> Desk:
    """Choose the buffers, with as few of them as the plan allows."""
    plan = rounds.plan
    merge = plan.merge
    # sick: nothing worth keeping; final: all must end equal; no delay: nothing was done meanwhile
    if flight.sick or final or (isinstance(merge, Rebase) and not plan.when.delay):
        merge = Replace()
    current = _current(rounds, replica, merge)
    if "current" in merge.needs:
        assert current is not None
        live = current
    elif rounds.anchor is not None:
        # the rule steps the anchor in place, so the agreed value stands there already
        live = rounds.anchor
    else:
        # with a residual, the signal's buffer has just become the residual
        live = rounds.scratch.take() if plan.residual.keeps else flight.signal
    lost = current is not None and "fresh" in plan.outer.needs and nonfinite(current)
    return Desk(live, current, flight.snapshot, flight.signal, merge, lost)


def _current(rounds: Round, replica: Replica, merge: Merge) -> Tensor | None:
    """The live value, where the merge or the rule asks for it."""
    fresh = "fresh" in rounds.plan.outer.needs
    if not fresh and "current" not in merge.needs:
        return None
    current = replica.read(rounds.plan.signal.target, rounds.layout, rounds.scratch.take())
    if fresh and rounds.anchor is not None:
        # as in the signal: what 16-bit parameters lack of the anchor was not moved by anybody
        rounds.layout.add_rounding(rounds.anchor, current, 1.0)
    return current


def _clear(rounds: Round, flight: Flight, desk: Desk) -> None:
    """Hand back every buffer that has not become part of the state."""
    # by identity: one buffer often plays two parts, and must not be handed back twice
    scratch = {
        id(buffer): buffer for buffer in (desk.live, desk.current, flight.snapshot, flight.signal) if buffer is not None
    }
    kept = {id(rounds.anchor), id(rounds.state.private.get("residual"))}
    rounds.scratch.give(*(buffer for key, buffer in scratch.items() if key not in kept))


def _make_room(signal: Tensor, outcome: Outcome) -> None:
    """A replica that abstained takes the others' value wherever they sent one, and keeps its own elsewhere."""
    for part in outcome.parts:
        if part.index is None:
            signal.zero_()
        else:
            signal.index_fill_(0, part.index, 0.0)


def _count(rounds: Round) -> None:
    """One more round, where the outer rule counts them."""
    counter = rounds.state.home(shared=not rounds.plan.private).get(f"{OUTER}{COUNTER}")
    if counter is not None:
        counter += 1


def _seen(rounds: Round, flight: Flight, outcome: Outcome, desk: Desk, cut: slice) -> Seen:
    """What the outer rule asked for, cut to the range."""
    outer, anchor = rounds.plan.outer, rounds.anchor
    fresh = sent = None
    if "fresh" in outer.needs:
        assert anchor is not None and desk.current is not None
        fresh = torch.zeros_like(anchor[cut]) if desk.lost else anchor[cut] - desk.current[cut]
    if "sent" in outer.needs:
        sent = _dense(outcome, cut, rounds.device)
    buffers = rounds.state.home(shared=not rounds.plan.private)
    return Seen(
        anchor=None if anchor is None else anchor[cut],
        signal=desk.signal[cut] if "signal" in outer.needs else None,
        fresh=fresh,
        sent=sent,
        memory={name: buffers[f"{OUTER}{name}"][cut] for name in outer.memory if name != COUNTER},
        # before anything has landed nobody took part: our own part is one of all
        replicas=len(outcome.ranks) or rounds.size,
        scale=flight.scale,
        rounds=int(buffers[f"{OUTER}{COUNTER}"]) if COUNTER in outer.memory else 1,
    )


def _dense(outcome: Outcome, cut: slice, device: torch.device) -> Tensor:
    """What we got across, zero where nothing."""
    value, index = outcome.sent.within(cut.start, cut.stop)
    if index is None:
        return value
    return torch.zeros(cut.stop - cut.start, device=device).index_copy_(0, index, value)


def _cut(buffer: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if buffer is None else buffer[start:stop]
