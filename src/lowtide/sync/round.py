"""One plan on one fragment of one replica: the halves of a round, none of which needs a network.

message = round.outgoing(replica, step)          reads the model, proposes
while message is not None:
    message = round.incoming(inbox of message)   decodes what came back
round.commit(replica)                            changes the model: all or nothing
round.drop()                                     instead of commit: as if the event had never been
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowtide.messages import Inbox, Message, Tag
from lowtide.sync.commit import apply, heal
from lowtide.sync.exchange import Closed, Leg, Me, Outcome
from lowtide.sync.outer import zeros
from lowtide.sync.plan import Plan
from lowtide.sync.replica import PARAMETERS, Replica, nonfinite
from lowtide.sync.state import EXCHANGE, OUTER, Flight, RoundState, Scratch
from lowtide.tensors import Layout


@dataclass(frozen=True)
class Report:
    """What came of one event."""

    plan: str
    event: int
    step: int
    ranks: tuple[int, ...]
    sick: str | None = None
    closed: str | None = None


class Round:
    """The state of one plan for one fragment, and the way through its events."""

    def __init__(
        self, plan: Plan, layout: Layout, name: str, *, fragment: int = 0, rank: int = 0, size: int = 1
    ) -> None:
        self.plan, self.layout, self.name, self.fragment = plan, layout, name, fragment
        self.grid = layout.grid
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        self.state = RoundState()
        self.flights: list[Flight] = []
        self.last_step = 0
        self.scratch = Scratch(self.grid.size, self.device)
        self._first_rate = 1.0
        # by elements: how a codec favours one kind of tensor is not known beforehand
        self._shares = layout.shares()

    def start(self, replica: Replica, device: torch.device) -> None:
        """Take the present parameters as the first anchor, everything else from zero."""
        plan, state = self.plan, self.state
        self.device = device
        self.scratch = Scratch(self.grid.size, device)
        # not the present rate, which a warm-up may start at zero
        self._first_rate = replica.base_rate() or 1.0
        if plan.signal.anchored:
            # where replicas drift, so do their anchors: these are no part of the fingerprint
            home = state.home(shared=not plan.private)
            home["anchor"] = replica.read(PARAMETERS, self.layout, self.grid.zeros(device=device))
        for name, buffer in zeros(plan.outer, self.grid.size, device).items():
            state.home(shared=not plan.private)[f"{OUTER}{name}"] = buffer
        if plan.residual.keeps:
            state.private["residual"] = self.grid.zeros(device=device)
        for name, buffer in plan.exchange.init(self.grid, device).items():
            state.home(shared=plan.shares(name))[f"{EXCHANGE}{name}"] = buffer

    def launches(self, step: int) -> bool:
        """Whether a message leaves after this step."""
        return self.plan.when.launches(step, self.fragment)

    @property
    def anchor(self) -> Tensor | None:
        """The value last agreed on, where the plan keeps one."""
        return self.state.home(shared=not self.plan.private).get("anchor")

    @property
    def tag(self) -> Tag:
        """The label of the newest open event's message: the one that `outgoing` has just returned."""
        return next(flight for flight in reversed(self.flights) if flight.outcome is None).tag

    def outgoing(
        self, replica: Replica, step: int, *, weight: float = 1.0, scale: float = 1.0, last: bool = False
    ) -> Message:
        """Read the signal and propose a message; nothing is changed yet.

        `scale` shortens the outer step of a round that was cut short; the `last` round passes every gate.
        """
        plan, state = self.plan, self.state
        signal = plan.signal.read(replica, self.layout, self.anchor, self.scratch.take())
        # the name is looked up only if something is wrong: that takes a check a tensor
        sick = self.layout.first_nonfinite(signal) if nonfinite(signal) else None
        snapshot = None
        # without a delay nothing happens between here and commit
        if "snapshot" in plan.merge.needs and plan.when.delay:
            snapshot = replica.read(plan.signal.target, self.layout, self.scratch.take())
        # a NaN would spread over its tile, and through the residual into all later events
        if sick is None:
            plan.exchange.transform.forward_(signal, self.grid)
            if plan.residual.keeps:
                plan.residual.add(state.private["residual"], signal, self.grid)
        # a number is spent at commit: a dropped event gives it back, so all count alike
        event = state.event + 1 + len(self.flights)
        rate = replica.learning_rate() / self._first_rate
        me = Me(self.rank, self.size, event, step, weight, rate, self.device, state.of_exchange(), last)
        leg = plan.exchange.open(None if sick else signal, self.grid, me)
        tag = Tag(self.name, event, 0, self.layout.identity, leg.cause, self._shares)
        # a step may be shortened, never stretched, however long ago the last round was
        self.flights.append(Flight(event, step, me, signal, snapshot, leg, tag, sick, min(scale, 1.0)))
        return leg.message

    def incoming(self, inbox: Inbox) -> Message | None:
        """Take what came back for the oldest open event; the next message, or `None` when the event is decided."""
        flight = next(flight for flight in self.flights if flight.outcome is None)
        signal = None if flight.sick else flight.signal
        answer = self.plan.exchange.advance(signal, self.grid, flight.leg.carry, inbox, flight.me)
        if isinstance(answer, Leg):
            flight.leg = answer
            flight.tag = replace(flight.tag, leg=flight.tag.leg + 1, cause=answer.cause)
            return answer.message
        flight.outcome = answer
        return None

    def commit(self, replica: Replica, *, final: bool = False) -> Report:
        """Apply the oldest event. `final` takes the agreed value as it is, whatever the merge rule."""
        flight = self.flights.pop(0)
        outcome = flight.outcome
        assert outcome is not None, "commit before the event was decided"
        # a closed event counts too: the number seeds what all replicas draw next
        self.state.event = flight.event
        for name, buffer in flight.me.memory.items():
            self.state.home(shared=self.plan.shares(name))[f"{EXCHANGE}{name}"] = buffer
        if isinstance(outcome, Outcome) and outcome.empty:
            outcome = Closed("no replica had a finite signal")
        if isinstance(outcome, Closed):
            if flight.sick:
                # nobody can help now: go back to what was agreed on last
                heal(self, replica, flight)
            self.scratch.give(flight.signal, flight.snapshot)
            return Report(self.name, flight.event, flight.step, (), flight.sick, outcome.reason)
        apply(self, replica, flight, outcome, final=final)
        # not for a closed event: the steps before it are still to be agreed on
        self.last_step = flight.step
        return Report(self.name, flight.event, flight.step, outcome.ranks, flight.sick)

    def commit_nothing(self, replica: Replica) -> None:
        """The outer step before anything has landed, for rules that use their own part at once."""
        fresh = self.flights[-1]
        # its signal is never read, it only lends a buffer; the fresh event itself stays open
        flight = Flight(0, fresh.step, fresh.me, self.scratch.take(), None, fresh.leg, fresh.tag, fresh.sick)
        apply(self, replica, flight, Outcome.nothing(self.grid.size, self.device), final=False)

    def drop(self) -> None:
        """Forget all open events; the state is as it was before them."""
        while self.flights:
            flight = self.flights.pop()
            self.scratch.give(flight.signal, flight.snapshot)

    def adopt(self, replica: Replica) -> None:
        """Take the present parameters as the anchor: another plan has made them common."""
        if self.anchor is not None:
            replica.read(PARAMETERS, self.layout, self.anchor)

    def revert(self, replica: Replica) -> None:
        """Go back to the anchor if the parameters are not finite: another plan has found this replica sick."""
        if self.anchor is not None:
            current = replica.read(PARAMETERS, self.layout, self.scratch.take())
            # looked at, not assumed: where these parts are sound their steps are kept
            if nonfinite(current):
                replica.write(PARAMETERS, self.layout, self.anchor)
            self.scratch.give(current)
